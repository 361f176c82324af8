# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Run one process for each variant, with an engine that serves the merged checkpoint in that variant alone.

Each engine compiles, captures graphs and chooses kernels as `vllm serve` does with a policy of one variant.
All engines are alive at once, so that they can be measured in turn under the same conditions.

Passes are timed in the process that requests them. The engine core runs in one of its own, as under
`vllm serve`, so the times include scheduling, sampling and sending tokens between the processes. Requests and
answers are token ids, so the times exclude tokenisation and HTTP.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flexquant.checkpoint.model_config import JsonObject
from flexquant.documents.yaml_document import to_yaml
from flexquant.errors import FlexQuantError, said_by
from flexquant.evaluation.engine import engine, prepare_environment
from flexquant.policy.rules import Policy

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

START_TIMEOUT = 1800
"""Largest number of seconds for an engine's start; compiling and capturing a large model takes minutes."""
CALL_TIMEOUT = 600
"""Largest number of seconds for one measurement."""
END_TIMEOUT = 30
"""Seconds that a process gets to end by itself after its connection is closed."""
LOG_LINES = 15
"""Lines from the end of an engine's log in the message of its failure."""
FULL = 1 << 20
"""Free bytes for temporary files below which a failure is blamed on a full disk."""

MIN_STEPS, MAX_STEPS = 3, 50
"""Least and most passes in one measurement."""

_processes = multiprocessing.get_context("forkserver")


def import_ahead() -> None:
    """Start to import vLLM in the background, once for all workers; it is a large part of their start."""
    callers = dict(os.environ)
    try:
        prepare_environment()
        # Python's tracker removes the shared memory that vLLM leaves, and would warn of each piece.
        os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
        _processes.set_forkserver_preload(["vllm.entrypoints.llm"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(callers)


class Worker:
    """The parent's handle of a process with an engine and a PassRunner."""

    def __init__(self, name: str, folder: Path, policy: Policy, options: JsonObject, logs: Path) -> None:
        self.name = name
        self.kernels: list[str] = []
        """Names of the kernels that run the engine's linear layers; known once it is ready."""
        self._log = logs / f"{name}.log"
        policy_file = logs / f"{name}.yaml"
        policy_file.write_text(to_yaml(policy.document), encoding="utf-8")
        options = {**options, "flexquant": {"policy": str(policy_file)}}
        self._connection, other = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(other, str(self._log), str(folder), options))
        self._process.start()
        other.close()

    def wait_until_ready(self) -> None:
        """Wait for the engine; raise FlexQuantError, with the end of the log, if it does not start."""
        self.kernels = self._receive(START_TIMEOUT)

    def call(self, method: str, *arguments: float) -> float:
        """Call a method of PassRunner; raise FlexQuantError if it fails or takes CALL_TIMEOUT seconds."""
        try:
            self._connection.send((method, arguments))
        except OSError as e:
            raise self._failure("has ended") from e
        return self._receive(CALL_TIMEOUT)

    def close(self) -> None:
        """Close the connection, which makes the process end; :meth:`join` waits for it."""
        self._connection.close()

    def join(self) -> None:
        """Wait END_TIMEOUT seconds for the process to end, then kill it and its children."""
        self._process.join(END_TIMEOUT)
        if self._process.is_alive() and self._process.pid is not None:
            # The group is missing if the process ends just now, or hangs before it has made one.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()

    def _receive(self, timeout: float) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise self._failure(f"did not answer within {timeout:.0f} s")
            succeeded, value = self._connection.recv()
        except (EOFError, OSError) as e:
            raise self._failure("has ended") from e
        if not succeeded:
            raise self._failure(value)
        return value

    def _failure(self, problem: str) -> FlexQuantError:
        folder = self._log.parent.parent
        if shutil.disk_usage(folder).free < FULL:
            problem += f"; the disk of {folder} is full: free some space, or set TMPDIR to a folder elsewhere"
        log = self._log.read_text(encoding="utf-8", errors="replace") if self._log.is_file() else ""
        end = "\n".join(log.splitlines()[-LOG_LINES:])
        return FlexQuantError(f"the engine of '{self.name}' {problem}; its log ends:\n{end}")


@contextmanager
def start_workers(
    policies: Mapping[str, Policy], folder: Path, options: Callable[[str], JsonObject]
) -> Iterator[dict[str, Worker]]:
    """Start an engine for each policy, with ``options`` by name; yield the workers, and stop them on leaving.

    On a GPU they start one by one, as each checks the memory left. Raises FlexQuantError if one fails.
    """
    import_ahead()
    from vllm.platforms import current_platform

    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="flexquant-tune-") as logs:
        try:
            for name, policy in policies.items():
                workers[name] = Worker(name, folder, policy, options(name), Path(logs))
                if not current_platform.is_cpu():
                    workers[name].wait_until_ready()
            if current_platform.is_cpu():
                for worker in workers.values():
                    worker.wait_until_ready()
            yield workers
        finally:
            for end in (Worker.close, Worker.join):
                for worker in workers.values():
                    end(worker)


