# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How to serve a model: its shape from a config.json alone, the choice and its text, `flexquant advise`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.speed.results import ROOT, read_cells
from benchmarks.speed.tables import by_workload
from flexquant import cli
from flexquant.checkpoint.merged_checkpoint import MergedCheckpoint
from flexquant.checkpoint.weight_bytes import report_checkpoint
from flexquant.merge import merge_checkpoints
from flexquant.planning import advising
from flexquant.planning.advising import INT4_TWICE, MARGIN, ONE_COPY, TWO_COPIES, Outcome, try_ways, ways
from flexquant.planning.device import HUMMING, MARLIN, W4A8, Device, load_device
from flexquant.planning.planned_model import MARLIN_TILES, PlannedModel
from flexquant.planning.roofline import Batches, Load
from tests.checkpoints import make_checkpoint
from tests.prediction import language_model, planned
from tests.refusals import refused

LLAMA_8B = language_model("llama", 4096, 32, (32, 8), 14336, 128256)
SMOLLM2 = language_model("llama", 576, 30, (9, 3), 1536, 49152, tie_word_embeddings=True)
MIXTURE = language_model("qwen3_moe", 2048, 4, (32, 4), 6144, 1024, head_dim=128)
MIXTURE |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
TRAFFIC = Batches(1024, 256, (1, 8, 32))


def tried(folder: Path, config: Any, device: str | Device, devices=1, traffic=TRAFFIC) -> dict[str, Outcome]:
    device = load_device(device) if isinstance(device, str) else device
    found = try_ways(planned(folder, config), device, traffic, devices, 0.9)
    return {outcome.way.name: outcome for outcome in found}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("architecture, eight", [("llama", "w8a8"), ("qwen3_moe", "w8a8"), ("qwen2", "fp8")])
def test_the_shape_is_that_of_the_quantised_checkpoint(architecture, eight, devices, tmp_path):
    """A quantised model's own config is read too."""
    sources = {
        name: make_checkpoint(tmp_path / name, architecture, name, tie_word_embeddings=eight == "fp8")
        for name in (eight, "w4a16")
    }
    merge_checkpoints(sources, tmp_path / "merged", policy="fp8-phase-batch" if eight == "fp8" else None)
    checkpoint = MergedCheckpoint.open(tmp_path / "merged")
    stored = report_checkpoint(checkpoint.merged, 2, checkpoint.tensors)
    for folder in (sources["w4a16"], tmp_path / "merged"):
        found = PlannedModel.read(str(folder)).shape((eight, "w4a16"), devices, {})
        for name, linears in found.linears.items():
            assert found.own_bytes[name] * devices == pytest.approx(stored.variants[name].own_bytes, rel=0.05)
            assert {linear.scheme for linear in linears} - {"bf16"} == {name}
        assert found.resident_bytes * devices == pytest.approx(stored.total_bytes, rel=0.05)


def test_bytes_of_a_known_model(tmp_path):
    """Llama-3.1-8B has 6.98e9 weights in decoder layers; INT4 in groups of 128 is 4.125 bits each."""
    model = planned(tmp_path, LLAMA_8B)
    weights, outside = 32 * (4096 * (4096 + 6144 + 28672) + 14336 * 4096), 2 * 128256 * 4096
    shape = model.shape(("w4a16",), 1, {})
    assert shape.resident_bytes == pytest.approx(weights * 4.125 / 8 + 2 * outside, rel=1e-3)
    assert model.shape(("w8a8",), 2, {}).resident_bytes == pytest.approx(weights / 2 + outside, rel=2e-3)
    # Groups are as small as the inputs need, 576 = 9 x 64; a head that is tied to the embedding is no more.
    model = planned(tmp_path, SMOLLM2)
    weights = 30 * (576 * (576 + 960 + 3072) + 1536 * 576)
    expected = weights * 4.25 / 8 + 2 * 49152 * 576
    assert model.shape(("w4a16",), 1, {}).resident_bytes == pytest.approx(expected, rel=1e-3)


