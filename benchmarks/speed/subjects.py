# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What is compared: static checkpoints on stock vLLM, FlexQuant under a policy, and other programs."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

from flexquant.errors import FlexQuantError
from flexquant.policy.rules import load_policy

FLEXQUANT = "flexquant:"
FLEXQUANT_ON = "flexquant@"
MERGED = "merged"
AGAIN = ":again"
LLAMA_CPP, OPENVINO = PEERS = ("llama.cpp", "openvino")
"""Other programs, which serve the 16-bit checkpoint as GGUF."""
QUANTISATIONS = ("Q4_0", "Q8_0", "F16")
"""GGUF's, of those that both peers read."""


@dataclass(frozen=True)
class Subject:
    """One way to serve a model: a checkpoint, and how vLLM is told to run it."""

    name: str
    variants: tuple[str, ...]
    """The variants that are served: one for a static checkpoint, those of the merged one for a policy."""
    policy: str | None = None
    arguments: tuple[str, ...] = ()
    cuda_arguments: tuple[str, ...] = ()
    """Arguments of ``vllm serve`` on a GPU only."""
    environment: dict[str, str] = field(default_factory=dict)
    has_stock_kernels: bool = True
    """Whether a static checkpoint on a CPU takes the kernels that vLLM chooses, not those of FlexQuant."""
    needs_w4a8: bool = False
    given: str | None = None
    """Which of the given checkpoints a policy serves, if it is not the merged one."""
    peer: str | None = None
    """The program that serves, if it is not vLLM."""
    quantisation: str | None = None
    """GGUF's, for a peer."""

    @property
    def is_merged(self) -> bool:
        return self.policy is not None

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint among given ones."""
        return self.given or (MERGED if self.is_merged else self.variants[0])

    def describe(self) -> dict[str, Any]:
        """Return what tells this subject from others in a cell's parameters."""
        if self.policy is None:
            return {"subject": self.name}
        document = json.dumps(load_policy(self.policy).document, sort_keys=True)
        return {"subject": self.name, "policy_crc32": f"{zlib.crc32(document.encode()):08x}"}


STATIC = {
    "bf16": Subject("bf16", ("bf16",)),
    "w8a8": Subject("w8a8", ("w8a8",)),
    # On some CPUs vLLM would serve W4A16 weights as W4A8.
    "w4a16": Subject("w4a16", ("w4a16",), environment={"VLLM_CPU_INT4_W4A8": "0"}),
    "w4a16-chosen": Subject("w4a16-chosen", ("w4a16",), has_stock_kernels=False),
    "fp8": Subject("fp8", ("fp8",)),
    # Marlin has to be named: vLLM prefers Machete on Hopper, which has no 8-bit activations.
    "w4a8": Subject(
        "w4a8",
        ("w4a16",),
        cuda_arguments=("--linear-backend", "marlin"),
        environment={"VLLM_MARLIN_INPUT_DTYPE": "int8", "VLLM_CPU_INT4_W4A8": "1"},
        needs_w4a8=True,
    ),
}
"""Static subjects, keyed by name; ``w4a16-chosen`` takes the kernels that FlexQuant would choose on a CPU."""


def is_peer(name: str) -> bool:
    """Return whether a subject's name is that of another program."""
    return name.partition(":")[0] in PEERS


def parse_subject(text: str) -> Subject:
    """Return the subject of a name: a static one, or ``flexquant:POLICY`` (built-in name or YAML file).

    A static one with ``:again`` is a second server of the same checkpoint, which shows how far equal servers
    differ. ``flexquant@CHECKPOINT:POLICY`` serves another of the given checkpoints than the merged one.
    ``llama.cpp:QUANTISATION`` and ``openvino:QUANTISATION`` are other programs.
    """
    if (static := text.removesuffix(AGAIN)) in STATIC:
        return replace(STATIC[static], name=text)
    head, _, policy = text.partition(":")
    if is_peer(text):
        if policy not in QUANTISATIONS:
            allowed = ", ".join(f"{head}:{name}" for name in QUANTISATIONS)
            raise FlexQuantError(f"'{text}' does not name a quantisation; choose from {allowed}")
        return Subject(text, ("bf16",), peer=head, quantisation=policy)
    if not policy or not (text.startswith(FLEXQUANT) or head.startswith(FLEXQUANT_ON)):
        raise FlexQuantError(
            f"'{text}' is not a subject; choose from {', '.join(STATIC)} (each also with {AGAIN}, a second "
            "server of the same), or write flexquant:POLICY, flexquant@CHECKPOINT:POLICY, "
            f"{' or '.join(f'{peer}:QUANTISATION' for peer in PEERS)}"
        )
    eight_bit = "fp8" if "fp8" in load_policy(policy).variants else "w8a8"
    arguments = ("--additional-config", json.dumps({"flexquant": {"policy": policy}}))
    if given := head.partition("@")[2]:
        arguments += ("--config-format", "flexquant")
    return Subject(text, (eight_bit, "w4a16"), policy, arguments, given=given or None)
