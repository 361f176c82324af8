# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Undo rotations of a linear's inputs that run with the model: QuIP's V, SpinQuant's and QuaRot's R4.

Such a linear's inputs are multiplied by an orthogonal V before all else, block by block, and W V is stored in
place of its matrix W. As in vLLM, a stored V is divided by the square root of its size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from compressed_tensors.transform import TransformConfig, TransformLocation, TransformScheme
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from torch import Tensor

from flexquant.checkpoint.loadable import ROUTERS
from flexquant.checkpoint.module_names import EMBEDDINGS, EXPERTS, LATENT_UP
from flexquant.checkpoint.patterns import Patterns
from flexquant.checkpoint.safetensors_io import load_tensor
from flexquant.checkpoint.schemes import LINEAR
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source
from flexquant.merge.kv.agreement import ScaledRows

PART = "_input"
"""What vLLM and compressed-tensors append to a rotation's name, for the module that has its matrix."""


class InputRotations:
    """The rotations of inputs in one source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        section = source.quantization_config.get("transform_config") or {}
        groups = TransformConfig.model_validate(section).config_groups if section else {}
        modules = [LINEAR, *dict.fromkeys(name.rpartition(".")[0] for name in source.tensors)]
        self._online = [
            (name, scheme, args, *(Patterns(p, modules, source.owner) for p in (args.targets, args.ignore)))
            for name, scheme in groups.items()
            for args in scheme.apply
            if args.location == TransformLocation.INPUT
        ]
        parts = tuple(f".{name}{PART}.weight" for name, *_ in self._online)
        self.tensors = {name for name in source.tensors if parts and name.endswith(parts)}
        """Names of the tensors that hold rotations."""

    def of(self, module: str, inputs: int) -> Tensor | None:
        """Return what blocks of a linear's stored rows are multiplied by, float32 [block, block], or None.

        Raises FlexQuantError for a matrix that is missing or does not fit, and inputs that vLLM leaves.
        """
        found = None
        if f"{module}.".endswith(tuple(f"{name}." for name in EMBEDDINGS)):
            return None
        for name, scheme, args, *patterns in self._online:
            targeted, ignored = (p.first(module) or p.first(LINEAR) for p in patterns)
            if targeted and not ignored:
                matrix = self._matrix(module, name, scheme, scheme.head_dim or inputs)
                found = matrix if args.inverse else matrix.t()
        by_itself = module.rpartition(".")[2] in (*ROUTERS, "lm_head")
        if found is not None and (by_itself or EXPERTS.match(f"{module}.") or LATENT_UP.match(f"{module}.")):
            raise self._error(module, "by its config, and not by vLLM, which has no such rotations for it")
        if found is not None and inputs % len(found):
            raise self._error(module, f"in blocks of {len(found)}, which do not divide its {inputs} inputs")
        return found

    def _matrix(self, module: str, name: str, scheme: TransformScheme, size: int) -> Tensor:
        """Return the rotation ``name``; linears with inputs of one size share it, and one has it on disk."""
        own = f"{module}.{name}{PART}.weight"
        shared = sorted(key for key in self.tensors if key.endswith(f".{name}{PART}.weight"))
        for key in [own, *shared]:
            ref = self._source.tensors.get(key)
            if ref is not None and ref.shape == (size, size):
                return load_tensor(ref).float() / size**0.5
        if scheme.type != "hadamard" or size & (size - 1):
            raise self._error(module, f"by '{name}', whose matrix [{size}, {size}] is not in the checkpoint")
        whole: Tensor = deterministic_hadamard_matrix(size, torch.float32, torch.device("cpu"))
        return whole / size**0.5

    def _error(self, module: str, problem: str) -> FlexQuantError:
        found = f"the inputs of '{module}' of {self._source.owner} are rotated {problem}"
        return FlexQuantError(f"{found}, so it cannot be compared; quantise it again")


def turned_back(stored: ScaledRows, rotation: Tensor) -> ScaledRows:
    """Return rows of a linear's matrix from stored ones and what :meth:`InputRotations.of` returns."""
    size, variance = len(rotation), stored.variance
    if variance.shape[1] > 1:
        width = stored.values.shape[1] // variance.shape[1]
        variance = _by_block(variance.repeat_interleave(width, dim=1), rotation.square(), size)
    return replace(stored, values=_by_block(stored.values, rotation, size), variance=variance)


def _by_block(rows: Tensor, matrix: Tensor, size: int) -> Tensor:
    return (rows.view(len(rows), -1, size) @ matrix).flatten(1)