def test_what_a_nested_config_leaves_out_is_the_default(tmp_path):
    """Llama's defaults are those of Llama-2-7B; what reads images is not counted, and this is said."""
    nested = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    model = planned(tmp_path, {**nested, "vision_config": {"model_type": "clip_vision_model"}})
    assert model.shape(("w8a8",), 1, {}).resident_bytes == pytest.approx(6.74e9, rel=0.05)
    assert model.has_towers and not planned(tmp_path, LLAMA_8B).has_towers


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({**LLAMA_8B, "model_type": "none such"}, "config.json: transformers cannot build the model"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "config.json: the config has num_hidden_layers 0"),
        ({**LLAMA_8B, "hidden_size": "wide"}, "config.json: transformers cannot build the model"),
        ({**LLAMA_8B, "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({}, "config.json: transformers cannot build the model"),
    ],
)
def test_a_config_that_is_no_language_model_is_refused(config, problem, tmp_path):
    with refused(problem):
        planned(tmp_path, config)
    with refused("no such folder"):
        PlannedModel.read(str(tmp_path / "missing"))


def test_what_a_device_cannot_run_is_said(tmp_path):
    a100, b200 = tried(tmp_path, LLAMA_8B, "a100"), tried(tmp_path, LLAMA_8B, "b200")
    assert [name for name, found in a100.items() if not found.loads] == ["stock FP8"]
    assert a100["stock FP8"].problem == "the device has no FP8 arithmetic"
    assert [name for name, found in b200.items() if not found.loads] == ["stock W8A8"]
    assert b200["stock W8A8"].problem == "vLLM has no INT8 kernel for the device"
    assert b200[TWO_COPIES].way.schemes == ("fp8", "w4a16")


def test_what_does_not_fit_is_said(tmp_path):
    """W4A16 and W8A8 of Llama-3.1-8B fit into 24 GB, both in twelve layers more do not."""
    found = tried(tmp_path, {**LLAMA_8B, "num_hidden_layers": 72}, "rtx-4090")
    assert found[TWO_COPIES].problem == "does not fit into 0.9 of 24 GiB"
    assert found[TWO_COPIES].kv_cache_tokens is None and not found[TWO_COPIES].loads
    one, alone = found[ONE_COPY], found["stock W4A16"]
    assert one.loads
    assert one.weights_gib - alone.weights_gib == pytest.approx(28672 * 4096 / 2**30)
    assert tried(tmp_path, {**LLAMA_8B, "num_hidden_layers": 72}, "rtx-4090", 4)[TWO_COPIES].loads


def test_linears_that_do_not_fill_marlin_have_no_one_copy_on_a_gpu(tmp_path):
    from flexquant.serving.worker.one_copy import gpu

    assert gpu.MARLIN.multiples == MARLIN_TILES
    assert "do not fill Marlin's tiles" in tried(tmp_path, SMOLLM2, "l20")[ONE_COPY].problem
    assert tried(tmp_path, SMOLLM2, "cpu-2-core")[ONE_COPY].loads
    assert tried(tmp_path, LLAMA_8B, "l20")[ONE_COPY].loads


def test_w4a8_is_a_way_where_the_device_file_has_its_kernels(tmp_path):
    """Alone it takes the memory of W4A16, beside it twice that."""
    found, without = tried(tmp_path, LLAMA_8B, "h200"), tried(tmp_path, LLAMA_8B, "l20")
    assert found.keys() - without.keys() == {"stock W4A8", INT4_TWICE}
    alone, twice, int4 = (found[name] for name in ("stock W4A8", INT4_TWICE, "stock W4A16"))
    assert alone.weights_gib == int4.weights_gib
    linears = 32 * (4096 * (4096 + 6144 + 28672) + 14336 * 4096) * 4.125 / 8 / 2**30
    assert twice.weights_gib == pytest.approx(int4.weights_gib + linears, rel=1e-3)
    assert twice.loads[1].tpot == int4.loads[1].tpot
    assert twice.loads[1].ttft == pytest.approx(alone.loads[1].ttft)
    assert tried(tmp_path, MIXTURE, "h200")[INT4_TWICE].loads
    h200 = load_device("h200")
    kernels = {scheme: kernel for scheme, kernel in h200.kernels.items() if scheme != W4A8}
    by_int8 = tried(tmp_path, LLAMA_8B, h200.model_copy(update={"kernels": kernels}))
    assert "stock W4A8" not in by_int8 and by_int8[INT4_TWICE].loads[1].ttft > 1.5 * twice.loads[1].ttft
    for config in (MIXTURE, SMOLLM2):
        problem = tried(tmp_path, config, "h200")["stock W4A8"].problem
        assert problem == "W4A8 is priced without experts, in groups of 128"


