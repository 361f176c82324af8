# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The speed benchmarks without vLLM: workloads, logs, results, checkpoints, tables by hand, every refusal."""

from __future__ import annotations

import json
import math
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from benchmarks.__main__ import main
from benchmarks.speed.command_line import choose_settings, make_parser, server_options
from benchmarks.speed.kernels import summarise
from benchmarks.speed.models import open_model
from benchmarks.speed.report import write_report
from benchmarks.speed.results import ROOT, SCHEMA, Results, end_of_log, read_about, read_cells
from benchmarks.speed.serving import paired_subjects, plan_cells
from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.speed.startup_log import parse_startup_log
from benchmarks.speed.subjects import parse_subject
from benchmarks.speed.synthetic import SCHEMES, word_tokenizer, write_checkpoint
from benchmarks.speed.tables import (
    batch_table,
    best_static_table,
    by_workload,
    decode_ms,
    kernel_results,
    kernel_table,
    latency_table,
    memory_table,
    prefill_ms,
    ratio_table,
    start_results,
    verdict,
)
from benchmarks.speed.worker import Worker, WorkerError
from benchmarks.speed.workloads import Workload
from flexquant.errors import FlexQuantError
from tests.policies import THRESHOLD

TINY = SHAPES["tiny"]

# workloads


@pytest.mark.parametrize(
    "text, workload",
    [
        ("8x1024+128", Workload(8, 1024, 128)),
        ("200x1024+256@10~0.5", Workload(200, 1024, 256, rate=10, spread=0.5)),
        ("24x128+32@0.25", Workload(24, 128, 32, rate=0.25)),
        ("10x20+30~.25", Workload(10, 20, 30, spread=0.25)),
    ],
)
def test_workloads_are_read_and_named(text, workload):
    assert Workload.parse(text) == workload
    assert Workload.parse(workload.name) == workload
    assert Workload(**workload.describe()) == workload


@pytest.mark.parametrize(
    "text",
    ["", "8", "8x1024", "0x8+4", "00x8+4", "8x0+4", "8x8+0", "8x8+4@", "8x8+4@0", "8x8+4@0.0", "8x8+4~1"]
    + ["8x8+4~1.5", "8x8+4@-1", "-8x8+4", "8x8+4 ", "8x8+4~0.5@2", "8 x 8 + 4", "8X8+4"],
)
def test_what_is_no_workload_is_refused(text):
    with pytest.raises(FlexQuantError, match="is not a workload; write REQUESTSxINPUT") as caught:
        Workload.parse(text)
    assert "\n" not in str(caught.value)


def test_rounds_differ_in_their_prompts_and_subjects_do_not():
    def options(workload: Workload, number: int) -> dict[str, str]:
        arguments = workload.bench_arguments("http://host:1", "model", "folder", number)
        return dict(zip(arguments[:-3:2], arguments[1:-3:2], strict=True))

    stream = Workload(24, 128, 32, rate=2, spread=0.5)
    first = options(stream, 0)
    assert first == options(stream, 0)
    assert {key for key, value in options(stream, 1).items() if first[key] != value} == {"--seed"}
    expected = {"--num-prompts": "24", "--random-input-len": "128", "--random-output-len": "32"}
    assert (expected | {"--request-rate": "2", "--random-range-ratio": "0.5"}).items() <= first.items()
    assert options(Workload(8, 16, 4), 0)["--request-rate"] == "inf"


def test_servers_have_room_for_the_longest_request_and_the_largest_batch():
    args = make_parser("").parse_args(
        ["run", "--quick", "--serving", "200x8+4", "300x64+12@8~0.5", "--overhead", "2x8+4"]
    )
    settings = choose_settings(args, on_gpu=False)
    options = server_options(args, settings, [parse_subject("w8a8")], on_gpu=False)
    assert options.max_length >= 76 * 1.5
    # A stream never has all its requests in one batch.
    assert options.max_sequences == 200


# subjects and the order of the cells


def test_subjects_name_checkpoints_and_policies(tmp_path):
    (tmp_path / "mine.yaml").write_text(THRESHOLD)
    mine = parse_subject(f"flexquant:{tmp_path / 'mine.yaml'}")
    built_in = parse_subject("flexquant:phase-batch")
    assert mine.variants == built_in.variants == ("w8a8", "w4a16")
    assert parse_subject("flexquant:fp8-phase-batch").variants == ("fp8", "w4a16")
    assert parse_subject("w4a8").variants == ("w4a16",)
    assert not parse_subject("w4a8").is_merged and mine.is_merged
    assert parse_subject("w8a8").describe() == {"subject": "w8a8"}
    assert built_in.describe()["policy_crc32"] != mine.describe()["policy_crc32"]


