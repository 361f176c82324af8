# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The faults: small breakages of the product, each with the fastest tests that should see it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """One text in one file replaced by another, so that the product runs on but does something else."""

    name: str
    breaks: str
    """What is wrong then, in one sentence."""
    file: str
    """Relative to the repository's root."""
    old: str
    """Text that the file holds exactly once."""
    new: str
    tests: tuple[str, ...]
    """pytest's node ids, of which at least one has to fail."""
    environment: str = "serve"
    """The virtual environment that the tests run in, ``serve`` or ``quantize``; ``interpreter`` is ``serve``
    with Triton's interpreter, for vLLM's V2 runner."""

    def plant(self, root: Path) -> None:
        """Break the source below ``root``; raise ValueError unless ``old`` is there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"fault '{self.name}' does not fit {self.file} any more: its text is there {count} times "
                "instead of once; write it anew in tests/faults/table.py"
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


POLICY = (
    Fault(
        "batch-size-max-exclusive",
        "A rule's 'max' leaves out the batch of exactly that size.",
        "flexquant/policy/routes.py",
        "starts.add(bounds.max * unit + 1)",
        "starts.add(bounds.max * unit)",
        ("tests/unit/test_routes.py::test_lookup_at_the_edges",),
    ),
    Fault(
        "single-size-never-matches",
        "A rule for one size alone, with 'max' equal to 'min', takes no pass.",
        "flexquant/policy/ranges.py",
        "self.max is None or number <= self.max",
        "self.max is None or number < self.max",
        ("tests/unit/test_routes.py::test_a_rule_for_one_size_alone",),
    ),
    Fault(
        "last-layer-left-out",
        "A range of layers in a policy ends one layer early.",
        "flexquant/policy/routes.py",
        "return range(first, last + 1)",
        "return range(first, max(last, first + 1))",
        ("tests/unit/test_routes.py::test_layers_of_the_layered_builtin",),
    ),
)

PHASES = "tests/integration/test_phases.py"
VIEWS = "tests/integration/test_plan_views.py::"
W4A8 = "tests/integration/test_w4a8.py::"
REPLAYS = "tests/gpu/test_replays.py::test_every_replay_is_of_the_plan_that_the_trace_names"
CHANGES = "tests/gpu/test_policy_change.py::"
COUNTS = "tests/gpu/test_counts.py::test_steps_tokens_and_sequences_are_the_schedulers"

SERVING = (
    Fault(
        "latent-expanded-by-each",
        "What expands a latent cache is held once for each variant.",
        "merge/merge_plan.py",
        "if inside := EXPERTS.match(tensor_name) or LATENT_UP.match(tensor_name):",
        "if inside := EXPERTS.match(tensor_name):",
        ("tests/unit/test_merging_experts.py::test_what_expands_a_latent_cache_is_held_once",),
    ),
    Fault(
        "no-head-no-sharing",
        "Variants whose logits come from the embedding have embeddings of their own.",
        "flexquant/serving/variants.py",
        "names = [name for name in names if name in found or name != LM_HEAD]",
        "names = [name for name in names if LM_HEAD in found]",
        ("tests/integration/test_architectures.py::test_variants_without_an_lm_head_share_the_embedding",),
    ),
    Fault(
        "phases-exchanged",
        "A pass of single tokens is no decode pass, and one of prompts is.",
        "flexquant/serving/forward_pass.py",
        "if longest <= tokens_per_sequence:",
        "if longest > tokens_per_sequence:",
        (PHASES,),
    ),
    Fault(
        "mixed-told-as-decode",
        "A pass with sequences in generation beside prompts takes the decode plan.",
        "flexquant/serving/forward_pass.py",
        'phase = "mixed"',
        'phase = "decode"',
        (PHASES,),
    ),
    Fault(
        "speculated-tokens-ignored",
        "A decode pass with speculated tokens is taken for a prefill pass.",
        "flexquant/serving/forward_pass.py",
        "if longest <= tokens_per_sequence:",
        "if longest <= 1:",
        (PHASES,),
    ),
    Fault(
        "warm-up-taken-for-serving",
        "vLLM's own requests, before it captures CUDA graphs, count as the first that are served.",
        "flexquant/serving/model_state.py",
        "observer.is_warming_up = any(is_of_vllm(name) for name in input_batch.req_ids)",
        "pass",
        (REPLAYS + "[V2-PIECEWISE-by-batch]",),
        "interpreter",
    ),
    Fault(
        "aux-hidden-states-of-one-plan",
        "EAGLE-3 gets the hidden states that it drafts from in the passes of one plan only.",
        "flexquant/serving/model.py",
        "for plan in self._plans.values():\n            if not isinstance(plan, SupportsEagle3):",
        "for plan in list(self._plans.values())[:1]:\n            if not isinstance(plan, SupportsEagle3):",
        ("tests/integration/test_speculative.py",),
    ),
    Fault(
        "padding-counted-as-scheduled",
        "The trace says that padding was scheduled.",
        "flexquant/serving/forward_pass.py",
        "longest, int(starts[-1] - starts[0]), requests)",
        "longest, tokens, requests)",
        (PHASES,),
    ),
    Fault(
        "shared-weights-counted-for-each-variant",
        "The doctor says that weights which variants share are one variant's.",
        "flexquant/doctor/memory.py",
        'sizes["shared" if len(names) > 1 else names[0]] += parameter.nbytes',
        "sizes[names[0]] += parameter.nbytes",
        ("tests/integration/test_doctor.py::test_weights_are_those_of_the_checkpoint",),
    ),
    Fault(
        "replays-forgotten",
        "A step that is replayed from a FULL graph is not told.",
        "flexquant/serving/forward_pass.py",
        "            self._left_over = found\n",
        "",
        (PHASES,),
    ),
    Fault(
        "captures-told-as-served",
        "Passes that only capture a CUDA graph are told as passes of the scheduler.",
        "flexquant/serving/forward_pass.py",
        "and self.is_serving and not self._in_capture:",
        ":",
        (PHASES,),
    ),
    Fault(
        "route-from-stale-metadata",
        "A pass takes the plan of the pass before it.",
        "flexquant/serving/forward_pass.py",
        "        return described if described.tokens == tokens else replace(described, tokens=tokens)\n",
        "        self._read, before = described, getattr(self, '_read', described)\n"
        "        return replace(before, tokens=tokens)\n",
        (PHASES,),
    ),
    Fault(
        "reachable-plan-not-captured",
        "Of the plans that a size can take, only the first has PIECEWISE graphs.",
        "flexquant/serving/graphs.py",
        "        for name in reachable:\n",
        "        for name in [*reachable][:1]:\n",
        (REPLAYS + "[V1-PIECEWISE-by-batch]",),
    ),
    Fault(
        "graphs-of-two-sizes-exchanged",
        "The FULL graph of a size holds the plan of another.",
        "flexquant/serving/model.py",
        "        plan = self.routes.lookup(forward_pass.phase, forward_pass.tokens)\n",
        "        other = 1 if self.observer.is_serving else 2\n"
        "        plan = self.routes.lookup(forward_pass.phase, other * forward_pass.tokens)\n",
        (REPLAYS + "[V1-FULL_DECODE_ONLY-by-batch]",),
    ),
    Fault(
        "device-read-in-forward",
        "The model waits for a value of the device, which no CUDA graph can hold.",
        "flexquant/serving/model.py",
        "        tokens = positions.shape[-1]\n",
        "        tokens = positions.shape[-1] + 0 * int(positions.sum())\n",
        (REPLAYS + "[V1-FULL_DECODE_ONLY-by-batch]",),
    ),
    Fault(
        "layers-shifted-in-a-plan",
        "A plan runs, as layer i, the layer i - 1 of the variant.",
        "flexquant/serving/plan_views.py",
        "variants[v].model.layers[i] for i, v in enumerate(plan.layers)",
        "variants[v].model.layers[max(i - 1, 0)] for i, v in enumerate(plan.layers)",
        (VIEWS + "test_every_layer_is_run_by_the_plans_variant_and_followed_by_the_last_ones_norm",),
    ),
    Fault(
        "variants-shifted-in-a-plan",
        "A layered plan takes, for layer i, the variant of the layer i - 1.",
        "flexquant/serving/plan_views.py",
        "variants[v].model.layers[i] for i, v in enumerate(plan.layers)",
        "variants[plan.layers[i - 1]].model.layers[i] for i, _ in enumerate(plan.layers)",
        (VIEWS + "test_every_layer_is_run_by_the_plans_variant_and_followed_by_the_last_ones_norm",),
    ),
    Fault(
        "first-layers-norm-and-head",
        "Norm and head behind a layered plan are those of its first layer's variant.",
        "flexquant/serving/plan_views.py",
        "base = variants[plan.layers[-1]]",
        "base = variants[plan.layers[0]]",
        (VIEWS + "test_every_layer_is_run_by_the_plans_variant_and_followed_by_the_last_ones_norm",),
    ),
    Fault(
        "another-plans-head",
        "Logits always come from the head of the first plan.",
        "flexquant/serving/model.py",
        "return self._plans[self._last_plan].compute_logits(hidden_states)",
        "return self._plans[self.routes.plans[0].name].compute_logits(hidden_states)",
        (VIEWS + "test_logits_come_from_the_head_of_the_last_passes_plan",),
    ),
    Fault(
        "first-plan-runs-all",
        "Every pass is run by the first plan, while the trace names its own.",
        "flexquant/serving/model.py",
        "        return self._plans[plan.name](*inputs)\n\n",
        "        return self._plans[self.routes.plans[0].name](*inputs)\n\n",
        (VIEWS + "test_every_layer_is_run_by_the_plans_variant_and_followed_by_the_last_ones_norm",),
    ),
    Fault(
        "trace-tells-the-plan-before",
        "The trace is written before the plan is chosen, and names that of the pass before.",
        "flexquant/serving/model.py",
        "self.records.serve(forward_pass, plan, graph)",
        "self.records.serve(forward_pass, self._last_plan, graph)",
        (VIEWS + "test_the_trace_tells_the_plan_of_every_pass_in_order",),
    ),
    Fault(
        "replays-not-counted",
        "A pass that is replayed from a FULL graph is in no counter of /metrics.",
        "flexquant/serving/pass_records.py",
        "        if self._metrics is not None:\n            self._metrics.count_pass(",
        "        if self._metrics is not None and graph != CUDAGraphMode.FULL:\n"
        "            self._metrics.count_pass(",
        (COUNTS + "[V1-FULL_DECODE_ONLY]",),
    ),
    Fault(
        "other-engines-not-asked",
        "Of data-parallel engines the first alone is asked for its counters and told of another policy.",
        "flexquant/serving/engine_client.py",
        "for core in client.core_engines\n",
        "for core in client.core_engines[:1]\n",
        ("tests/integration/test_data_parallel.py::test_both_take_another_policy",),
    ),
    Fault(
        "live-times-not-taken",
        "A policy is proposed from the times that were measured, whatever the live server takes.",
        "flexquant/tuning/retuning.py",
        "*(seconds * ratios[variant, phase] for seconds in measured)",
        "*(seconds for seconds in measured)",
        ("tests/unit/test_retuning.py::test_a_live_time_that_differs_moves_the_crossover",),
    ),
    Fault(
        "full-graphs-outlive-a-policy",
        "Another policy is taken without other FULL graphs, whatever plans they hold.",
        "flexquant/serving/graphs.py",
        "return all(routes.lookup(*cell).name == plan for cell, plan in self._full.items()) and all(",
        "return all(",
        (CHANGES + "test_every_replay_is_of_the_plan_that_the_policy_gives[FULL_DECODE_ONLY-V1]",),
    ),
    Fault(
        "pieces-not-captured-for-a-policy",
        "Another policy is taken without the PIECEWISE graphs that only it needs.",
        "flexquant/serving/graphs.py",
        "            for plan in routes.reachable(size.num_tokens)\n",
        "            for plan in routes.reachable(size.num_tokens)[:0]\n",
        (CHANGES + "test_every_replay_is_of_the_plan_that_the_policy_gives[PIECEWISE-V1]",),
    ),
    Fault(
        "last-replay-told-by-the-next-policy",
        "A replay before a change of the policy is counted for the plan that it would have had after it.",
        "flexquant/serving/model.py",
        "            self.observer.settle()\n            for plan in after",
        "            for plan in after",
        (CHANGES + "test_a_replay_before_the_change_counts_for_the_policy_before[V1]",),
    ),
    Fault(
        "any-key-will-do",
        "The routes ask for a key, and take every one.",
        "flexquant/serving/endpoints.py",
        "    if not any(matches):\n",
        "    if False and matches:\n",
        ("tests/integration/test_live_server.py::test_the_status_asks_for_vllms_key[one server]",),
    ),
    Fault(
        "everybody-waits-for-a-posted-policy",
        "A posted policy is read in the loop of the server, which answers nobody meanwhile.",
        "flexquant/serving/policy_endpoint.py",
        "await asyncio.to_thread(read_policy, body, name)",
        "read_policy(body, name)",
        ("tests/integration/test_hostile_callers.py::test_nobody_waits_for_a_body_that_is_slow_to_read",),
    ),
    Fault(
        "span-of-no-time",
        "FlexQuant's span of a request begins when the request has ended.",
        "flexquant/serving/request_spans.py",
        "start_time=span.start_time",
        "start_time=span.end_time",
        (
            "tests/integration/test_live_server.py::"
            "test_the_span_of_a_request_has_a_child_that_tells_the_plans[one server]",
        ),
    ),
    Fault(
        "worker-reads-the-file",
        "A worker opens the policy's file once more, instead of taking what the front end has read.",
        "flexquant/serving/options.py",
        '    return resolved["name"], parse_policy(resolved["document"], resolved["name"])',
        "    return choose_policy(ServingOptions.from_vllm(vllm_config).policy)",
        ("tests/integration/test_resolved_policy.py",),
    ),
    Fault(
        "ranks-not-compared",
        "Ranks with other routes than the first serve beside it.",
        "flexquant/serving/ranks.py",
        "    if world.world_size == 1:\n",
        "    if world.world_size > 0:\n",
        ("tests/integration/test_ranks.py",),
    ),
    Fault(
        "two-kv-caches",
        "The second variant keeps its own attention layers, with a KV cache of their own.",
        "flexquant/serving/variants.py",
        "                replacements[layer] = real_context[layer_name]\n",
        '                layer.layer_name = f"{name}.{layer_name}"\n'
        "                real_context[layer.layer_name] = layer\n",
        (VIEWS + "test_switching_between_variants_of_equal_weights_changes_nothing",),
    ),
    Fault(
        "experts-of-the-first-variant",
        "All variants' expert layers have one name, so that those of one variant run for all.",
        "flexquant/serving/expert_layers.py",
        '    layer.layer_name = f"{layer.layer_name}@{variant}"\n',
        "    context.setdefault(layer.layer_name, layer)\n    return\n",
        ("tests/integration/test_experts.py::test_pure_plans_equal_stock_vllm_and_layered_plans_run",),
    ),
    Fault(
        "routers-not-compared",
        "Variants whose routers send tokens to other experts are merged.",
        "merge/kv/pair.py",
        "        for module in self.reference.routers(layer):\n",
        "        for module in self.reference.routers(layer)[:0]:\n",
        ("tests/unit/test_merging_experts.py",),
    ),
    Fault(
        "variant-left-out-of-the-compile-key",
        "The key of a plan's compiled code says how its last variant is quantised, and no other.",
        "flexquant/serving/plan_views.py",
        "    for name in plan.variants:\n",
        "    for name in plan.variants[-1:]:\n",
        ("tests/unit/test_plan_digest.py",),
    ),
    Fault(
        "compile-key-without-schemes",
        "Compiled code is found by the name of its plan, however its variants are quantised.",
        "flexquant/serving/plan_views.py",
        'f"{plan_name} {digest}"',
        "plan_name",
        ("tests/integration/test_compile_state.py",),
    ),
    Fault(
        "inductors-folder-without-schemes",
        "The pieces of a plan are kept in a folder of its name, however its variants are quantised.",
        "flexquant/serving/plan_views.py",
        "-{digest[:16]}",
        "",
        ("tests/integration/test_compile_state.py",),
    ),
    Fault(
        "padded-decode-batch-ignored",
        "The route table ends at the largest batch, though CUDA graphs pad it to a larger size.",
        "flexquant/serving/config.py",
        "return max(as_given, rounded)",
        "return most",
        ("tests/integration/test_graphs.py::test_no_graph_is_missing_and_the_plan_is_the_policys",),
    ),
    Fault(
        "w4a8-served-as-w4a16",
        "A derived variant keeps the kernels of its source, without a word.",
        "flexquant/serving/variants.py",
        "            use_8bit_activations(variant, derived[name].activations)\n",
        "            pass\n",
        # The second is for CPUs with AMX, whose W4A16 kernel multiplies with 8-bit activations too.
        (
            W4A8 + "test_a_layer_multiplies_dequantised_int4_weights_with_int8_activations",
            W4A8 + "test_one_copy_serves_small_passes_as_w4a16_and_large_ones_as_w4a8",
        ),
    ),
)

KERNELS = (
    Fault(
        "kernels-of-another-machine-believed",
        "A kernel that was the fastest for another layer, or on another machine, is taken.",
        "flexquant/serving/cpu/remembering.py",
        'if found["key"] == key and found["chosen"]',
        'if found["chosen"]',
        ("tests/unit/test_cpu_choosing.py",),
    ),
    Fault(
        "kernels-tried-with-the-sizes-of-prefill",
        "A variant's kernels are tried with as many tokens as prompts have, also where it decodes.",
        "flexquant/serving/cpu/choosing.py",
        "(in_others | in_decode).items()",
        "(in_decode | in_others).items()",
        ("tests/unit/test_cpu_choosing.py",),
    ),
)

MERGE = "tests/unit/test_merge.py::"
OUTPUT = "tests/unit/test_output.py::"

MERGING = (
    Fault(
        "latent-not-expanded-alike",
        "Variants share a cache of latents that each expands in its own way.",
        "merge/kv/pair.py",
        "if a.keys() == b.keys() and all(same_bytes(a[name], b[name]) for name in a):",
        "if a.keys() == b.keys():",
        ("tests/unit/test_kv_compat.py::test_another_latent_cache_is_caught",),
    ),
    Fault(
        "latent-norm-not-compared",
        "The norm of what latent attention caches may differ.",
        "merge/kv/pair.py",
        'CACHED_NORMS = ("self_attn.k_norm", "self_attn.kv_a_layernorm")',
        'CACHED_NORMS = ("self_attn.k_norm",)',
        ("tests/unit/test_kv_compat.py::test_another_latent_cache_is_caught",),
    ),
    Fault(
        "zero-points-one-off",
        "Zero points of the older GPTQ format are taken as they are stored.",
        "merge/gptq_format.py",
        "self._unpacked(zeros) + self.offset",
        "self._unpacked(zeros)",
        ("tests/unit/test_conversion.py::test_values_scales_and_zero_points_are_kept",),
    ),
    Fault(
        "order-of-inputs-not-looked-at",
        "GPTQ checkpoints with desc_act are converted as if their inputs were in order.",
        "merge/gptq_format.py",
        "if not torch.equal(groups.long(), torch.arange(inputs) // size):",
        "if groups.numel() != inputs:",
        ("tests/unit/test_conversion.py::test_what_cannot_be_converted_leaves_nothing",),
    ),
    Fault(
        "shared-tensor-dropped",
        "One of the tensors that all variants share is not written.",
        "merge/merge_plan.py",
        "for name in sorted(shared)}}",
        "for name in sorted(shared)[1:]}}",
        (MERGE + "test_tensors_are_stored_once_or_under_their_variant",),
    ),
    Fault(
        "prefixes-exchanged",
        "The merged config gives each variant the prefix of another one's tensors.",
        "merge/merging.py",
        'Variant(f"{s.name}.", s.quantization_config) for s in plan.sources',
        'Variant(f"{t.name}.", s.quantization_config) for s, t in zip(plan.sources, plan.sources[::-1])',
        ("tests/unit/test_split_verify.py::test_split_gives_the_source_back",),
    ),
    Fault(
        "shared-across-differences",
        "Tensors of equal size count as equal, whatever their bytes.",
        "merge/merge_plan.py",
        "return all(name in s.tensors and same_bytes(ref, s.tensors[name]) for s in others)",
        "return all(name in s.tensors and ref.nbytes == s.tensors[name].nbytes for s in others)",
        (MERGE + "test_tensors_that_only_have_name_and_size_in_common_are_stored_for_each_variant",),
    ),
    Fault(
        "verify-skips-a-tensor",
        "Verifying leaves out the tensor that comes last.",
        "flexquant/checkpoint/recorded_hashes.py",
        "pool.submit(check, name, ref) for name, ref in tensors.items()}",
        "pool.submit(check, name, ref) for name, ref in list(tensors.items())[:-1]}",
        ("tests/unit/test_split_verify.py::test_verify_accepts_what_merge_wrote",),
    ),
    Fault(
        "verify-trusts-shared-tensors",
        "Verifying against the sources does not compare the tensors that are stored once.",
        "merge/verify.py",
        "lambda name, ref: same_bytes(ref, stored[name])",
        "lambda name, ref: keys[name].startswith('shared.') or same_bytes(ref, stored[name])",
        ("tests/unit/test_split_verify.py::test_verify_finds_a_flipped_byte",),
    ),
    Fault(
        "output-replaced-in-two-steps",
        "The old output is removed before the new one takes its place.",
        "flexquant/checkpoint/output.py",
        "    libc = ctypes.CDLL(None, use_errno=True)\n",
        "    shutil.rmtree(target)\n    os.rename(stage, target)\n    return\n"
        "    libc = ctypes.CDLL(None, use_errno=True)\n",
        (OUTPUT + "test_killed_before_any_operation_it_leaves_the_old_output_or_none[True-exchange]",),
    ),
    Fault(
        "kv-rows-bound-loosened",
        "K and V may differ by five times the gain that the comparison allows.",
        "merge/kv/agreement.py",
        "allowed = (ROW_GAIN_SIGMAS",
        "allowed = 5 * (ROW_GAIN_SIGMAS",
        ("tests/unit/test_kv_compat.py::test_v_to_o_smoothing_is_caught",),
    ),
    Fault(
        "kv-columns-bound-loosened",
        "K and V may differ by five times the median gain of the columns.",
        "merge/kv/agreement.py",
        "allowed = (COLUMN_GAIN_SIGMAS",
        "allowed = 5 * (COLUMN_GAIN_SIGMAS",
        ("tests/unit/test_kv_compat.py",),
    ),
    Fault(
        "kv-noise-bound-loosened",
        "K and V may differ by four times the rounding noise that the comparison allows.",
        "merge/kv/agreement.py",
        "NOISE_FACTOR = 4.0\n",
        "NOISE_FACTOR = 16.0\n",
        ("tests/unit/test_kv_compat.py",),
    ),
    Fault(
        "kv-rows-sampled",
        "Of K and V only a sample of the rows is compared.",
        "merge/kv/effective_maps.py",
        "return self._matrix(rows.module, [range(rows.start, rows.stop)], columns)",
        "return self._matrix(rows.module, sample_rows(rows.stop, layer), columns)",
        ("tests/unit/test_kv_sampling.py::test_any_row_of_k_or_v_is_compared",),
    ),
    Fault(
        "every-layer-samples-alike",
        "Of o_proj and down_proj every layer compares the same rows.",
        "merge/kv/effective_maps.py",
        "turn = layer + self.output_modules(layer).index(module)",
        "turn = 1 + self.output_modules(layer).index(module)",
        ("tests/unit/test_kv_sampling.py::test_neighbouring_layers_compare_other_rows",),
    ),
)

MEASURING = (
    Fault(
        "forced-token-shifted",
        "A step is forced to the token of the step before.",
        "flexquant/evaluation/forced_decoding.py",
        "token = self._forced[position]",
        "token = self._forced[max(position - 1, 0)]",
        ("tests/unit/test_forced_decoding.py",),
    ),
    Fault(
        "kl-arguments-exchanged",
        "Forced decoding takes the policy for the reference.",
        "flexquant/evaluation/forced_decoding.py",
        "kl_divergence(reference, log_probs)",
        "kl_divergence(log_probs, reference)",
        ("tests/unit/test_forced_decoding.py",),
    ),
    Fault(
        "kl-formula-exchanged",
        "KL(policy || reference) is reported as KL(reference || policy).",
        "flexquant/evaluation/scores.py",
        "terms = reference.exp() * (reference - other)",
        "terms = other.exp() * (other - reference)",
        ("tests/unit/test_evaluation.py::test_kl_divergence_by_hand",),
    ),
    Fault(
        "crossing-inverted",
        "A range ends where the variant that follows is slower.",
        "flexquant/tuning/deciding.py",
        "samples.compare(a, b, phase, size).ratio",
        "samples.compare(b, a, phase, size).ratio",
        ("tests/unit/test_tune.py::test_thresholds_lie_at_the_crossover",),
    ),
    Fault(
        "slowest-chosen",
        "Tuning chooses the slowest variant instead of the fastest.",
        "flexquant/tuning/samples.py",
        "best = min(variants",
        "best = max(variants",
        ("tests/unit/test_tune.py::test_thresholds_lie_at_the_crossover",),
    ),
    Fault(
        "interval-too-narrow",
        "The interval of a ratio has 90 % instead of 95 %.",
        "flexquant/measuring/comparison.py",
        "<= (1 - CONFIDENCE) / 2",
        "<= 1 - CONFIDENCE",
        ("tests/unit/test_comparison.py::test_as_many_averages_are_left_out_as_the_tables_say",),
    ),
    Fault(
        "equality-rounded-down",
        "Two things are called equal within less than the interval says.",
        "flexquant/measuring/comparison.py",
        "percent(self.within, math.ceil)",
        "percent(self.within)",
        ("tests/unit/test_comparison.py::test_equality_is_never_told_closer_than_it_is",),
    ),
    Fault(
        "rounds-added-without-end",
        "A noisy size is measured in more rounds than were asked for.",
        "flexquant/tuning/rounds.py",
        "self._grid.effort.max_rounds + 1):",
        "self._grid.effort.max_rounds + 2):",
        (
            "tests/unit/test_tune.py::test_rounds_are_added_until_the_intervals_are_narrow_or_the_most_rounds_are_measured",
        ),
    ),
    Fault(
        "scheduler-ignores-the-budget",
        "A simulated pass takes a waiting prompt whole, whatever the token budget.",
        "flexquant/simulation/scheduler.py",
        "            tokens = min(sequence.length, budget)\n",
        "            tokens = sequence.length\n",
        ("tests/unit/test_scheduling.py::test_chunked_prefill_leaves_decode_its_token",),
    ),
    Fault(
        "padding-ignored",
        "A simulated pass costs its own tokens instead of those of its CUDA graph.",
        "flexquant/simulation/scheduler.py",
        "return next((size for size in self.capture_sizes if size >= tokens), tokens)",
        "return tokens",
        ("tests/unit/test_server_limits.py::test_the_padded_batch_size_decides",),
    ),
)

QUANTISING = (
    Fault(
        "smoothing-strength-ignored",
        "SmoothQuant uses one strength, 0.5, whatever the recipe says.",
        "flexquant/quantization/smoothing.py",
        "            self._chosen[name] = self.fixed[name]\n",
        "            self._chosen[name] = None if self.fixed[name] is None else REFERENCE\n",
        ("tests/quantize/test_smoothing.py::test_a_fixed_strength_is_the_one_that_scales",),
        "quantize",
    ),
    Fault(
        "smoothing-formula-ignores-alpha",
        "SmoothQuant's scales have the exponent 0.5, whatever the strength.",
        "flexquant/quantization/smoothing.py",
        "clamp(min=FLOOR).pow(alpha)",
        "clamp(min=FLOOR).pow(0.5)",
        ("tests/quantize/test_smoothing.py::test_scales_are_smoothquants",),
        "quantize",
    ),
    Fault(
        "sensitive-layers-quantised",
        "The linears that were found sensitive are quantised like the others.",
        "flexquant/quantization/sensitivity.py",
        "        self._hand_over({name: linears[name] for name in self.spared})\n",
        "",
        ("tests/quantize/test_sensitivity.py::test_the_hard_linear_stays_in_16_bit",),
        "quantize",
    ),
)

FAULTS: tuple[Fault, ...] = (*POLICY, *SERVING, *KERNELS, *MERGING, *MEASURING, *QUANTISING)
