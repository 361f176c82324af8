# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""List policies, check one, show which plan each forward pass takes, and change a live server's policy.

flexquant policy list
flexquant policy validate my-policy.yaml
flexquant policy show phase-batch
flexquant policy show my-policy.yaml --model merged/ --max-tokens 8192
flexquant policy show --model merged/        # the policy that serving merged/ takes by default
flexquant policy apply http://127.0.0.1:8000 my-policy.yaml
flexquant policy schema > policy.schema.json   # for editors: they complete and check policies with it
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexquant.checkpoint.merged_config import read_merged_config
from flexquant.checkpoint.model_config import JsonObject
from flexquant.cli._arguments import add_json, parse_count
from flexquant.documents.results import table_lines
from flexquant.policy.pass_times import device_name, format_times
from flexquant.policy.routes import build_route_table, match_rules
from flexquant.policy.rules import DEFAULT_POLICY, builtin_policies, choose_policy, load_policy
from flexquant.policy.schema import PHASES, json_schema
from flexquant.serving.frontend.client import ADMIN_KEY, apply_policy

Rows = Sequence[tuple[int, int, str]]
"""First and last number of tokens of passes, and their plan."""


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    json_too = argparse.ArgumentParser(add_help=False)
    add_json(json_too, default=argparse.SUPPRESS)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=text, description=text, parents=[json_too])

    add("list", "list the built-in policies")
    add("schema", "print the JSON Schema of policies, for editors")
    show = add("show", "show which plan serving takes for each forward pass")
    text = f"built-in name or policy file (default: the model's stored policy, else {DEFAULT_POLICY})"
    show.add_argument("policy", nargs="?", metavar="NAME|FILE", help=text)
    text = "checkpoint, to check the policy's variants and layers against"
    show.add_argument("--model", type=Path, metavar="DIR", help=text)
    text = "most tokens in one pass, vLLM's --max-num-batched-tokens (default: no limit)"
    show.add_argument("--max-tokens", type=parse_count, default=sys.maxsize, metavar="N", help=text)
    validate = add("validate", "check a policy file without a model")
    validate.add_argument("policy", metavar="FILE", help="policy file, or a built-in name")
    apply = add("apply", f"change a live server's policy (the environment's {ADMIN_KEY} is the server's key)")
    apply.add_argument("url", metavar="URL", help="URL of vllm serve, e.g. http://127.0.0.1:8000")
    apply.add_argument("policy", metavar="NAME|FILE", help="built-in name or policy file")
    apply.add_argument("--dry-run", action="store_true", help="only say what would change")


def run(args: argparse.Namespace) -> JsonObject:
    actions = {"list": _list, "show": _show, "validate": _validate, "apply": _apply, "schema": _schema}
    return actions[args.action](args)


def _schema(args: argparse.Namespace) -> JsonObject:
    schema = json_schema()
    if not getattr(args, "json", False):
        print(json.dumps(schema, indent=1))
    return schema


def _list(args: argparse.Namespace) -> JsonObject:
    policies = {name: load_policy(name).description for name in builtin_policies()}
    marks = {DEFAULT_POLICY: " (default)"}
    print("\n".join(table_lines([[name, f"{text}{marks.get(name, '')}"] for name, text in policies.items()])))
    listed = [{"name": name, "description": text} for name, text in policies.items()]
    return {"policies": listed, "default": DEFAULT_POLICY}


def _validate(args: argparse.Namespace) -> JsonObject:
    policy = load_policy(args.policy)
    count = len(policy.rules)
    print(f"{policy.name} is valid: {count} rule{'s' * (count > 1)}, variants {', '.join(policy.variants)}")
    return {"policy": policy.name, "valid": True, "rules": count, "variants": list(policy.variants)}


def _show(args: argparse.Namespace) -> JsonObject:
    result: JsonObject = {}
    rows: dict[str, Rows]
    if args.model is None:
        policy = choose_policy(args.policy)
        names = [rule.plan_text for rule in policy.rules]
        rows = {phase: match_rules(policy, names, phase, args.max_tokens) for phase in PHASES}
    else:
        config, num_layers = read_merged_config(args.model)
        policy = choose_policy(args.policy, config.policy)
        table = build_route_table(policy, config.variants, num_layers, args.max_tokens, config.mixable_groups)
        rows = {phase: [(*row[:2], row.plan.name) for row in table.intervals(phase)] for phase in PHASES}
        result = {"num_layers": num_layers, "plans": table.layers_by_plan()}

    print(f"{policy.name}: {policy.description}" if policy.description else policy.name)
    print("\n".join(_table(rows)))
    if policy.measured is not None:
        origin = policy.measured.origin
        print(f"\nmeasured: {origin.get('model')}, {device_name(origin)}, {origin.get('date')}")
        print("\n".join(format_times(policy.measured, lambda phase, size: _plan(rows[phase], size))))
    routes = [
        {"phase": phase, "min_tokens": low, "max_tokens": None if high == sys.maxsize else high, "plan": plan}
        for phase in PHASES
        for low, high, plan in rows[phase]
    ]
    measured = None if policy.measured is None else policy.measured.to_data()
    shown = {"policy": policy.name, "description": policy.description, "routes": routes, "measured": measured}
    return shown | result


def _table(rows: Mapping[str, Rows]) -> list[str]:
    cells = [[f"{'phase':8}", f"{'forward pass of':22}", "plan"]]
    for phase, found in rows.items():
        unit = "sequences" if phase == "decode" else "tokens"
        for first, last, plan in found:
            size = f"{first} or more" if last == sys.maxsize else f"{first} to {last}"
            cells.append([phase, f"{size} {unit}", plan])
    return table_lines(cells)


def _plan(rows: Rows, size: int) -> str:
    return next((plan for first, last, plan in rows if first <= size <= last), "-")


def _apply(args: argparse.Namespace) -> JsonObject:
    answer = apply_policy(args.url, load_policy(args.policy), dry_run=args.dry_run)
    before, after = answer["before"]["name"], answer["after"]["name"]
    print(f"{after} {'would replace' if args.dry_run else 'has replaced'} {before}")
    for change in answer["routes"]:
        tokens = f"{change['min_tokens']} to {change['max_tokens']} tokens"
        print(f"{change['phase']:<8}  {tokens:<22}  {change['before']} -> {change['after']}")
    if not answer["routes"]:
        print("every pass keeps its plan")
    if answer["captures_graphs"]:
        print(f"CUDA graphs {'would be' if args.dry_run else 'were'} captured, requests waiting meanwhile")
    if not args.dry_run:
        print(f"took {answer['seconds']:.1f} s; a restart serves the policy that the server was started with")
    return answer
