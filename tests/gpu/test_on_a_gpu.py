# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What takes a GPU: sleep, after which answers are as before, and answers that do not depend on the batch.

After sleep, variants, what one copy computes with, and graphs stay. Under VLLM_BATCH_INVARIANT=1 and one plan
a request has the log-probabilities that it has alone.
"""

from pathlib import Path

import pytest

from tests.gpu.conftest import RUNNERS, graph_engine
from tests.integration.conftest import answers
from tests.integration.test_precisions import in_a_process
from tests.policies import rules

pytestmark = pytest.mark.cuda
PROMPTS = ["a prompt", "another one"]


@pytest.mark.parametrize("policy", ["phase", "w8a8-from-int4"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_answers_after_sleep_at_level_1_are_those_before(runner: str, policy: str, checkpoints: Path) -> None:
    mode, options = "FULL_AND_PIECEWISE", {"max_tokens": 16, "ignore_eos": True}
    with graph_engine(checkpoints / "merged", runner, mode, policy, enable_sleep_mode=True) as llm:
        before = answers(llm, PROMPTS, **options)
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm, PROMPTS, **options) == before


# vLLM reads the variable as its modules are imported, and replaces operators of the whole process.
SERVE = """
import json, sys
from flexquant.evaluation import engine
from tests.integration.conftest import answers

others = [f"{i} of several" for i in range(16)]
options = dict(max_model_len=128, gpu_memory_utilization=0.1, attention_backend="FLASH_ATTN")
with engine.engine(sys.argv[1], enforce_eager=True, flexquant={"policy": sys.argv[2]}, **options) as llm:
    alone, first, last = (
        answers(llm, batch) for batch in (["a prompt"], ["a prompt", *others], [*others, "a prompt"])
    )
with open(sys.argv[3], "w") as file:
    json.dump([alone[0], first[0], last[-1]], file)
"""


@pytest.mark.parametrize(
    "policy", ["w8a8", rules("- use: {default: w8a8, layers: {0: fp8}}")], ids=["constant", "by-layer"]
)
def test_log_probabilities_in_a_batch_are_those_alone(policy: str, checkpoints: Path, tmp_path: Path) -> None:
    if policy != "w8a8":
        (tmp_path / "policy.yaml").write_text(policy)
        policy = str(tmp_path / "policy.yaml")
    options = {"work": tmp_path, "zentorch": False, "VLLM_BATCH_INVARIANT": "1"}
    alone, first, last = in_a_process(SERVE, checkpoints / "merged", policy, **options)
    assert first == last == alone
