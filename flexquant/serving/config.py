# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Resolve a policy for one server: read it, build its route table, and refuse what cannot be served.

The front end (every process in which vLLM builds its configuration) does all this, at the start
(:func:`resolve_policy`) and for each later policy (:func:`served_policy`). It puts the table beside the
user's options into vLLM's ``--additional-config``, which all workers of the front end get, so no worker reads
a policy. Workers clip the table to their server (:func:`clip_to_server`), and those of several front ends,
one on each machine, compare what they received (:mod:`flexquant.serving.worker.ranks`).
"""

import json
import os
from dataclasses import dataclass, replace
from typing import Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.platforms import current_platform

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.module_names import layer_number
from flexquant.documents.results import digest_of
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable, RouteTableData, build_route_table
from flexquant.policy.rules import Policy, choose_policy
from flexquant.policy.schema import Head
from flexquant.serving.derivable import check_derivable
from flexquant.serving.refusals import has_one_head, refusals
from flexquant.serving.vllm_api import get_pp_indices

OPTIONS_KEY = "flexquant"
"""Key of ``additional_config`` with the user's options."""
RESOLVED_KEY = "flexquant_policy"
"""Key of ``additional_config`` with the policy that the front end has resolved."""


class ServingOptions(BaseModel):
    """Options in ``--additional-config '{"flexquant": {...}}'``; a field's description says what it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    policy: str | None = Field(None, description="a string")
    """Name of a built-in policy or path of a YAML file; None: the checkpoint's, else the default."""
    kernels: dict[str, str] = Field({}, description="a mapping of variants to names of kernels, both strings")
    """Variant -> the kernel of its linears, by the beginning of vLLM's class name, such as ``humming``."""
    head: Head | None = Field(None, description="stored or int8")
    """Precision of the lm_head; None: the policy's."""
    trace: str | None = Field(None, description="a string")
    """File that receives one JSON line per forward pass (phase, tokens, plan ...); None: no trace."""
    trace_mib: int = Field(1024, ge=1, description="a whole number from 1 on")
    """Largest size of a trace file in MiB, at least 1."""
    verify: bool = Field(False, description="true or false")
    """Whether the checkpoint is compared with the hashes that the merge recorded before it is loaded."""
    allow_incompatible_kv: bool = Field(False, description="true or false")
    """Whether variants may read one another's KV cache, though the merge found that they misread it."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Self:
        """Read the options; raise :class:`FlexQuantError` for an unknown key or a value of another type."""
        options = additional_config(vllm_config).get(OPTIONS_KEY, {})
        try:
            return cls.model_validate(options)
        except ValidationError as e:
            path, value = e.errors()[0]["loc"], e.errors()[0]["input"]
        fields, allowed = cls.model_fields, list(cls.model_fields)
        if not path:
            problem = f"key '{OPTIONS_KEY}' is {options!r}; give a mapping with keys {allowed}"
        elif path[0] not in fields:
            problem = f"'{OPTIONS_KEY}' has the unknown key '{path[0]}'; allowed: {allowed}"
        else:
            problem = f"'{OPTIONS_KEY}.{path[0]}' is {value!r}; give {fields[str(path[0])].description}"
        raise FlexQuantError(f"additional-config {problem}")


def merged_of(model_config: ModelConfig) -> MergedConfig:
    """Return the section about the variants; raise :class:`FlexQuantError` if it is none of this version."""
    return MergedConfig.from_json(model_config.hf_config.quantization_config)


def additional_config(vllm_config: VllmConfig) -> JsonObject:
    """Return a copy of vLLM's ``additional_config``; raise :class:`FlexQuantError` if it is no mapping."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        problem = f"additional-config is of the type {type(additional).__name__}"
        raise FlexQuantError(f"{problem}, and FlexQuant puts the policy into it; give a mapping, or none")
    return dict(additional)


class PolicyName(TypedDict):
    name: str
    digest: str
    """SHA-256 of the policy document without its measured times, in hexadecimal."""


class ServedPolicyData(PolicyName):
    """A :class:`ServedPolicy` as plain data, as vLLM carries it to workers."""

    routes: RouteTableData


class RankMetrics(TypedDict):
    """What the rank that counts tells for ``/metrics``."""

    engine: str
    policies: list[tuple[str, str, int]]
    """Name and digest of each policy that has routed, and 1 for the one that routes now, else 0."""
    counted: list[JsonObject]
    """Plan, phase, and the counters of :meth:`flexquant.serving.worker.pass_records.PlanCounters.to_data`."""
    sizes: list[tuple[list[tuple[str, int]], int]]
    """For each record of ``counted``: the upper end of each bucket with the number of passes up to it, and
    the sum of the passes' sizes."""
    weight_bytes_by_layers: dict[str, dict[str, int]]


