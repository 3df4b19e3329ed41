"""Keeps the ranks of a heat together: the start, the gathering of results, and the stop.

[Note: apart from what is measured]
Barriers and results travel on a gloo group of their own, between the turns. They neither depend on
the backend under test nor are they in any measured time.

[Note: stopping]
Ctrl-C asks. The question is answered at the end of each turn, by all ranks alike: they leave after
the same turn, no collective is torn apart, and what was measured stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

DEADLINE: Final = timedelta(minutes=10)  # of one turn, the slowest rank's

Item = TypeVar("Item")


class Stopped(Exception):
    """The user stopped the run; all ranks raise it after the same turn."""


class Meeting:
    """The ranks 0 to ``world - 1``, and a group of them on each backend.

    All processes of the default group construct it, in the same order, also those that are not
    among the ranks: so torch wants it.
    """

    def __init__(
        self,
        world: int,
        backends: Sequence[str] = (),
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.world = world
        self.rank = dist.get_rank()
        self.groups = {backend: self._new_group(backend) for backend in backends}
        self._group = self._new_group("gloo")
        self._is_asked_to_stop = is_asked_to_stop

    def barrier(self) -> None:
        """Wait for all."""
        dist.barrier(group=self._group)

    def gather(self, own: Item) -> list[Item]:
        """What each rank has, on all of them; raises ``Stopped`` if any was asked to stop."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, (own, self._is_asked_to_stop()), group=self._group)
        if any(stop for _, stop in everyone):
            raise Stopped
        return [value for value, _ in everyone]

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        ranks = list(range(self.world))
        group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=DEADLINE)
        return group


def turns(contenders: Sequence[Item], number: int) -> list[Item]:
    """The order in a round: forward, then backward, then both again from the next on.

    So everyone comes first, and everyone before and after everyone else, equally often.

    >>> ["".join(turns("abc", number)) for number in range(6)]
    ['abc', 'cba', 'bca', 'acb', 'cab', 'bac']
    """
    shift = number // 2 % len(contenders)
    order = [*contenders[shift:], *contenders[:shift]]
    return order[::-1] if number % 2 else order
