# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Starts engines for the tests: vLLM in this process, on a CPU if there is no GPU, eager.

An engine takes seconds to load, so one is asked for all policies that a test compares: by ``generate``, which
keeps the answers for the session and not the engine, or with ``take_policy``.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from flexquant.errors import FlexQuantError
from flexquant.evaluation import engine as in_process
from flexquant.evaluation.engine import change_policy
from flexquant.policy.rules import Policy, load_policy, parse_policy
from tests.conftest import STARTS
from tests.integration.live_server import LIVE, live, records_of  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from vllm import LLM

# Set before a test module imports vLLM, which reads these variables.
in_process.prepare_environment()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# With this, static checkpoints are W4A16 even where vLLM would make W4A8 of them, and merged ones run on the
# same kernel: only test_precisions.py chooses kernels by their speed.
os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
if "avx512f" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("VLLM_DISABLED_KERNELS", "TorchCPUInt4LinearKernel,FlexQuantCPUInt4LinearKernel")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one worker of ``--dist loadfile`` run all files that ask the live server, so that one starts."""
    from xdist.scheduler import LoadFileScheduling

    class LiveTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "live" if Path(file).stem in LIVE else file

    return LiveTogether(config, log) if config.getvalue("dist") == "loadfile" else None


WORK = Path(__file__).parents[2] / ".work"
NAME = "SmolLM2-135M-Instruct"
SMALL_CACHE = {"num_gpu_blocks_override": 256}
"""Options of engines on CPUs: vLLM writes zeros into a whole KV cache, which takes a third of a start."""


@pytest.fixture(scope="session", autouse=True)
def watch_engines(pytestconfig: pytest.Config) -> Iterator[None]:
    """Count the engines of this process; only its first two search what is imported for garbage."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore

    starts, start = pytestconfig.stash[STARTS], EngineCore.__init__
    platform, freeze, thaw = type(current_platform), gc.freeze, gc.unfreeze

    def counted(self: EngineCore, *args: Any, **kwargs: Any) -> None:
        starts["engines"] += 1
        start(self, *args, **kwargs)

    def freeze_what_is_imported() -> None:
        if starts["engines"] < 2:
            freeze()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "__init__", counted)
        patch.setattr(in_process, "gc", SimpleNamespace(collect=gc.collect, freeze=freeze_what_is_imported))
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        if register := getattr(platform, "register_triton_kernel_overrides", None):
            patch.setattr(platform, register.__name__, staticmethod(functools.cache(register)))
        yield
    thaw()


@contextmanager
def options_for(policy: str | None, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield FlexQuant's options, which leave ``options``, with a policy: a name, a file or a text."""
    with tempfile.TemporaryDirectory() as folder:
        if policy is not None and "\n" in policy:
            (file := Path(folder, "policy.yaml")).write_text(policy)
            policy = str(file)
        yield options.pop("flexquant", {}) | ({"policy": policy} if policy is not None else {})


@contextmanager
def engine(folder: Path | str, policy: str | None = None, **options: Any) -> Iterator[LLM]:
    """Yield an in-process engine on ``folder``, freed on leaving; ``policy`` is for merged checkpoints."""
    from vllm.platforms import current_platform

    from flexquant.serving.kernels.cpu_kernels import provide_cpu_kernels

    # Stock vLLM needs them too, for the checkpoints that merged ones are compared with.
    provide_cpu_kernels()
    small = SMALL_CACHE if current_platform.is_cpu() else {}
    options = {"enforce_eager": True, "max_model_len": 1024, **small, **options}
    with options_for(policy, options) as own, in_process.engine(folder, flexquant=own, **options) as llm:
        yield llm


Answers = list[tuple[list[int], list[dict[int, float]]]]


def answers(llm: LLM, prompts: list[Any], adapters: list[Any] | None = None, **sampling: Any) -> Answers:
    """Return greedy answers: for every prompt the token ids, and at every step the top logprobs by token id.

    ``adapters`` has the LoRA request of every prompt, or None for a prompt without one.
    """
    from vllm import SamplingParams

    parameters = SamplingParams(**{"temperature": 0, "max_tokens": 16, "logprobs": 5, **sampling})
    outputs = llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapters)

    def logprobs(found: Any) -> list[dict[int, float]]:
        return [{token: entry.logprob for token, entry in step.items()} for step in found.logprobs]

    return [(list(o.outputs[0].token_ids), logprobs(o.outputs[0])) for o in outputs]


