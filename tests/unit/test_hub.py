# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A Hugging Face id can stand wherever a model's folder can; a local server answers as the Hub does."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import pytest
from huggingface_hub import ModelCard, constants

from flexquant.checkpoint.built_model import nothing_fetched
from flexquant.checkpoint.folder import find_model
from tests import programs
from tests.checkpoints import make_checkpoint
from tests.hub import TOKEN, Hub, serving
from tests.refusals import refused

TEMPLATE = "additional_chat_templates/tool_use.jinja"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hub")
    found = {f"org/{s}": make_checkpoint(folder / s, scheme=s, num_shards=2) for s in ("w8a8", "w4a16")}
    for name, source in found.items():
        language = "en" if name == "org/w8a8" else "de"
        metadata = f"license: apache-2.0\nlanguage: {language}\nbase_model: org/model"
        (source / "README.md").write_text(f"---\n{metadata}\n---\nA model.\n")
        for copy in ("consolidated.safetensors", "original/params.json", "fp32/a/model.safetensors"):
            (source / copy).parent.mkdir(parents=True, exist_ok=True)
            (source / copy).write_bytes(b"another copy")
        (source / TEMPLATE).parent.mkdir()
        (source / TEMPLATE).write_text("{{ messages }}")
        (source / "pytorch_model.bin").write_bytes(b"and another")
    return found


@pytest.fixture
def hub(models: dict[str, Path]) -> Iterator[Hub]:
    with serving(Hub(dict(models))) as running:
        yield running


