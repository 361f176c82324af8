# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The list of all faults."""

from __future__ import annotations

from tests.faults.fault import Fault
from tests.faults.planted.commands import COMMANDS
from tests.faults.planted.graphs import GRAPHS
from tests.faults.planted.inputs import INPUTS
from tests.faults.planted.kernels import KERNELS
from tests.faults.planted.measuring import MEASURING
from tests.faults.planted.merging import MERGING
from tests.faults.planted.policy import POLICY
from tests.faults.planted.predicting import PREDICTING
from tests.faults.planted.quantising import QUANTISING
from tests.faults.planted.reading import READING
from tests.faults.planted.records import RECORDS
from tests.faults.planted.searching import SEARCHING
from tests.faults.planted.second_round import SECOND_ROUND
from tests.faults.planted.serving import SERVING
from tests.faults.planted.shared_states import SHARED_STATES
from tests.faults.planted.states import IN_STATES
from tests.faults.planted.tuning import TUNING
from tests.faults.planted.writing import WRITING

FAULTS: tuple[Fault, ...] = (
    *POLICY,
    *SERVING,
    *SHARED_STATES,
    *RECORDS,
    *GRAPHS,
    *KERNELS,
    *INPUTS,
    *MERGING,
    *IN_STATES,
    *WRITING,
    *MEASURING,
    *QUANTISING,
    *READING,
    *SEARCHING,
    *TUNING,
    *PREDICTING,
    *COMMANDS,
    *SECOND_ROUND,
)