def test_an_edited_policy_is_another_cell(tmp_path):
    (tmp_path / "mine.yaml").write_text(THRESHOLD)
    subject = parse_subject(f"flexquant:{tmp_path / 'mine.yaml'}")
    before = subject.describe()
    assert subject.describe() == before
    edited = THRESHOLD.replace("w8a8", "w4a16")
    assert edited != THRESHOLD
    (tmp_path / "mine.yaml").write_text(edited)
    assert subject.describe() != before


def test_rounds_go_forward_and_backward_and_overhead_takes_pairs():
    subjects = [parse_subject(name) for name in ("bf16", "w8a8", "flexquant:phase-batch", "flexquant:w8a8")]
    assert [s.name for s in paired_subjects(subjects)] == ["w8a8", "flexquant:w8a8"]
    parts = {"serving": [Workload(1, 8, 4)], "overhead": [Workload(2, 8, 4)]}
    cells = list(plan_cells(parts, subjects, rounds=2))
    assert [(c.round, c.part, c.subject.name) for c in cells] == [
        (0, "serving", "bf16"),
        (0, "serving", "w8a8"),
        (0, "serving", "flexquant:phase-batch"),
        (0, "serving", "flexquant:w8a8"),
        (0, "overhead", "w8a8"),
        (0, "overhead", "flexquant:w8a8"),
        (1, "serving", "flexquant:w8a8"),
        (1, "serving", "flexquant:phase-batch"),
        (1, "serving", "w8a8"),
        (1, "serving", "bf16"),
        (1, "overhead", "flexquant:w8a8"),
        (1, "overhead", "w8a8"),
    ]


# start-up logs

CPU_LOG = """\
(EngineCore pid=22075) INFO 11-21 12:41:19 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config:
(Worker pid=22558) INFO 11-21 12:42:10 [__init__.py:846] Selected ExactCPUInt8LinearKernel for CompressedTensorsW8A8Int8
(Worker pid=22558) INFO 11-21 12:42:10 [__init__.py:923] Using TorchCPUInt4LinearKernel for mixed-precision linear
(Worker pid=22558) INFO 11-21 12:42:10 [compressed_tensors_wNa16.py:138] Using TorchCPUInt4LinearKernel for CompressedTensorsWNA16
(Worker pid=22558) INFO 11-21 12:42:10 [model.py:78] FlexQuant 0.1.0: policy phase-batch; plans w8a8 (8 layers w8a8), w4a16 (8 layers w4a16); weights w8a8 24.2 MiB, w4a16 12.4 MiB, shared 8.0 MiB, in all 80 % of 16-bit
(Worker pid=22558) INFO 11-21 12:42:11 [default_loader.py:501] Loading weights took 0.08 seconds
(Worker pid=22558) INFO 11-21 12:42:12 [cpu_worker.py:260] Explicitly set (1.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=22491) INFO 11-21 12:42:12 [kv_cache_utils.py:2327] CPU KV cache size: 117,760 tokens, Maximum concurrency for 115 tokens per request: 1024.00x
(EngineCore pid=22491) INFO 11-21 12:42:13 [core.py:402] init engine (profile, create kv cache, warmup model) took 0.83 s
"""  # noqa: E501 - as vLLM 0.32 printed it
GPU_LOG = """\
(EngineCore_DP0 pid=7) INFO 11-21 12:00:01 [__init__.py:846] Selected CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8
(EngineCore_DP0 pid=7) INFO 11-21 12:00:01 [compressed_tensors_wNa16.py:138] Using MarlinLinearKernel for CompressedTensorsWNA16
(EngineCore_DP0 pid=7) INFO 11-21 12:00:09 [default_loader.py:501] Loading weights took 3.25 seconds
(EngineCore_DP0 pid=7) INFO 11-21 12:00:10 [gpu_model_runner.py:5149] Model loading took 8.49 GiB memory and 4.123456 seconds
(EngineCore_DP0 pid=7) INFO 11-21 12:00:30 [gpu_worker.py:759] Available KV cache memory: 101.5 GiB
(EngineCore_DP0 pid=7) INFO 11-21 12:00:30 [kv_cache_utils.py:2327] GPU KV cache size: 1,662,976 tokens, Maximum concurrency for 1,153 tokens per request: 1442.30x
(EngineCore_DP0 pid=7) INFO 11-21 12:00:42 [gpu_model_runner.py:6581] Graph capturing finished in 7 secs, took -0.62 GiB
(EngineCore_DP0 pid=7) INFO 11-21 12:00:42 [core.py:395] init engine (profile, create kv cache, warmup model) took 31.07 s (compilation: 12.50 s)
"""  # noqa: E501 - vLLM 0.32's formats, as on a GPU