@dataclass(frozen=True)
class ServedPolicy:
    """A policy as the front end hands it to workers: its route table for one model and server."""

    name: str
    """Name for users: a built-in policy's name, a file's path, or the name that they gave."""
    digest: str
    """SHA-256 of the policy document without its measured times, in hexadecimal."""
    routes: RouteTable

    @classmethod
    def from_json(cls, data: ServedPolicyData) -> Self:
        return cls(data["name"], data["digest"], RouteTable.from_json(data["routes"]))

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Self:
        """In a worker: return the policy that the front end has resolved."""
        resolved = additional_config(vllm_config).get(RESOLVED_KEY)
        if resolved is None:
            problem = "the configuration holds no policy, which FlexQuant's front end puts there"
            how = "vLLM's EngineArgs.create_engine_config(), in a process in which the plugin is loaded"
            raise FlexQuantError(f"{problem}; build it with {how}")
        return cls.from_json(resolved)

    def to_json(self) -> ServedPolicyData:
        return {"name": self.name, "digest": self.digest, "routes": self.routes.to_json()}

    def described(self) -> PolicyName:
        """Return the name and the digest, for people."""
        return {"name": self.name, "digest": self.digest}


def resolve_policy(vllm_config: VllmConfig, merged: MergedConfig) -> RouteTable:
    """In the front end: put the policy that the options name into ``vllm_config``; return its table.

    Workers' has decode passes of all sizes: vLLM sets the largest later. Raises :class:`FlexQuantError`.
    """
    options = ServingOptions.from_vllm(vllm_config)
    policy = choose_policy(options.policy, merged.policy)
    variants = [*merged.variants, *(name for name, how in policy.derived.items() if not how.is_one_copy)]
    if unknown := [name for name in options.kernels if name not in variants]:
        problem = f"additional-config key '{OPTIONS_KEY}.kernels' has '{unknown[0]}', no variant with weights"
        raise FlexQuantError(f"{problem}; allowed: {', '.join(variants)}")
    served = served_policy(vllm_config, merged, policy)
    vllm_config.additional_config = additional_config(vllm_config) | {RESOLVED_KEY: served.to_json()}
    return served.routes.up_to(max_decode_tokens(vllm_config))


def served_policy(vllm_config: VllmConfig, merged: MergedConfig, policy: Policy) -> ServedPolicy:
    """In the front end: return the policy for workers; raise :class:`FlexQuantError` for one not served."""
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    for module in merged.shared_modules:
        if (layer_number(module) or 0) >= num_layers:
            found = f"the merged checkpoint's quantization_config has '{module}' among shared_modules"
            there = f"the model has {num_layers} decoder layers, counted from 0"
            raise FlexQuantError(f"{found}, and {there}; merge it again")
    routes = build_route_table(
        policy,
        variants=list(merged.variants),
        num_layers=num_layers,
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        mixable=merged.mixable_groups,
        nested=merged.nested,
        tokens_per_sequence=tokens_per_sequence(vllm_config),
        head=ServingOptions.from_vllm(vllm_config).head,
    )
    for variant, derivation in policy.derived.items():
        derives = f"{policy.place(('derive', variant))} derives '{variant}'"
        check_derivable(derives, derivation, merged.variants[derivation.source])
    reached = routes.up_to(max_decode_tokens(vllm_config))
    check_supported(vllm_config, merged, reached)
    check_caches(vllm_config, merged, policy.name, reached)
    document = {key: value for key, value in policy.document.items() if key != "measured"}
    return ServedPolicy(policy.name, digest_of(document), routes)


def clip_to_server(vllm_config: VllmConfig, merged: MergedConfig, served: ServedPolicy) -> ServedPolicy:
    """In a worker: return the policy with the decode passes alone that this server can run.

    Raises :class:`FlexQuantError` for what cannot be served with CUDA graphs, which vLLM settles late.
    """
    clipped = replace(served, routes=served.routes.up_to(max_decode_tokens(vllm_config)))
    if vllm_config.compilation_config.cudagraph_mode:
        check_supported(vllm_config, merged, clipped.routes)
    return clipped


