# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Sort the tensors of one variant by decoder layer and by their use in transformers' layer, and read them."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flexquant.checkpoint.model_config import count_layers
from flexquant.checkpoint.module_names import EMBEDDINGS, HEAD, above, decoder_layer, decoder_stacks
from flexquant.checkpoint.safetensors_io import TensorRef, Tensors, is_finite, load_tensor, same_bytes
from flexquant.checkpoint.schemes import FLOAT_DTYPES, QUANTISATION_PARAMETER, mantissa_bits
from flexquant.errors import FlexQuantError
from flexquant.merge.formats import Source
from flexquant.merge.kv.agreement import BLOCK_ROWS, ScaledMatrix, ScaledRows, row_numbers, sample_rows
from flexquant.merge.kv.dequantize import WeightReader
from flexquant.merge.kv.matrices import is_experts, shape_of
from flexquant.merge.kv.skeleton import Skeleton, is_state

CHUNK_WEIGHTS = 1 << 18  # weights of a chunk: 1 MiB as float32, which fits into a core's cache
CACHE_SCALE = re.compile(r"\.([kv]_(scale|zero_point)|[kv]_proj\.output_(scale|zero_point))$")
"""End of the name of a KV-cache scale or zero point; `pair` compares them."""
STATE = re.compile(r"\.(A_log|conv1d\.weight|conv\.weight)$")
"""End of the name of a tensor in a module that carries a state from token to token."""
INDEXER = ".self_attn.indexer."
"""Part of the name of a tensor of sparse attention, which has a cache of its own."""
WEIGHTS = ("weight", "weight_packed")
EXPERT = re.compile(r"^(?P<experts>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<matrix>.+)$")
Experts = dict[str, dict[str, str]]
"""Number of an expert -> name of its matrix -> module in the checkpoint."""


@dataclass
class LayerTensors:
    matrices: dict[str, str] = field(default_factory=dict)
    """Matrices: name of the module in transformers' layer -> module in the checkpoint."""
    parameters: dict[str, TensorRef] = field(default_factory=dict)
    experts: dict[str, Experts] = field(default_factory=dict)
    """Experts, by the name of their module in transformers' layer."""
    fused: dict[str, dict[str, TensorRef]] = field(default_factory=dict)
    """Tensors that hold one matrix of all experts, by module and parameter in transformers' layer."""
    unread: dict[str, TensorRef] = field(default_factory=dict)
    """Tensors that transformers' layer does not read, by name in the checkpoint."""


