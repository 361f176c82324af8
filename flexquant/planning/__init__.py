# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Judge policies without the machine or the load: predict times of passes, and replay a trace of requests.

Predicting needs neither the device nor vLLM. `roofline` has the cost model and its assumptions;
``devices/*.yaml`` have the figures of each device, with their sources. `device` reads them, `model_shape` the
checkpoint, `config_numbers` its config and `linears` its linears, `predicting` computes times of passes, and
`prediction_report` makes the report.

`planned_model` works out from a config.json what a model would be when quantised; `advising` replays loads on
it for each way to serve it and chooses one, and `advice_report` says which and why.

A replay runs a trace through vLLM's scheduling, pass by pass. `trace` reads the requests. `replaying` runs
the clock until every request is served: `scheduler` decides what vLLM puts into the next forward pass, within
the limits of a `server`, `flexquant.policy.routes` gives the pass its plan, and `pass_cost` its time.
`simulation_report` computes TTFT, TPOT, throughput and time per plan. `times` finds the measured times and
checks that they cover a policy.
"""
