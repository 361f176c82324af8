# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""An editor with the policy's schema: yaml-language-server itself finds mistakes, completes and explains."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs

SERVER = shutil.which("yaml-language-server")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(SERVER is None, reason="`make test-full` fetches yaml-language-server"),
]
PATIENCE = 120
"""Seconds after which a server that does not answer is ended."""
SETTINGS = {"yaml": {"schemaStore": {"enable": False}, "kubernetesCRDStore": {"enable": False}}}
"""The server takes schemas from the network unless it is told otherwise; what is left out has its default."""


class Editor:
    """Speaks the Language Server Protocol with a server, which answers in JSON over its standard streams."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.asked = 0

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
        self.process.stdin.flush()

    def next_message(self) -> dict[str, Any]:
        """Return the server's next message, and answer it if it asks for settings or for leave."""
        assert self.process.stdout is not None
        length = 0
        while header := self.process.stdout.readline().strip():
            name, _, value = header.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, "the server has ended"
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        if "method" in message and "id" in message:
            items = (message["params"] or {}).get("items", ())
            self.send(id=message["id"], result=[SETTINGS.get(item["section"]) for item in items])
        return message

    def ask(self, method: str, **params: Any) -> Any:
        self.asked += 1
        self.send(id=self.asked, method=method, params=params)
        while (message := self.next_message()).get("id") != self.asked or "method" in message:
            pass
        return message["result"]

    def diagnostics(self) -> list[dict[str, Any]]:
        """Wait until the server publishes what is wrong in the document."""
        while (message := self.next_message()).get("method") != "textDocument/publishDiagnostics":
            pass
        found: list[dict[str, Any]] = message["params"]["diagnostics"]
        return found


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [str(SERVER), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    editor = Editor(process)
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    try:
        capabilities = {"workspace": {"configuration": True}, "textDocument": {"publishDiagnostics": {}}}
        editor.ask("initialize", processId=None, rootUri=tmp_path.as_uri(), capabilities=capabilities)
        editor.send(method="initialized", params={})
        yield editor
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def test_a_policy_is_checked_completed_and_explained(editor: Editor, tmp_path: Path) -> None:
    shutil.copy(programs.ROOT / "policies" / "policy.schema.json", tmp_path)
    text = (programs.ROOT / "policies" / "phase.yaml").read_text(encoding="utf-8")
    for right, wrong in (
        ("description: prefill and mixed passes in W8A8, decode in W4A16", "describtion: a wrong key"),
        ("{phase: decode}", "{phase: decoding}"),
        ("    use: w4a16", "    use: w4a16\n  - when:\n      tokens: {min: 2}\n      \n    use: w8a8"),
    ):
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    lines = text.splitlines()
    document = {"uri": (tmp_path / "phase.yaml").as_uri()}
    opened = {**document, "languageId": "yaml", "version": 1, "text": text}
    editor.send(method="textDocument/didOpen", params={"textDocument": opened})

    found = {lines[d["range"]["start"]["line"]].strip(): d["message"] for d in editor.diagnostics()}
    assert found == {
        "describtion: a wrong key": "Property describtion is not allowed.",
        "- when: {phase: decoding}": 'Value is not accepted. Valid values: "prefill", "decode", "mixed".',
    }

    place = {"line": lines.index("      "), "character": 6}
    completions = editor.ask("textDocument/completion", textDocument=document, position=place)["items"]
    documented = {item["label"]: item["documentation"] for item in completions}
    assert set(documented) == {"phase", "batch_size"}, "tokens are given already"
    assert documented["batch_size"] == "Sequences of a decode pass."

    place = {"line": lines.index("      tokens: {min: 2}"), "character": 8}
    hover = editor.ask("textDocument/hover", textDocument=document, position=place)
    assert "Tokens of a pass, padding included." in hover["contents"]["value"]
