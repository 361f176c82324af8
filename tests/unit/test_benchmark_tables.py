# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks' figures by hand, and synthetic checkpoints: equal in all schemes, read, merged."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from benchmarks import readme_tables
from benchmarks.speed import kernels, tables
from benchmarks.speed.comparing import compare_beside
from benchmarks.speed.models import open_model
from benchmarks.speed.report import write_report
from benchmarks.speed.results import ROOT, Results, read_lines
from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.synthetic import SCHEMES, word_tokenizer
from benchmarks.speed.tables import by_workload, said
from benchmarks.speed.workloads import Workload
from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.evaluation.comparison import EQUAL, HIGHER, compare
from tests.checkpoints import load_all


def test_kernel_summary_by_hand():
    sizes = {"weight_bytes": 1000, "outputs": 10, "inputs": 20, "tokens": 5}
    found = kernels.summarise([5e-6, 1e-6, 3e-6, 2e-6, 4e-6], **sizes)
    # 1000 bytes of weights, 2 * 5 * 20 of inputs, 2 * 5 * 10 of outputs; 2 * 5 * 20 * 10 operations; in 3 us.
    assert found.pop("microseconds_quartiles") == pytest.approx([2, 4])
    expected = {"microseconds": 3, "rounds": 5, "gb_per_s": 1.3 / 3, "tflop_per_s": 2e-3 / 3}
    assert found == pytest.approx(expected, rel=1e-9)


PARTS = {"serving": "## Latency", "start": "## Memory", "kernels": "## Kernels"}
BATCH = Workload(2, 100, 50)


def served(subject: str, number: int, workload: Workload = BATCH, **result: Any) -> dict[str, Any]:
    """Return a serving cell in which the second request's prompt comes last."""
    whole = {"ttfts": [0.1, 0.3], "tpots": [0.02, 0.01], "median_ttft_ms": 200.0, "median_tpot_ms": 15.0}
    whole |= {"p99_itl_ms": 40.0, "output_throughput": 80.0, **result}
    parameters = {"subject": subject, "workload": workload.describe(), "round": number}
    return {"part": "serving", "parameters": parameters, "result": whole}


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_prefill_ends_with_the_last_first_token_and_decode_follows_it():
    result = {"ttfts": [0.4, 0.9, 0.5], "tpots": [0.1, 0.025, 0.2]}
    assert tables.prefill_ms(result) == pytest.approx(900) and tables.decode_ms(result) == pytest.approx(25)


def test_latency_table_by_hand():
    cells = [served("w8a8", n, median_ttft_ms=ttft) for n, ttft in enumerate((100.0, 130.0, 110.0))]
    assert rows(tables.latency_table(by_workload(cells, "serving")))[2:] == [
        ["2x100+50", "`w8a8`", "110.0 (100.0 – 130.0)", "15.00 (15.00 – 15.00)"]
        + ["40.0 (40.0 – 40.0)", "80.0 (80.0 – 80.0)"]
    ]


