"""How torch makes our groups: by the name of the backend, or in the place of gloo's."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradsync.backend import monitored_barrier
from gradsync.backend.group_base import DEFAULT_TIMEOUT, GroupBase
from gradsync.backend.members import Member
from gradsync.backend.process_group import SharedMemoryGroup


def create(options: Any, _backend_options: object) -> SharedMemoryGroup:
    """What torch calls for ``backend="gradsync"``."""
    ranks = options.global_ranks_in_group
    return SharedMemoryGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout or DEFAULT_TIMEOUT,
        ranks[options.group_rank] if ranks else None,
        _known(ranks),
    )


def _known(ranks: Sequence[int]) -> list[Member]:
    """Those who are to be in a group, as the default group knows them."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, GroupBase):
        return []
    return [replace(world.members[name], rank=rank) for rank, name in enumerate(ranks)]


def register() -> None:
    """Make ``backend="gradsync"`` known to torch."""
    if not hasattr(dist.Backend, "GRADSYNC"):
        dist.Backend.register_backend("gradsync", create, extended_api=True, devices=["cpu"])
        monitored_barrier.serve(SharedMemoryGroup)


class GlooGroup(SharedMemoryGroup):
    """What stands in for torch's ``ProcessGroupGloo``: made as that is, and under its name."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> None:
        name = dist.get_rank() if dist.is_initialized() else None
        super().__init__(store, rank, size, timeout, name)
        if torch.cuda.is_available():
            self._engines.gloo()  # it takes CUDA tensors too, also in messages between two ranks

    def name(self) -> str:
        """Of the backend."""
        return "gloo"
