"""What the ranks tell each other of a step: a trailer in every step, a roll call if need be.

[Note: the trailer] Two things have to be known on all ranks at the end of a backward: whether
every rank got through it, and, where unused parameters are allowed, which parameters were used
anywhere. Both are sums over ranks, so they ride as extra elements behind the gradients of the
last bucket and cost no collective of their own:

- element 0 counts the ranks that have something to report. It is 0 in an ordinary step.
- the others, if usage is asked for, count for each parameter the ranks that used it.

Both are read as «zero or not», which is exact in any floating dtype whatever the world size.
Only when somebody has something to report do the ranks hold a roll call, an all-gather of a
``Statement`` of each, from which all of them draw the same conclusion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.ddp.collectives import Work, all_gather, wait


class Incident(IntFlag):
    """What a rank may have to report of a step."""

    UNUSED = 1  # parameters got no gradient though that is not allowed
    ABANDONED = 2  # the backward raised
    FORWARD_FAILED = 4  # a forward before this backward raised
    PARTIAL = 8  # gradients are missing, and that is allowed


@dataclass(frozen=True)
class Statement:
    """What one rank says of a step.

    ``used`` and ``unused`` are by parameter. A parameter may be neither: frozen, or not part of
    this rank's static graph.
    """

    incidents: Incident
    forwards: int  # since the last step
    used: Sequence[bool]
    unused: Sequence[bool]


class RollCall:
    """An all-gather of the ranks' statements, begun when it is made."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, mine: Statement, step: int
    ) -> None:
        encoded = [int(mine.incidents), mine.forwards, *map(int, mine.used), *map(int, mine.unused)]
        self._group = group
        self._step = step
        self._answers: list[Tensor]
        self._work: Work
        self._answers, self._work = all_gather(
            group, torch.tensor(encoded, dtype=torch.int64, device=device)
        )

    def wait(self) -> list[Statement]:
        """The statements by rank."""
        wait(self._work, self._group, lambda: f"the roll call after step {self._step}")
        statements = []
        for answer in self._answers:
            incidents, forwards, *flags = answer.tolist()
            used, unused = flags[: len(flags) // 2], flags[len(flags) // 2 :]
            statements.append(Statement(Incident(incidents), forwards, used, unused))
        return statements


def trailer_size(parameters: int, *, with_usage: bool) -> int:
    """How many extra elements the last bucket has."""
    return 1 + parameters if with_usage else 1


def write_trailer(tail: Tensor, *, incident: bool, used: Sequence[bool] | None) -> None:
    """Fill in this rank's part; ``used`` is None where usage is not asked for."""
    if used is None:
        tail.fill_(incident)
    else:
        tail.copy_(torch.tensor([incident, *used], dtype=tail.dtype, device="cpu"))


def has_incident(tail: Tensor) -> bool:
    """After the reduction: has any rank something to report?"""
    return bool((tail if tail.numel() == 1 else tail[0]).item() != 0)


def usage_counts(tail: Tensor) -> Tensor:
    """After the reduction: for each parameter, how many ranks used it."""  # 1D
    counts = tail[1:]
    return (counts.real if counts.is_complex() else counts).ceil().to(torch.int32)
