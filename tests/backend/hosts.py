"""Machines, feigned by ``GRADSYNC_MACHINE``, and ranks that cannot share memory."""

from __future__ import annotations

import errno
from datetime import timedelta
from typing import Any

import seccomp
import torch.distributed as dist

DEADLINE = 1.5  # seconds, set when all have met: to meet may take longer


def machines(layout: str) -> dict[str, Any]:
    """For ``Nursery.run``: a rank for every letter, on the machine of that name."""
    return {"ranks": len(layout), "env": [{"GRADSYNC_MACHINE": name} for name in layout]}


def apart(ranks: int) -> dict[str, Any]:
    """The same for ranks of one machine of which none can make a segment."""

    def prepare(rank: int) -> None:
        seccomp.forbid("memfd_create", errno.EPERM)

    return {"ranks": ranks, "prepare": prepare}


def store_of_group() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def set_deadline(seconds: float) -> None:
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