EVERY = slice(None)
TIE = 0.1
"""Nats between two tokens, either of which a 16-bit engine may choose if it sums in another order."""


def distance(one: Answers, other: Answers, steps: slice = EVERY) -> float:
    """Return the mean difference in nats of the logprobs that both list, at ``steps`` after equal tokens."""
    differences: list[float] = []
    for (ids, found), (other_ids, other_found) in zip(one, other, strict=True):
        for i in range(min(len(ids), len(other_ids)))[steps]:
            if ids[:i] == other_ids[:i]:
                common = found[i].keys() & other_found[i].keys()
                differences += [abs(found[i][token] - other_found[i][token]) for token in common]
    return sum(differences) / len(differences)


def assert_alike(found: Answers, expected: Answers, wholly: float = 0.5) -> None:
    """Assert that greedy answers agree: a share of them ``wholly``, the others up to a tie of ``expected``.

    It is for engines that give the same passes other shapes: some CPUs' kernels then sum in another order.
    """
    whole = 0
    for (ids, _), (others, logprobs) in zip(found, expected, strict=True):
        assert len(ids) == len(others)
        differ = next((i for i, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b), None)
        if differ is None:
            whole += 1
            continue
        behind = logprobs[differ][others[differ]] - logprobs[differ].get(ids[differ], float("-inf"))
        assert behind < TIE, f"token {differ} is {ids[differ]}, {behind:.2f} nats behind {others[differ]}"
    assert whole >= len(expected) * wholly


def read_policy(policy: str) -> Policy:
    """Return a built-in policy, one in a file, or one given as text."""
    return parse_policy(yaml.safe_load(policy), "test") if "\n" in policy else load_policy(policy)


def every_plan_of(policies: list[str]) -> str:
    """Return the text of a policy under which an engine holds all plans of ``policies``.

    Each plan gets the passes of one token count, so an engine holds at most as many plans as a pass has
    tokens. The first policy says the precision of the lm_head.
    """
    documents = [read_policy(policy).document for policy in policies]
    uses: list[Any] = []
    for rule in (rule for document in documents for rule in document["rules"]):
        if rule["use"] not in uses:
            uses.append(rule["use"])
    rules = [{"when": {"tokens": {"max": i}}, "use": use} for i, use in enumerate(uses[:-1], 1)]
    derive = {name: how for document in documents for name, how in document.get("derive", {}).items()}
    others = {key: documents[0][key] for key in ("schema", "head") if key in documents[0]}
    document = {**others, "rules": [*rules, {"use": uses[-1]}]}
    return yaml.safe_dump(document | ({"derive": derive} if derive else {}))


def take_policy(llm: LLM, policy: str, empty_cache: bool = True) -> None:
    """Have an eager engine, which holds all of the policy's plans, route by the policy.

    ``empty_cache`` drops the prefixes in the KV cache, which the policy before has written.
    """
    from flexquant.serving.config import clip_to_server, served_policy

    def swap(model: Any) -> None:
        config = llm.llm_engine.vllm_config
        named = dataclasses.replace(read_policy(policy), name=model.policy.name)
        model.policy = clip_to_server(config, model.merged, served_policy(config, model.merged, named))
        assert {plan.name for plan in model.routes.plans} <= model.plans.keys(), "the engine lacks a plan"

    llm.apply_model(swap)
    if empty_cache:
        assert llm.reset_prefix_cache()


def change(llm: LLM, name: str, document: dict[str, Any], *more: Any) -> dict[str, Any]:
    """Ask an engine of one rank to take another policy, as a server does; return what it tells."""
    try:
        (told,) = change_policy(llm, name, document, *more)
    except FlexQuantError as e:
        return {"refused": str(e)}
    return told


class Served(NamedTuple):
    """What an engine answered under one policy."""

    answers: list[Answers]
    """The answers to each batch."""
    passes: list[dict[str, Any]]
    """The policy's part of the trace; empty for stock vLLM."""
    header: dict[str, Any]
    """What the trace says of the engine, which holds the plans of all policies."""