def test_startup_log_of_a_cpu():
    assert parse_startup_log(CPU_LOG) == {
        "kv_cache_gib": 1.0,
        "kv_cache_tokens": 117760,
        "load_seconds": 0.08,
        "engine_seconds": 0.83,
        "kernels": ["ExactCPUInt8LinearKernel", "TorchCPUInt4LinearKernel"],
        "flexquant": "policy phase-batch; plans w8a8 (8 layers w8a8), w4a16 (8 layers w4a16); weights w8a8 "
        "24.2 MiB, w4a16 12.4 MiB, shared 8.0 MiB, in all 80 % of 16-bit",
        "variant_gib": {"w8a8": 24.2 / 1024, "w4a16": 12.4 / 1024, "shared": 8 / 1024},
    }


def test_startup_log_of_a_gpu():
    assert parse_startup_log(GPU_LOG) == {
        "weights_gib": 8.49,
        "kv_cache_gib": 101.5,
        "kv_cache_tokens": 1662976,
        "graph_gib": -0.62,
        "graph_seconds": 7,
        "load_seconds": 3.25,
        "engine_seconds": 31.07,
        "compile_seconds": 12.5,
        "kernels": ["CutlassInt8ScaledMMLinearKernel", "MarlinLinearKernel"],
    }


def test_startup_log_that_says_nothing():
    assert parse_startup_log("INFO:     Application startup complete.\n") == {"kernels": []}


def test_end_of_a_log_has_no_folders_of_this_machine():
    lines = [f"line {number}" for number in range(40)]
    text = "\n".join([*lines, f"(Worker pid=1) ERROR in {ROOT}/flexquant/model.py", f"at {Path.home()}/x"])
    end = end_of_log(text).splitlines()
    assert len(end) == 30
    assert end[-2] == "ERROR in ./flexquant/model.py"
    assert str(Path.home()) not in end[-1]


# results

PARAMETERS = {"model": "tiny", "layer": "o_proj", "tokens": 4, "schemes": ["bf16"]}


def test_a_saved_cell_is_found_again(tmp_path):
    results = Results(tmp_path / "new" / "results", "tiny", "abc")
    assert results.find("kernels", PARAMETERS) is None
    saved = results.save("kernels", PARAMETERS, 1.23456, result={"bf16": 1})
    assert (saved["schema"], saved["part"], saved["parameters"]) == (SCHEMA, "kernels", PARAMETERS)
    assert (saved["commit"], saved["seconds"], saved["result"]) == ("abc", 1.235, {"bf16": 1})
    assert saved["machine"]["cores"] and saved["versions"]["torch"] and saved["argv"]
    again = Results(results.folder, "tiny", "abc")
    assert again.find("kernels", PARAMETERS) == saved
    assert read_cells(results.folder) == [saved]
    assert again.find("serving", PARAMETERS) is None
    assert again.find("kernels", {**PARAMETERS, "tokens": 5}) is None
    assert Results(results.folder, "tiny", "other").find("kernels", PARAMETERS) is None


def test_a_failed_cell_is_kept_but_not_found(tmp_path):
    results = Results(tmp_path, "tiny", "abc")
    failed = results.save("kernels", PARAMETERS, 1, failure="no answer within 1 s")
    assert results.find("kernels", PARAMETERS) is None
    assert read_cells(tmp_path) == [failed]
    saved = results.save("kernels", PARAMETERS, 1, result={})
    assert results.find("kernels", PARAMETERS) == saved
    assert read_cells(tmp_path) == [saved]


