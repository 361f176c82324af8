# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant tune` and `fit`: real engines timed, a policy written, a run that goes on after a stop."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_checkpoint import weights_identity
from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.cli import build_parser, main
from flexquant.cli._arguments import STUDY_DEFAULTS, study_of
from flexquant.doctor.examining import count_bytes, examine
from flexquant.evaluation.workers import PassRunner
from flexquant.layers.sensitivity import SCHEMA as SENSITIVITY
from flexquant.layers.sensitivity import policy_that_loads
from flexquant.merge import merge_checkpoints
from flexquant.policy.plans import all_in, describe_layers, with_layer
from flexquant.policy.routes import build_route_table
from flexquant.policy.rules import load_policy
from flexquant.tuning.candidates import FROM_INT4, find_variants
from flexquant.tuning.measure import Measurement
from flexquant.tuning.policy_file import TuningFiles
from flexquant.tuning.samples import QUICK_CPU, QUICK_GPU
from tests.checkpoints import make_checkpoint, make_pair
from tests.integration.conftest import answers, edited_json, engine
from tests.refusals import refused
from tests.states import make_variants

pytestmark = pytest.mark.engine

VARIANTS = ["w8a8", "w4a16"]
TRIPLE = [*VARIANTS, FROM_INT4]
FEW = ["--quick", "--max-batch", "4", "--max-tokens", "64"]


class Done(NamedTuple):
    """What a command in this process came to."""

    status: int
    stdout: str
    stderr: str


def run_here(*arguments) -> Done:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main([*map(str, arguments)])
    return Done(status, out.getvalue(), err.getvalue())


class Tuned(NamedTuple):
    merged: Path
    policy: Path
    unreachable: Done
    """The earlier run, whose objective no policy could meet."""
    done: Done


@pytest.fixture(scope="module")
def tuned(tiny_merged, tmp_path_factory) -> Tuned:
    """Tune twice in one round, which no noise can call undecided, over another run's policy and samples."""
    merged, output = tiny_merged() / "merged", tmp_path_factory.mktemp("tuned") / "policy.yaml"
    output.write_text("an earlier policy")
    output.with_name("policy.yaml.samples.json").write_text('{"run": {}, "seconds": {}}')
    arguments = ["tune", merged, "--output", output, *FEW, "--rounds", 1, "--enforce-eager", "--overwrite"]
    unreachable = run_here(*arguments, "--slo", "ttft=0.001ms")
    return Tuned(merged, output, unreachable, run_here(*arguments, "--json", "--objective", "latency"))


def test_every_size_is_measured_and_written_down(tuned):
    measured = load_policy(str(tuned.policy)).measured
    assert set(measured.decode) == set(measured.prefill) == {"w8a8", "w4a16"}
    for variant in measured.variants:
        sizes = list(measured.decode[variant]), list(measured.prefill[variant])
        assert sizes == ([1, 4], [12, 40, 64])
    assert measured.origin["versions"]["vllm"] and tuned.done.status == 0
    assert json.loads(tuned.done.stdout.splitlines()[-1])["measured"] == measured.to_data()
    assert f"wrote {tuned.policy}" in tuned.done.stdout
    assert re.search(r"^the lm_head in 16 bit is \d+% of the weights", tuned.done.stdout, re.MULTILINE)
    assert {file.suffix for file in tuned.policy.parent.iterdir()} == {".yaml", ".png"}


def test_another_objective_is_decided_without_engines(tuned):
    assert tuned.unreachable.status == 1 and "cannot be met" in tuned.unreachable.stderr
    assert "starting w8a8, w4a16" in tuned.unreachable.stderr
    assert "starting" not in tuned.done.stderr


def test_policy_show_draws_the_times_beside_the_plans(tuned):
    policy = load_policy(str(tuned.policy))
    shown = run_here("policy", "show", tuned.policy, "--model", tuned.merged)
    table = build_route_table(policy, VARIANTS, num_layers=4, max_tokens=64)
    assert shown.status == 0 and f"measured: {tuned.merged.name}" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if line.startswith("4 sequences"))
    assert f"{1e3 * policy.measured.decode['w8a8'][4].median:.3g}" in row.split()
    assert row.split()[-1] == table.lookup("decode", 4).name


