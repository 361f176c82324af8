# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What runs in the API server's process: the routes under ``/flexquant``, and ``/metrics``."""
