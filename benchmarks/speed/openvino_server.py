# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""A program for `.venv/peers`: OpenVINO GenAI's pipeline behind what the client asks of OpenAI's API.

`python openvino_server.py --model FILE.gguf --port N --threads N --max-length N --cache-gib N` answers GET
/health and POST /v1/completions: a prompt of token ids, a stream of text that ends at max_tokens.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openvino_genai as genai
from openvino import Tensor


class Engine:
    """Takes steps in a thread while there are requests; tokens go into the queue of their request."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = genai.SchedulerConfig()
        settings.cache_size = args.cache_gib
        settings.enable_prefix_caching = False
        # As many tokens a pass as vLLM takes, so that a prompt is not split.
        settings.max_num_batched_tokens = max(2048, args.max_length)
        properties = {"INFERENCE_NUM_THREADS": args.threads, "ENABLE_CPU_PINNING": True}
        self._pipeline = genai.ContinuousBatchingPipeline(args.model, settings, "CPU", properties)
        self.decode = self._pipeline.get_tokenizer().decode
        self._open: list[tuple[genai.GenerationHandle, queue.SimpleQueue[list[int] | None]]] = []
        self._asked = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._take_steps, daemon=True).start()

    def ask(self, ids: list[int], tokens: int) -> Iterator[list[int]]:
        """Yield the tokens of an answer as they come."""
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        found: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        with self._changed:
            self._asked += 1
            prompt = Tensor(np.array([ids], dtype=np.int64))
            self._open.append((self._pipeline.add_request(self._asked, prompt, config), found))
            self._changed.notify()
        while (part := found.get()) is not None:
            yield part

    def _take_steps(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open)
                asked = list(self._open)
            self._pipeline.step()
            for request in asked:
                handle, found = request
                while handle.can_read():
                    for output in handle.read().values():
                        found.put(list(output.generated_ids))
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    found.put(None)
                    with self._changed:
                        self._open.remove(request)


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        tokens = 0
        for part in self.engine.ask(asked["prompt"], asked["max_tokens"]):
            tokens += len(part)
            self._send(json.dumps({"choices": [{"index": 0, "text": self.engine.decode(part)}]}))
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": tokens}
        self._send(json.dumps({"choices": [], "usage": usage}))
        self._send("[DONE]")

    def _send(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    for number in ("port", "threads", "max-length", "cache-gib"):
        parser.add_argument(f"--{number}", type=int)
    arguments = parser.parse_args()
    Handler.engine = Engine(arguments)
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
