# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""The cost model: how fast a merged checkpoint's variants run on a device, worked out instead of measured.

Needs neither the device nor vLLM. What it rests on stands in :mod:`flexquant.prediction.roofline`; what is
known of each device, and from where, in ``devices/*.yaml``.
"""

from flexquant.prediction.predicting import predict_pass_times

__all__ = ["predict_pass_times"]
