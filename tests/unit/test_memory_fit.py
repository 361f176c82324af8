# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""How many layers get W8A8 of their own in a given memory, which, and what the table says of the choices."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flexquant.doctor.examining import LoadedBytes
from flexquant.errors import FlexQuantError, UsageError
from flexquant.layers.memory_fit import Fit, PlanLosses
from flexquant.layers.sensitivity import SCHEMA
from flexquant.policy.pass_times import PassTimes, Time
from flexquant.policy.plans import all_in, describe_layers, with_layer
from flexquant.policy.rules import Policy, find_policies
from flexquant.tuning.candidates import FROM_INT4
from flexquant.tuning.objectives import Decision, Range
from flexquant.tuning.policy_file import TuningResult

LAYERS = 4
MIB = 1 << 20
ONE_COPY = 10 + 4 * 4 + 3
"""MiB of the shared weights, of the INT4 weights, and to compute INT8 weights in."""
MIXABLE = [("w8a8", "w4a16")]
HEAD = "layers twice (of 4) bits/weight memory KV tokens TTFT 64 TPOT 64"
FILES = {"model.safetensors": 1}


def loaded(layers: int = LAYERS, **others: int) -> LoadedBytes:
    """Return made-up bytes: 8 MiB a layer of W8A8 and 4 of W4A16; ``others`` are variants with theirs."""
    a_layer = {"w8a8": 8, "w4a16": 4, **others}
    by_layer: dict[str, dict[int | None, int]] = {
        variant: dict.fromkeys(range(layers), size * MIB) for variant, size in a_layer.items()
    }
    rest: dict[str, dict[int | None, int]] = {FROM_INT4: {}, "shared": {None: 10 * MIB}}
    written, sources = {FROM_INT4: 3 * MIB}, {FROM_INT4: "w4a16"}
    sizes = by_layer | rest, written, sources, LAYERS * 8 * MIB
    return LoadedBytes(*sizes, lambda size: 100 - size // MIB, int)


def variants(*names: str) -> dict[str, Policy]:
    return find_policies(names or ("w8a8", "w4a16", FROM_INT4), ["bf16", "w8a8", "w4a16"])


def fit(
    mib, losses=None, names=(), held=None, high="w8a8", mixable=MIXABLE, layers=LAYERS, is_nested=False
) -> Fit:
    """Return what fits into so many MiB, by default of W8A8 and W4A16; ``held`` are the bytes of each."""
    held, how = held or loaded(layers), {"high": high, "is_nested": is_nested, "mixable": mixable}
    return Fit(variants(*names), int(mib * MIB), held, layers, losses, **how)


def plan_of(found: Fit, *others: str) -> list[str]:
    """Return the candidates that are no variant, but for ``others``."""
    return [name for name in found.candidates if name not in {*variants(), *others}]


def test_tokens_of_the_cache_leave_a_memory():
    """The made-up cache has 100 tokens, and one less for each MiB of weights."""
    assert loaded().most_beside(40) == 61 * MIB - 1
    assert loaded().most_beside(0) == (4 * 8 + 4 * 4 + 3 + 10) * MIB, "all weights"
    with pytest.raises(FlexQuantError, match="a KV cache of 100 tokens without any weights, and 101 are"):
        loaded().most_beside(101)


@pytest.mark.parametrize(
    ("mib", "plan"),
    [(ONE_COPY, []), (ONE_COPY + 7.9, []), (ONE_COPY + 8, [f"{FROM_INT4}+w8a8[0]"])]
    + [(ONE_COPY + 3 * 8, [f"w8a8+{FROM_INT4}[3]"]), (ONE_COPY + 4 * 8 - 3, [])],
)
def test_as_many_layers_as_fit_have_their_own(mib, plan):
    """With two whole copies there is nothing to compute, and so no memory for that."""
    found, apart = fit(mib), fit(mib, mixable=[("w8a8",), ("w4a16",)])
    assert plan_of(found) == plan
    whole = mib == ONE_COPY + 4 * 8 - 3
    assert (["w8a8", "w4a16"] in found.together) == whole
    assert all({"w8a8", "w4a16"} - set(names) or whole for names in found.together)
    assert "from the first: no --sensitivity" in found.remark
    # Layers that no plan can mix are all twice or none.
    assert plan_of(apart) == [] and (["w8a8", "w4a16"] in apart.together) == whole
    assert whole or "cannot mix" in apart.remark


def test_what_is_computed_takes_the_weights_that_it_is_computed_from():
    computed, int4 = (all_in(variant, LAYERS) for variant in (FROM_INT4, "w4a16"))
    assert loaded().of([computed]) == loaded().of([computed, int4]) == ONE_COPY * MIB
    assert loaded().bits([computed]) == loaded().bits([int4]) == 4


def test_less_than_one_copy_is_refused_with_what_it_takes_rounded_up_to_whole_mib():
    with pytest.raises(FlexQuantError, match=r"^one copy takes 29.0 MiB a rank, more than the 28.0 MiB") as e:
        fit(ONE_COPY - 1)
    parts = "26.0 MiB of weights, and 3.0 MiB to compute INT8 weights in; give --memory 29MiB or more"
    assert parts in str(e.value) and "w4a16 alone fits: serve by that policy" in str(e.value)
    with pytest.raises(FlexQuantError, match="give --memory 29MiB or more, or fewer --kv-tokens$"):
        fit(1)
    more = replace(loaded(), written={FROM_INT4: 3 * MIB + 1})
    with pytest.raises(FlexQuantError, match="give --memory 30MiB or more") as e:
        fit(ONE_COPY, held=more)
    assert "and 3.0 MiB to compute" in str(e.value) and fit(ONE_COPY + 1 / MIB, held=more).together


def test_a_checkpoint_of_one_variant_has_one_copy():
    one = partial(fit, names=("w4a16", FROM_INT4), high=None, mixable=[("w4a16",)])
    found = one(100)
    assert "One copy is all that is possible" in found.remark
    assert found.together == [["w4a16", FROM_INT4], ["w4a16"]]
    with pytest.raises(FlexQuantError, match="one copy takes"):
        one(1)


def test_layers_have_8_bit_of_their_own_beside_a_variant_in_16():
    """The 16-bit variant is more precise, and no layer of it is mixed with INT8 from INT4."""
    names, mixable = ("bf16", "w8a8", "w4a16", FROM_INT4), [("bf16",), ("w8a8", "w4a16")]
    found = fit(ONE_COPY + 16, names=names, held=loaded(bf16=16), mixable=mixable)
    assert plan_of(found, "bf16") == [f"w8a8+{FROM_INT4}[2-3]"]
    assert found.remark.startswith("2 of 4 layers (0-1) fit with w8a8 of their own")
    assert {"bf16, w4a16", "bf16 alone"} <= {choice.name for choice in found.choices}


def sensitivity(folder: Path, lower: str = "w4a16", **changed: Any) -> Path:
    """Write a file by which layer 2 loses most, then 0."""
    high = all_in("w8a8", LAYERS)
    kl = {describe_layers(high): [0.1, 0.1], describe_layers(all_in(lower, LAYERS)): [1.0, 1.2]}
    for layer, cost in enumerate((0.3, 0.1, 0.5, 0.2)):
        kl[describe_layers(with_layer(high, layer, lower))] = [0.1 + cost, 0.1 + cost]
    document = {"schema": SCHEMA, "layers": LAYERS, "files": FILES, "variants": ["w8a8", lower], "kl": kl}
    file = folder / "sensitivity.json"
    file.write_text(json.dumps(document | changed))
    return file


def losses(file: Path) -> PlanLosses:
    return PlanLosses(file, "w8a8", (FROM_INT4, "w4a16"), LAYERS, FILES)


@pytest.mark.parametrize("lower", ["w4a16", FROM_INT4])
def test_the_layers_that_lose_most_come_first(lower, tmp_path):
    found = fit(ONE_COPY + 16, losses(sensitivity(tmp_path, lower)))
    (name,) = plan_of(found)
    assert name == f"w8a8+{FROM_INT4}[1,3]"
    assert "2 of 4 layers (0,2) fit" in found.remark and "sensitivity.json" in found.remark


def test_what_a_plan_loses_is_measured_or_the_sum_of_its_layers(tmp_path):
    found = losses(sensitivity(tmp_path))
    assert found.describe(all_in(FROM_INT4, LAYERS)) == found.describe(all_in("w4a16", LAYERS)) == "1.1"
    assert found.describe(all_in("w8a8", LAYERS)) == "0.1"
    assert found.describe(("w8a8", FROM_INT4, "w8a8", FROM_INT4)) == "~0.4"
    assert found.describe(all_in("w4a8", LAYERS)) == "-"
    assert f"w4a16 in place of {FROM_INT4}" in found.note


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {"other.safetensors": 1}}, "is of another checkpoint"),
        ({"layers": 5}, "is of another checkpoint"),
        ({"schema": "flexquant.sensitivity/v1"}, "by another release"),
        ({"variants": ["fp8", "w4a16"]}, "compares fp8, w4a16, and here w8a8 comes first"),
        ({"variants": ["w8a8", "w4a8"]}, f"then {FROM_INT4} or w4a16"),
        ({"kl": {"w8a8 0-3": [0.1]}}, "lacks 4 plans, such as w4a16 0, w8a8 1-3"),
        ({"kl": {"w8a8 0-3": ["much"]}}, "cannot be read"),
        ({"variants": 3}, "cannot be read"),
    ],
)
def test_a_file_that_says_nothing_of_these_layers_is_refused(changed, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        losses(sensitivity(tmp_path, **changed))


def tuned(found: Fit, prefill: str, decode: str = "w4a16") -> TuningResult:
    """Return a result by which W8A8 takes 8 ms, INT8 from INT4 12, W4A16 20, and a plan of several 9."""
    ms = {"w8a8": 8, "w4a16": 20, FROM_INT4: 12, "w4a8": 5}
    of_decode, of_prefill = (
        {
            name: {n: Time(*[t * ms.get(name, 9) / 1e3] * 3) for n, t in sizes.items()}
            for name in found.candidates
        }
        for sizes in ({64: 1, 256: 3}, {16: 0.3, 64: 1})
    )
    decision = Decision({"decode": (Range(None, decode, None),), "prefill": (Range(None, prefill, None),)})
    times = PassTimes.model_construct(decode=of_decode, prefill=of_prefill, context=16, origin={})
    return TuningResult({}, decision, times, [])


def rows(found: Fit, prefill: str) -> dict[str, list[str]]:
    """Return the table's cells, by choice and number of layers."""
    _, _, head, *lines = found.report(tuned(found, prefill)).notes
    assert " ".join(head.split()) == HEAD
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    return {f"{row[0]}, {row[1].strip()}": [cell.strip() for cell in row[2:]] for row in cells}


def test_the_table_tells_measured_times_from_interpolated_ones():
    found = fit(ONE_COPY + 16)
    (plan,) = plan_of(found)
    assert rows(found, plan) == {
        "two copies: w8a8, w4a16, 4": ["12.00", "58.0 MiB", "42", "8", "8", "does not fit"],
        "one copy, and w8a8 in some, 3": ["10.00", "53.0 MiB", "47", "~9", "~9", "does not fit"],
        "one copy, and w8a8 in some, 2": ["8.00", "45.0 MiB", "55", "9", "9", "chosen"],
        "one copy, and w8a8 in some, 1": ["6.00", "37.0 MiB", "63", "~11", "~11"],
        "one copy, 0": ["4.00", "29.0 MiB", "71", "12", "12"],
        "w8a8 alone, 0": ["8.00", "42.0 MiB", "58", "8", "8"],
        "w4a16 alone, 0": ["4.00", "26.0 MiB", "74", "20", "20"],
    }
    _, _, head, first, *_, last = found.report(tuned(found, plan)).notes
    assert head.endswith("  KV tokens  TTFT 64  TPOT 64"), "numbers end below each other, and names begin so"
    assert first.endswith("         42        8        8  does not fit") and first.startswith("two copies: ")
    assert last.endswith("         74       20       20")


def test_the_table_has_steps_of_a_quarter_of_the_layers_rounded_down_and_calls_a_nested_variant_so():
    assert [choice.twice for choice in fit(10 + 6 * 4 + 3, layers=6).choices] == [6, 4, 3, 1, 0, 0, 0]
    names = [choice.name for choice in fit(100, is_nested=True).choices]
    assert names[:2] == ["nested: w8a8, w4a16", "one copy, and nested w8a8 in some"]


def test_what_is_chosen_is_what_the_policy_loads_also_of_other_variants():
    other = fit(42, names=("w8a8", "w4a16", FROM_INT4, "w4a8"), held=loaded(w4a8=4))
    assert ["w4a16", "w4a8"] in other.together
    for found, prefill, row in (
        (fit(ONE_COPY + 16), FROM_INT4, "one copy, 0"),
        (fit(100), "w8a8", "two copies: w8a8, w4a16, 4"),
        (other, "w4a8", "w4a8, w4a16, 0"),
    ):
        assert rows(found, prefill)[row][-1] == "chosen"
