# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Compare one layer of two variants: run transformers' layer for both, and compare the matrices on the way.

Everything but the matrices runs in float32 in transformers' own code, with the parameters of either variant.
The matrices return the same answers in both, so what the layer caches and returns has to be equal, up to the
rounding of parameters. A matrix's input has to be equal up to a factor for each column, which a fold
(SmoothQuant) moves there. With these multiplied out, matrices may differ by quantisation noise only. If rows
have factors (a fold from up_proj into down_proj), answers are multiplied by them, provided that they cancel
further on. Routed experts are compared by tensor name, since transformers fuses their matrices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from flexquant.checkpoint.module_names import ranges
from flexquant.checkpoint.safetensors_io import TensorRef, load_tensor, same_bytes
from flexquant.checkpoint.schemes import FLOAT_DTYPES, mantissa_bits
from flexquant.merge.kv import layer_pass
from flexquant.merge.kv.agreement import (
    ERROR_CAP,
    OUTPUT_NOISE_FACTOR,
    OUTPUT_ROW_GAIN,
    ROW_GAIN,
    MatrixDistance,
    MatrixSums,
    judge_matrices,
    row_numbers,
    sample_rows,
    sum_products,
    unexplained_gains,
)
from flexquant.merge.kv.matrices import is_experts, is_linear, shape_of
from flexquant.merge.kv.skeleton import WITH_HEADS
from flexquant.merge.kv.variant_weights import VariantWeights, unequal

DOWN_AND_UP = {"down_proj": "up_proj", "w2": "w3"}
"""Down projection -> up projection; the columns of the first may undo a factor of the second's rows."""
LEAST_ROWS = 96
"""Least rows compared of an expert's gate or up projection; fewer than elsewhere, as experts are many."""

Weights = tuple[VariantWeights, VariantWeights]
"""The variant's, and the reference's."""
Modules = tuple[str, str]
"""A matrix's module in the variant and in the reference."""
Rows = Sequence[range]
Rotation = Tensor | None
Columns = tuple[Tensor, Tensor]
"""Factors of a matrix's columns in the variant and in the reference, [in] each."""
LATENT_UP = "kv_b_proj"
"""Projection that expands the latent KV cache; vLLM's attention layer, which all variants share, holds it."""
RESCALED = 0.1
"""Deviation of the median factor from 1 above which a matrix is rescaled; GPTQ moves single rows by more."""
OF_ANOTHER = 2.0
"""Multiple of the allowed error above which a matrix is another model's; GPTQ once reached half of it."""
LEAST_COLUMN = 0.1
"""Least weight of a matrix's column, as a share of the mean, however small its inputs were."""
IN_A_STATE = "a state is computed with, where a difference adds up from token to token"
RowsCached = dict[object, layer_pass.Cached]
"""Names and shapes of a layer's matrices -> what such a layer's cache is computed with."""


def equal_but_for_columns(a: TensorRef, b: TensorRef, factors: Tensor | None) -> bool:
    """Whether [experts, ., .] are equal but for ``factors`` [in]; without them (or all 1) to the byte."""
    if factors is None or bool(((factors - 1).abs() < layer_pass.ARITHMETIC).all()):
        return same_bytes(a, b)
    if a.shape != b.shape or not {a.dtype, b.dtype} <= FLOAT_DTYPES.keys() or len(factors) not in a.shape[1:]:
        return False
    last = a.shape[-1] == len(factors)
    rounding = 2.0 ** -mantissa_bits(a, b)
    for expert in range(a.shape[0]):
        x, y = (load_tensor(ref, [range(expert, expert + 1)]).float() for ref in (a, b))
        x *= factors if last else factors[:, None]
        if layer_pass.excess(x, y, rounding * y.abs() / layer_pass.ROUNDING) > 1:
            return False
    return True


