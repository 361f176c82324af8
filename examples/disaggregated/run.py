# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Prefill and decode in two servers of one merged checkpoint, on the CPUs of one machine.

    python examples/disaggregated/run.py MERGED [--connector NixlConnector]

The prefill server loads W8A8 alone; the decode server what its policy needs. One of vLLM's connectors takes
the KV cache from one to the other. Then one server alone answers the same prompts by the same routes, and the
tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from flexquant.evaluation.engine import describe_command, describe_machine, describe_versions

sys.path.insert(0, str(Path(__file__).parents[1]))
from vllm_server import ProcessGroup, VLLMServer, default_environment, free_port  # noqa: E402

HERE = Path(__file__).parent
BLOCK = 32
"""Tokens in a block of the KV cache; the same on both sides."""
ONE_SERVER = {"phase-batch": "phase-batch", "w4a16": str(HERE / "prompts-in-w8a8.yaml")}
"""Policy of the decode server -> the policy by which one server alone takes the same routes."""
PROMPT_TOKENS = {"ExampleConnector": 2 * BLOCK + 8, "NixlConnector": 2 * BLOCK + 1}
"""Connector -> a length of prompts, of which the decode server fetches two blocks and computes the rest.

With ExampleConnector it computes 2 to 33 tokens, since blocks are fetched whole; with NIXL one token.
"""
ARGUMENTS = ("--enforce-eager", "--max-model-len", "1024", "--block-size", str(BLOCK))
PROMPTS = (
    "A letter arrived this morning from the keeper of the lighthouse at the end of the northern coast. He "
    "wrote that the winter storms had broken two windows, that the stairs are wet from the roof to the door, "
    "and that the lamp needs new glass before the next season, since ships come closer in the fog than they "
    "should. The town council has met twice, and this is the answer that it sends him:",
    "The recipe of my grandmother begins with four large apples, a spoon of cinnamon, two cups of flour and "
    "a little salt. First the butter is rubbed into the flour until it looks like fine sand. Then the apples "
    "are peeled and cut into slices, which are laid in circles from the rim to the middle. While the oven "
    "gets hot, the sugar is melted in a pan until it is brown, and after that one has to",
    "Rivers carry sand and stones from the mountains to the sea. Where the water slows down, it can no "
    "longer hold what it carries, and lets it fall. So over thousands of years every large river builds new "
    "land at its mouth, which people call a delta. Its arms divide again and again, and the sea takes back "
    "in a storm what the river brought in a year. The best known examples of such land are",
)
"""Prompts, each of more tokens than are taken of it, by any tokenizer that people use."""
TOKENS = 32
PROXY_SECONDS = 60


class Servers(NamedTuple):
    """The servers' URLs without ``/v1``."""

    proxy: str
    prefill: str
    decode: str


@contextmanager
def disaggregated(model: Path, decode_policy: str, connector: str, folder: Path) -> Iterator[Servers]:
    """Serve ``model`` in two servers behind the proxy; logs and the KV cache's files go to ``folder``."""
    kv_folder = folder / "kv"
    kv_folder.mkdir()
    # ExampleConnector counts on what it saved itself, so no other cache of prompts may stand beside it.
    arguments = [*ARGUMENTS, "--no-enable-prefix-caching", "--kv-transfer-config"]
    halves = halves_of_the_cores()
    with ExitStack() as stack:
        urls = []
        for role, policy, cores in (("prefill", "w8a8", halves[0]), ("decode", decode_policy, halves[1])):
            kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
            transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": kv_role}
            if connector == "ExampleConnector":
                transfer["kv_connector_extra_config"] = {"shared_storage_path": str(kv_folder)}
            urls.append(serve(stack, model, policy, cores, folder / role, [*arguments, json.dumps(transfer)]))
        port = free_port()
        command = [sys.executable, str(HERE / "proxy.py"), "--port", str(port)]
        command += ["--prefill", urls[0], "--decode", urls[1]]
        proxy = ProcessGroup(command, folder / "proxy", dict(os.environ))
        stack.callback(proxy.stop)
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url)
        yield Servers(url, *urls)


def serve(stack: ExitStack, model: Path, policy: str, cores: str, log: Path, arguments: Sequence[str]) -> str:
    options = json.dumps({"flexquant": {"policy": policy}})
    environment = default_environment() | {"VLLM_PLUGINS": "flexquant", "VLLM_CPU_OMP_THREADS_BIND": cores}
    environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    command = [*arguments, "--served-model-name", "merged", "--additional-config", options]
    server = VLLMServer(model, command, log, environment)
    stack.callback(server.stop)
    server.wait_until_healthy()
    return server.url


