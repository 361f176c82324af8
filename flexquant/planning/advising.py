# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Choose how to serve a model on a device, by the latencies predicted for each way, and say why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import geometric_mean
from textwrap import wrap

from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.weight_bytes import head_remark
from flexquant.documents.results import table_lines
from flexquant.planning.device import GIB, HUMMING, W4A8, W4A8_INT8, Device
from flexquant.planning.planned_model import INT4, ModelShape, PlannedModel
from flexquant.planning.roofline import Batch, Batches, Limits, Load, pass_seconds, scheme_on, serve
from flexquant.policy.routes import RouteTable, build_route_table
from flexquant.policy.rules import Policy, find_policies, load_policy, parse_policy
from flexquant.policy.schema import SCHEMA, Phase

MARGIN = 0.08
"""Share of a request's time that a prediction cannot tell from none, as in the committed runs."""
SCHEMES = ("bf16", "fp8", "w8a8", "w4a16")
FROM_16_BIT, ONE_COPY, INT4_TWICE = "from 16 bit", "one copy", "INT4 twice"
NESTED, TWO_COPIES = "nested", "two copies"
REASONS = {
    NESTED: "INT8 and answers read INT4 weights, which are in memory with INT8's differences from them.",
    FROM_16_BIT: "8 bit, from the 16-bit weights that answers read; nothing is quantised before.",
    INT4_TWICE: "W4A8 and answers in W4A16, of whose INT4 weights memory holds a copy for each.",
    ONE_COPY: "INT8 and answers read INT4 weights, which are in memory once.",
}
WIDTH = 110


@dataclass(frozen=True)
class Way:
    name: str
    schemes: tuple[str, ...]
    policy: Policy
    is_flexquant: bool
    """Whether it takes FlexQuant; stock vLLM serves the others."""


@dataclass(frozen=True)
class Outcome:
    """What one way comes to."""

    way: Way
    weights_gib: float
    """On each device."""
    kv_cache_tokens: int | None
    """None if the way is not possible."""
    loads: Mapping[int, Load]
    """Requests at once -> what they see; empty if the way is not possible."""
    problem: str
    """Why the way is not possible; empty if it is."""
    head: str = ""
    """What an lm_head in INT8 would gain; empty for little."""

    @property
    def seconds(self) -> float:
        """Time of a request, the geometric mean over the loads; infinite if the way is not possible."""
        return geometric_mean(load.request for load in self.loads.values()) if self.loads else inf


def ways(device: Device) -> list[Way]:
    """Return the ways to serve a model, the simplest first.

    Two copies have W8A8 beside W4A16, or FP8 on a device without an INT8 kernel. INT4 twice has W4A8 beside
    W4A16, by FP8 activations or, without a kernel for these, INT8. Nested has W8A8's differences from W4A16
    and needs an INT8 kernel. From 16 bit, prompts compute in 8 bit; a CPU holds a copy in INT8 for them.
    """
    has_int8, has_w4a8 = "w8a8" in device.kernels, W4A8 in device.kernels
    eight, policy = ("w8a8", "phase-batch") if has_int8 else ("fp8", "fp8-phase-batch")
    schemes = [*SCHEMES, W4A8] if has_w4a8 else [*SCHEMES]
    static = find_policies(schemes, schemes).items()
    twice = load_policy("single-copy")
    if has_w4a8:
        derive = {"w4a8": {"from": "w4a16", "activations": "fp8"}}
        twice = parse_policy({**twice.document, "derive": derive}, INT4_TWICE)
    of_16_bit = Way(FROM_16_BIT, ("bf16",), load_policy("prefill-8-bit"), True)
    if not device.is_gpu:
        rules = [*of_16_bit.policy.document["rules"][:-1], {"use": "w8a8"}]
        with_copy = parse_policy({"schema": SCHEMA, "rules": rules}, FROM_16_BIT)
        of_16_bit = Way(FROM_16_BIT, ("bf16", "w8a8"), with_copy, True)
    found = [Way(f"stock {scheme.upper()}", (scheme,), policy, False) for scheme, policy in static]
    found += [of_16_bit, Way(ONE_COPY, ("w4a16",), load_policy("one-copy"), True)]
    if has_w4a8 or W4A8_INT8 in device.kernels:
        found.append(Way(INT4_TWICE, ("w4a16",), twice, True))
    of_two = [NESTED, TWO_COPIES] if has_int8 else [TWO_COPIES]
    return found + [Way(name, (eight, "w4a16"), load_policy(policy), True) for name in of_two]


