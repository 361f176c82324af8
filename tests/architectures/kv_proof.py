# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Every parameter of a layer, changed in one variant: does the cache change, and is the merge refused?

    python -m tests.architectures.kv_proof [ARCHITECTURE ...]

Each parameter of a small random model's first layer, but for those of MLP and experts, is changed in
turn: another random matrix of the same size takes a matrix' place, and N(0, 0.1) is added to a vector.
transformers' own model says what that does to its caches, K, V and states of all layers, from the same
tokens; the comparison of W8A8 of the model with W4A16 of the changed one says whether they may share a
cache. Norms are folded too (SmoothQuant), wherever that leaves the model's answers as they are: that has to
be accepted.

Without names: those architectures that are served, and those whose layers carry a state, some of which stock
vLLM does not serve on a CPU. The results lie in tests/architectures/kv_proof.json, and
the page about them in merge/KV_PROOF.md.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from argparse import RawDescriptionHelpFormatter as AsWritten
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from flexquant.checkpoint.module_names import STACKS
from flexquant.errors import FlexQuantError
from flexquant.evaluation.engine import describe_versions
from flexquant.merge.formats import open_source
from flexquant.merge.kv.compatibility import check_kv_compatibility
from tests.architectures.models import random_model, small_config, source, split
from tests.architectures.outcomes import RESULTS as SERVED_RESULTS
from tests.architectures.outcomes import ROOT, SERVED
from tests.checkpoints import write_checkpoint

HYBRIDS = "Bamba FalconH1 GraniteMoeHybrid Jamba KimiLinear Lfm2 Lfm2Moe NemotronH OlmoHybrid"
WITH_STATES = [f"{name}ForCausalLM" for name in (*HYBRIDS.split(), "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")]
"""Architectures whose first layer carries a state."""
RESULTS = Path(__file__).parent / "kv_proof.json"
PAGE = ROOT / "merge" / "KV_PROOF.md"
FIRST_LAYER = re.compile(r"\.(layers|h)\.0\.")
APART = ("mlp", "experts", "feed_forward", "block_sparse_moe", "shared_mlp")
"""Parts of the names of parameters that belong to MLP and experts."""
VECTOR_CHANGE = 0.1
"""Standard deviation of what is added to each number of a vector; the weights of norms are about 1."""
STATED = 0.02
"""A cache that changes by no more than this, as a share of it, counts as unchanged."""
FOLD = "norms folded"
WITH_NORMS = {
    "CohereForCausalLM": {"use_qk_norm": True},
    "PhiForCausalLM": {"qk_layernorm": True},
    "StableLmForCausalLM": {"qk_layernorm": True},
}
"""Architecture -> fields that some of its published models have, and others do not."""


@dataclass(frozen=True)
class Cell:
    """What came of one change."""

    parameter: str
    change: float
    """The largest change of K, V or a state of a layer, as a share of its norm."""
    verdict: str
    """One of ``merged``, ``not mixed`` and ``refused``."""
    reason: str

    @property
    def is_right(self) -> bool:
        if self.parameter == FOLD:
            return self.verdict == "merged"
        return self.verdict == "refused" or self.change <= STATED


def cells(architecture: str, work: Path) -> Iterator[Cell]:
    """Yield what comes of each change of an architecture's first layer, and of folding its norms."""
    made_of = json.loads(SERVED_RESULTS.read_text())["architectures"].get(architecture, {})
    kind, own = source(architecture, []) or (made_of["model_type"], {})
    model = random_model(small_config(kind, **own, **WITH_NORMS.get(architecture, {})))
    state, quantised, left_out = split(model)
    model.config.architectures = [architecture]
    for scheme in ("w8a8", "w4a16"):
        write_checkpoint(work / scheme, model.config, state, scheme, quantised, left_out)
    model = model.float().eval()
    before = caches(model)
    for name, parameter in model.named_parameters():
        found = FIRST_LAYER.search(name)
        if found and not any(part in APART for part in name.split(".")):
            saved = parameter.detach().clone()
            with torch.no_grad():
                noise = torch.randn_like(parameter)
                is_matrix = parameter.ndim > 1
                parameter.copy_(noise * parameter.std() if is_matrix else parameter + noise * VECTOR_CHANGE)
            change = max(float((a - b).norm() / b.norm()) for a, b in zip(caches(model), before, strict=True))
            verdict, reason = judge(work, model, quantised, left_out)
            yield Cell(name[found.end() :], change, verdict, reason)
            with torch.no_grad():
                parameter.copy_(saved)
    if fold(model):
        yield Cell(FOLD, 0.0, *judge(work, model, quantised, left_out))