def test_the_newest_of_equal_cells_counts(tmp_path):
    results = Results(tmp_path, "tiny", "old")
    for commit, finished, number in (("new", "2026-01-02", 2), ("old", "2026-01-01", 1)):
        cell = results.save("kernels", PARAMETERS, 1, result=number)
        document = json.dumps({**cell, "commit": commit, "finished": f"{finished}T00:00:00Z"})
        (tmp_path / "kernels" / f"{commit}.json").write_text(document)
        (results._path("kernels", PARAMETERS)).unlink()
    assert [cell["result"] for cell in read_cells(tmp_path)] == [2]


def test_another_models_folder_is_refused(tmp_path):
    Results(tmp_path, "tiny", "abc")
    with pytest.raises(FlexQuantError, match="results of the model 'tiny', not 'small'; choose another"):
        Results(tmp_path, "small", "abc")


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(FlexQuantError, match="something else than speed results; choose another --output"):
        Results(tmp_path, "tiny", "abc")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("text, message", [("{", "no readable suite.json"), ('{"schema": "v9"}', "'v9'")])
def test_an_unreadable_folder_is_refused(tmp_path, text, message):
    (tmp_path / "suite.json").write_text(text)
    for read in (read_about, lambda folder: Results(folder, "tiny", "abc")):
        with pytest.raises(FlexQuantError, match=message):
            read(tmp_path)


def test_commit_is_gits(tmp_path):
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = done.stdout.strip() if done.returncode == 0 else "unknown"
    assert Results(tmp_path, "tiny").environment["commit"].removesuffix("+changes") == expected


# kernels


def test_kernel_summary_by_hand():
    found = summarise([5e-6, 1e-6, 3e-6, 2e-6, 4e-6], weight_bytes=1000, outputs=10, inputs=20, tokens=5)
    # 1000 bytes of weights, 2 * 5 * 20 of inputs, 2 * 5 * 10 of outputs; 2 * 5 * 20 * 10 operations; in 3 us.
    assert found.pop("microseconds_quartiles") == pytest.approx([2, 4])
    assert found == pytest.approx(
        {"microseconds": 3, "rounds": 5, "gb_per_s": 1.3 / 3, "tflop_per_s": 2e-3 / 3}, rel=1e-9
    )