@pytest.mark.parametrize("device", ["h200", "l20", "cpu-2-core"])
def test_from_16_bit_decodes_as_stock_16_bit_and_has_its_prompts_in_8_bit(device, tmp_path):
    """A GPU rounds each linear's weights in each pass; a CPU has a copy of all of them in INT8."""
    on_cpu = device == "cpu-2-core"
    found = tried(tmp_path, SMOLLM2 if on_cpu else LLAMA_8B, device)
    stock, ours, eight = (found[name] for name in ("stock BF16", advising.FROM_16_BIT, "stock W8A8"))
    assert ours.loads[1].tpot == pytest.approx(stock.loads[1].tpot)
    more = 30 * (576 * (576 + 960 + 3072) + 1536 * 576) if on_cpu else 4096 * 28672
    assert ours.weights_gib == pytest.approx(stock.weights_gib + more / 2**30, rel=1e-2)
    assert eight.loads[8].ttft * (1 if on_cpu else 1.01) <= ours.loads[8].ttft < 0.9 * stock.loads[8].ttft


def test_the_limits_of_int4_are_those_of_a_ranks_shapes(tmp_path):
    """8 ranks share the 11008 = 8 x 1376 inputs of Llama-2-7B's down_proj: no whole groups of 128."""
    llama2 = {"model_type": "llama"}
    shared = tried(tmp_path, llama2, "l20", 8)
    for name in ("stock W4A16", ONE_COPY, TWO_COPIES):
        assert shared[name].problem == "groups of 128 do not divide the 1376 inputs of a device"
    assert shared["stock W8A8"].loads and shared["stock FP8"].loads
    assert tried(tmp_path, llama2, "l20", 2)[ONE_COPY].loads, "5504 = 43 x 128"
    # All fill tiles of 64 x 128 or 128 x 64, but 3136 = 49 x 64 outputs with half of 3200 = 50 x 64 inputs.
    wide = {**SMOLLM2, "model_type": "qwen3", "hidden_size": 3136, "intermediate_size": 3200}
    wide |= {"num_attention_heads": 52, "num_key_value_heads": 52, "head_dim": 64, "num_hidden_layers": 2}
    assert tried(tmp_path, wide, "l20")[ONE_COPY].loads
    halved = tried(tmp_path, wide, "l20", 2)
    assert halved[ONE_COPY].problem == "1600 inputs and 3136 outputs do not fill Marlin's tiles"
    assert halved["stock W4A16"].loads


def test_experts_of_one_copy_take_the_time_of_int4(tmp_path):
    """Attention alone is faster, and experts are most of this model."""
    found = tried(tmp_path, MIXTURE, "l20")
    alone, one, two = (found[name].loads[32].ttft for name in ("stock W4A16", ONE_COPY, TWO_COPIES))
    assert two < 0.75 * alone < 0.85 * alone < one < alone


