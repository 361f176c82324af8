# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Takes one architecture from a random model to its answers: made, quantised, merged, served, compared."""

import json
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.utils import is_torchvision_available

from flexquant.errors import FlexQuantError
from flexquant.merge import merge_checkpoints
from tests.architectures.models import features, random_model, small_config, source, split
from tests.architectures.outcomes import FAILS, NOT_MADE, REFUSED, SERVED, STOCK_FAILS
from tests.checkpoints import write_checkpoint
from tests.integration.conftest import generate

PROMPTS = ["hello world, this is a prompt of more than one chunk " * 3, "abc", "xyz 1", "xyz 2"]
SAMPLING = {"max_tokens": 8, "ignore_eos": True}
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512}
VARIANTS = ("w8a8", "w4a16")
SECONDS = 180
"""Seconds that one architecture gets."""
LONGEST = 400
"""Longest reason, in characters."""


@dataclass(frozen=True)
class Outcome:
    """What came of one architecture."""

    architecture: str
    model_type: str | None
    """The model type of transformers that the model was made of."""
    features: list[str]
    outcome: str
    reason: str


class Ended(Exception):
    """Raised by a step that the chain does not get beyond; holds the outcome, and the reason."""


def step(outcome: str, what: Callable[[], Any], place: str = "") -> Any:
    """Do one step; raise Ended if it fails, as a refusal where FlexQuant says so itself.

    ``place`` begins the reason; what failed where is printed.
    """
    try:
        return what()
    except Exception as e:
        traceback.print_exc()
        refused = next((cause for cause in causes(e) if isinstance(cause, FlexQuantError)), None)
        if refused is not None:
            raise Ended(REFUSED, in_one_line(refused)) from e
        raise Ended(outcome, f"{place}{type(e).__name__}: {in_one_line(e)}") from e


def causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def in_one_line(error: BaseException) -> str:
    """Return a message in one line, cut if it is long; without one, the code that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    said = " ".join(str(error).split()) or (f"{frames[-1].line}, in {frames[-1].name}" if frames else "")
    return textwrap.shorten(said, LONGEST, placeholder=" ...")


def same_class(architecture: str) -> list[str]:
    """Return the other names of vLLM's class for an architecture; none where it is transformers' own."""
    from vllm.model_executor.models.registry import _VLLM_MODELS

    its_class = _VLLM_MODELS[architecture]
    names = [name for name, other in _VLLM_MODELS.items() if other == its_class and name != architecture]
    return [] if its_class[0] == "transformers" else names


def make_variants(architecture: str, kind: str, own: dict[str, Any], work: Path) -> list[str]:
    """Write the checkpoints of the variants; return what the model has."""
    model = random_model(small_config(kind, **own))
    state, quantised, left_out = split(model)
    model.config.architectures = [architecture]
    for scheme in VARIANTS:
        write_checkpoint(work / scheme, model.config, state, scheme, quantised, left_out)
    return features(model.config, state)


def run(work: Path) -> None:
    """Go through the chain of the variants in ``work``; raise Ended where it ends early."""
    # Before an engine: vLLM turns classes that it takes from transformers into some that only it can build.
    try:
        step(FAILS, lambda: merge_checkpoints({v: work / v for v in VARIANTS}, work / "merged"))
        not_merged = None
    except Ended as e:
        not_merged = e

    def answers(name: str, policies: list[str] | None) -> Any:
        return generate(work / name, policies, PROMPTS, sampling=SAMPLING, **OPTIONS)

    stock = {v: step(STOCK_FAILS, partial(answers, v, None), f"{v}: ")[0] for v in VARIANTS}
    if not_merged is not None:
        raise not_merged
    served = step(FAILS, lambda: answers("merged", list(VARIANTS)))
    for variant, found in zip(VARIANTS, served, strict=True):
        if found.answers != stock[variant].answers:
            check_stock_agrees_with_itself(variant, work)
            raise Ended(FAILS, f"the answers under {variant} are not those of stock vLLM")
    if stock["w8a8"].answers == stock["w4a16"].answers:
        raise Ended(NOT_MADE, "both variants give the same answers")


def check_stock_agrees_with_itself(variant: str, work: Path) -> None:
    """Raise Ended if stock vLLM gives several answers to one prompt, or none: its logprobs are no numbers."""
    asked = {"sampling": SAMPLING, "enable_prefix_caching": False, **OPTIONS}
    first, second = generate(work / variant, None, PROMPTS, PROMPTS, **asked)[0].answers
    if first != second:
        raise Ended(STOCK_FAILS, f"{variant}: asked the same twice, it answers differently")


def out_of_time(*_: Any) -> None:
    raise TimeoutError(f"no end within {SECONDS} s")


def try_architecture(architecture: str, work: Path, output: Path) -> None:
    """Write to ``output``, a JSON file, what came of an architecture; its checkpoints go to ``work``."""
    from vllm.model_executor.models import registry

    # vLLM inspects a model class in a process of its own; this process has one class alone, so ask it here.
    registry._run_in_subprocess = lambda ask: ask()
    provide_torchvision()
    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(SECONDS)
    found = source(architecture, same_class(architecture))
    kind, has, outcome, reason = None, [], SERVED, ""
    try:
        if found is None:
            raise Ended(NOT_MADE, "transformers has no class of this name, and none whose tensors it loads")
        kind, own = found
        step(STOCK_FAILS, registry.ModelRegistry.models[architecture].load_model_cls)
        has = step(NOT_MADE, lambda: make_variants(architecture, kind, own, work))
        run(work)
    except Ended as e:
        outcome, reason = e.args
    output.write_text(json.dumps(asdict(Outcome(architecture, kind, has, outcome, reason)), indent=1) + "\n")


PARTS = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")
TORCHVISION = [f"torchvision{part}" for part in PARTS]
"""Modules of torchvision of which vLLM's classes import names that a text model does not call."""


class Names(ModuleType):
    """A module that has every name, and nothing behind it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def provide_torchvision() -> None:
    """Let this process import torchvision's names; for transformers, it stays missing."""
    if is_torchvision_available():
        return
    for name in TORCHVISION:
        parent, _, last = name.rpartition(".")
        sys.modules[name] = Names(name)
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
