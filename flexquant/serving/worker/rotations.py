# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Load the matrices by which linears multiply their inputs in each pass (QuIP, SpinQuant's fourth rotation).

Linears with inputs of one size share a matrix, and a checkpoint has it under the first of them alone, whose
layer need not be on this rank, or in any plan. vLLM leaves a matrix that it does not find as the memory was.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from torch import nn

from flexquant.checkpoint.schemes import ROTATION
from flexquant.errors import FlexQuantError
from flexquant.serving.vllm_api import HadamardTransform
from flexquant.serving.vllm_api import module as rotation_module


def rotate_on_every_rank() -> None:
    """Have vLLM build rotations under tensor parallelism, where each rank rotates its blocks of inputs.

    vLLM (0.26 to 0.33) refuses all of them. Delete this once it builds those in blocks.
    """
    rotation_module.get_tensor_model_parallel_world_size = lambda: 1


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

    def _fill(self, own: torch.Tensor, matrix: torch.Tensor) -> None:
        own.data.copy_(matrix)
        self._filled.add(own.data_ptr())


def _check_blocks(variant: str, linear: nn.Module, rotation: HadamardTransform) -> None:
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