@pytest.mark.parametrize(
    "config, device, folder",
    [(LLAMA_8B, "h100", "llama-3.1-8b-h100"), (SMOLLM2, "cpu-2-core", "smollm2-135m-cpu")],
)
def test_latencies_relate_as_measured(config, device, folder, tmp_path):
    """Every ratio of two ways' TTFT or TPOT is within 35 % of the committed runs', for each batch.

    What two copies save against the better static precision is within the margin of what they saved. W4A16
    ran on the kernel that vLLM chooses.
    """
    loaded = load_device(device)
    kernels = {s: kernel for s, kernel in loaded.kernels.items() if s not in (MARLIN, HUMMING)}
    as_run = loaded.model_copy(update={"kernels": kernels})
    names = {"w8a8": "stock W8A8", "w4a16": "stock W4A16", "flexquant:phase-batch": TWO_COPIES}
    cells = read_cells(ROOT / "benchmarks/results" / folder)
    batches = {w: found for w, found in by_workload(cells, "serving").items() if w.rate is None}
    assert len(batches) > 1
    for load, measured in batches.items():
        outcomes = tried(tmp_path, config, as_run, traffic=Batches(load.input, load.output, (load.requests,)))
        for metric in ("ttft", "tpot"):
            by_subject = {}
            for subject, name in names.items():
                found = median(result[f"mean_{metric}_ms"] for result in measured[subject].values())
                by_subject[subject] = getattr(outcomes[name].loads[load.requests], metric) / found
            off = max(by_subject.values()) / min(by_subject.values())
            assert off < 1.35, (load, metric, by_subject)

        def request(result: Mapping[str, float], output: int = load.output) -> float:
            return result["mean_ttft_ms"] + (output - 1) * result["mean_tpot_ms"]

        seconds = {subject: median(map(request, measured[subject].values())) for subject in names}
        predicted = {subject: outcomes[name].seconds for subject, name in names.items()}
        ratios = (of["flexquant:phase-batch"] / min(of["w8a8"], of["w4a16"]) for of in (seconds, predicted))
        saved, expected = (1 - ratio for ratio in ratios)
        assert abs(saved - expected) < MARGIN, (load, saved, expected)


def test_a_full_kv_cache_makes_requests_wait(tmp_path):
    """In 24 GB, 64 layers of W4A16 leave room for few requests: the others come after them."""
    big = {**LLAMA_8B, "num_hidden_layers": 128}
    little, much = tried(tmp_path, big, "rtx-4090"), tried(tmp_path, big, "rtx-4090", 4)
    alone = little["stock W4A16"]
    assert alone.kv_cache_tokens is not None and alone.kv_cache_tokens < 8 * 1280
    assert alone.loads[32].ttft > 3 * alone.loads[8].ttft
    assert alone.loads[32].ttft / much["stock W4A16"].loads[32].ttft > 5


FIVE = "stock FP8", "stock W8A8", "stock W4A16", ONE_COPY, TWO_COPIES


def made(seconds: Mapping[str, float | None], device: str = "l20") -> list[Outcome]:
    """Return outcomes of the ways on a device with these times of a request; None is not possible."""
    outcomes = []
    for way in ways(load_device(device)):
        time = seconds.get(way.name)
        loads = {} if time is None else {1: Load(time / 2, time / 512, time)}
        gib = 12.0 if way.name == TWO_COPIES else 5.0
        tokens = None if time is None else 5000
        outcomes.append(Outcome(way, gib, tokens, loads, "" if loads else "does not fit"))
    return outcomes


@pytest.mark.parametrize(
    ("seconds", "choice", "text"),
    [  # of FIVE
        ((2, 2, 1.5, 1.0, 0.98), ONE_COPY, "copy: a request takes 33% less time .* than with stock W4A16"),
        ((2, 2, 1.5, 1.0, 0.98), ONE_COPY, r"Two copies would save 2\.0% more, for 7\.0 GiB more of weights"),
        ((2, 2, 1.5, 1.0, None), ONE_COPY, "in memory once.$"),
        ((2, 2, 1.5, 1.0, 0.9), TWO_COPIES, "Take two .* 40% less time .* both of which are in memory.$"),
        # One copy is as good as two, but not better than W4A16 by the margin.
        ((2, 2, 1.0, 0.95, 0.91), TWO_COPIES, "9% less time .* than with stock W4A16"),
        ((2, 1, 2, 1.0, 0.96), "stock W8A8", "not help you here: .*, as two copies would save 4.0%"),
        ((1, 1, 2, 1.1, 1.2), "stock FP8", "a request takes 10.0% more time with one copy"),
        # The simplest that is good enough, not the fastest.
        ((1.02, 1.01, 1, 1.1, 1.2), "stock FP8", "take stock FP8"),
        # Just above the margin, and just below it.
        ((2, 2, 1, 2, 1 - MARGIN - 0.001), TWO_COPIES, ""),
        ((2, 2, 1, 2, 1 - MARGIN + 0.001), "stock W4A16", ""),
        ((None, None, 1, None, None), "stock W4A16", "neither one copy nor two can be served"),
        ((None, None, None, 1, None), ONE_COPY, "Take one copy: nothing without FlexQuant serves the model"),
        ((None,) * 5, None, "None of these can serve the model .* --tensor-parallel-size"),
    ],
)
def test_the_choice_and_why(seconds, choice, text):
    outcomes = made(dict(zip(FIVE, seconds, strict=True)))
    found = advising.choose(outcomes)
    assert (found and found.way.name) == choice
    assert re.search(text, advising.explain(outcomes)), advising.explain(outcomes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (INT4_TWICE, "prompts compute in W4A8 and answers in W4A16, of whose INT4 weights"),
        (advising.NESTED, "in memory with INT8's differences from them"),
        (advising.FROM_16_BIT, "prompts compute in 8 bit, from the 16-bit weights that answers read"),
    ],
)
def test_each_way_may_be_the_choice(name, text):
    outcomes = made(dict.fromkeys(FIVE, 2) | {name: 1}, "h200")
    found = advising.choose(outcomes)
    assert found is not None and found.way.name == name and text in advising.explain(outcomes)


