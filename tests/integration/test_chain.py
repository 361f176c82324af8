# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Other architectures all the way: quantised and merged by `flexquant build`, served, evaluated and tuned.

And `vllm serve org/merged`, which fetches a merged checkpoint as any model; a local server is the Hub.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from openai import OpenAI

from examples.vllm_server import VLLMServer, default_environment, vllm_serve
from flexquant.evaluation.evaluating import evaluate
from flexquant.evaluation.inputs import Settings
from flexquant.policy.rules import load_policy
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.hub import Hub, serving
from tests.integration.conftest import generate, records_of
from tests.integration.live_server import complete, flexquant_options

pytestmark = [pytest.mark.engine, pytest.mark.full]

QUANTIZE = programs.ROOT / ".venv/quantize/bin/flexquant"
SETTINGS = Settings(batch_sizes=(4,), samples=8, prompt_tokens=32, tokens=16)
SAMPLING = {"max_tokens": 8, "ignore_eos": True}
RECIPES = {"qwen2": "unrotated", "qwen3": "default", "qwen2_moe": "experts-in-16-bit"}
"""Architecture -> recipe; not every CPU has kernels for quantised experts."""


@pytest.fixture(scope="module", params=RECIPES)
def chain(request, tmp_path_factory) -> dict[str, Path]:
    """Return what `flexquant build` made of a small model; Qwen2 has biases on q, k and v."""
    if not QUANTIZE.exists():
        pytest.fail("the quantising environment is missing: run the tests with 'make test', which makes it")
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder / "model", request.param, scheme=None)
    command = [QUANTIZE, "build", model, "--output", folder / "merged", "--samples", "8", "--length", "64"]
    command += ["--recipe", RECIPES[request.param]]
    programs.run(command, timeout=300)
    return {"model": model, "merged": folder / "merged"}


def plans_in(trace: Path) -> list[tuple[str, str]]:
    return [(p["phase"], p["plan"]) for p in records_of(trace)[1:]]


def test_served(chain, tmp_path):
    options = flexquant_options(policy="phase", trace=str(tmp_path / "trace.jsonl"))
    options += ["--max-model-len", "256", "--max-num-seqs", "4", "--enforce-eager"]
    with vllm_serve(chain["merged"], *options, "--served-model-name", "tiny") as url:
        answer = complete(OpenAI(base_url=url, api_key="none"), "def merge(", 8)
    assert answer.usage.completion_tokens == 8
    assert plans_in(tmp_path / "trace.jsonl") == [("prefill", "w8a8")] + [("decode", "w4a16")] * 7


def test_evaluated(chain, tmp_path):
    (text := tmp_path / "text.txt").write_text(topics["execmodel"])
    asked = {"reference": chain["model"], "policies": ["w8a8", "phase"], "questions": []}
    reference, w8a8, phase = evaluate(chain["merged"], text, settings=SETTINGS, **asked)["results"]
    assert w8a8["deviations"] == phase["deviations"] == []
    assert 0 < w8a8["quality"]["mean_kl"] < phase["quality"]["mean_kl"]
    # Random weights have flat distributions: what is far off here is a broken fold of a bias or a scale.
    assert phase["quality"]["mean_kl"] < 0.5
    assert w8a8["quality"]["top1_agreement"] > 0.8
    assert reference["quality"]["perplexity"] > 1


def test_tuned(chain, tmp_path):
    """One round, which no noise can call undecided."""
    command = [sys.executable, "-m", "flexquant", "tune", chain["merged"], "--quick", "--rounds", "1"]
    command += ["--max-batch", "2", "--max-tokens", "64", "--output", tmp_path / "tuned.yaml"]
    programs.run(command, timeout=600)
    assert set(load_policy(str(tmp_path / "tuned.yaml")).variants) <= {"w8a8", "w4a16"}


def test_a_merged_checkpoint_is_served_by_its_id(tiny_merged, tmp_path):
    prompt, trace, merged = [5, 6, 7, 8], tmp_path / "trace.jsonl", tiny_merged() / "merged"
    hub = Hub({"org/merged": merged})
    environment = {**default_environment(), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    options = flexquant_options(policy="phase", trace=str(trace))
    options += ["--max-model-len", "64", "--enforce-eager"]
    with serving(hub):
        environment["HF_ENDPOINT"] = hub.url
        server = VLLMServer("org/merged", options, tmp_path / "log", environment)
        try:
            server.wait_until_healthy()
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
            answer = complete(client, prompt, 8, model="org/merged", logprobs=0)
        finally:
            server.stop()
    assert plans_in(trace) == [("prefill", "w8a8")] + [("decode", "w4a16")] * 7
    fetched = [name for method, name, _ in hub.requests if method == "GET" and name.endswith(".safetensors")]
    assert sorted(fetched) == sorted(f"org/merged/{file.name}" for file in merged.glob("*.safetensors"))
    asked = [{"prompt_token_ids": prompt}]
    (alone,) = generate(merged, ["phase"], asked, sampling=SAMPLING, max_model_len=64)
    (((tokens, likely),),) = alone.answers
    expected = [step[token] for token, step in zip(tokens, likely, strict=True)]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)