def caches(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return K, V and the states of every layer, each model asked with the same tokens."""
    cache = DynamicCache(config=model.config)
    logits(model, past_key_values=cache, use_cache=True)
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        for own in ("keys", "values", "conv_states", "recurrent_states"):
            written = getattr(layer, own, None)
            parts = written.values() if isinstance(written, dict) else [written]
            found += [tensor for tensor in parts if tensor is not None]
    return found


def logits(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(24)[None] * 7 % 250, **options).logits
    return found


def judge(work: Path, model: PreTrainedModel, quantised: set[str], left_out: list[str]) -> tuple[str, str]:
    """Return what the comparison of W8A8 with W4A16 of the changed model says, and why."""
    folder = Path(tempfile.mkdtemp(dir=work)) / "changed"
    state, _, _ = split(model.to(torch.bfloat16))
    model.float()
    write_checkpoint(folder, model.config, state, "w4a16", quantised, left_out)
    try:
        found = check_kv_compatibility([open_source("w8a8", work / "w8a8"), open_source("w4a16", folder)])
    except FlexQuantError as e:
        return "refused", str(e)
    if not found.compatible:
        return "refused", found.message
    return ("merged", "") if found.layered_plans else ("not mixed", found.residual_messages[0])


def fold(model: PreTrainedModel) -> int:
    """Move factors of every norm into all that reads it, where answers stay the same; return their number."""
    answers, folded = logits(model), 0
    for layer in decoder_layers(model):
        for norm, readers in norms_and_readers(model, layer):
            parameters = [*norm.parameters(recurse=False), *readers]
            before = [p.detach().clone() for p in parameters]
            factors = torch.empty(norm.get_parameter("weight").numel()).uniform_(0.5, 2)
            with torch.no_grad():
                offset = norm_offset(norm)
                norm.weight.copy_((norm.weight + offset) / factors - offset)
                if getattr(norm, "bias", None) is not None:
                    norm.bias /= factors
                for weight in readers:
                    weight *= factors
                if torch.allclose(logits(model), answers, rtol=1e-3, atol=1e-3):
                    folded += 1
                else:
                    for p, saved in zip(parameters, before, strict=True):
                        p.copy_(saved)
    return folded


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    return next(list(m) for name, m in model.named_modules() if name.endswith(STACKS) and len(list(m)) > 1)


def norms_and_readers(model: PreTrainedModel, layer: nn.Module) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    """Return the norms of a layer whose output matrices read, and these matrices, [..., features]."""
    outputs: list[tuple[nn.Module, int]] = []
    reading: dict[int, list[torch.Tensor]] = {}
    kept: list[Any] = []  # keeps tensors alive, so that no two get the same memory

    def seen(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kept.append((args, output))
        own = dict(module.named_parameters(recurse=False))
        if "weight" in own and own["weight"].ndim == 1 and isinstance(output, torch.Tensor):
            outputs.append((module, output.data_ptr()))
        if args and isinstance(args[0], torch.Tensor):
            matrices = [p for p in own.values() if p.ndim >= 2]
            reading.setdefault(args[0].data_ptr(), []).extend(matrices)

    hooks = [module.register_forward_hook(seen) for module in layer.modules()]
    logits(model)
    for hook in hooks:
        hook.remove()
    found = []
    for norm, pointer in outputs:
        size = norm.get_parameter("weight").numel()
        if weights := [p for p in reading.get(pointer, []) if p.shape[-1] == size]:
            found.append((norm, weights))
    return found


def norm_offset(norm: nn.Module) -> float:
    """Return what a norm adds to its weight: 0 or 1."""
    weight = norm.get_parameter("weight")
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.zero_()
        output = norm(torch.linspace(-1, 2, weight.numel())[None])
        weight.copy_(saved)
    bias = getattr(norm, "bias", None)
    return float((output if bias is None else output - bias).any())


def page(results: dict[str, Any]) -> str:
    """Return the page about the results, in Markdown."""
    versions = results["versions"]
    lines = [
        "# What the proof of one KV cache sees",
        "",
        "`python -m tests.architectures.kv_proof` pairs W8A8 of a small random model with W4A16 of the same",
        "model in which one parameter of the first layer is changed: a matrix is random anew, a vector gets",
        f"N(0, {VECTOR_CHANGE}) added. Each parameter outside MLP and experts is changed in turn. Its effect",
        "is the largest relative change of K, V or a state in any layer of transformers' model. A merge may",
        f"accept effects below {STATED}, but none on what computes a state, which may show after thousands",
        "of tokens. `tests/architectures/kv_proof.json` has every effect.",
        "[What to do](README.md#if-the-kv-caches-differ) if a merge is refused.",
        "",
        f"transformers {versions['transformers']}, torch {versions['torch']}.",
    ]
    architectures = sorted(results["architectures"].items(), key=lambda item: item[0].lower())
    folds = {name: [c["verdict"] for c in found if c["parameter"] == FOLD] for name, found in architectures}
    without = [name for name, verdicts in folds.items() if not verdicts]
    wrong = [name for name, verdicts in folds.items() if verdicts not in ([], ["merged"])]
    end = f", and refused in {', '.join(wrong)}." if wrong else "."
    lines += [
        "",
        "Folded norms (SmoothQuant) change no cache. They are merged in all architectures but those whose",
        f"norms cannot be folded ({', '.join(without)}){end}",
        *("", "| parameter | architectures | their smallest change refused |", "| --- | --- | --- |"),
    ]
    merged, smallest = list[str](), dict[str, list[float]]()
    for name, found in architectures:
        changes = [c for c in found if c["parameter"] != FOLD]
        least = min((c for c in changes if c["verdict"] == "refused"), key=lambda c: c["change"])
        merged += [f"{name} {c['parameter']} {c['change']:.2g}" for c in changes if c["verdict"] != "refused"]
        smallest.setdefault(least["parameter"], []).append(least["change"])
    for parameter, refused in sorted(smallest.items()):
        ends = dict.fromkeys(f"{change:.2g}" for change in (min(refused), max(refused)))
        lines.append(f"| `{parameter}` | {len(refused)} | {' to '.join(ends)} |")
    lines += ["", f"Merged with a change: {', '.join(merged)}."] if merged else []
    return "\n".join(lines) + "\n"


def compared() -> list[str]:
    """Return the architectures that are served, and those with states."""
    found = json.loads(SERVED_RESULTS.read_text())["architectures"]
    return sorted({*(name for name, one in found.items() if one["outcome"] == SERVED), *WITH_STATES})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=AsWritten)
    parser.add_argument("architectures", nargs="*")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"architectures": {}}
    results |= {"argv": ["python", "-m", "tests.architectures.kv_proof"], "versions": describe_versions()}
    for name in args.architectures or compared():
        with tempfile.TemporaryDirectory() as work:
            found = list(cells(name, Path(work)))
        wrong = [cell.parameter for cell in found if not cell.is_right]
        print(f"{name}: {len(found)} cells" + (f", WRONG: {', '.join(wrong)}" if wrong else ""), flush=True)
        results["architectures"][name] = [asdict(cell) for cell in found]
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