def _serve(connection: Connection, log: str, folder: str, options: JsonObject) -> None:
    """Run the worker's process: start the engine, and answer calls until the parent closes the connection."""
    os.setpgrp()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        with engine(folder, **options) as llm:
            timer = PassRunner(llm)
            timer.prefill(1, seconds=0)
            (status, *_) = llm.collective_rpc("flexquant_status")
            connection.send((True, sorted({name for names in status["kernels"].values() for name in names})))
            while True:
                try:
                    method, arguments = connection.recv()
                except EOFError:
                    return
                connection.send((True, getattr(timer, method)(*arguments)))
    except Exception as e:
        traceback.print_exc()
        try:
            connection.send((False, f"failed ({type(e).__name__}: {said_by(e)})"))
        except OSError:
            return


class PassRunner:
    """Has an engine run passes of one kind, and leaves it idle."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._vocabulary = llm.model_config.get_vocab_size()
        self._random = random.Random(0)
        self._count = 0

    def prefill(self, tokens: int, seconds: float) -> float:
        """Return the median seconds of prefilling ``tokens``, for ``seconds``, at most MAX_STEPS times."""
        times: list[float] = []
        while not times or (sum(times) < seconds and len(times) < MAX_STEPS):
            prompt = self._prompt(tokens)
            start = time.perf_counter()
            self._add(prompt, answer=1)
            while self._engine.has_unfinished_requests():
                self._engine.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def decode(self, sequences: int, context: int, seconds: float) -> float:
        """Return the mean time, in seconds, of successive passes that decode ``sequences`` sequences.

        Each sequence has a prompt of ``context`` tokens. Passes are counted for ``seconds``, at least
        MIN_STEPS and at most MAX_STEPS, from the second pass in which all sequences decode.
        """
        self._check_room(sequences, context)
        requests = [self._add(self._prompt(context)) for _ in range(sequences)]
        waiting = set(requests)
        while waiting:
            waiting -= {output.request_id for output in self._step() if output.outputs[0].token_ids}
        self._step()
        start = time.perf_counter()
        steps = 0
        while steps < MIN_STEPS or (time.perf_counter() - start < seconds and steps < MAX_STEPS):
            self._step()
            steps += 1
        elapsed = time.perf_counter() - start
        self._engine.abort_request(requests)
        self._engine.reset_prefix_cache()  # returns once the running pass has ended
        return elapsed / steps

    def _check_room(self, sequences: int, context: int) -> None:
        """Raise FlexQuantError if the KV cache has too few blocks: some sequences would wait for others."""
        cache = self._engine.vllm_config.cache_config
        needed = sequences * -(-(context + MIN_STEPS) // cache.block_size)
        if cache.num_gpu_blocks is not None and needed >= cache.num_gpu_blocks:  # one block is never used
            problem = f"{sequences} sequences of {context} tokens need {needed} blocks of the KV cache"
            advice = "lower --max-batch, or set VLLM_CPU_KVCACHE_SPACE on a CPU"
            raise FlexQuantError(f"{problem}, which has {cache.num_gpu_blocks - 1}; {advice}")

    def _step(self) -> list[RequestOutput]:
        """Run the engine until a pass yields outputs, and return them."""
        while not (outputs := self._engine.step()):
            continue
        return cast("list[RequestOutput]", outputs)

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._vocabulary), k=tokens)

    def _add(self, prompt: list[int], answer: int | None = None) -> str:
        """Queue a prompt for an answer of ``answer`` tokens (None: until it is aborted); return its id."""
        from vllm import SamplingParams

        self._count += 1
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)
