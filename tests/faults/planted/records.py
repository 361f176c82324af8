# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Faults in what a server records of its passes and requests, and in who may change its policy."""

from __future__ import annotations

from tests.faults.fault import Fault

CHANGE = "tests/integration/test_policy_change.py::"
CLIENT = "tests/unit/test_policy_client.py::"
ENDPOINT = "tests/unit/test_policy_endpoint.py::"
REQUESTS = "tests/unit/test_request_plans.py::"
TRACE = "tests/unit/test_trace_file.py::"

RECORDS = (
    Fault(
        "full-disk-under-the-trace",
        "A trace that cannot be written ends the engine.",
        "flexquant/serving/trace.py",
        '            self._end(f"it cannot be written ({e.strerror})")\n',
        "            raise\n",
        (TRACE + "test_a_full_disk_ends_it",),
    ),
    Fault(
        "half-a-line-in-the-trace",
        "A trace ends with the part of a line that the disk took.",
        "flexquant/serving/trace.py",
        "self._file.truncate(self._size)",
        "self._file.flush()",
        (TRACE + "test_a_full_disk_ends_it",),
    ),
    Fault(
        "closing-the-trace-ends-the-engine",
        "A trace whose file cannot even be closed ends the engine.",
        "flexquant/serving/trace.py",
        "            with suppress(OSError):  # a file system may find only now that it has no room\n",
        "            if not file.closed:\n",
        (TRACE + "test_a_file_that_fails_once_more_when_it_is_closed_ends_it",),
    ),
    Fault(
        "trace-without-a-bound",
        "A trace grows until the disk is full.",
        "flexquant/serving/trace.py",
        "if size > self._mib << 20:",
        "if size < 0:",
        (TRACE + "test_it_ends_at_the_size_that_it_may_have",),
    ),
    Fault(
        "metrics-grow-by-holes",
        "The files that a worker counts in have their place on the disk at first, and grow without.",
        "flexquant/serving/metrics.py",
        "os.posix_fallocate(self._f.fileno(), 0, capacity)",
        "self._f.truncate(capacity)",
        ("tests/unit/test_metrics_files.py::test_on_a_full_disk_the_numbers_that_have_a_place_go_on",),
    ),
    Fault(
        "requests-forgotten-under-way",
        "Where many requests are under way, the first are forgotten and begin anew.",
        "flexquant/serving/request_plans.py",
        "(name for name in self._runs if name not in under_way)",
        "(name for name in self._runs)",
        (REQUESTS + "test_requests_under_way_are_kept_however_many_they_are",),
    ),
    Fault(
        "incomplete-not-marked",
        "A request whose first runs have been forgotten looks like a shorter one.",
        "flexquant/serving/request_plans.py",
        "                self._incomplete.add(request)\n",
        "                pass\n",
        (REQUESTS + "test_a_request_that_goes_on_after_it_was_forgotten_is_marked",),
    ),
    Fault(
        "all-requests-taken-for-ended",
        "A worker does not ask vLLM's runner which requests are under way.",
        "flexquant/serving/worker_extension.py",
        "        model.records.requests.under_way = lambda: under_way\n",
        "        assert under_way is not None\n",
        ("tests/gpu/test_requests.py::test_requests_under_way_are_not_forgotten[V1]",),
    ),
    Fault(
        "unforeseen-on-one-rank",
        "A rank that fails in a way that nobody foresaw leaves the others to themselves.",
        "flexquant/serving/ranks.py",
        "    except Exception as e:\n",
        "    except FlexQuantError as e:\n",
        (CHANGE + "test_a_failure_that_nobody_foresaw_changes_nothing",),
    ),
    Fault(
        "pipeline-ranks-not-asked",
        "Of the ranks of an engine only those that share a layer take a step together.",
        "flexquant/serving/ranks.py",
        "for group in (get_tp_group(), get_pp_group()):",
        "for group in (get_tp_group(),):",
        ("tests/integration/test_ranks.py::test_a_step_fails_on_all_ranks_or_on_none[1]",),
    ),
    Fault(
        "derivation-not-compared",
        "Another policy takes a variant for one that was derived from another source.",
        "flexquant/serving/policy_change.py",
        "if after.routes.derived.get(name) != derived.get(name):",
        "if name not in needed:",
        (CHANGE + "test_a_variant_that_was_derived_from_another_is_refused",),
    ),
    Fault(
        "derivation-without-passes",
        "A policy is refused for a variant that it derives for no pass.",
        "flexquant/serving/policy_change.py",
        "    for name in sorted(needed):\n",
        "    for name in after.routes.derived:\n",
        (CHANGE + "test_a_variant_that_is_derived_for_no_pass_need_not_be_there",),
    ),
    Fault(
        "policy-in-the-place-of-an-unseen-one",
        "Of two who change the policy at once, the second replaces what it has not seen.",
        "flexquant/serving/policy_change.py",
        "if seen is not None and before.digest not in seen:",
        "if seen is not None and not seen:",
        (CHANGE + "test_a_policy_replaces_those_alone_that_its_sender_has_seen_and_goes_back_by_name",),
    ),
    Fault(
        "engines-left-apart",
        "Where one engine refuses a policy, the others keep it.",
        "flexquant/serving/policy_endpoint.py",
        '        await _ask_all(request, CAPTURE_TIMEOUT, "flexquant_restore_policy", change)\n',
        "",
        (ENDPOINT + "test_an_engine_that_has_taken_another_meanwhile_keeps_it_and_the_others_go_back",),
    ),
    Fault(
        "disagreement-not-told",
        "The status tells the first engine's policy, whatever the others route by.",
        "flexquant/serving/endpoints.py",
        "if len(policies) > 1 else {}",
        "if not policies else {}",
        (ENDPOINT + "test_the_status_says_where_engines_disagree",),
    ),
    Fault(
        "first-key-alone",
        "Of several keys of vLLM's only the first is taken.",
        "flexquant/serving/endpoints.py",
        "for key in keys]\n    if not any",
        "for key in keys[:1]]\n    if not any",
        (ENDPOINT + "test_every_key_of_vllms_is_taken",),
    ),
    Fault(
        "key-follows-a-redirect",
        "The administrator's key goes to whomever the server names.",
        "flexquant/serving/client.py",
        "urllib.request.build_opener(_NoRedirects)",
        "urllib.request.build_opener()",
        (CLIENT + "test_the_key_follows_no_redirect",),
    ),
    Fault(
        "key-in-a-message",
        "A key that is not printable ASCII is taken.",
        "flexquant/serving/client.py",
        "if not (key.isprintable() and key.isascii()):",
        "if key is None:",
        (CLIENT + "test_a_key_that_is_not_printable_ascii_is_refused_and_not_shown",),
    ),
    Fault(
        "key-of-latin-1",
        "A key is taken that clients send as other bytes than the server reads.",
        "flexquant/serving/client.py",
        " and key.isascii()",
        "",
        (CLIENT + "test_a_key_that_is_not_printable_ascii_is_refused_and_not_shown",),
    ),
    Fault(
        "newline-in-the-key",
        "A newline behind the administrator's key is taken for a part of it.",
        "flexquant/serving/client.py",
        'os.environ.get(ADMIN_KEY, "").strip()',
        'os.environ.get(ADMIN_KEY, "")',
        (CLIENT + "test_space_around_the_key_is_none_of_it",),
    ),
    Fault(
        "pass-timed-twice",
        "A pass whose logits are asked for twice is counted twice.",
        "flexquant/serving/pass_times.py",
        "began, self._began = self._began, None",
        "began = self._began",
        ("tests/unit/test_pass_clock.py::test_a_pass_is_timed_once_and_only_if_it_began",),
    ),
    Fault(
        "counters-of-one-engine",
        "Of several engines' counters the first alone are told.",
        "flexquant/serving/endpoints.py",
        "cells.setdefault(where, Counter()).update(",
        "cells[where] = cells.get(where) or Counter(",
        ("tests/unit/test_pass_clock.py::test_counters_of_engines_are_added_by_plan_and_phase",),
    ),
)
