# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""`flexquant advise`: which way to serve a model on a device, from its config.json and a data sheet."""
