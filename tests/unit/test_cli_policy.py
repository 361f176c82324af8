# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The commands of ``flexquant policy``: what they print, and the key that apply sends to a server alone."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from flexquant import cli
from flexquant.checkpoint.merged_config import MergedConfig, StoredVariant
from flexquant.errors import FlexQuantError
from flexquant.policy.rules import builtin_policies, load_policy
from flexquant.policy.schema import json_schema
from flexquant.serving.frontend.client import ADMIN_KEY, apply_policy
from tests.pass_times import make_times


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[list[str], dict[str, Any]]:
    """Run with --json; return the lines for people and the result."""
    assert cli.main(["policy", *argv, "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def fail(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run; return the one line on stderr."""
    assert cli.main(["policy", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def merged(folder: Path, nested: bool = False, num_layers: int = 6, **section: Any) -> str:
    variants = {name: StoredVariant(f"{name}.", {}, True, False) for name in ("w8a8", "w4a16")}
    layers = {"num_hidden_layers": num_layers}
    written = MergedConfig("LlamaForCausalLM", variants, **section).to_json()
    config = {**({"text_config": layers} if nested else layers), "quantization_config": written}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("argv", [["list", "--json"], ["--json", "list"]])
def test_list(capsys, argv):
    assert cli.main(["policy", *argv]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == builtin_policies()
    assert [line.split()[0] for line in lines if line.endswith("(default)")] == ["phase-batch"]
    result = json.loads(last)
    assert result["default"] == "phase-batch"
    assert result["policies"][-2] == {"name": "w8a8", "description": "W8A8 for every forward pass"}


def test_show_without_a_model_has_layers_as_written_and_ends_at_max_tokens(capsys):
    lines, result = run(capsys, "show", "phase-batch-layer")
    assert [line.split() for line in lines[2:]] == [
        ["prefill", "1", "or", "more", "tokens", "w8a8"],
        ["decode", "1", "to", "32", "sequences", "w4a16+w8a8[0-3,-1]"],
        ["decode", "33", "or", "more", "sequences", "w8a8"],
        ["mixed", "1", "or", "more", "tokens", "w8a8"],
    ]
    assert result["routes"][2] == {"phase": "decode", "min_tokens": 33, "max_tokens": None, "plan": "w8a8"}
    assert "num_layers" not in result
    lines, _ = run(capsys, "show", "phase-batch", "--max-tokens", "100")
    assert lines[2].split() == ["prefill", "1", "to", "100", "tokens", "w8a8"]
    assert lines[4].split() == ["decode", "33", "to", "100", "sequences", "w8a8"]


@pytest.mark.parametrize("nested", [False, True], ids=["num_hidden_layers", "text_config"])
def test_show_with_a_model_resolves_layers(capsys, tmp_path, nested):
    command = ["show", "phase-batch-layer", "--model", merged(tmp_path, nested)]
    assert run(capsys, *command, "--max-tokens", "40")[1]["routes"][-1]["max_tokens"] == 40
    lines, result = run(capsys, *command)
    assert lines[3].split()[-1] == "w8a8+w4a16[4]" and result["num_layers"] == 6
    assert result["plans"]["w8a8+w4a16[4]"] == ["w8a8"] * 4 + ["w4a16", "w8a8"]


def test_show_tells_the_times_beside_the_plans(capsys, tmp_path):
    decode, prefill = {1: 0.01, 32: 0.02, 33: 0.02}, {1: 0.01}
    times = make_times({"w8a8": (decode, prefill), "w4a16": (decode, prefill)})
    document = load_policy("phase-batch").document | {"measured": times.to_data()}
    (tmp_path / "tuned.yaml").write_text(json.dumps(document))
    lines, _ = run(capsys, "show", str(tmp_path / "tuned.yaml"))
    rows = [line.split() for line in lines if re.match(r"\d+ sequences? ", line)]
    assert [(row[0], row[-1]) for row in rows] == [("1", "w4a16"), ("32", "w4a16"), ("33", "w8a8")]


def test_show_takes_the_stored_policy_of_the_model_or_the_default(capsys, tmp_path):
    assert run(capsys, "show")[1]["policy"] == "phase-batch"
    assert run(capsys, "show", "--model", merged(tmp_path))[1]["policy"] == "phase-batch"
    _, result = run(capsys, "show", "--model", merged(tmp_path, policy=load_policy("w4a16").document))
    assert result["policy"] == "the checkpoint's policy"
    assert {route["plan"] for route in result["routes"]} == {"w4a16"}


def test_validate_and_schema_which_is_printed_once(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("schema: flexquant.policy/v1\nrules: [{when: {phase: decode}, use: fp8}, {use: w8a8}]\n")
    lines, result = run(capsys, "validate", str(path))
    assert lines == [f"{path} is valid: 2 rules, variants fp8, w8a8"]
    assert result == {"policy": str(path), "valid": True, "rules": 2, "variants": ["fp8", "w8a8"]}
    path.write_text("schema: flexquant.policy/v1\nrules:\n  - use: 8\n")
    assert f"error: {path}, line 3: rules[0].use is 8;" in fail(capsys, "validate", str(path))
    assert run(capsys, "schema") == ([], json_schema())


def test_show_refuses_an_unknown_policy_and_one_that_does_not_fit(capsys, tmp_path):
    assert "unknown policy 'fast'" in fail(capsys, "show", "fast")
    layered = "show", "phase-batch-layer", "--model"
    few = merged(tmp_path, num_layers=3)
    assert "names layer 3, but the model has 3 layers" in fail(capsys, *layered, few)
    assert "without 'layers'" in fail(capsys, *layered, merged(tmp_path, mixable=(("w8a8",), ("w4a16",))))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "has no file 'config.json'"),
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list"),
        ('{"text_config": null, "num_hidden_layers": 2}', "names no architecture"),
    ],
)
def test_show_refuses_a_folder_that_is_not_merged(capsys, tmp_path, content, problem):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    message = fail(capsys, "show", "w8a8", "--model", str(tmp_path))
    assert all(part in message for part in (str(tmp_path), problem, "flexquant merge"))


@pytest.mark.parametrize("argv", ["", "unknown", "validate", "show --max-tokens 0", "show --max-tokens many"])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["policy", *argv.split()])
    assert exit_.value.code == 2 and "usage: flexquant policy" in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["policy", "--help"])
    assert exit_.value.code == 0 and "flexquant policy show phase-batch" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "List policies, check one, show which plan" in capsys.readouterr().out


KEY = "an administrator's key"


class Server(HTTPServer):
    """A server that answers as it is told, and keeps the keys that it was given."""

    def __init__(self, code: int, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.code, self.location = code, location
        self.answer: Any = {}
        self.keys: list[str | None] = []
        self.path = ""
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.keys.append(self.headers["Authorization"])
        self.server.path = self.path
        self.send_response(self.server.code)
        if self.server.location:
            self.send_header("Location", self.server.location)
        answer = json.dumps(self.server.answer).encode()
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[Server]:
    server = Server(200)
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_the_key_follows_no_redirect(code, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, KEY)
    named = Server(code, f"{other.url}/flexquant/policy")
    with named, pytest.raises(FlexQuantError, match=f"sends on to '{other.url}/flexquant/policy' .{code}.*"):
        try:
            apply_policy(named.url, load_policy("w8a8"))
        finally:
            named.shutdown()
    assert (named.keys, other.keys) == ([f"Bearer {KEY}"], [])


@pytest.mark.parametrize("key", [KEY, f"{KEY}\n", f"\t {KEY} \r\n"])
def test_space_around_the_key_is_none_of_it(key, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, key)
    other.answer = {"routes": []}
    assert apply_policy(other.url, load_policy("w8a8")) == other.answer
    assert other.keys == [f"Bearer {key.strip()}"]


@pytest.mark.parametrize("answer", [{}, [], None])
def test_what_is_no_answer_of_flexquant_is_told(answer, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, KEY)
    other.answer = answer
    with pytest.raises(FlexQuantError, match="the answer is not FlexQuant's.*; check that vllm serve runs"):
        apply_policy(other.url, load_policy("w8a8"))


@pytest.mark.parametrize("key", ["a\nkey", "a\x7fkey", "a k\u00e9y", "a key\u2026"])
def test_a_key_that_is_not_printable_ascii_is_refused_and_not_shown(key, other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, key)
    with pytest.raises(FlexQuantError) as refused:
        apply_policy(other.url, load_policy("w8a8"))
    assert str(refused.value) == (
        f"the key in {ADMIN_KEY} has characters that not every client can send; use printable ASCII alone"
    )
    assert other.keys == []


def test_nothing_but_space_is_no_key(other, monkeypatch):
    monkeypatch.setenv(ADMIN_KEY, " \n")
    with pytest.raises(FlexQuantError, match=f"the environment has no {ADMIN_KEY}"):
        apply_policy(other.url, load_policy("w8a8"))


DRY = "w8a8 would replace phase", "CUDA graphs would be captured, requests waiting meanwhile"
APPLIED = (
    "w8a8 has replaced phase",
    "took 2.0 s; a restart serves the policy that the server was started with",
)


@pytest.mark.parametrize(("options", "first", "last"), [(["--dry-run"], *DRY), ([], *APPLIED)])
def test_the_command_tells_which_plan_comes_after_which(options, first, last, other, monkeypatch, capsys):
    monkeypatch.setenv(ADMIN_KEY, KEY)
    change = {"phase": "decode", "min_tokens": 1, "max_tokens": 64, "before": "w4a16", "after": "w8a8"}
    other.answer = {"before": {"name": "phase"}, "after": {"name": "w8a8"}, "routes": [change]}
    other.answer |= {"captures_graphs": True, "seconds": 2.0}
    assert cli.main(["policy", "apply", other.url, "w8a8", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == (first, last)
    assert lines[1].split() == ["decode", "1", "to", "64", "tokens", "w4a16", "->", "w8a8"]
    other.answer |= {"routes": [], "captures_graphs": False}
    assert cli.main(["policy", "apply", f"{other.url}/v1/", "w8a8", *options]) == 0
    assert other.path == f"/flexquant/policy?name=w8a8&dry_run={'true' if options else 'false'}"
    told = capsys.readouterr().out
    assert told.splitlines()[1] == "every pass keeps its plan" and "CUDA graphs" not in told