def check_supported(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """Raise :class:`FlexQuantError` if vLLM is configured with a feature that is not supported."""
    if what := next(refusals(vllm_config, merged, routes), None):
        raise FlexQuantError(f"FlexQuant does not support {what}")
    check_pipeline(vllm_config, merged)


def check_caches(vllm_config: VllmConfig, merged: MergedConfig, policy: str, *tables: RouteTable) -> None:
    """Raise :class:`FlexQuantError` if ``tables`` have variants that the merge did not find to share a cache.

    ``policy`` is the name of the policy that takes them. With a KV connector, other servers' variants count.
    """
    used = sorted({table.source(v) for table in tables for plan in table.plans for v in plan.variants})
    if vllm_config.kv_transfer_config is not None:
        policy, used = "a KV connector", sorted(merged.variants)
    if merged.may_share_cache(used) or ServingOptions.from_vllm(vllm_config).allow_incompatible_kv:
        return
    consent = f"--additional-config '{json.dumps({OPTIONS_KEY: {'allow_incompatible_kv': True}})}'"
    problem = f"{policy} lets {' and '.join(used)} read one KV cache, and the merge did not find that they"
    advice = f"take a policy of one variant, and no KV connector, or, to serve it all the same, add {consent}"
    raise FlexQuantError(f"{problem} can; {advice}. Recorded is: {merged.kv_compatibility.get('message')}")


def choose_graph_mode(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """In the front end: if vLLM chooses the CUDA graph mode, prevent FULL graphs that cannot be served.

    After a FULL graph, which calls no model, a model with several lm_heads would not know which one to use.
    """
    if vllm_config.compilation_config.cudagraph_mode is None and not has_one_head(merged, routes):
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def fuse_as_for_variants(vllm_config: VllmConfig, merged: MergedConfig, routes: RouteTable) -> None:
    """In the front end: if a variant in use is in NVFP4, fuse activations and quantisation, as vLLM would.

    vLLM looks for NVFP4 in the checkpoint's own ``quantization_config``, and Inductor cannot fuse that
    format's operators. What the user has set, and level 0, which fuses nothing, are not changed.
    """
    used = {routes.source(name) for name in routes.layers}
    formats = (str(merged.variants[name].quantization_config.get("format", "")) for name in used)
    passes = vllm_config.compilation_config.pass_config
    is_asked = passes.fuse_act_quant is None and int(vllm_config.optimization_level) > 0
    if is_asked and any("nvfp4" in storage.lower() for storage in formats):
        passes.fuse_act_quant = True


def find_compiled_code_again() -> None:
    """In the front end: on a CPU, make later starts of a model reuse the compiled code of the first.

    On a CPU, vLLM (0.32) stores compiled code in a form that it cannot load ("'function' object has no
    attribute 'finalize_loading'"), so it compiles at every start. Without that form, Inductor caches the code
    itself, for all plans. A value that the user has set stays. Delete this once all supported vLLMs load
    their form.
    """
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")


def check_pipeline(vllm_config: VllmConfig, merged: MergedConfig) -> None:
    """Refuse pipeline parallelism for a base model that lacks it, and ranks without a decoder layer."""
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.pipeline_parallel_size
    if ranks == 1:
        return
    if not model.registry.is_pp_supported_model([merged.base_architecture], model):
        problem = f"vLLM has no pipeline parallelism for {merged.base_architecture}"
        raise FlexQuantError(f"{problem} (use --tensor-parallel-size)")
    layers = model.hf_text_config.num_hidden_layers
    empty = [rank for rank in range(ranks) if len(range(*get_pp_indices(layers, rank, ranks))) == 0]
    if empty:
        leaves = f"leaves rank {empty[0]} none of the model's {layers} decoder layers"
        advice = f"use --pipeline-parallel-size 1 to {layers}, and no zeros in VLLM_PP_LAYER_PARTITION"
        raise FlexQuantError(f"pipeline parallelism over {ranks} ranks {leaves} ({advice})")


def tokens_per_sequence(vllm_config: VllmConfig) -> int:
    """Return the tokens of one sequence in a decode pass: 1, plus the speculated tokens."""
    speculative = vllm_config.speculative_config
    return 1 + (speculative.num_speculative_tokens if speculative is not None else 0)


def max_decode_tokens(vllm_config: VllmConfig) -> int:
    """Return the largest number of tokens in a decode pass, padding to a CUDA graph's size included.

    If decoding sequences have several tokens, vLLM's V1 runner rounds the sizes up to a multiple of these.
    """
    one = tokens_per_sequence(vllm_config)
    most = vllm_config.scheduler_config.max_num_seqs * one
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    as_given = min((size for size in sizes if size >= most), default=most)
    rounded = min((-(-size // one) * one for size in sizes if -(-size // one) * one >= most), default=most)
    return max(as_given, rounded)