class VariantWeights:
    """The weights of one source, read a few rows at a time."""

    def __init__(self, source: Source, skeleton: Skeleton) -> None:
        self.source = source
        self.reader = WeightReader(source)
        self.num_layers = count_layers(source.config)
        self.skeleton = skeleton
        self._stack = _decoder_stack(source)
        self._root = above(self._stack)
        self.layers = [LayerTensors() for _ in range(self.num_layers)]
        for name, ref in source.tensors.items():
            found = decoder_layer(name)
            if found is not None and found["stack"] == self._stack and int(found["index"]) < self.num_layers:
                self._sort(int(found["index"]), name, found.end(), ref)
        for number, tensors in enumerate(self.layers):
            for matrix in skeleton.matrices[number]:
                if matrix not in tensors.matrices and not is_experts(matrix):
                    problem = f"layer {number} of variant '{source.name}' has no weight for '{matrix}'"
                    reason = f"which a {source.architecture} has as transformers builds it"
                    raise FlexQuantError(f"{problem}, {reason}, so what it caches cannot be compared")

    def load_parameters(self, layer: int) -> dict[str, Tensor]:
        """Return the parameters of transformers' layer but Linears' weights, float32; missing ones are ones.

        Raises FlexQuantError for a shape that does not fit the config, and for NaN or infinite numbers.
        """
        tensors = self.layers[layer]
        loaded = {}
        for name, shape in self.skeleton.parameters[layer].items():
            module, _, own = name.rpartition(".")
            if own == "weight" and module in tensors.matrices:
                loaded[name] = self.reader.open(tensors.matrices[module]).read().matrix()
            elif (ref := tensors.parameters.get(name)) is not None:
                self._check_shape(ref.name, ref.shape, shape)
                loaded[name] = self._load_finite(ref)
            else:
                loaded[name] = torch.ones(shape, dtype=torch.float32)
        return loaded

    def rounding_steps(self, layer: int) -> dict[str, float]:
        """Return the largest relative rounding error of each parameter's dtypes, by name."""
        refs, names = self.layers[layer].parameters, self.skeleton.parameters[layer]
        known = {name for name in names if name in refs and refs[name].dtype in FLOAT_DTYPES}
        bits = {name: mantissa_bits(refs[name]) if name in known else 7 for name in names}
        return {name: 2.0 ** -(of_name + 1) for name, of_name in bits.items()}

    def matrix(
        self,
        module: str,
        rows: Sequence[range] | None = None,
        row_factors: Tensor | None = None,
        chunk_weights: int = CHUNK_WEIGHTS,
    ) -> ScaledMatrix:
        """Return these rows of a module's matrix, or all, times the rows' ``row_factors`` [out]."""
        linear = self.reader.open(module)
        rows = [range(linear.shape[0])] if rows is None else rows

        def chunks() -> Iterator[ScaledRows]:
            for chunk in _in_chunks(rows, chunk_weights // linear.shape[1]):
                read = linear.read(chunk)
                if row_factors is not None:
                    read = replace(read, rows=read.rows * row_factors[row_numbers(chunk)])
                yield read

        return ScaledMatrix(chunks(), torch.ones(linear.shape[1], dtype=torch.float32))

    @property
    def embeddings_name(self) -> str:
        """The module of the token embeddings; raises FlexQuantError where there is none."""
        for name in (f"{self._root}{module}" for module in EMBEDDINGS):
            if any(f"{name}.{own}" in self.source.tensors for own in WEIGHTS):
                return name
        problem = f"variant '{self.source.name}' has no '{self._root}{EMBEDDINGS[0]}'"
        raise FlexQuantError(f"{problem}, so its residual stream cannot be compared")

    @property
    def head_name(self) -> str:
        """The module that makes the logits: the lm_head or, where there is none, the token embeddings."""
        heads = (name.rpartition(".")[0] for name in self.source.tensors if HEAD.search(name))
        return next(heads, self.embeddings_name)

    def embedding_sample(self) -> list[range]:
        """Return blocks of at least four times as many tokens as the hidden size, or of all tokens."""
        tokens, hidden = self.reader.shape(self.embeddings_name)
        return sample_rows(tokens, 0, least=4 * hidden)

    def stored(self, module: str) -> dict[str, TensorRef]:
        """Return the tensors of a module, keyed by the last part of their names."""
        prefix = f"{module}."
        tensors = self.source.tensors
        return {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}

    def outside(self, modules: Collection[str]) -> dict[str, TensorRef]:
        """Return the tensors of modules of the decoder that are in none of its layers."""
        names = {self._root + module for module in modules}
        outer = {n: ref for n, ref in self.source.tensors.items() if not n.startswith(self._stack)}
        return {n: ref for n, ref in outer.items() if n.rpartition(".")[0] in names}

    def load_last(self) -> dict[str, Tensor]:
        """Return the parameters of what runs behind the last layer by their own names, float32."""
        last = self.outside(self.skeleton.after_layers)
        return {name.rpartition(".")[2]: self._load_finite(ref) for name, ref in last.items()}

    def _sort(self, layer: int, name: str, start: int, ref: TensorRef) -> None:
        """Add one tensor to its LayerTensors; ``name[start:]`` is its name in the layer."""
        tensors, matrices = self.layers[layer], self.skeleton.matrices[layer]
        module, _, own = name.rpartition(".")
        local = name[start:]
        states = any(map(is_state, self.skeleton.writes(layer)))
        if INDEXER in name or (STATE.search(name) and not states):
            problem = f"layer {layer} of variant '{self.source.name}' has a state or a cache of its own in"
            reason = "which transformers does not keep in the cache of its model"
            undone = "so it cannot be compared and the model cannot be merged"
            raise FlexQuantError(f"{problem} '{module}', {reason}, {undone}")
        weight = self.skeleton.rename(layer, f"{local.removesuffix(f'.{own}')}.weight")
        matrix = weight.removesuffix(".weight")
        parameter = self.skeleton.rename(layer, local)
        of_matrix = own in WEIGHTS or QUANTISATION_PARAMETER.search(name) is not None
        is_parameter = parameter in self.skeleton.parameters[layer]
        if is_parameter:
            tensors.parameters[parameter] = ref
        if of_matrix and matrix in matrices:
            if own in WEIGHTS:
                tensors.matrices[matrix] = module
                self._check_shape(name, self.reader.shape(module), shape_of(matrices[matrix]))
        elif of_matrix and (expert := EXPERT.match(matrix)) is not None and expert["experts"] in matrices:
            experts = tensors.experts.setdefault(expert["experts"], {})
            experts.setdefault(expert["number"], {})[expert["matrix"]] = module
        elif is_parameter or CACHE_SCALE.search(name) or name in self.reader.rotations.tensors:
            pass
        elif (fused := self.skeleton.fused_experts(layer, local)) is not None:
            tensors.fused.setdefault(fused[0], {})[fused[1]] = ref
        else:
            tensors.unread[name] = ref

    def _load_finite(self, ref: TensorRef) -> Tensor:
        tensor = load_tensor(ref).float()
        if not is_finite(tensor):
            problem = f"tensor '{ref.name}' of variant '{self.source.name}' holds NaN or infinite numbers"
            raise FlexQuantError(f"{problem}; quantise it again")
        return tensor

    def _check_shape(self, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
        if tuple(found) != tuple(expected):
            problem = f"tensor '{name}' of variant '{self.source.name}' has the shape {list(found)}"
            advice = "take both from one model"
            raise FlexQuantError(f"{problem}, but its config.json makes it {list(expected)}; {advice}")


def _in_chunks(rows: Sequence[range], most: int) -> Iterator[list[range]]:
    """Yield the rows in chunks of at most ``most`` rows; a chunk may always hold one block."""
    most = max(BLOCK_ROWS, most)
    chunk: list[range] = []
    for block in rows:
        for part in (block[start : start + most] for start in range(0, len(block), most)):
            if chunk and sum(map(len, chunk)) + len(part) > most:
                yield chunk
                chunk = []
            chunk.append(part)
    if chunk:
        yield chunk


def _decoder_stack(source: Source) -> str:
    """Return the prefix of the numbers of the language model's decoder layers, e.g. ``model.layers.``."""
    stacks = decoder_stacks(source.tensors)
    if len(stacks) != 1:
        found = f"found {', '.join(sorted(stacks))}" if stacks else "found none"
        tensors = "tensors named '<stack>layers.<number>.self_attn.*'"
        problem = f"variant '{source.name}' should have one stack of decoder layers, {tensors}, but {found}"
        raise FlexQuantError(f"{problem}; this architecture's KV cache cannot be compared")
    return stacks.pop()


def unequal(a: Tensors, b: Tensors) -> Iterator[str]:
    """Yield the names, in order, of what is not in both with the same dtype, shape and bytes."""
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b or not same_bytes(a[name], b[name]):
            yield name