class Cache:
    """A cache of the Hub's tools, and a folder in which commands use it."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.folder, self.environment = folder, hub.environment(folder / "cache")

    def run(self, *arguments: str, status: int | None = 0, **environment: str) -> CompletedProcess[str]:
        """Run a command; fail unless it ends with ``status``, None for any."""
        command, variables = [*COMMAND, *arguments], {**self.environment, **environment}
        return programs.run(command, timeout=240, status=status, environment=variables, folder=self.folder)


@pytest.fixture
def cache(hub: Hub, tmp_path: Path) -> Cache:
    return Cache(hub, tmp_path)


COMMAND = [sys.executable, "-m", "flexquant"]
MERGE = ("merge", "w8a8=org/w8a8", "w4a16=org/w4a16@main", "--output", "merged")
FULL = pytest.mark.full


@FULL
def test_ids_are_merged_and_then_need_no_network(cache, hub, models):
    cache.run(*MERGE)
    asked = {path for _, path, _ in hub.requests}
    assert not [path for path in asked if path.endswith((".bin", "consolidated.safetensors"))]
    assert {path for path in asked if path.count("/") > 2} == {f"{name}/{TEMPLATE}" for name in models}
    folders = [f"{name.removeprefix('org/')}={folder}" for name, folder in models.items()]
    cache.run("verify", "merged", "--against", *folders)
    sources = json.loads((cache.folder / "merged/flexquant_provenance.json").read_text())["sources"]
    assert sources["w8a8"]["folder"] == f"org/w8a8@{hub.commit('org/w8a8')}"
    assert ModelCard.load(cache.folder / "merged/README.md").data.to_dict() == {
        **{"base_model": ["org/model"], "base_model_relation": "quantized", "library_name": "vllm"},
        **{"license": "apache-2.0", "pipeline_tag": "text-generation"},
        "tags": ["flexquant", "compressed-tensors"],
    }
    hub.models["org/merged"] = cache.folder / "merged"
    for command in (["inspect"], ["verify"], ["policy", "show", "--model"]):
        cache.run(*command, "org/merged")
    count = len(hub.requests)
    cache.run(*MERGE, "--overwrite", HF_HUB_OFFLINE="1")
    assert len(hub.requests) == count
    assert "it is not in the cache" in cache.run("inspect", "org/other", status=1, HF_HUB_OFFLINE="1").stderr


def test_advice_fetches_the_config_alone(cache, hub):
    assert "stock W4A16" in cache.run("advise", "org/w4a16@main", "--device", "l20").stdout
    fetched = {path for method, path, _ in hub.requests if method == "GET" and path.count("/") > 1}
    assert fetched == {"org/w4a16/config.json"}


@FULL
def test_a_merge_that_was_killed_fetches_only_what_had_not_arrived(cache, hub):
    stalled, other = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    hub.stalled[stalled] = 1000
    merge = ("merge", "w8a8=org/w8a8", "--output", "merged")
    process = Popen([*COMMAND, *merge], cwd=cache.folder, env=cache.environment, stderr=PIPE, text=True)
    blobs = cache.folder / "cache/hub/models--org--w8a8/snapshots" / hub.commit("org/w8a8")
    try:
        while not (hub.waiting.wait(0.2) and (blobs / other).exists()):
            assert process.poll() is None, process.communicate()[1]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    hub.stalled.clear()
    assert not (cache.folder / "merged").exists()
    hub.requests.clear()
    cache.run(*merge)
    fetched = {path for method, path, _ in hub.requests if method == "GET"}
    assert f"org/w8a8/{stalled}" in fetched and f"org/w8a8/{other}" not in fetched


@pytest.mark.parametrize("model", ["./w8a8", "../w8a8", ".models/w8a8", "models/.w8a8", "a/b/c", "org/here"])
def test_a_path_that_is_no_id_is_not_asked_for_nor_a_folder(model, tmp_path, monkeypatch):
    (tmp_path / "org/here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    fetch = "flexquant.checkpoint.folder._fetch"
    monkeypatch.setattr(fetch, lambda *asked: pytest.fail(f"asked for {asked}"))
    assert find_model(model) == Path(model)


@pytest.mark.parametrize("is_offline", [True, False])
def test_whoever_is_offline_stays_so(is_offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with nothing_fetched():
        assert constants.HF_HUB_OFFLINE
    assert is_offline == constants.HF_HUB_OFFLINE


def test_the_home_of_nobody_is_refused():
    with refused("~no-such-user/w8a8 cannot be the name of a folder .*; give a folder"):
        find_model("~no-such-user/w8a8")


@pytest.mark.parametrize(
    ("model", "environment", "said"),
    [
        ("models/w8a8", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "and it is not in the cache"),
        ("models/w8a8", {"HF_HUB_OFFLINE": "1"}, "and it is not in the cache"),
        ("models/w8a8--half", {}, "and no model can have it"),
    ],
)
def test_a_folder_is_called_missing_where_the_hub_cannot_be_asked(cache, hub, model, environment, said):
    assert f"no folder has this name, {said}" in cache.run("inspect", model, status=1, **environment).stderr
    assert hub.requests == []


@FULL
@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_a_connection_that_breaks_is_taken_up_again(cache, hub, name):
    hub.cut[name] = 1000
    done = cache.run(*MERGE, status=None)
    if done.returncode:  # small files are not taken up again by huggingface_hub itself
        assert "try again" in done.stderr
        cache.run(*MERGE)
    cache.run("verify", "merged")


@FULL
def test_a_file_that_arrives_damaged_is_refused_and_fetched_again(cache, hub):
    hub.damaged.add("model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors arrived damaged" in cache.run(*MERGE, status=1).stderr
    hub.damaged.clear()
    cache.run(*MERGE)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("org/none", "no folder and no public model has this name"),
        pytest.param(
            "org/gated", "ask for access on the model's page, and log in by 'hf auth login'", marks=FULL
        ),
        pytest.param(
            "org/w8a8@v9", "after the @, give one of the model's branches, tags or commits", marks=FULL
        ),
    ],
)
def test_what_cannot_be_fetched_is_told_with_the_way_on(cache, hub, models, model, said):
    hub.models["org/gated"] = models["org/w8a8"]
    hub.gated.add("org/gated")
    done = cache.run("merge", f"w8a8={model}", "--output", "merged", status=1)
    assert f"{model} cannot be fetched from the Hugging Face Hub" in done.stderr and said in done.stderr
    assert "Traceback" not in done.stderr and not (cache.folder / "merged").exists()
    if model == "org/gated":
        cache.run("merge", f"w8a8={model}", "--output", "merged", HF_TOKEN=TOKEN)
