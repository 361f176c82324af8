# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Start threads that compare one layer each; PyTorch releases the GIL, so they use all cores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of as many threads as PyTorch uses; inside each, PyTorch computes on one thread.

    On leaving, tasks that have not begun are cancelled, and PyTorch's number of threads is restored.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
