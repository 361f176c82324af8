# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Load the matrices by which linears multiply their inputs in each pass (QuIP), and have vLLM multiply them.

Linears with inputs of one size share a matrix, and a checkpoint has it under the first of them alone, whose
layer need not be on this rank, or in any plan. vLLM leaves a matrix that it does not find as the memory was.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from torch import nn
from vllm.platforms import current_platform

from flexquant.checkpoint.schemes import ROTATION
from flexquant.errors import FlexQuantError
from flexquant.serving.kernels.cpu_loops import has_loops
from flexquant.serving.vllm_api import HadamardTransform, SharedWeightParameter
from flexquant.serving.vllm_api import module as rotation_module

LOOP_SIZES = [2**n for n in range(4, 11)]
"""Sizes of blocks that `rotation.cpp` takes."""


class WholeMatrix(SharedWeightParameter):
    """The matrix of a rotation, which each rank has whole."""

    tp_size = property(lambda _: 1, lambda *_: None)


@functools.cache
def provide_rotations() -> None:
    """Have vLLM rotate, in this process, under tensor parallelism, and where its operator for GPUs is absent.

    Under tensor parallelism, where each rank rotates its blocks of inputs, vLLM (0.26 to 0.33) builds no
    rotation. Without the operator, as on CPUs, it fails at the first pass. Delete what the oldest supported
    vLLM does itself.
    """
    rotation_module.get_tensor_model_parallel_world_size = lambda: 1
    rotation_module.SharedWeightParameter = WholeMatrix  # type: ignore[misc]
    if not hasattr(torch.ops._C, "hadacore_transform"):
        HadamardTransform.forward = rotation_by_products()  # type: ignore[method-assign]


def rotation_by_products() -> Callable[..., torch.Tensor]:
    """Return what takes the place of ``HadamardTransform.forward``."""
    # A CPU without such products in hardware takes ten times as long for 16 bits as for 32.
    in_16_bit = not current_platform.is_cpu() or torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def forward(rotation: HadamardTransform, x: torch.Tensor, part_id: int = 0) -> torch.Tensor:
        """Return ``x`` [..., inputs] times the rotation's matrix, block by block, in its dtype."""
        if part_id not in rotation.weight.partitions:
            return x
        stored = rotation.weight.partitions[part_id]
        if getattr(rotation, "has_loop", False):
            return torch.ops.flexquant_rotation.rotate(x, len(stored))
        matrix = stored.t() if rotation.transforms[part_id].args.inverse else stored
        matrix = matrix if in_16_bit else matrix.float()
        blocks = x.unflatten(-1, (-1, len(matrix))).to(matrix.dtype)
        scale = getattr(rotation, "scales", {}).get(part_id, 1.0)  # vLLM 0.26 keeps it beside the matrix
        return (blocks @ matrix).flatten(-2).to(x.dtype) * scale

    return forward


class RotationLoader:
    """Fills the matrices of variants that are built, by whatever layer's name they are stored."""

    def __init__(self, variants: Mapping[str, nn.Module]) -> None:
        """Raises FlexQuantError for a rank whose inputs are no whole number of blocks."""
        self._rotations: dict[str, list[tuple[str, HadamardTransform]]] = {}
        for name, variant in variants.items():
            modules = variant.named_modules()
            self._rotations[name] = [(path, m) for path, m in modules if isinstance(m, HadamardTransform)]
            for path, rotation in self._rotations[name]:
                _check_blocks(name, variant.get_submodule(path.rpartition(".")[0]), rotation)
        self._filled: set[int] = set()
        # vLLM (not 0.26) divides each matrix once, and knows it by its address, which another model in this
        # process may have had before.
        getattr(HadamardTransform, "scaled_data_ptrs", set()).clear()

    def takes(self, variant: str, key: str) -> bool:
        """Whether a tensor, by its name in the variant's own checkpoint, is one of its matrices."""
        has_part = any(_has_part(path, key) for path, _ in self._rotations[variant])
        return has_part and ROTATION.search(key) is not None

    def load(self, variant: str, key: str, matrix: torch.Tensor) -> None:
        """Fill all matrices of a rotation, by the name of its part of a linear, that have this size."""
        for path, rotation in self._rotations[variant]:
            if _has_part(path, key):
                for own in rotation.weight.partitions.values():
                    if own.shape == matrix.shape:
                        self._fill(own, matrix)

    def finish(self) -> None:
        """Make Hadamard's matrices that no tensor was stored for; raise FlexQuantError for another kind."""
        for variant, rotations in self._rotations.items():
            for path, rotation in rotations:
                for part, own in rotation.weight.partitions.items():
                    if own.data_ptr() in self._filled:
                        continue
                    size = len(own)
                    if rotation.transforms[part].scheme.type != "hadamard" or size & (size - 1):
                        raise FlexQuantError(
                            f"variant '{variant}' of the merged checkpoint lacks the matrix [{size}, {size}] "
                            f"of '{path}', by which inputs are multiplied; merge again"
                        )
                    self._fill(own, deterministic_hadamard_matrix(size, torch.float32, own.device))
                vars(rotation)["has_loop"] = _has_loop([*rotation.weight.partitions.values()])

    def _fill(self, own: torch.Tensor, matrix: torch.Tensor) -> None:
        own.data.copy_(matrix)
        self._filled.add(own.data_ptr())


def _has_loop(matrices: list[torch.Tensor]) -> bool:
    """Whether `rotation.cpp` rotates as these unscaled matrices do: it knows Hadamard's alone."""
    fits = all(matrix.device.type == "cpu" and len(matrix) in LOOP_SIZES for matrix in matrices)
    return fits and _load_loop() and all(torch.equal(m.float(), _hadamard(len(m))) for m in matrices)


@functools.cache
def _hadamard(size: int) -> torch.Tensor:
    return deterministic_hadamard_matrix(size, torch.float32, torch.device("cpu"))


@functools.cache
def _load_loop() -> bool:
    if has_loops():
        torch.library.register_fake("flexquant_rotation::rotate", lambda x, size: x.new_empty(x.shape))
    return has_loops()


def _check_blocks(variant: str, linear: Any, rotation: HadamardTransform) -> None:
    inputs = getattr(linear, "input_size_per_partition", linear.input_size)
    for part, own in rotation.weight.partitions.items():
        if rotation.transforms[part].args.location == "input" and inputs % len(own):
            raise FlexQuantError(
                f"variant '{variant}' rotates inputs of '{linear.prefix}' in blocks of {len(own)}, and a "
                f"rank has {inputs}; choose another --tensor-parallel-size, or a policy without '{variant}'"
            )


def _has_part(path: str, key: str) -> bool:
    """Whether a module and a tensor are of one rotation, such as ``v_input``, of whatever linears."""
    return path.rpartition(".")[2] == key.split(".")[-2]
