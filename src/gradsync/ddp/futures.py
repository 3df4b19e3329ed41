"""Waiting for a future of the user's, and not for ever."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradsync.errors import DeadlineError

GRACE = timedelta(seconds=5)  # what a collective inside says when its own time is over tells more


def result_of(
    future: "torch.futures.Future[Any]", group: dist.ProcessGroup, describe: Callable[[], str]
) -> Any:
    """What it holds, or raise what went wrong; that includes that it has come to nothing in time.

    The time is that of a collective of ``group``, from now on.
    """
    if not future.done():
        closed = threading.Lock()
        closed.acquire()
        future.add_done_callback(lambda _: closed.release())
        limit = timeout_of(group) + GRACE
        if not closed.acquire(timeout=min(limit.total_seconds(), threading.TIMEOUT_MAX)):
            raise DeadlineError(
                f"rank {group.rank()} of {group.size()}: {describe()} has returned a future that "
                f"has not completed in {limit}. Somebody has to complete it: call set_result, or "
                "return the future of a collective, or what then() makes of one."
            )
    return future.wait()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective may take; torch's default if the group does not tell."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return default_pg_timeout
