# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Merging, converting, and what is written."""

from __future__ import annotations

from tests.faults.fault import Fault

MERGE = "tests/unit/test_merge.py::"

MERGING = (
    Fault(
        "towers-not-compared",
        "The variants of a vision model may read images each in its own way.",
        "merge/merge_plan.py",
        "if name not in shared:",
        "if False:",
        ("tests/unit/test_merging_vision.py::test_towers_that_differ_are_refused",),
    ),
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
    Fault(
        "states-not-compared",
        "Layers with a state beside attention are merged as if they had none.",
        "merge/kv/effective_maps.py",
        'if mixer := self._mixers.get(f"{self.root}layers.{layer}."):',
        "if mixer := None:",
        ("tests/integration/test_unlike_llama.py::test_layers_with_a_state_beside_attention_are_refused",),
    ),
)
