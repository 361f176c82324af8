# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Threads that compare a layer each: PyTorch lets go of Python's lock, so they use all cores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Give as many threads as PyTorch would use; each computes on its own core, without PyTorch's threads.

    At the end what has not begun is cancelled, and PyTorch's number of threads is as before.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