def test_ratio_tables_pair_rounds_by_hand():
    cells = [
        served("w8a8", 0, median_ttft_ms=100.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("w8a8", 1, median_ttft_ms=200.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("flexquant:phase", 0, median_ttft_ms=110.0, median_tpot_ms=11.0, output_throughput=45.0),
        served("flexquant:phase", 1, median_ttft_ms=180.0, median_tpot_ms=12.0, output_throughput=55.0),
        # Not paired: no ratio comes from it.
        served("flexquant:phase", 2, median_ttft_ms=9999.0, median_tpot_ms=9999.0),
        # A constant policy is not compared.
        served("flexquant:w8a8", 0, median_ttft_ms=50.0, median_tpot_ms=5.0, output_throughput=100.0),
    ]
    assert rows(tables.ratio_table(by_workload(cells, "serving"))) == [
        ["requests", "ratio", "TTFT", "TPOT", "tokens/s", "rounds"],
        ["---"] * 6,
        # The estimate of two ratios is their geometric mean.
        ["2x100+50", "`flexquant:phase` / `w8a8`", "0.995 (0.900 – 1.100), too few rounds"]
        + ["1.149 (1.100 – 1.200), too few rounds", "0.995 (0.900 – 1.100), too few rounds", "2"],
    ]
    assert by_workload(cells, "start") == {}


def test_kernel_and_memory_tables_by_hand():
    times = {"microseconds": 12.5, "microseconds_quartiles": [12.25, 13.0]}
    found = {"kernel": "SomeKernel", **times, "gb_per_s": 1234.0, "tflop_per_s": 0.125}
    layer = {"layer": "o_proj", "outputs": 8, "inputs": 16}
    start = {"start_seconds": 61.4, "kv_cache_tokens": 117760, "kv_cache_gib": 1.0, "checkpoint_gib": 0.125}
    cells = [
        {"part": part, "parameters": parameters, "result": result}
        for part, parameters, result in (
            ("kernels", {**layer, "tokens": 16}, {"w8a8": found}),
            ("kernels", {**layer, "tokens": 2}, {"w8a8": found, "fp8": {"unavailable": "ValueError: no"}}),
            ("start", {"subject": "w8a8"}, start),
        )
    ]
    text = "12.5 µs (12.25 – 13), 1.23e+03 GB/s, 0.125 TFLOP/s"
    head, rule, *lines = rows(tables.kernel_table(tables.kernel_results(cells)["o_proj", 8, 16]))
    assert (head, rule) == (["tokens", "w8a8", "fp8"], ["---"] * 3)
    assert lines == [["2", text, "no kernel"], ["16", text, "–"]]
    (memory,) = rows(tables.memory_table(tables.start_results(cells)))[2:]
    assert memory == ["`w8a8`", "0.12", "1.00", "117,760", "61"]


def test_report_of_hand_made_cells(tmp_path):
    results = Results(tmp_path, "tiny", "abc123")
    for subject in ("w8a8", "flexquant:phase"):
        cell = served(subject, 0)
        results.save("serving", cell["parameters"], 2, result={**cell["result"], "duration": 1.0})
    results.save("start", {"subject": "fp8"}, 0, failure="GPUs only")
    assert write_report(tmp_path) == tmp_path / "report.md"
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Speed of tiny\n")
    assert "- commit: abc123\n" in report and "- 3 cells, " in report and ", 4 s of measuring" in report
    assert "| 2x100+50 | `flexquant:phase` / `w8a8` | 1.000, too few rounds | 1.000, too" in report
    assert "## Not measured\n\n- start, fp8: GPUs only" in report
    assert {path.name for path in tmp_path.iterdir()} == {"cells.jsonl", "report.md"}


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks/results").glob("*/cells.jsonl")), ids=lambda file: file.parent.name
)
def test_the_committed_cells_are_whole_and_make_the_report_that_git_does_not_keep(file, tmp_path, capsys):
    header, cells = read_lines(file.parent)
    assert capsys.readouterr().out == ""
    assert cells and all({"result", "failure"} & cell.keys() for cell in cells)
    assert {cell["parameters"]["model"] for cell in cells} == {header["model"]}
    shutil.copy(file, tmp_path)
    write_report(tmp_path)
    report = (tmp_path / "report.md").read_text()
    for part, title in PARTS.items():
        assert (title in report) == any(c["part"] == part and "result" in c for c in cells), part


@pytest.mark.parametrize(
    ("again", "found"),
    [([1.0, 0.9, 1.1], HIGHER), ([1.05], EQUAL), ([1 / 1.05], EQUAL), ([1.01], HIGHER), ([1 / 1.01], HIGHER)],
)
def test_servers_of_the_same_subject_widen_the_interval_by_their_ratio(again, found):
    ratios = [1.03, 1.1, 1.2, 1.06, 1.1]
    comparison = compare_beside(ratios, again)
    apart = max(compare(again).ratio, 1 / compare(again).ratio)
    assert (comparison.low, comparison.high) == pytest.approx((1.03 / apart, 1.2 * apart))
    assert comparison.ratio == compare(ratios).ratio and comparison.verdict == found


def test_more_tokens_a_second_are_faster():
    assert [said(compare([2.0] * 5), m) for m in ("TTFT ms", "tokens/s")] == ["100 % slower", "100 % faster"]
    assert [said(compare([0.5] * 5), m) for m in ("TTFT ms", "tokens/s")] == ["50 % faster", "50 % slower"]
    by_rounds = [said(compare([0.9, 1, 1, 1, 1.2][:n]), "tokens/s") for n in (5, 4)]
    assert by_rounds == ["equal within 20 %", "too few rounds"]


TINY = SHAPES["tiny"]


def dequantise(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a linear's fp32 weights in any scheme, unpacked here by hand."""
    if (packed := tensors.get(f"{name}.weight_packed")) is not None:
        shape = tensors[f"{name}.weight_shape"].tolist()
        bits = 32 * packed.numel() // math.prod(shape)
        numbers = (packed.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32)) & (1 << bits) - 1
        integers = (numbers - (1 << bits - 1)).flatten(1).float()
        assert list(integers.shape) == shape
        scale = tensors[f"{name}.weight_scale"].float()
        return integers * (scale if bits == 8 else scale.repeat_interleave(128, dim=1))
    weight = tensors[f"{name}.weight"]
    scaled = weight.dtype != torch.bfloat16
    return weight.float() * (tensors[f"{name}.weight_scale"].float() if scaled else 1)


def test_all_schemes_have_the_same_weights_up_to_rounding(checkpoints):
    tensors = {scheme: load_all(folder) for scheme, folder in checkpoints.items()}
    for layer in range(TINY.layers):
        for projection, (outputs, inputs) in TINY.projections().items():
            name = f"model.layers.{layer}.{projection}"
            found = {scheme: dequantise(tensors[scheme], name) for scheme in SCHEMES}
            exact = found["w8a8"]
            assert exact.shape == (outputs, inputs)
            assert exact.std().item() == pytest.approx(1 / math.sqrt(inputs), rel=0.05)
            torch.testing.assert_close(found["bf16"], exact, rtol=2**-8, atol=0)
            torch.testing.assert_close(found["fp8"], exact, rtol=2**-4, atol=0)
            assert torch.equal(found["w8a16"], exact)
            # A step of W4A16 is 16 steps of W8A8; 127 is at most 7 steps of W4A16.
            step = tensors["w8a8"][f"{name}.weight_scale"].float()
            off = ((found["w4a16"] - exact) / step).abs()
            assert off.max() <= 15 and off[(exact / step).abs() <= 120].max() <= 8 and off.mean() > 1
    # other layers have other weights
    assert not torch.equal(*(tensors["w8a8"][f"model.layers.{n}.mlp.up_proj.weight"] for n in range(2)))


def test_what_is_not_quantised_is_the_same_in_all_schemes(checkpoints):
    whole = map(load_all, checkpoints.values())
    first, *others = ({name: t for name, t in of.items() if "_proj." not in name} for of in whole)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < first.keys()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_synthetic_checkpoints_can_be_read(checkpoints):
    for scheme, folder in checkpoints.items():
        config = json.loads((folder / "config.json").read_text())
        assert replace(Shape.from_config(config), max_length=TINY.max_length) == TINY
        assert ("quantization_config" in config) == (scheme != "bf16")
        assert AutoConfig.from_pretrained(folder).num_hidden_layers == TINY.layers
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        tensors = load_all(folder)
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(folder / file)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["w8a8"])
    assert tokenizer("t5 t511").input_ids == [5, 511]
    assert tokenizer.decode([7, 8]).split() == ["t7", "t8"] and len(tokenizer) == TINY.vocabulary


