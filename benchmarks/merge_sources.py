# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Random checkpoints of one model, Llama-shaped and of any size, for timing what merges them.

They are W8A8 and W4A16 as compressed-tensors, and W4A16 as AWQ, all with the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

VOCAB, GROUP_SIZE = 1024, 128
HEADS, KV_HEADS = 32, 8
WEIGHTS_PER_SHARD = 1 << 28
BF16_ONE = b"\x80\x3f"
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The output that each place of a word of AWQ's holds, of eight neighbouring ones."""

Tensors = Iterator[tuple[str, str, list[int], bytes]]


def projections(hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's Linears."""
    intermediate, kv_size = 4 * hidden, hidden * KV_HEADS // HEADS
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def weights_of_layer(hidden: int) -> int:
    return sum(rows * columns for rows, columns in projections(hidden).values())


def layer_tensors(layer: int, scheme: str, hidden: int, pool: bytes) -> Tensors:
    """Yield (name, dtype, shape, bytes) of one decoder layer, the bytes cut from a random pool."""
    prefix = f"model.layers.{layer}."

    def cut(name: str, size: int) -> bytes:
        start = hash_name(name) % (len(pool) - size)
        return pool[start : start + size]

    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{norm}.weight", "BF16", [hidden], BF16_ONE * hidden
    for projection, (rows, columns) in projections(hidden).items():
        name = f"{prefix}{projection}.weight"
        packed = cut(name, rows * columns // 2)
        groups = columns // GROUP_SIZE
        if scheme == "w8a8":
            yield name, "I8", [rows, columns], times_16(packed)
            yield name + "_scale", "BF16", [rows, 1], b"\x80\x3a" * rows  # 2 ** -10
        elif scheme == "awq":
            module = name.removesuffix("weight")
            yield module + "qweight", "I32", [columns, rows // 8], as_awq(packed, rows, columns)
            yield module + "qzeros", "I32", [groups, rows // 8], b"\x88" * (groups * rows // 2)
            yield module + "scales", "BF16", [groups, rows], b"\x80\x3c" * (rows * groups)  # 2 ** -6
        else:
            yield name + "_packed", "I32", [rows, columns // 8], packed
            yield name + "_shape", "I64", [2], rows.to_bytes(8, "little") + columns.to_bytes(8, "little")
            yield name + "_scale", "BF16", [rows, groups], b"\x80\x3c" * (rows * groups)  # 2 ** -6


def times_16(packed: bytes) -> bytes:
    """Return 16 times each packed 4-bit value, as int8: the same weights at a scale of a sixteenth."""
    values = bytearray(2 * len(packed))
    values[0::2] = packed.translate(bytes(((b & 15) - 8) * 16 % 256 for b in range(256)))
    values[1::2] = packed.translate(bytes(((b >> 4) - 8) * 16 % 256 for b in range(256)))
    return bytes(values)


def as_awq(packed: bytes, rows: int, columns: int) -> bytes:
    """Return packed 4-bit values [rows, columns] as AWQ packs them."""
    import torch  # here, as the processes whose memory is measured import this module too

    pairs = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(rows, columns // 2)
    values = torch.stack([pairs & 15, pairs >> 4], -1).view(rows // 8, 8, columns)[:, AWQ_COLUMNS]
    words = values[:, 0::2] | values[:, 1::2] << 4
    return bytes(words.permute(2, 0, 1).contiguous().numpy())


def quantization_config(scheme: str) -> dict[str, object]:
    """Return the section of ``config.json`` for a scheme."""
    if scheme == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP_SIZE,
            "zero_point": True,
            "version": "gemm",
        }
    weights: dict[str, object] = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    if scheme == "w4a16":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}
    group: dict[str, object] = {"targets": ["Linear"], "weights": weights}
    group |= {"input_activations": activations} if scheme == "w8a8" else {}
    return {
        "quant_method": "compressed-tensors",
        "format": {"w8a8": "int-quantized", "w4a16": "pack-quantized"}[scheme],
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def hash_name(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % 1_000_000_007


def write_shard(path: Path, tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    header, position = {}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for *_, data in tensors:
            f.write(data)


def make_source(folder: Path, scheme: str, num_layers: int, hidden: int, pool: bytes) -> None:
    folder.mkdir()
    shards = []
    layers_per_shard = max(1, WEIGHTS_PER_SHARD // weights_of_layer(hidden))
    for first in range(0, num_layers, layers_per_shard):
        layers = range(first, min(first + layers_per_shard, num_layers))
        shards.append([t for layer in layers for t in layer_tensors(layer, scheme, hidden, pool)])
        write_shard(folder / shard_name(len(shards) - 1), shards[-1])
        shards[-1] = [(name, dtype, shape, b"") for name, dtype, shape, _ in shards[-1]]
    embedding = bytearray(pool[: 2 * VOCAB * hidden])
    embedding[1::2] = embedding[1::2].translate(bytes((b & 0x80) | 0x3C for b in range(256)))  # about 2 ** -6
    outer = [("model.embed_tokens.weight", [VOCAB, hidden]), ("lm_head.weight", [VOCAB, hidden])]
    shards.append(
        [(name, "BF16", shape, embedding) for name, shape in outer]
        + [("model.norm.weight", "BF16", [hidden], BF16_ONE * hidden)]
    )
    write_shard(folder / shard_name(len(shards) - 1), shards[-1])
    weight_map = {name: shard_name(i) for i, shard in enumerate(shards) for name, *_ in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCAB,
        "quantization_config": quantization_config(scheme),
    }
    (folder / "config.json").write_text(json.dumps(config))


def shard_name(number: int) -> str:
    return f"shard-{number:03d}.safetensors"
