# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Edits of the 16-bit weights of ``make_checkpoint``: smoothings, rotations, changes of single tensors."""

import re
from collections.abc import Callable

import torch

from tests.checkpoints import StateDict

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 32, 128, 256
LAYERS = ("model.layers.0.", "model.layers.1.")
READS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
WRITES = ("self_attn.o_proj", "mlp.down_proj")
Edit = Callable[[StateDict], None]


def in_float32(edit: Edit) -> Callable[[StateDict], StateDict]:
    def transform(state: StateDict) -> StateDict:
        torch.manual_seed(7)
        state = {name: tensor.float() for name, tensor in state.items()}
        edit(state)
        return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}

    return transform


def factors(n: int, low: float, high: float) -> torch.Tensor:
    return torch.empty(n).uniform_(low, high)


def orthogonal(n: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, n))[0]


def smooth_norms(norm_offset: float = 0.0, norms=READS, compensate: bool = True, low=0.5, high=2.0) -> Edit:
    def edit(state: StateDict) -> None:
        for layer in LAYERS:
            for norm, readers in norms.items():
                scale = factors(HIDDEN, low, high)
                weight = state[f"{layer}{norm}.weight"]
                weight.copy_((weight + norm_offset) / scale - norm_offset)
                for reader in readers if compensate else ():
                    state[f"{layer}{reader}.weight"] *= scale

    return edit


def smooth_v_to_o(low: float, high: float) -> Edit:
    def edit(state: StateDict) -> None:
        for layer in LAYERS:
            scale = factors(KV_HEADS * HEAD_DIM, low, high)
            state[layer + "self_attn.v_proj.weight"] *= scale[:, None]
            per_query_head = scale.view(KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 0)
            state[layer + "self_attn.o_proj.weight"] /= per_query_head.reshape(-1)

    return edit


def rotate_v_and_o(state: StateDict) -> None:
    for layer in LAYERS:
        rotation = orthogonal(HEAD_DIM)
        rotate_head_rows(state, layer + "self_attn.v_proj.weight", rotation)
        o = layer + "self_attn.o_proj.weight"
        state[o] = (state[o].view(HIDDEN, HEADS, HEAD_DIM) @ rotation.T).reshape(HIDDEN, -1)


def rotate_q_and_k(state: StateDict) -> None:
    for layer in LAYERS:
        rotation = orthogonal(HEAD_DIM)
        for projection in ("q_proj", "k_proj"):
            rotate_head_rows(state, f"{layer}self_attn.{projection}.weight", rotation)


def rotate_head_rows(state: StateDict, name: str, rotation: torch.Tensor) -> None:
    weight = state[name]
    state[name] = (rotation @ weight.view(-1, HEAD_DIM, weight.shape[1])).reshape(weight.shape)


def rotate_residual(state: StateDict) -> None:
    """Apply QuaRot's first rotation: fold the norms, and turn everything that touches the residual stream."""
    rotation = orthogonal(HIDDEN)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"] @ rotation
    for layer in LAYERS:
        for norm, readers in READS.items():
            for reader in readers:
                name = f"{layer}{reader}.weight"
                state[name] = (state[name] * state[f"{layer}{norm}.weight"]) @ rotation
            state[f"{layer}{norm}.weight"].fill_(1)
        for writer in WRITES:
            state[f"{layer}{writer}.weight"] = rotation.T @ state[f"{layer}{writer}.weight"]
    state["lm_head.weight"] = (state["lm_head.weight"] * state["model.norm.weight"]) @ rotation
    state["model.norm.weight"].fill_(1)


def scale_up_to_down(state: StateDict) -> None:
    for layer in LAYERS:
        scale = factors(INTERMEDIATE, 0.5, 2)
        state[layer + "mlp.up_proj.weight"] /= scale[:, None]
        state[layer + "mlp.down_proj.weight"] *= scale


def edit_tensor(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(state: StateDict) -> None:
        names = [name for name in state if re.search(pattern, name)]
        assert names
        for name in names:
            state[name] = change(state[name])

    return edit


double_keys_of_the_last_layer = in_float32(edit_tensor(r"layers\.1\.self_attn\.k_proj", lambda w: 2 * w))