def wait_until_healthy(url: str) -> None:
    ends = time.monotonic() + PROXY_SECONDS
    while True:
        try:
            read(f"{url}/health")
            return
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.25)


def halves_of_the_cores() -> tuple[str, str]:
    """Return this process's cores in two halves, in the form that vLLM binds its threads by."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    return ",".join(map(str, cores[:half])), ",".join(map(str, cores[half:] or cores))


def read(url: str, body: dict[str, Any] | None = None) -> str:
    """Return what a server answers, to a POST of ``body`` if there is one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(reply.read(), "utf-8")


def tokenize(url: str, text: str) -> list[int]:
    tokens: list[int] = json.loads(read(f"{url}/tokenize", {"model": "merged", "prompt": text}))["tokens"]
    return tokens


def answer(url: str, prompt: list[int], tokens: int = TOKENS) -> tuple[list[int], str]:
    """Return the tokens of the greedy answer, and its text."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    completion = client.completions.create(
        model="merged",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = completion.choices[0]
    return choice.model_extra["token_ids"], choice.text


def weights_in_mib(url: str) -> dict[str, float]:
    """Return the weights that a server holds, by variant."""
    held = json.loads(read(f"{url}/flexquant"))["weight_bytes"]
    return {name: round(number / 2**20, 1) for name, number in held.items()}


def fetched_tokens(url: str) -> int:
    """Return how many tokens of prompts a server took from the connector."""
    families = text_string_to_metric_families(read(f"{url}/metrics"))
    (fetched,) = [f for f in families if f.name == "vllm:external_prefix_cache_hits"]
    return int(sum(sample.value for sample in fetched.samples if sample.name.endswith("_total")))


def run(model: Path, decode_policy: str, connector: str, folder: Path) -> dict[str, Any]:
    """Answer the prompts in both ways; return the answers, and what each server held and fetched."""
    with disaggregated(model, decode_policy, connector, folder) as servers:
        prompts = [tokenize(servers.decode, text)[: PROMPT_TOKENS[connector]] for text in PROMPTS]
        apart = [answer(servers.proxy, prompt) for prompt in prompts]
        fetched = fetched_tokens(servers.decode)
        memory = {"prefill": weights_in_mib(servers.prefill), "decode": weights_in_mib(servers.decode)}
    with ExitStack() as stack:
        policy, cores = ONE_SERVER[decode_policy], halves_of_the_cores()[0]
        arguments = [*ARGUMENTS, "--enable-prefix-caching"]
        url = serve(stack, model, policy, cores, folder / "one", arguments)
        # Asked first as the prefill server is; what then fills whole blocks is not computed again.
        for prompt in prompts:
            answer(url, prompt, tokens=1)
        alone = [answer(url, prompt) for prompt in prompts]
        memory["one server"] = weights_in_mib(url)
    return {
        "decode_policy": decode_policy,
        "connector": connector,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "equal_answers": sum(a[0] == b[0] for a, b in zip(apart, alone, strict=True)),
        "tokens_of_answers": [len(tokens) for tokens, _ in apart],
        "texts": [text for _, text in apart],
        "prompt_tokens_fetched": fetched,
        "weights_mib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="merged checkpoint with w8a8 and w4a16")
    parser.add_argument(
        "--decode-policy",
        choices=ONE_SERVER,
        default="phase-batch",
        help="policy of the decode server (%(default)s)",
    )
    parser.add_argument(
        "--connector", choices=PROMPT_TOKENS, default="ExampleConnector", help="vLLM's (%(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write what came of it to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disaggregated-") as folder:
        result = run(args.model, args.decode_policy, args.connector, Path(folder))
    for prompt, text in zip(PROMPTS, result["texts"], strict=True):
        print(f"{prompt[:40]} ...\n   {text.strip()!r}")
    prompts = result["prompt_tokens"]
    print(f"the decode server fetched {result['prompt_tokens_fetched']} of {sum(prompts)} tokens of prompts")
    print(f"{result['equal_answers']} of {len(prompts)} answers have the same tokens as one server's")
    for server, weights in result["weights_mib"].items():
        parts = " + ".join(f"{variant} {mib}" for variant, mib in weights.items())
        print(f"weights of {server}: {parts} = {sum(weights.values()):.1f} MiB")
    if args.output:
        found = {
            "argv": ["python", "examples/disaggregated/run.py", *describe_command()[1:]],
            "machine": describe_machine(),
            "versions": describe_versions(),
        }
        args.output.write_text(json.dumps(found | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
