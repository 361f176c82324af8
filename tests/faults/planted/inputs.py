# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in checking other people's files, damaged or odd, before anything uses them."""

from __future__ import annotations

from tests.faults.fault import Fault

SOURCES = "tests/unit/test_source_errors.py::"
LINEARS = "tests/unit/test_dequantize.py::"

INPUTS = (
    Fault(
        "linears-of-any-shape",
        "Scales, zero points and biases may have any shape.",
        "flexquant/checkpoint/schemes.py",
        "if ref is not None and ref.shape not in shapes:",
        "if False:",
        (f"{LINEARS}test_parameters_that_do_not_fit_are_refused_by_their_shapes",),
    ),
    Fault(
        "weights-of-any-dtype",
        "A weight may be stored in another dtype than its scheme's.",
        "flexquant/checkpoint/schemes.py",
        "if weight.dtype != dtype:",
        "if False:",
        (f"{LINEARS}test_parameters_that_do_not_fit_are_refused_by_their_shapes",),
    ),
    Fault(
        "inputs-in-another-order",
        "What vLLM refuses when it starts is merged.",
        "flexquant/checkpoint/loadable.py",
        'if group.weights.actorder in ("group", "dynamic"):',
        "if False:",
        (f"{LINEARS}test_inputs_in_another_order_are_refused_when_merging_since_vllm_does_not_undo_it",),
    ),
    Fault(
        "packed-shapes-believed",
        "A weight is taken to have whatever shape is stored beside it.",
        "flexquant/checkpoint/schemes.py",
        "if not fits or not 1 <=",
        "if False and not 1 <=",
        (f"{LINEARS}test_parameters_that_do_not_fit_are_refused_by_their_shapes",),
    ),
    Fault(
        "patterns-not-compiled",
        "Names of linears may be patterns that are none.",
        "flexquant/checkpoint/schemes.py",
        'match_name("", name)',
        "str(name)",
        (f"{LINEARS}test_a_senseless_section_is_named",),
    ),
    Fault(
        "configs-that-transformers-refuses",
        "What transformers says about a config's types ends in a traceback.",
        "flexquant/checkpoint/known_models.py",
        "except Exception as e:  # a config class",
        "except ValueError as e:  # each class",
        (f"{SOURCES}test_numbers_of_a_config_that_no_model_has",),
    ),
    Fault(
        "no-heads",
        "A model may have 0 heads.",
        "flexquant/checkpoint/known_models.py",
        "not 1 <= value <= MAX_NUMBER",
        "value > MAX_NUMBER",
        (f"{SOURCES}test_numbers_of_a_config_that_no_model_has",),
    ),
    Fault(
        "pointers-for-files",
        "What git-lfs keeps in the place of a file is taken for the file.",
        "flexquant/checkpoint/folder.py",
        "if file.read(len(LFS_POINTER)) == LFS_POINTER:",
        "if False:",
        (f"{SOURCES}test_a_pointer_of_git_lfs_is_called_one",),
    ),
    Fault(
        "halves-of-characters",
        "Tensors may have names that cannot be written.",
        "flexquant/checkpoint/safetensors_io.py",
        '"".join(result).encode()  # raises',
        '"".join(result)  # raises',
        (f"{SOURCES}test_half_a_character_in_a_name_is_refused",),
    ),
    Fault(
        "tokenizers-own-exceptions",
        "A broken tokenizer ends in a traceback.",
        "flexquant/checkpoint/known_models.py",
        "(Exception,)",
        "(OSError, ValueError)",
        (f"{SOURCES}test_a_tokenizer_that_cannot_be_read_is_named",),
    ),
    Fault(
        "folders-named-twice",
        "A message on a folder that is no merged checkpoint says its path twice.",
        "flexquant/checkpoint/served_config.py",
        'f"{e}; give the folder',
        'f"{folder}: {e}; give the folder',
        (f"{SOURCES}test_a_folder_that_is_no_merged_checkpoint_is_named_once",),
    ),
    Fault(
        "numbers-to-base-8-or-60",
        "010 is read as 8.",
        "flexquant/documents/yaml_document.py",
        "and OLD_NUMBER.fullmatch(node.value)",
        "and False",
        (
            "tests/unit/test_yaml_document.py::test_a_number_that_only_yaml_1_1_reads_to_another_base_is_refused",
        ),
    ),
    Fault(
        "keys-of-any-length",
        "A key has more digits than Python makes a number of.",
        "flexquant/documents/yaml_document.py",
        "if len(key) > MAX_KEY:",
        "if False:",
        ("tests/unit/test_policy_refusals.py",),
    ),
    Fault(
        "counters-that-begin-again",
        "The traffic of a server that was started again is less than none.",
        "flexquant/tuning/traffic.py",
        "after.get(counter, -1.0) < value",
        "False",
        ("tests/unit/test_retuning.py::test_a_server_that_was_started_again_meanwhile_is_refused",),
    ),
    Fault(
        "settings-beside-the-config-not-served",
        "A published INT4 checkpoint whose settings lie in a file of their own is merged, and not served.",
        "flexquant/checkpoint/served_config.py",
        "return config if section is None else",
        "return config if True else",
        ("tests/unit/test_served_config.py::test_settings_in_a_file_of_their_own_are_read",),
    ),
    Fault(
        "verified-unasked",
        "A start verifies the checkpoint though nobody asked, so an id of the Hub is refused as no folder.",
        "flexquant/serving/registration.py",
        "if not ServingOptions.from_vllm(vllm_config).verify:",
        "if False:",
        ("tests/integration/test_hub_serving.py::test_a_merged_checkpoint_is_served_by_its_id",),
    ),
)
