# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Predict with a cost model how fast a merged checkpoint's variants run on a device.

Predicting needs neither the device nor vLLM. :mod:`flexquant.prediction.roofline` has the model and its
assumptions; ``devices/*.yaml`` have the figures of each device, with their sources.
"""

from flexquant.prediction.predicting import predict_pass_times

__all__ = ["predict_pass_times"]