def try_ways(
    model: PlannedModel, device: Device, batches: Batches, devices: int, utilization: float
) -> list[Outcome]:
    """Return what each of :func:`ways` comes to, in ``utilization`` of the memory; raise as these do."""
    limits = Limits.of(device, devices)

    def routes_of(way: Way) -> RouteTable:
        decoding = limits.sequences
        return build_route_table(way.policy, way.schemes, 1, limits.tokens, max_decode_tokens=decoding)

    def serve_by(way: Way, shape: ModelShape, tokens: int) -> dict[int, Load]:
        routes = routes_of(way)

        def seconds(phase: Phase, batch: Batch) -> float:
            (variant,) = routes.lookup(phase, batch.tokens).layers
            return pass_seconds(shape, variant, batch, device)

        return {count: serve(batches, count, limits, tokens, seconds) for count in batches.concurrency}

    outcomes = []
    for way in ways(device):
        shape = model.shape(way.schemes, devices, way.policy.derived)
        if way.name == NESTED and not model.has_experts:
            shape = shape.with_nested(*way.schemes)
        tokens = kv_cache_tokens(shape, device, utilization, batches.request_tokens)
        weights = shape.resident_bytes / GIB
        problem = _problem(shape, device, model.group_size)
        if way.name == NESTED and model.has_experts:
            problem = "experts are not nested"
        if not problem and tokens < batches.request_tokens:
            problem = f"does not fit into {utilization:g} of {device.memory_bytes / GIB:.3g} GiB"
        loads = {} if problem else serve_by(way, shape, tokens)
        (decodes,) = routes_of(way).lookup("decode", 1).layers
        read = sum(n * x.active_experts * x.weight_bytes for x, n in shape.linears[decodes].items())
        head = head_remark(shape.head.weight_bytes, read)
        outcomes.append(Outcome(way, weights, None if problem else tokens, loads, problem, head))
    return outcomes