@pytest.mark.full
def test_a_stopped_run_goes_on(tiny_merged, tmp_path):
    """The first run is stopped; a sample that it left is changed, and the second run writes the changed one.

    The runs have a single round, so that this sample is all there is of its size.
    """
    output, samples = tmp_path / "policy.yaml", tmp_path / "policy.yaml.samples.json"
    arguments = ["tune", tiny_merged() / "merged", "--output", output, "--rounds", "1"]
    arguments += ["--max-batch", "16", "--max-tokens", "64"]
    first = subprocess.Popen(
        [sys.executable, "-m", "flexquant", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore SIGINT, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while not samples.is_file() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 1, errors
    assert "flexquant tune: interrupted" in errors and not output.exists()
    with edited_json(samples) as data:
        data["seconds"]["w8a8"]["decode"]["1"] = [1234.5]
    assert run_here(*arguments).status == 0
    assert load_policy(str(output)).measured.decode["w8a8"][1].median == pytest.approx(1234.5, rel=1e-3)
    assert not samples.exists()


@pytest.mark.full
def test_an_engine_that_does_not_start_is_named_with_its_log(tiny_merged, tmp_path):
    output = ["--output", tmp_path / "p.yaml"]
    done = run_here("tune", tiny_merged() / "merged", *output, *FEW, "--tensor-parallel-size", "3")
    assert done.status == 1 and "its log ends:" in done.stderr
    assert "flexquant tune: error: the engine of 'w8a8' failed" in done.stderr
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tune --output p.json", "end its name in .yaml"),
        ("tune --output missing/p.yaml", "the folder of missing/p.yaml does not exist"),
        ("tune --output p.yaml --slo ttft=soon", "'ttft=soon' in --slo is not a bound"),
        ("tune --output p.yaml --max-quality-loss 0.1", "--max-quality-loss and --text need each other"),
        ("tune --output p.yaml --text t", "--max-quality-loss and --text need each other"),
        ("tune --output p.yaml --reference m", "--reference is what --text is measured against"),
        ("tune --output p.yaml --variants w8a8", "there is nothing to choose from but w8a8"),
        ("fit --output p.yaml --memory 1GiB --sensitivity s", "s cannot be read"),
        ("fit --output p.yaml --memory 1KiB --variants phase", "'phase' runs passes or layers in several"),
    ],
)
def test_wrong_use_costs_no_time(tiny_merged, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    subcommand, *options = arguments.split()
    done = run_here(subcommand, tiny_merged() / "merged", *options)
    assert done.status == 2 and message in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of the arguments --memory --kv-tokens is required"),
        (["--memory", "1GiB", "--kv-tokens", "9"], "--kv-tokens: not allowed with argument --memory"),
    ],
)
def test_memory_is_said_in_one_way(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", str(tmp_path), "--output", str(tmp_path / "p.yaml"), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["merged", "w4a16"])
def test_less_memory_than_one_copy_is_refused(tiny_merged, tmp_path, kind, monkeypatch):
    """A published checkpoint of INT4 weights has nothing but one copy. The user's environment stays."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    command = ["fit", tiny_merged() / kind, "--output", tmp_path / "p.yaml"]
    done = run_here(*command, "--memory", "100KiB")
    assert done.status == 1 and "more than the 100.0 KiB there are for weights" in done.stderr
    assert "to compute INT8 weights in; give --memory 1MiB or more" in done.stderr
    assert list(tmp_path.iterdir()) == [] and "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert "10,000,000,000 are asked for; give fewer" in run_here(*command, "--kv-tokens", 10**10).stderr
    halved = run_here(*command, "--memory", "100KiB", "--tensor-parallel-size", 2)
    sizes = [re.search(r"one copy takes ([\d.]+ \w+) a rank", told.stderr)[1] for told in (done, halved)]
    assert sizes[0] != sizes[1]


def test_memory_without_int4_weights_is_refused(tmp_path):
    made = {name: make_checkpoint(tmp_path / name, scheme=name) for name in ("w8a8", "fp8")}
    merge_checkpoints(made, tmp_path / "merged", policy="w8a8")
    done = run_here("fit", tmp_path / "merged", "--output", tmp_path / "p.yaml", "--memory", "1GiB")
    said = "--memory and --kv-tokens need a variant w4a16, and the checkpoint has w8a8, fp8"
    assert done.status == 2 and said in done.stderr


def sensitivity_file(merged, file) -> Path:
    """Write a file by which the last layers lose most."""
    high, files = all_in("w8a8", 30), weights_identity(merged)
    kl = {describe_layers(high): [0.01], describe_layers(all_in("w4a16", 30)): [0.2]}
    kl |= {describe_layers(with_layer(high, n, "w4a16")): [0.01 + n / 1e4] for n in range(30)}
    document = {"schema": SENSITIVITY, "layers": 30, "variants": VARIANTS, "files": files, "kl": kl}
    file.write_text(json.dumps(document))
    return file


def remember(arguments, variants, seconds) -> None:
    """Write the samples of a run that was stopped at its end: ``seconds(variant, size)`` for every pass."""
    args = build_parser().parse_args([*map(str, arguments)])
    output = TuningFiles(args.output)
    grid = QUICK_CPU if current_platform.is_cpu() else QUICK_GPU
    eager = current_platform.is_cpu() if args.enforce_eager is None else args.enforce_eager
    measured = Measurement(args.folder, variants, grid, output.samples, enforce_eager=eager)
    for _ in range(args.max_rounds or grid.effort.rounds):
        for phase, sizes in (("decode", measured.grid.decode), ("prefill", measured.grid.prefill)):
            for size, variant in itertools.product(sizes, variants):
                measured.samples.add(variant, phase, size, seconds(variant, size))
    measured.samples.save(output.samples, measured.run)


def test_what_follows_from_samples_needs_no_engine(tiny_merged, tmp_path):
    """W4A16 is the faster for few sequences; in a GiB two copies of this model fit.

    The samples of one run are of compiled engines, and are gone on with by a run that asks for these.
    """
    folder, seconds = tiny_merged() / "merged", {"w8a8": 1.0, FROM_INT4: 1.1}
    merged = read_merged_config(folder)[0]
    for command, names in (
        (["tune", "--no-enforce-eager"], None),
        (["fit", "--max-rounds", 5, "--memory", "1GiB"], TRIPLE),
    ):
        output = tmp_path / f"{command[0]}.yaml"
        arguments = [*command, folder, "--output", output, "--quick"]
        remember(arguments, find_variants(merged, names), lambda v, n: seconds.get(v, 0.5 + n / 8))
        told = run_here(*arguments)
        assert told.status == 0 and "starting" not in told.stderr and f"wrote {output}" in told.stdout
        assert [rule.variant for rule in load_policy(str(output)).rules] == ["w4a16", "w8a8", "w8a8"]
        assert not output.with_name(f"{output.name}.samples.json").exists()
    assert "two copies: w8a8, w4a16" in told.stdout and told.stdout.count("  chosen\n") == 1
    output = tmp_path / "largest.yaml"
    largest = ["tune", folder, "--output", output, "--quick", "--objective", "throughput", "--width", "50%"]
    scattered = itertools.cycle((1, 1.1, 0.9, 1.05, 0.95))
    remember(largest, find_variants(merged, None), lambda v, n: seconds.get(v, 0.5 + n / 8) * next(scattered))
    told = run_here(*largest, "--request-tokens", 100)
    assert told.status == 0 and "requests of 100 tokens fit into memory: --max-batch" in told.stdout
    assert "starting" not in told.stderr, "intervals are narrower than was asked for"
    assert [rule.variant for rule in load_policy(str(output)).rules] == ["w8a8"]


def test_a_loss_that_was_measured_is_limited_without_an_engine(tiny_merged, tmp_path):
    """Each layer in W4A16 loses 0.01, and 0.025 may be lost: two layers of four keep to it."""
    merged, output, text = tiny_merged() / "merged", tmp_path / "p.yaml", tmp_path / "text.txt"
    arguments = ["tune", merged, "--output", output, "--quick", "--max-quality-loss", 0.025, "--text", text]
    assert f"there is no file {text}" in run_here(*arguments).stderr
    text.write_text(Path(__file__).read_text())
    study = study_of(build_parser().parse_args([*map(str, arguments)]), STUDY_DEFAULTS)
    plans = itertools.product(study.variants, repeat=4)
    kl = {describe_layers(plan): [plan.count("w4a16") / 100] for plan in plans}
    TuningFiles(output).sensitivity.write_text(json.dumps(study.described() | {"kl": kl}))
    remember(arguments, study.variants, lambda v, n: 1.0 if v == "w8a8" else 0.5 + n / 8)
    told = run_here(*arguments)
    assert told.status == 0 and "starting" not in told.stderr
    assert "At most 0.025 is allowed: the fastest plan, " in told.stdout
    assert load_policy(str(output)).rules[0].layers == {"2-3": "w4a16"}


@pytest.mark.full
def test_layers_are_chosen_for_a_memory(real_merged, tmp_path):
    """Eight layers and a half fit; what is chosen takes no more when it is served."""
    variants = find_variants(read_merged_config(real_merged)[0], TRIPLE)
    loaded = count_bytes(real_merged, policy_that_loads(variants), devices=1)
    memory = loaded.of([all_in(FROM_INT4, 30)]) + int(8.5 * loaded.by_layer["w8a8"][0])
    output, file = tmp_path / "policy.yaml", sensitivity_file(real_merged, tmp_path / "sensitivity.json")
    arguments = ["--output", output, "--memory", memory, "--sensitivity", file, *FEW, "--rounds", "1"]
    done = run_here("fit", real_merged, *arguments)
    assert done.status == 0 and "8 of 30 layers (22-29) fit with w8a8 of their own" in done.stderr
    text = output.read_text()
    assert text.count("  chosen\n") == 1
    (fits,) = [line for line in text.splitlines() if re.match("# one copy, and w8a8 in some +8 ", line)]
    assert re.split(r"\s{2,}", fits)[7] == "~0.0331"
    assert set(load_policy(str(output)).measured.decode) == {*TRIPLE}
    with engine(real_merged, str(output), max_model_len=256) as llm:
        ((tokens, _),) = answers(llm, ["The capital of France is"], max_tokens=4)
        (found,) = llm.apply_model(lambda model: sum(model.weight_bytes.values()))
    assert len(tokens) == 4 and found <= 1.01 * memory


@pytest.mark.parametrize(
    ("model", "per_token"),
    [
        # 2 layers, keys and values of 2 heads of 32, 2 bytes a number: each device has a head at least.
        ({"num_attention_heads": 8, "hidden_size": 256}, {1: 512, 2: 512, 8: 2048}),
        # Latent attention: every device has all 512 + 64 numbers.
        ({"architecture": "deepseek_v2"}, {1: 2 * 576 * 2, 2: 2 * 2 * 576 * 2}),
    ],
)
def test_the_kv_cache_of_requests_is_counted_on_all_devices(tmp_path, model, per_token):
    merge_checkpoints(make_pair(tmp_path, **model), tmp_path / "merged")
    for devices, nbytes in per_token.items():
        measured = measurement(tmp_path, tensor_parallel_size=devices, request_tokens=10**4)
        assert measured.requests(["w8a8"]) == measured.memory.requests(["w8a8"], 10**4 * nbytes)


def test_a_request_has_the_states_of_its_layers_once(tmp_path):
    """Gated delta nets in 3 of 4 layers: 2 heads of 64 x 64 numbers, and three columns of 384."""
    made = make_variants(tmp_path, "qwen3_next")
    merge_checkpoints({name: made / name for name in VARIANTS}, tmp_path / "merged")
    variants = find_variants(read_merged_config(tmp_path / "merged")[0], VARIANTS)
    size = count_bytes(tmp_path / "merged", variants["w8a8"].document, devices=1).request_bytes
    assert size(1000) - size(0) == 1000 * 2 * 4 * 32 * 2
    assert 3 * 2 * (2 * 64 * 64 + 3 * 384) <= size(0) < 1000 * 2 * 4 * 32 * 2 * 3
    found = examine(str(tmp_path / "merged"), ["--max-model-len", "256"])
    (memory,) = [finding for finding in found if finding.subject == "memory"]
    assert memory.details["bytes_per_token"] > 2 * 4 * 32 * 2 + size(0) // 256, "a block has more tokens"


def measurement(folder, **options) -> Measurement:
    variants = find_variants(read_merged_config(folder / "merged")[0], VARIANTS)
    return Measurement(folder / "merged", variants, QUICK_CPU, folder / "samples.json", **options)


def test_more_sequences_than_the_kv_cache_holds_are_refused(tiny_merged):
    """Of its blocks one is never used."""
    blocks = 32
    with engine(tiny_merged() / "merged", "w8a8", max_model_len=256, num_gpu_blocks_override=blocks) as llm:
        for sequences, context in ((1_000_000, 16), (blocks, 1)):
            with refused(f"{sequences} sequences of {context} tokens need .* which has {blocks - 1}; lower"):
                PassRunner(llm).decode(sequences, context, seconds=0)
        assert PassRunner(llm).decode(blocks - 1, 1, seconds=0) > 0


def test_a_policy_is_not_overwritten_unasked(tiny_merged, tmp_path):
    (tmp_path / "p.yaml").write_text("mine")
    done = run_here("tune", tiny_merged() / "merged", "--output", tmp_path / "p.yaml", *FEW)
    assert done.status == 2 and "exists; give another --output, or --overwrite" in done.stderr
    assert (tmp_path / "p.yaml").read_text() == "mine"