class LayerComparison:
    """The comparison of one layer; with a ``rotation`` of the residual stream it stops at the KV cache."""

    def __init__(self, weights: Weights, layer: int, rotation: Rotation, known: RowsCached) -> None:
        self.agreements: list[tuple[str, MatrixDistance]] = []
        """(Last part of the matrix's name, how it agrees), in the order of the comparisons."""
        self.cache_difference = ""
        """Why the variants cannot share a cache; empty if nothing was found against it."""
        self.residual_difference = ""
        """Why plans cannot mix the variants' layers; empty if nothing was found against it."""
        self.rescaled = rotation is not None
        """Whether a fold or rotation gives a matrix other inputs or outputs than the reference's."""
        self._weights, self._layer, self._rotation = weights, layer, rotation
        self._skeleton = skeleton = weights[1].skeleton
        self._tensors = [of.layers[layer] for of in weights]
        self._parameters = [of.load_parameters(layer) for of in weights]
        self._pass = partial(layer_pass.run_pass, skeleton, layer, until_cached=rotation is not None)
        matrices, written = skeleton.matrices[layer], skeleton.writes(layer)
        kind = *((name, None if is_experts(name) else shape_of(m)) for name, m in matrices.items()), *written
        if kind not in known:
            known[kind] = layer_pass.find_cached(self._pass, self._parameters[1])
        self._rows, self._of_states = known[kind]
        self._seen = self._pass(self._parameters[1])
        self._run = partial(self._pass, reference=self._seen)
        self._cached_rows_differ = False
        self._turned = set[str]()
        """The variant's modules that read the residual stream, which is rotated."""
        self._given = dict[str, Tensor]()
        """Inputs of the variant's matrices, rotated into the reference's basis."""

    def run(self) -> Self:
        """Compare the layer and return self; raise FlexQuantError for a tensor that cannot be read."""
        self._compare_stored()
        if self.cache_difference:
            return self
        seen = self._run(self._parameters[0], gains=self._compare_matrix, rotation=self._rotation)
        for name, matrix in self._skeleton.matrices[self._layer].items():
            if self._rotation is not None or name in seen.inputs:
                continue
            if is_experts(name):
                self._refuse(f"layer {self._layer} {name} is not reached by transformers' own layer")
            else:
                self._compare_rows(name, _no_factors(shape_of(matrix)[1]))
        seen = replace(seen, inputs=self._given)
        a, b = (of.rounding_steps(self._layer) for of in self._weights)
        steps = {name: max(a[name], b[name]) for name in a}
        self._compare_beside_matrices(steps)
        if difference := layer_pass.explain_difference(seen, self._seen, self._run, self._parameters, steps):
            self.cache_difference = f"layer {self._layer} {difference}"
        return self

    def _compare_stored(self) -> None:
        """Compare, byte for byte, tensors that no pass reads and the projection of a latent cache."""
        a, b = self._tensors
        for name in unequal(a.unread, b.unread):
            problem = "the layer as transformers builds it does not read it, so what it does to the cache"
            self._refuse(f"'{name}' is not equal in both, and {problem} is not known")
        for name in unequal(a.parameters, b.parameters) if self._skeleton.stands_in else ():
            stored = (b.parameters.get(name) or a.parameters[name]).name
            unknown = "what the model does with it is unknown, as the installed transformers cannot build it"
            advice = "update transformers, or quantise without moving scales into the norms"
            self._refuse(f"'{stored}' is not equal in both, and {unknown}; {advice}")
        both = list(zip(self._weights, self._tensors, strict=True))
        for matrix in (name for name in a.matrices if name.endswith(LATENT_UP)):
            if any(unequal(*(weights.stored(own.matrices[matrix]) for weights, own in both))):
                use = "expands the cached latent for all variants at once"
                advice = f"keep it in 16 bits in all ('re:.*{LATENT_UP}$' among what the recipe ignores)"
                self._refuse(f"layer {self._layer} {matrix}, which {use}, is not the same in both; {advice}")

    def _compare_beside_matrices(self, steps: Mapping[str, float]) -> None:
        """Compare parameters whose differences a pass does not show, or not after so few tokens."""
        matrices = self._skeleton.matrices[self._layer]
        a, b = self._parameters
        for name in a:
            router, _, own = name.rpartition(".")
            use = IN_A_STATE if name in self._of_states else ""
            if router in matrices and own != "weight" and not is_linear(matrices[router]):
                use = "helps to choose experts"
            rounding = steps[name] * b[name].abs() / layer_pass.ROUNDING
            if use and layer_pass.excess(a[name], b[name], rounding) > 1:
                self._refuse(f"layer {self._layer} {name}, which {use}, differs")

    def _compare_matrix(self, name: str, x: Tensor) -> Tensor | None:
        """Compare a matrix whose input is ``x`` [tokens, in]; return row factors [out] that cancel later."""
        expected = self._seen.inputs[name]
        name = name.partition(layer_pass.CALL)[0]
        factors = layer_pass.column_factors(x, expected)
        if self._rotation is not None and layer_pass.excess(x, factors * expected) > 1:
            x = x @ self._rotation.T
            factors = layer_pass.column_factors(x, expected)
            self._turned.add(self._tensors[0].matrices.get(name, ""))
        self._given[name] = x
        size = expected.square().mean(0).sqrt()
        size = size.clamp_min(LEAST_COLUMN * float(size.mean()))
        columns = (factors * size, size)
        if not is_experts(name):
            self.rescaled |= bool((factors - 1).abs().median() > RESCALED)
            return self._compare_rows(name, columns)
        self._compare_fused(name, factors)
        self._compare_experts(name, columns)
        return None

    def _compare_fused(self, name: str, factors: Tensor) -> None:
        """Compare 16-bit tensors that hold all experts; ``factors`` [in] are those of the experts' input."""
        a, b = (of.fused.get(name, {}) for of in self._tensors)
        for own, ref in b.items():
            given = factors if len(ref.shape) == 3 and not own.startswith("down") else None
            if own not in a or not equal_but_for_columns(a[own], ref, given):
                advice = "leave experts in 16 bits as they are"
                self._refuse(f"'{ref.name}' differs by more than rounding; {advice}")

    def _compare_experts(self, name: str, columns: Columns) -> None:
        """Compare experts that are stored one by one, matrix by matrix; ``columns`` are of their inputs."""
        a, b = (of.experts.get(name, {}) for of in self._tensors)
        for turn, (number, matrices) in enumerate(sorted(b.items()), self._layer):
            pairs = {part: (a[number][part], module) for part, module in matrices.items()}
            for part, modules in pairs.items():
                rows, inputs = self._weights[1].reader.shape(modules[1])
                if part in DOWN_AND_UP:
                    sample, ones = sample_rows(rows, turn), _no_factors(inputs)
                    agreement, up = self._judge(modules, sample, ones), pairs.get(DOWN_AND_UP[part])
                    if up is not None and not agreement.agrees:
                        gains = self._sums(up, [range(inputs)], columns).rows.gains().float()
                        agreement = self._judge(modules, sample, (gains, ones[1]))
                else:
                    agreement = self._judge(modules, sample_rows(rows, turn, LEAST_ROWS), columns)
                self._note(f"{name}.{number}.{part}", modules, agreement, cached=False)

    def _compare_rows(self, name: str, columns: Columns) -> Tensor | None:
        """Compare the rows that reach the cache and a sample of the others; return as ``_compare_matrix``."""
        matrices = self._skeleton.matrices[self._layer]
        out = shape_of(matrices[name])[0]
        modules = self._tensors[0].matrices[name], self._tensors[1].matrices[name]
        cached = self._rows.get(name, torch.zeros(out, dtype=torch.bool))
        if self._skeleton.stands_in and name in self._rows:  # its rows may lie in another order
            cached = torch.ones_like(cached)
        if rows := _ranges(cached):
            widths = (self._seen.results[of].shape[-1] for of in WITH_HEADS if of in self._seen.results)
            heads = next((width for width in widths if int(cached.sum()) % width == 0), None)
            sums = self._sums(modules, rows, columns)
            self._note(name, modules, judge_matrices(sums, heads, row_numbers=row_numbers(rows)), cached=True)
        others = _ranges(~cached)
        turn = self._layer + list(matrices).index(name)
        sample = [part[block.start : block.stop] for part in others for block in sample_rows(len(part), turn)]
        if not sample:
            return None
        sums, gains = self._sums(modules, sample, columns), None
        self.rescaled |= bool((sums.rows.gains() - 1).abs().median() > RESCALED)
        agreement = judge_matrices(sums, None, OUTPUT_NOISE_FACTOR, ROW_GAIN, row_numbers(sample))
        if not agreement.agrees:
            gains = self._cancelling_gains(name, modules, others, columns)
            agreement = self._judge(modules, sample, columns, None if gains is None else 1 / gains)
        self._note(name, modules, agreement, cached=False)
        return gains

    def _cancelling_gains(self, name: str, modules: Modules, rows: Rows, columns: Columns) -> Tensor | None:
        """Return row factors [out] that change nothing later in the layer but columns; None if they do."""
        matrix = self._skeleton.matrices[self._layer][name]
        if self._rotation is not None or not is_linear(matrix):
            return None
        found = unexplained_gains(self._sums(modules, rows, columns).rows).float()
        if not bool((found.isfinite() & (found > 0)).all()):
            return None
        gains = torch.ones(matrix.out_features, dtype=torch.float32)
        gains[row_numbers(rows)] = found
        seen = self._run(self._parameters[1], gains=lambda point, _: gains if point == name else None)
        return None if layer_pass.changed(seen, self._seen) else gains

    def _judge(
        self, modules: Modules, rows: Rows, columns: Columns, row_factors: Tensor | None = None
    ) -> MatrixDistance:
        """Return how rows that do not reach the cache agree; see `_sums`."""
        sums = self._sums(modules, rows, columns, row_factors)
        return judge_matrices(sums, None, OUTPUT_NOISE_FACTOR, OUTPUT_ROW_GAIN, row_numbers(rows))

    def _sums(
        self, modules: Modules, rows: Rows, columns: Columns, row_factors: Tensor | None = None
    ) -> MatrixSums:
        """Sum over rows of the variant's matrix, turned back or with ``row_factors``, and the reference's."""
        of_variant = self._weights[0].matrix(modules[0], rows, row_factors)
        if self._rotation is not None and modules[0] in self._turned:
            of_variant = of_variant.rotated(self._rotation)
        of_reference = self._weights[1].matrix(modules[1], rows)
        return sum_products(of_variant.times_columns(columns[0]), of_reference.times_columns(columns[1]))

    def _note(self, name: str, modules: Modules, agreement: MatrixDistance, *, cached: bool) -> None:
        """Record how a matrix agrees; a difference that no quantisation explains also forbids sharing."""
        self.agreements.append((name.rpartition(".")[2], agreement))
        if agreement.agrees:
            return
        overall = "" if agreement.worst == agreement.error else f"; {agreement.error}"
        by = f"more than quantisation noise ({agreement.worst}{overall})"
        difference = f"layer {self._layer} {name} differs by {by}"
        both = zip(self._weights, modules, strict=True)
        quantised = any(of.reader.is_quantised(module) for of, module in both)
        if cached and not self._cached_rows_differ:
            self.cache_difference, self._cached_rows_differ = difference, True
        elif not quantised or _is_of_another_model(agreement):
            self._refuse(difference)
        else:
            self.residual_difference = self.residual_difference or difference

    def _refuse(self, difference: str) -> None:
        self.cache_difference = self.cache_difference or difference


def _is_of_another_model(agreement: MatrixDistance) -> bool:
    """Whether no quantisation explains the difference, or a norm was changed without its projections."""
    error = agreement.error
    return error.measured > ERROR_CAP or error.ratio > OF_ANOTHER or agreement.columns.ratio > 1


def _ranges(rows: Tensor) -> list[range]:
    return ranges(torch.nonzero(rows).flatten().tolist())


def _no_factors(inputs: int) -> Columns:
    ones = torch.ones(inputs, dtype=torch.float32)
    return ones, ones