def kv_cache_tokens(model: ModelShape, device: Device, utilization: float, request_tokens: int) -> int:
    """Return the KV cache's tokens beside weights and requests' states; below 0 if weights do not fit."""
    left = device.memory_bytes * utilization - model.resident_bytes - device.reserve_bytes
    return int(left // (model.kv_bytes_per_token + model.state_bytes / request_tokens))


def _problem(shape: ModelShape, device: Device, group_size: int) -> str:
    every = [linear for linears in shape.linears.values() for linear in linears]
    lacking = {scheme_on(device, linear, linear.scheme) for linear in every} - device.kernels.keys()
    if "fp8" in lacking:
        return "the device has no FP8 arithmetic"
    if "w8a8" in lacking:
        return "vLLM has no INT8 kernel for the device"
    for linear in every:
        if linear.scheme == W4A8 and (linear.experts > 1 or group_size != 128):
            return "W4A8 is priced without experts, in groups of 128"
        if linear.scheme in INT4 and linear.inputs % group_size:
            return f"groups of {group_size} do not divide the {linear.inputs} inputs of a device"
        if linear.is_from_int4 and device.is_gpu and not linear.fills_marlin:
            return f"{linear.inputs} inputs and {linear.outputs} outputs do not fill Marlin's tiles"
    return ""


def choose(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the simplest way that is as good as the fastest, within the margin; None if none is possible.

    One with FlexQuant is also better, by the margin, than all without.
    """
    stock, ours = (fastest_way(outcomes, is_flexquant=which).seconds for which in (False, True))
    most = min(stock, ours) / (1 - MARGIN)
    if most == inf:
        return None
    is_flexquant = stock > most
    if is_flexquant:
        most = min(most, stock * (1 - MARGIN))
    return next(o for o in outcomes if o.way.is_flexquant == is_flexquant and o.seconds <= most)


def fastest_way(outcomes: Sequence[Outcome], *, is_flexquant: bool) -> Outcome:
    """Return the fastest of the ways with FlexQuant, or of those without; it may not be possible."""
    return min((o for o in outcomes if o.way.is_flexquant == is_flexquant), key=lambda o: o.seconds)


def find_way(outcomes: Sequence[Outcome], name: str) -> Outcome:
    return next(outcome for outcome in outcomes if outcome.way.name == name)


def advice_to_json(outcomes: Sequence[Outcome]) -> JsonObject:
    """Return the outcomes by way, and the choice, as JSON-able data."""
    choice = choose(outcomes)
    return {
        "ways": {
            outcome.way.name: {
                "weights_gib": outcome.weights_gib,
                "kv_cache_tokens": outcome.kv_cache_tokens,
                "loads": {count: asdict(load) for count, load in outcome.loads.items()},
                "problem": outcome.problem,
            }
            for outcome in outcomes
        },
        "choice": choice and choice.way.name,
        "helps": choice is not None and choice.way.is_flexquant,
    }


def format_advice(outcomes: Sequence[Outcome], model: PlannedModel, device: Device, batches: Batches) -> str:
    """Return the advice as text for a terminal."""
    notes = [f"note: {note}" for note in _notes(outcomes, model, device, batches)]
    lines = [
        f"requests of {batches.input_tokens} + {batches.output_tokens} tokens, so many at once; times in ms:",
        *_table(outcomes, batches),
        "",
        *(line for text in (explain(outcomes), *notes) for line in wrap(text, WIDTH, break_on_hyphens=False)),
    ]
    return "\n".join(lines)


def explain(outcomes: Sequence[Outcome]) -> str:
    """Return the choice and why, in a sentence or two."""
    choice = choose(outcomes)
    if choice is None:
        advice = "take a larger device, a larger --tensor-parallel-size or shorter requests"
        return f"None of these can serve the model on this device: {advice}."
    ours, stock = (fastest_way(outcomes, is_flexquant=which) for which in (True, False))
    if not stock.loads:
        return f"Take {choice.way.name}: nothing without FlexQuant serves the model on this device."
    if choice.way.is_flexquant:
        less = f"{1 - choice.seconds / stock.seconds:.0%} less time (geometric mean over the columns)"
        than = f"{stock.way.name}, the best without FlexQuant"
        why = f"as prompts compute in {_reason(choice, find_way(outcomes, TWO_COPIES))}"
        return f"Take {choice.way.name}: a request takes {less} than with {than}, {why}"
    start = f"FlexQuant will not help you here: take {choice.way.name}"
    if not ours.loads:
        return f"{start}, as neither one copy nor two can be served on this device."
    saving = 1 - ours.seconds / choice.seconds
    if saving <= 0:
        return f"{start}, as a request takes {-saving:.1%} more time with {ours.way.name}."
    saved = f"{ours.way.name} would save {saving:.1%} of a request's time"
    return f"{start}, as {saved}, and a prediction cannot tell less than {MARGIN:.0%} from nothing."


def _reason(choice: Outcome, two: Outcome) -> str:
    """Return what makes it faster, and what two copies would give beyond one, and for what memory."""
    if choice is two:
        eight = "FP8" if "fp8" in choice.way.schemes else "INT8"
        return f"{eight} and answers read INT4 weights, both of which are in memory."
    reason = REASONS[choice.way.name]
    if choice.way.name == ONE_COPY and two.loads:
        gain, memory = 1 - two.seconds / choice.seconds, two.weights_gib - choice.weights_gib
        reason += f" Two copies would save {max(gain, 0):.1%} more, for {memory:.1f} GiB more of weights."
    return reason


def _table(outcomes: Sequence[Outcome], batches: Batches) -> list[str]:
    rows = [["", "weights", "KV cache"], ["", "GiB", "tokens"]]
    for count in batches.concurrency:
        rows[0] += [str(count), ""]
        rows[1] += ["TTFT", "TPOT"]
    for outcome in outcomes:
        row = [outcome.way.name, f"{outcome.weights_gib:.3g}"]
        if outcome.kv_cache_tokens is not None:
            row.append(str(outcome.kv_cache_tokens))
        times = [1e3 * time for load in outcome.loads.values() for time in (load.ttft, load.tpot)]
        row += [f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in times]
        rows.append(row)
    lines = table_lines(rows, numbers=range(1, len(rows[0])))
    problems = ["", "", *(outcome.problem for outcome in outcomes)]
    return [f"{line}  {problem}".rstrip() for line, problem in zip(lines, problems, strict=True)]


def _notes(found: Sequence[Outcome], model: PlannedModel, device: Device, batches: Batches) -> Iterator[str]:
    choice, one = choose(found), find_way(found, ONE_COPY)
    yield "this is predicted; 'flexquant tune' measures. Quality is not compared; 'flexquant eval' does that"
    if choice is not None and choice.kv_cache_tokens is not None:
        fit = choice.kv_cache_tokens // batches.request_tokens
        if fit < max(batches.concurrency):
            held = f"the KV cache of {choice.way.name} holds {fit} requests at once, and further ones wait"
            yield f"{held}; a larger --tensor-parallel-size or device would hold more"
    if choice is not None and choice.head:
        yield f"with {choice.way.name}, {choice.head}; the times above have it in 16 bit"
    if HUMMING in device.kernels:
        what = "W4A16 has the time of its fastest kernel, mostly Humming, which vLLM takes if asked to"
        yield f"{what} (--linear-backend humming); one copy has that of Marlin or Humming"
    if any(outcome.way.name == INT4_TWICE for outcome in found):
        which = "FP8 activations, by CUTLASS" if W4A8 in device.kernels else "INT8 activations, by Humming"
        yield f"W4A8 has {which}; {INT4_TWICE} holds a second copy of W4A16's INT4 weights for it"
    if one.loads and device.is_gpu:
        what = "one copy has been measured on one GPU alone, an H200, nested and from 16 bit on none"
        yield f"{what}: their times are the least certain"
    if one.loads and model.has_experts:
        yield "one copy leaves experts in INT4 for prompts too"
    if device.is_gpu and "w8a8" not in device.kernels:
        yield "NVFP4, if the device has it, is not compared"
    if not device.is_gpu:
        yield "on CPUs W8A8 and W4A16 are timed with the kernels that FlexQuant chooses"
    if model.has_towers:
        yield "what reads images or sound is not counted"
