# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant advise`: which way to serve a model on a device, from its config.json and a data sheet.

device          reads device files: bandwidths, rates and overheads
config_numbers  reads the heads, the layers with a KV cache and the experts of a config
planned_model   works out the linears and bytes that a model would have in each scheme
roofline        predicts the time of a forward pass from bytes, operations and overheads
batch_serving   predicts the latencies of requests that arrive at once, pass after pass
advising        tries each way to serve the model, chooses one, and says why
"""
