# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Judge policies without a GPU: replay a trace of requests through vLLM's scheduling, pass by pass.

    from flexquant.simulation.replaying import replay
    from flexquant.simulation.report import summarise

    passes_and_latencies = replay(read_trace("bursty"), table, PassCost(times), Limits())
    summarise(passes_and_latencies)

`trace` reads the requests (`arrivals` made the built-in traces). `replaying` runs the clock, pass after pass
until every request is served: `scheduler` decides what vLLM puts into the next forward pass, within the
limits that `server` knows, `flexquant.policy.routes` gives the pass its plan, and `pass_cost` its time.
`report` computes TTFT, TPOT, throughput and time per plan. `times` finds the measured times and checks that
they cover a policy.
"""
