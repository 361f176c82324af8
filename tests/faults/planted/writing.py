# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in writing: all or nothing, on the disk, and readable by others."""

from __future__ import annotations

from tests.faults.fault import Fault

MERGE = "tests/unit/test_merge.py::"
OUTPUT = "tests/unit/test_output.py::"
VERIFY = "tests/unit/test_split_verify.py::"

WRITING = (
    Fault(
        "output-replaced-in-two-steps",
        "The old output is removed before the new one takes its place.",
        "flexquant/checkpoint/output.py",
        "    if _renamed(stage, target, RENAME_EXCHANGE):\n",
        "    shutil.rmtree(target)\n    os.rename(stage, target)\n    if True:\n",
        (OUTPUT + "test_killed_before_any_operation_it_leaves_the_old_output_or_none[True-exchange]",),
    ),
    Fault(
        "what-appeared-is-replaced",
        "What came to lie at the output while it was written is deleted unasked.",
        "flexquant/checkpoint/output.py",
        "    if not (overwrite and _is_checkpoint(target)):\n",
        "    if False:\n",
        (OUTPUT + "test_what_appears_meanwhile_is_told_and_stays",),
    ),
    Fault(
        "merging-replaces-unasked",
        "A checkpoint that came to lie at a merge's output is replaced without --overwrite.",
        "merge/merging.py",
        "staged_folder(output, overwrite=overwrite)",
        "staged_folder(output, overwrite=True)",
        (MERGE + "test_a_checkpoint_that_appears_meanwhile_is_replaced_only_when_told_to",),
    ),
    Fault(
        "root-taken-for-an-output",
        "The root of the file system is taken for a folder to write beside.",
        "flexquant/checkpoint/output.py",
        "    if not target.name:\n",
        "    if False:\n",
        (OUTPUT + "test_a_name_that_no_output_can_have_is_one_sentence",),
    ),
    Fault(
        "pipe-replaced",
        "A file takes the place of the pipe or device that was to be written to.",
        "flexquant/checkpoint/output.py",
        "    if file.exists() and not file.is_file():\n",
        "    if False:\n",
        (OUTPUT + "test_a_pipe_is_written_to_and_stays",),
    ),
    Fault(
        "what-was-to-be-replaced-is-deleted",
        "After a crash between two renames a folder made at the output costs the old checkpoint.",
        "flexquant/checkpoint/output.py",
        "(stage.exists() or not target.exists())",
        "not target.exists()",
        (OUTPUT + "test_killed_before_any_operation_it_leaves_the_old_output_or_none[True-two renames]",),
    ),
    Fault(
        "failed-swap-looks-finished",
        "A swap that cannot be undone looks like a finished one, so that the old checkpoint is deleted.",
        "flexquant/checkpoint/output.py",
        "                if not _beside(target, OLD).exists():",
        "                if True:",
        (OUTPUT + "test_what_appears_between_the_two_renames_does_not_cost_the_old_copy",),
    ),
    Fault(
        "folder-written-as-a-file",
        "A folder that was named for a file is given to the writer like a pipe.",
        "flexquant/checkpoint/output.py",
        "    if file.is_dir():\n",
        "    if False:\n",
        (OUTPUT + "test_a_folder_in_the_place_of_a_file_is_one_sentence",),
    ),
    Fault(
        "leftovers-by-a-common-name",
        "What others call half done beside an output is taken for a dead run's.",
        "flexquant/checkpoint/output.py",
        ".flexquant-{what}",
        ".{what}",
        (OUTPUT + "test_what_others_keep_beside_an_output_stays",),
    ),
    Fault(
        "no-sync-before-the-rename",
        "An output is in its place before its files are on the disk.",
        "flexquant/checkpoint/output.py",
        'for path in (*stage.rglob("*"), stage):',
        "for path in (stage,):",
        (OUTPUT + "test_everything_is_on_the_disk_before_the_output_is_in_its_place",),
    ),
    Fault(
        "no-sync-after-the-rename",
        "That an output is in its place is not on the disk when the command ends.",
        "flexquant/checkpoint/output.py",
        "                sync(target.parent)\n",
        "",
        (OUTPUT + "test_everything_is_on_the_disk_before_the_output_is_in_its_place",),
    ),
    Fault(
        "file-not-synced",
        "A file is in its place before its content is on the disk.",
        "flexquant/checkpoint/output.py",
        "        sync(partial)\n",
        "",
        (OUTPUT + "test_a_file_is_on_the_disk_before_it_is_in_its_place",),
    ),
    Fault(
        "link-replaced",
        "A file takes the place of the link that led to it.",
        "flexquant/checkpoint/output.py",
        "    target = Path(os.path.realpath(file))\n",
        "    target = file\n",
        (OUTPUT + "test_a_link_still_leads_to_the_file_that_is_written",),
    ),
    Fault(
        "tensors-not-aligned",
        "Tensors lie in the order of their names, wherever that puts wide numbers.",
        "flexquant/checkpoint/writer.py",
        "key=lambda item: (-item[1].alignment, item[0])",
        "key=lambda item: item[0]",
        (MERGE + "test_every_tensor_lies_where_a_reader_can_map_it",),
    ),
    Fault(
        "headers-not-padded",
        "Tensors begin wherever the header ends.",
        "flexquant/checkpoint/writer.py",
        '    text += b" " * (-len(text) % HEADER_ALIGNMENT)\n',
        "",
        (MERGE + "test_every_tensor_lies_where_a_reader_can_map_it",),
    ),
    Fault(
        "numbers-that-json-lacks",
        "What only Python reads as JSON is read, and written on.",
        "flexquant/checkpoint/folder.py",
        "        check_finite(content)\n        if",
        "        if",
        (MERGE + "test_what_only_python_reads_as_json_is_not_written_on",),
    ),
    Fault(
        "added-files-not-named",
        "Verifying does not see files that the merge did not write.",
        "flexquant/checkpoint/recorded_hashes.py",
        "if added := _unknown_files(checkpoint) if files else []:",
        "if added := []:",
        (VERIFY + "test_verify_names_files_that_the_merge_did_not_write",),
    ),
    Fault(
        "provenance-not-checked",
        "What the provenance holds is taken for what it should hold.",
        "flexquant/checkpoint/provenance.py",
        "Provenance.model_validate(read_json(file))",
        "Provenance.model_construct(**read_json(file))",
        (VERIFY + "test_a_malformed_provenance_is_one_sentence",),
    ),
)