_kept: dict[str, list[Served]] = {}


def generate(
    folder: Path | str, policies: list[str] | None, *batches: Any, sampling: Any = None, **options: Any
) -> list[Served]:
    """Return what one engine answers to ``batches`` under each policy; kept for the session.

    ``policies`` are built-in ones, files or texts; None means stock vLLM on a variant's own folder, whose
    answers are a list of one. ``sampling`` is for :func:`answers`, and ``options`` are the engine's.
    """
    documents = policies and [read_policy(policy).document for policy in policies]
    asked = [str(folder), documents, batches, sampling, options]
    key = json.dumps(asked, sort_keys=True, default=lambda image: image.tobytes().hex())
    if key not in _kept:
        _kept[key] = _generate(folder, policies, batches, sampling or {}, options)
    return _kept[key]


def _generate(folder: Path | str, policies: Any, batches: Any, sampling: Any, options: Any) -> list[Served]:
    if policies is None:
        with engine(folder, **options) as llm:
            return [Served([answers(llm, batch, **sampling) for batch in batches], [], {})]
    served = []
    with tempfile.TemporaryDirectory() as work:
        trace, union = Path(work, "trace.jsonl"), every_plan_of(policies)
        with engine(folder, union, flexquant={"trace": str(trace)}, **options) as llm:
            for policy in policies:
                take_policy(llm, policy)
                before = len(records_of(trace)[1:])
                found = [answers(llm, batch, **sampling) for batch in batches]
                header, *passes = records_of(trace)
                served.append(Served(found, passes[before:], header))
    return served


def check_variants(
    merged: Path, sources: Mapping[str, Path], *batches: list[Any], more: Sequence[str] = (), **options: Any
) -> list[Served]:
    """Assert that each variant answers as stock vLLM does from its own folder, one of ``sources``.

    Return what the variants, and then the policies ``more``, answer; the rest is for :func:`generate`.
    """
    served = generate(merged, [*sources, *more], *batches, **options)
    for (variant, source), found in zip(sources.items(), served, strict=False):
        (stock,) = generate(source, None, *batches, **options)
        assert found.answers == stock.answers, variant
    return served


@contextmanager
def edited_json(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what is in a JSON file, to be edited; it is written back at the end."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


def bytes_of_int4_group() -> int:
    """Return the bytes that this CPU's W4A16 kernel keeps for a group of weights, beside their 4 bits each.

    vLLM's kernel keeps a 16-bit scale; PyTorch's, where vLLM has none, a scale and a zero in 16 bit.
    """
    import torch

    return 2 if hasattr(torch.ops._C, "cpu_gemm_wna16") else 4


def made(path: Path) -> Path:
    if not (path / "config.json").is_file():
        pytest.fail(f"{path.relative_to(WORK.parent)} is missing: 'make test' makes it and runs the tests")
    return path


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in 16 bit."""
    return made(WORK / NAME)


@pytest.fixture(scope="session")
def real_variants() -> dict[str, Path]:
    """Return the folders of its variants, as ``flexquant quantize`` wrote them."""
    return {name: made(WORK / "variants" / NAME / name) for name in ("w8a8", "w4a16")}


@pytest.fixture(scope="session")
def real_merged() -> Path:
    """Return the folder of its variants merged by ``flexquant merge``."""
    return made(WORK / "merged" / NAME)


@pytest.fixture(scope="session")
def tiny_merged(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a folder with w8a8, w4a16 and merged of a random model.

    It takes the architecture, the number of layers, and regular expressions of what stays in 16 bit.
    """
    from flexquant.merge import merge_checkpoints
    from tests.checkpoints import make_pair

    @functools.cache
    def make(architecture: str = "llama", num_layers: int = 4, ignore: tuple[str, ...] = ()) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        pair = make_pair(folder, architecture, num_layers=num_layers, ignore=ignore)
        merge_checkpoints(pair, folder / "merged")
        return folder

    return make


@pytest.fixture(scope="session")
def merged(tiny_merged: Callable[..., Path]) -> Path:
    """Return the folder of w8a8 and w4a16 of a random Llama, merged."""
    return tiny_merged() / "merged"