# synthetic checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("synthetic") / "tiny"
    for scheme in SCHEMES:
        write_checkpoint(folder / scheme, TINY, scheme)
    assert sorted(path.name for path in folder.iterdir()) == sorted(SCHEMES)
    return {scheme: folder / scheme for scheme in SCHEMES}


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def dequantise(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The fp32 weights of a linear in any scheme, unpacked here by hand."""
    if (packed := tensors.get(f"{name}.weight_packed")) is not None:
        nibbles = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        integers = (nibbles - 8).flatten(1).float()
        scale = tensors[f"{name}.weight_scale"].float().repeat_interleave(128, dim=1)
        assert list(integers.shape) == tensors[f"{name}.weight_shape"].tolist()
        return integers * scale
    weight = tensors[f"{name}.weight"]
    scaled = weight.dtype != torch.bfloat16
    return weight.float() * (tensors[f"{name}.weight_scale"].float() if scaled else 1)


def test_all_schemes_have_the_same_weights_up_to_rounding(checkpoints):
    tensors = {scheme: load(folder) for scheme, folder in checkpoints.items()}
    for layer in range(TINY.layers):
        for projection, (outputs, inputs) in TINY.projections().items():
            name = f"model.layers.{layer}.{projection}"
            found = {scheme: dequantise(tensors[scheme], name) for scheme in SCHEMES}
            exact = found["w8a8"]
            assert exact.shape == (outputs, inputs)
            assert exact.std().item() == pytest.approx(1 / math.sqrt(inputs), rel=0.05)
            torch.testing.assert_close(found["bf16"], exact, rtol=2**-8, atol=0)
            torch.testing.assert_close(found["fp8"], exact, rtol=2**-4, atol=0)
            # A step of W4A16 is 16 of W8A8; 7 steps are the most, for 127.
            step = tensors["w8a8"][f"{name}.weight_scale"].float()
            off = ((found["w4a16"] - exact) / step).abs()
            assert off.max() <= 15 and off[(exact / step).abs() <= 120].max() <= 8
            assert off.mean() > 1
    # Other layers have other weights.
    assert not torch.equal(*(tensors["w8a8"][f"model.layers.{n}.mlp.up_proj.weight"] for n in range(2)))


def test_what_is_not_quantised_is_the_same_in_all_schemes(checkpoints):
    first, *others = (
        {name: tensor for name, tensor in load(folder).items() if "_proj." not in name}
        for folder in checkpoints.values()
    )
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < first.keys()
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_synthetic_checkpoints_can_be_read(checkpoints):
    for scheme, folder in checkpoints.items():
        config = json.loads((folder / "config.json").read_text())
        assert replace(Shape.from_config(config), max_length=TINY.max_length) == TINY
        assert ("quantization_config" in config) == (scheme != "bf16")
        assert AutoConfig.from_pretrained(folder).num_hidden_layers == TINY.layers
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        tensors = load(folder)
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        for name, file in index["weight_map"].items():
            assert name in load_file(folder / file)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["w8a8"])
    assert tokenizer("t5 t511").input_ids == [5, 511]
    assert tokenizer.decode([7, 8]).split() == ["t7", "t8"]
    assert len(tokenizer) == TINY.vocabulary


def test_prompts_of_a_synthetic_model_keep_their_length(tmp_path):
    from vllm.tokenizers import get_tokenizer

    for name, document in word_tokenizer(5000).items():
        (tmp_path / name).write_text(json.dumps(document))
    tokenizer = get_tokenizer(str(tmp_path))
    tokens = [*range(4700, 5000), *range(2, 40)]
    text = tokenizer.decode(tokens)
    assert tokenizer.encode(text) == tokens
    assert len(tokenizer.decode(tokens[:300])) <= 300 * tokenizer.max_chars_per_token  # or vLLM refuses it


def test_synthetic_variants_merge(tmp_path):
    model = open_model(["tiny"], tmp_path)
    folder = model.folder(parse_subject("flexquant:w8a8"))
    assert folder == tmp_path / "tiny" / "merged-w8a8-w4a16"
    assert (folder / "config.json").is_file()
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert model.folder(parse_subject("flexquant:phase-batch")) == folder
    assert model.folder(parse_subject("w8a8")) == tmp_path / "tiny" / "w8a8"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == made


def test_a_checkpoint_folder_is_there_only_when_complete(tmp_path):
    folder = tmp_path / "w8a8"
    # All layers are written before the embedding, which cannot be made.
    with pytest.raises(RuntimeError, match="negative dimension"):
        write_checkpoint(folder, replace(TINY, vocabulary=-1), "w8a8")
    assert not folder.exists()
    (stage,) = tmp_path.iterdir()
    assert len(list(stage.glob("*.safetensors"))) == TINY.layers
    (stage / "left-over").touch()
    write_checkpoint(folder, TINY, "w8a8")
    assert list(tmp_path.iterdir()) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


# tables

BATCH = Workload(2, 100, 50)


def served(
    subject: str, number: int, workload: Workload = BATCH, part: str = "serving", **result: Any
) -> dict[str, Any]:
    """A serving cell: the second request's prompt comes last."""
    whole = {
        "ttfts": [0.1, 0.3],
        "tpots": [0.02, 0.01],
        "median_ttft_ms": 200.0,
        "median_tpot_ms": 15.0,
        "p99_itl_ms": 40.0,
        "output_throughput": 80.0,
        **result,
    }
    parameters = {"subject": subject, "workload": workload.describe(), "round": number}
    return {"part": part, "parameters": parameters, "result": whole}


def rows(table: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_prefill_ends_with_the_last_first_token_and_decode_follows_it():
    result = {"ttfts": [0.4, 0.9, 0.5], "tpots": [0.1, 0.025, 0.2]}
    assert prefill_ms(result) == pytest.approx(900)
    assert decode_ms(result) == pytest.approx(25)


def test_batch_table_by_hand():
    cells = [
        served("w8a8", 0),
        served("w8a8", 1, ttfts=[0.5, 0.1], tpots=[0.03, 0.01], output_throughput=60.0),
        served("flexquant:w8a8", 0),
        served("w4a16", 0),
        served("w8a8", 0, Workload(9, 100, 50, rate=1.0)),
        {"part": "serving", "parameters": {"subject": "bf16"}, "failure": "it broke"},
    ]
    memory = {
        "w8a8": {"weights_gib": 2.0, "kv_cache_gib": 1.0, "kv_cache_tokens": 1000},
        # As on a CPU: what FlexQuant says goes before the size on disk.
        "flexquant:w8a8": {
            "variant_gib": {"w8a8": 2.5, "shared": 0.5},
            "checkpoint_gib": 9.0,
            "kv_cache_gib": 2.0,
            "kv_cache_tokens": 1000,
        },
    }
    assert rows(batch_table(by_workload(cells, "serving"), memory)) == [
        ["batch", "input", "output", "subject", "prefill ms", "decode ms", "tokens/s", "GiB"],
        ["---"] * 8,
        # Prefill 300 and 500, decode 10 and 30; 2 GiB and 300 tokens of 1/1000 GiB.
        ["2", "100", "50", "`w8a8`", "400.0 (300.0 – 500.0)", "20.00 (10.00 – 30.00)"]
        + ["70.0 (60.0 – 80.0)", "2.30"],
        ["2", "100", "50", "`flexquant:w8a8`", "300.0", "10.00", "80.0", "3.60"],
        ["2", "100", "50", "`w4a16`", "300.0", "10.00", "80.0", "–"],
    ]


def test_latency_table_by_hand():
    cells = [served("w8a8", n, median_ttft_ms=ttft) for n, ttft in enumerate((100.0, 130.0, 110.0))]
    assert rows(latency_table(by_workload(cells, "serving")))[2:] == [
        ["2x100+50", "`w8a8`", "110.0 (100.0 – 130.0)", "15.00 (15.00 – 15.00)"]
        + ["40.0 (40.0 – 40.0)", "80.0 (80.0 – 80.0)"]
    ]


def test_ratio_tables_pair_rounds_by_hand():
    cells = [
        served("w8a8", 0, median_ttft_ms=100.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("w8a8", 1, median_ttft_ms=200.0, median_tpot_ms=10.0, output_throughput=50.0),
        served("flexquant:w8a8", 0, median_ttft_ms=110.0, median_tpot_ms=11.0, output_throughput=45.0),
        served("flexquant:w8a8", 1, median_ttft_ms=180.0, median_tpot_ms=12.0, output_throughput=55.0),
        # Not paired: no ratio comes from it.
        served("flexquant:w8a8", 2, median_ttft_ms=9999.0, median_tpot_ms=9999.0),
        served("flexquant:phase", 1, median_ttft_ms=50.0, median_tpot_ms=5.0, output_throughput=100.0),
    ]
    measured = by_workload(cells, "serving")
    head = [["requests", "ratio", "TTFT", "TPOT", "tokens/s", "rounds"], ["---"] * 6]
    assert rows(ratio_table(measured, constant=True)) == [
        *head,
        ["2x100+50", "`flexquant:w8a8` / `w8a8`", "1.000 (0.900 – 1.100)", "1.150 (1.100 – 1.200)"]
        + ["1.000 (0.900 – 1.100)", "2"],
    ]
    assert rows(ratio_table(measured, constant=False)) == [
        *head,
        ["2x100+50", "`flexquant:phase` / `w8a8`", "0.250", "0.500", "2.000", "1"],
    ]
    assert by_workload(cells, "overhead") == {}


def test_kernel_and_memory_tables_by_hand():
    times = {"microseconds": 12.5, "microseconds_quartiles": [12.25, 13.0]}
    found = {"kernel": "SomeKernel", **times, "gb_per_s": 1234.0, "tflop_per_s": 0.125}
    parameters = {"layer": "o_proj", "outputs": 8, "inputs": 16, "tokens": 16}
    cells = [
        {"part": "kernels", "parameters": parameters, "result": {"w8a8": found}},
        {
            "part": "kernels",
            "parameters": {**parameters, "tokens": 2},
            "result": {"w8a8": found, "fp8": {"unavailable": "ValueError: no"}},
        },
        {
            "part": "start",
            "parameters": {"subject": "w8a8"},
            "result": {"kernels": ["A", "B"], "start_seconds": 61.4, "kv_cache_tokens": 117760}
            | {"kv_cache_gib": 1.0, "checkpoint_gib": 0.125},
        },
    ]
    text = "12.5 µs (12.25 – 13), 1.23e+03 GB/s, 0.125 TFLOP/s"
    assert rows(kernel_table(kernel_results(cells)["o_proj", 8, 16])) == [
        ["tokens", "w8a8", "fp8"],
        ["---"] * 3,
        ["2", text, "no kernel"],
        ["16", text, "–"],
    ]
    assert rows(memory_table(start_results(cells)))[2:] == [
        ["`w8a8`", "0.12", "1.00", "–", "117,760", "61", "–", "–", "A, B"]
    ]


def test_report_of_hand_made_cells(tmp_path):
    results = Results(tmp_path, "tiny", "abc123")
    for subject in ("w8a8", "flexquant:w8a8"):
        cell = served(subject, 0, part="overhead")
        results.save("overhead", cell["parameters"], 2, result=cell["result"])
    results.save("start", {"subject": "fp8"}, 0, failure="GPUs only")
    assert write_report(tmp_path) == ["report.md", "overhead.png"]
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("# Speed of tiny\n")
    assert "- commit: abc123\n" in report
    assert "- 3 cells, " in report and ", 4 s of measuring" in report
    assert "| 2x100+50 | `flexquant:w8a8` / `w8a8` | 1.000 | 1.000 | 1.000 | 1 |" in report
    assert "## Not measured\n\n- start, fp8: GPUs only" in report
    assert (tmp_path / "overhead.svg").is_file()


# the child processes

CHILD = """
import os, time
from benchmarks.speed.worker import answer_requests

def answer(request):
    if request == "end":
        os._exit(3)
    if request == "sleep":
        time.sleep(600)
    print("this is no reply")
    return [os.getpid(), 1 / request]

answer_requests(answer)
"""


def test_worker_survives_errors_and_comes_back_after_a_loss(tmp_path):
    (tmp_path / "child_for_test.py").write_text(CHILD)
    path = f"{tmp_path}:{ROOT}"
    worker = Worker("child_for_test", tmp_path / "log", {"PYTHONPATH": path})
    try:
        first, half = worker.call(2, timeout=60)
        assert half == 0.5
        with pytest.raises(WorkerError, match="^ZeroDivisionError: division by zero$"):
            worker.call(0, timeout=60)
        assert worker.call(1, timeout=60) == [first, 1.0]
        with pytest.raises(WorkerError, match="ended with code 3; see .*log"):
            worker.call("end", timeout=60)
        second, _ = worker.call(1, timeout=60)
        assert second != first
        with pytest.raises(WorkerError, match="no answer within 1 s"):
            worker.call("sleep", timeout=1)
        assert worker.call(1, timeout=60)[0] != second
    finally:
        worker.close()
    log = (tmp_path / "log").read_text()
    assert "this is no reply" in log and "Traceback" in log


# the command line


@pytest.fixture
def command(capsys):
    """``main`` by what it returns and prints on stderr; it sets a signal handler, which goes again.

    A run may begin no cell, so that one which is not refused starts no servers.
    """
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str | Path) -> tuple[int, str]:
        limit = ["--time-limit", "0"] if arguments[0] == "run" else []
        return main([*map(str, arguments), *limit]), capsys.readouterr().err

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no model is given; add --model, e.g. --model 0.5b, or try --quick"),
        (["--model", "gpt"], "'gpt' is not a model; choose from tiny, small, "),
        (["--model", "tiny", "--parts", "kernels,serve"], "'serve' is not a part; choose from kernels, "),
        (["--model", "tiny", "--schemes", "w8a8,w2a16"], "'w2a16' is not a scheme; choose from bf16, "),
        (["--model", "tiny", "--layers", "lm_head"], "'lm_head' is not a layer; choose from qkv_proj, "),
        (["--model", "tiny", "--tokens", "1,0"], "'0' is not a number of tokens; give whole numbers"),
        (["--model", "tiny", "--tokens", "many"], "'many' is not a number of tokens; give whole numbers"),
        (["--model", "tiny", "--serving", "8x8"], "'8x8' is not a workload; write REQUESTSxINPUT+OUTPUT"),
        (["--model", "tiny", "--subjects", "w2a16"], "'w2a16' is not a subject; choose from bf16, "),
        (["--model", "tiny", "--subjects", "flexquant:none"], "none"),
        (
            ["--model", "tiny", "--subjects", "w8a8,flexquant:w4a16"],
            "the subjects are w8a8, flexquant:w4a16; add such a pair to --subjects, or leave the part out",
        ),
        (["--model", "w2a16=x"], "'w2a16=x' does not name a checkpoint; write VARIANT=FOLDER"),
        (["--model", "w8a8=", "w4a16=x"], "'w8a8=' does not name a checkpoint; write VARIANT=FOLDER"),
        (["--model", "w8a8=absent"], "absent is not a checkpoint folder (no config.json); correct 'w8a8="),
    ],
)
def test_command_line_errors_take_one_line_and_leave_nothing(command, tmp_path, arguments, message):
    folders = ["--work", tmp_path / "work", "--output", tmp_path / "results"]
    code, error = command("run", *arguments, *folders)
    assert code == 1
    assert error.startswith("error: ") and error.count("\n") == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_a_variant_that_is_not_given_is_missed_before_anything_is_measured(command, checkpoints, tmp_path):
    model = [f"w8a8={checkpoints['w8a8']}", f"bf16={checkpoints['bf16']}"]
    folders = ["--work", tmp_path / "work", "--output", tmp_path / "results"]
    for subjects, missing in (("w8a8,w4a16", "w4a16"), ("w8a8,flexquant:w8a8", "merged")):
        parts = ["--parts", "kernels,serving", "--subjects", subjects]
        code, error = command("run", "--model", *model, *parts, *folders)
        subject = subjects.partition(",")[2]
        assert code == 1
        assert error == (
            f"error: subject '{subject}' needs the checkpoint '{missing}' of tiny, but given are w8a8, bf16; "
            f"add {missing}=FOLDER to --model, or leave it out of --subjects\n"
        )
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_shape_is_refused(command, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_head": 12}')
    code, error = command("run", "--model", f"bf16={tmp_path}", "--output", tmp_path / "results")
    assert code == 1
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "num_attention_heads" in error


@pytest.mark.parametrize("option", ["--parts", "--subjects", "--schemes", "--layers", "--tokens"])
def test_an_empty_list_is_refused(capsys, option):
    with pytest.raises(SystemExit) as caught:
        make_parser("").parse_args(["run", "--model", "tiny", option, ","])
    assert caught.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err


def test_report_of_anything_else_is_refused(command, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        code, error = command("report", folder)
        assert code == 1
        assert error == (
            f"error: {folder} is not a folder of speed results (no readable suite.json); "
            "give the --output of a run\n"
        )
    Results(tmp_path / "begun", "tiny", "abc")
    code, error = command("report", tmp_path / "begun")
    assert (code, error) == (1, f"error: {tmp_path / 'begun'} holds no results yet; start the run again\n")


def test_help_names_every_part(capsys):
    with pytest.raises(SystemExit) as caught:
        make_parser("").parse_args(["run", "--help"])
    assert caught.value.code == 0
    assert "kernels,serving,overhead,offline" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratios", "found"),
    [
        ([1.1, 1.2, 1.01], "slower"),
        ([0.9, 0.8, 0.99], "faster"),
        ([0.9, 1.2, 1.1], "within noise"),
        ([1.5], "too few rounds"),
    ],
)
def test_a_verdict_needs_all_rounds(ratios, found):
    assert verdict(ratios) == found


@pytest.mark.parametrize(
    ("ratios", "again", "found"),
    [
        ([1.1, 1.2, 1.01], [0.9, 1.0, 1.05], "slower"),
        ([1.1, 1.2, 1.01], [1.0, 1.0, 1.1], "within noise"),
        ([0.9, 0.8, 0.99], [0.95, 1.2, 1.1], "faster"),
        ([0.9, 0.8, 0.99], [0.85, 0.9, 0.8], "within noise"),
    ],
)
def test_what_two_servers_of_the_same_subject_differ_by_is_noise(ratios, again, found):
    assert verdict(ratios, again) == found


def test_the_best_static_variant_is_told_beside_its_second_server():
    def rounds(*milliseconds):
        return {n: {"median_ttft_ms": ms, "median_tpot_ms": ms} for n, ms in enumerate(milliseconds)}

    subjects = {
        "w8a8": rounds(30, 30, 30),
        "w4a16": rounds(10, 20, 10),
        "w4a16:again": rounds(11, 20, 12),
        "flexquant:mine": rounds(11, 21, 11),
    }
    (row,) = best_static_table({Workload(1, 16, 8): subjects}).splitlines()[2:]
    half = "`w4a16` | 1.100 (1.050 – 1.100) | 1.100 (1.000 – 1.200) | within noise"
    assert row == f"| 1x16+8 | `flexquant:mine` | {half} | {half} |"
