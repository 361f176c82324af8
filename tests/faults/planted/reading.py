# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in reading files: documents, text and checkpoints."""

from __future__ import annotations

from tests.faults.fault import Fault

READING = (
    Fault(
        "text-read-no-further-than-needed",
        "Calibration takes the beginning of a text instead of rows from all over it.",
        "flexquant/documents/texts.py",
        "if len(tokens) >= POOL * needed:",
        "if len(tokens) >= needed:",
        ("tests/unit/test_calibration.py::test_rows_are_drawn_from_more_text_than_they_need",),
    ),
    Fault(
        "digest-of-an-order",
        "One policy has another digest where its keys stand in another order.",
        "flexquant/documents/digest.py",
        "sort_keys=sort_keys",
        "sort_keys=False",
        ("tests/unit/test_yaml_document.py::test_one_content_has_one_digest_whatever_the_order_of_its_keys",),
    ),
    Fault(
        "links-into-all-of-the-hubs-cache",
        "A link of a snapshot may lead to any file of the hub's cache, not to blobs alone.",
        "flexquant/checkpoint/folder.py",
        'return in_hub_cache and target.is_relative_to(repository / "blobs")',
        "return in_hub_cache and target.is_relative_to(repository)",
        ("tests/unit/test_source_errors.py::test_hub_cache_links_are_followed",),
    ),
    Fault(
        "bits-without-what-is-shared",
        "Bits per parameter leave out the tensors that variants share.",
        "flexquant/checkpoint/contents.py",
        "8 * (total_bytes(own) + shared_bytes) /",
        "8 * total_bytes(own) /",
        ("tests/unit/test_mixing.py::test_bits_per_parameter_count_what_variants_share",),
    ),
    Fault(
        "unit-of-bytes-skipped",
        "What is a GiB or more is told in MiB, under the name of the greater unit.",
        "flexquant/checkpoint/layer_ranges.py",
        '("bytes", "KiB", "MiB")',
        '("bytes", "KiB")',
        ("tests/unit/test_layer_ranges.py::test_bytes_are_told_with_the_layers",),
    ),
    Fault(
        "copy-of-the-embedding-counts",
        "An lm_head that is stored and never loaded counts among what is loaded.",
        "flexquant/checkpoint/contents.py",
        "not (no_head and HEAD.search(key))",
        "True",
        ("tests/unit/test_layer_ranges.py::test_a_copy_of_the_embedding_is_stored_and_not_loaded",),
    ),
    Fault(
        "derived-norms-count-twice",
        "What a derived variant has in common with its source counts for both.",
        "flexquant/checkpoint/contents.py",
        "of_source is None or not is_in(key, of_source) or _is_packed_linear(key, own)",
        "True",
        (
            "tests/unit/test_layer_ranges.py::test_a_derived_variant_counts_what_its_source_does_not_hold_for_it",
        ),
    ),
    Fault(
        "copies-in-folders-fetched",
        "Weights that a repository of the Hub holds once more, in a folder, are fetched too.",
        "flexquant/checkpoint/hub.py",
        'NOT_NEEDED = ("consolidated*", *(f"*/{pattern}" for pattern in FILES if "/" not in pattern))',
        'NOT_NEEDED = ("original/*", "onnx/*", "consolidated*")',
        ("tests/unit/test_hub.py::test_ids_are_merged_and_then_need_no_network",),
    ),
    Fault(
        "cards-needed",
        "A source whose card cannot be read is refused.",
        "merge/card.py",
        "except (FlexQuantError, ValueError, TypeError, yaml.YAMLError):",
        "except (ValueError, TypeError, yaml.YAMLError):",
        ("tests/unit/test_origins.py::test_a_card_that_git_lfs_did_not_fetch_is_none",),
    ),
    Fault(
        "routers-named-quantised",
        "The config of a converted mixture of experts says that its routers are quantised.",
        "merge/packed_formats.py",
        "if not key.endswith(EMBEDDING_WEIGHTS)",
        'if not key.endswith((*EMBEDDING_WEIGHTS, "gate.weight"))',
        ("tests/unit/test_conversion.py::test_each_expert_is_converted_and_routers_stay_in_16_bit",),
    ),
    Fault(
        "what-vllm-keeps-in-32-bit-cast",
        "Tensors in 32 bit are cast to the dtype that is asked for, though vLLM keeps some of them so.",
        "flexquant/checkpoint/cast.py",
        "if tensors[name].dtype not in CASTS.values():",
        'if tensors[name].dtype not in (*CASTS.values(), "F32"):',
        ("tests/unit/test_merging_formats.py::test_what_is_in_32_bit_is_cast_by_the_server",),
    ),
    Fault(
        "every-converted-tensor-kept",
        "A merge keeps each tensor that it has converted until its end.",
        "merge/packed_formats.py",
        "    key = object()\n",
        "    key, _last = object(), _Last()\n",
        ("tests/unit/test_merge_memory.py::test_four_times_the_model_takes_the_same_memory",),
    ),
)