def test_notes_are_of_the_model_and_the_device(tmp_path):
    def notes(config: dict[str, Any], device: str) -> str:
        model = planned(tmp_path, config)
        loaded = load_device(device)
        text = advising.format_advice(try_ways(model, loaded, TRAFFIC, 1, 0.9), model, loaded, TRAFFIC)
        return " ".join(text.partition("note: ")[2].split())

    assert "one copy has been measured on one GPU alone" in notes(LLAMA_8B, "l20")
    assert "experts in INT4" not in notes(LLAMA_8B, "l20") and "at once" not in notes(LLAMA_8B, "l20")
    assert "one copy leaves experts in INT4 for prompts too" in notes(MIXTURE, "l20")
    assert "Humming" not in notes(LLAMA_8B, "l20")
    assert "with one copy, the lm_head in 16 bit is 23% of the weights that a" in notes(LLAMA_8B, "l20")
    assert "lm_head" not in notes(MIXTURE, "l20")
    on_h200 = notes(LLAMA_8B, "h200")
    assert "mostly Humming, which vLLM takes if asked to" in on_h200
    assert "FP8 activations, by CUTLASS; INT4 twice holds a second copy of W4A16's INT4" in on_h200
    assert "NVFP4" in notes(LLAMA_8B, "b200") and "NVFP4" not in notes(LLAMA_8B, "h100")
    on_cpu = notes(SMOLLM2, "cpu-2-core")
    assert "kernels that FlexQuant chooses" in on_cpu and "GPU" not in on_cpu
    deep = {**LLAMA_8B, "num_hidden_layers": 128}
    tokens = tried(tmp_path, deep, "rtx-4090")[ONE_COPY].kv_cache_tokens
    assert tokens is not None and 1 < tokens // 1280 < 32
    assert f"one copy holds {tokens // 1280} requests at once, and further" in notes(deep, "rtx-4090")


def test_command(capsys, tmp_path):
    planned(tmp_path, LLAMA_8B)
    command = ["advise", str(tmp_path), "--device", "l20", "--tensor-parallel-size"]
    options = "--concurrency 1,4,1 --input-len 512 --output-len 128 --gpu-memory-utilization 0.5 --json"
    assert cli.main([*command, "2", *options.split()]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path} on 2 x NVIDIA L20, 48 GB (l20)"
    assert lines[2].startswith("requests of 512 + 128 tokens")
    names = [way.name for way in ways(load_device("l20"))]
    assert [line[:12].rstrip() for line in lines[5 : 5 + len(names)]] == names
    found = json.loads(last)
    model, l20 = PlannedModel.read(str(tmp_path)), load_device("l20")
    one = try_ways(model, l20, Batches(512, 128, (1, 4)), 2, 0.5)[names.index(ONE_COPY)]
    assert found["ways"][ONE_COPY]["kv_cache_tokens"] == one.kv_cache_tokens
    assert found["ways"][ONE_COPY]["loads"]["4"]["ttft"] == one.loads[4].ttft
    assert lines[3].split()[-2:] == ["1", "4"]
    assert found["choice"] == "stock W4A16" and found["helps"] is False
    assert cli.main([*command, "3"]) == 1
    assert "32 attention heads and 8 KV heads, which 3 devices cannot share" in capsys.readouterr().err