def test_prompts_of_a_synthetic_model_keep_their_length(tmp_path):
    from vllm.tokenizers import get_tokenizer

    for name, document in word_tokenizer(5000).items():
        (tmp_path / name).write_text(json.dumps(document))
    tokenizer = get_tokenizer(str(tmp_path))
    tokens = [*range(4700, 5000), *range(2, 40)]
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens
    assert len(tokenizer.decode(tokens[:300])) <= 300 * tokenizer.max_chars_per_token  # or vLLM refuses it


def test_synthetic_variants_merge_and_without_weights_say_the_same(tmp_path: Path) -> None:
    model = open_model(["tiny"], tmp_path)
    merged = model.folder(parse_subject("flexquant:w8a8"))
    assert merged == tmp_path / "tiny" / "merged-w8a8-w4a16"
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert model.folder(parse_subject("flexquant:phase-batch")) == merged
    assert model.folder(parse_subject("w8a8")) == tmp_path / "tiny" / "w8a8"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == made
    empty = model.without_weights(("w8a8", "w4a16"))
    assert not list(empty.glob("*.safetensors"))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (merged, empty)]
    sections = [MergedConfig.from_json(config.pop("quantization_config")) for config in configs]
    assert configs[0] == configs[1]
    kept = [(s.base_architecture, s.variants, s.mixable, set(s.shared_modules)) for s in sections]
    assert kept[0] == kept[1] and len(AutoTokenizer.from_pretrained(empty)) == TINY.vocabulary


def test_the_pages_have_what_the_results_say(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["readme_tables", "--check"])
    assert readme_tables.main() == 0
