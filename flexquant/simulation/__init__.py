# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Policies judged without a GPU: a trace of requests replayed through vLLM's scheduling, pass by pass.

    from flexquant.simulation.replaying import replay
    from flexquant.simulation.report import summarise

    passes_and_latencies = replay(read_trace("bursty"), table, PassCost(times), Limits())
    summarise(passes_and_latencies)

The way through: `trace` (read the requests; `arrivals` made the built-in ones), `scheduler` (what vLLM puts
into the next forward pass; `server`: within which limits), `flexquant.policy.routes` (the plan of that
pass), `pass_cost` (how long it takes), `replaying` (the clock: pass after pass until every request is
served), `report` (TTFT, TPOT, throughput, time per plan). `times` finds the measured times and checks that a
policy can be judged by them.
"""
