"""What the ranks tell each other in the last bucket of a step, behind its gradients.

[Note: the trailer] Two things have to be known on all ranks at the end of a backward: whether
every rank got through it, and, where unused parameters are allowed, which parameters were used
anywhere. Both are sums over ranks, so they ride as extra elements of the last bucket and cost
no collective of their own:

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
from torch import Tensor


class Incident(IntFlag):
    """What a rank may have to report of a step."""

    UNUSED = 1  # parameters got no gradient though that is not allowed
    ABANDONED = 2  # the backward raised
    FORWARD_FAILED = 4  # a forward before this backward raised


@dataclass(frozen=True)
class Statement:
    """What one rank says of its step: incidents, forwards since the last one, parameters used."""

    incidents: Incident
    forwards: int
    used: Sequence[bool]

    def encode(self, device: torch.device) -> Tensor:
        return torch.tensor(
            [int(self.incidents), self.forwards, *map(int, self.used)],
            dtype=torch.int64,
            device=device,
        )

    @classmethod
    def decode(cls, encoded: Tensor) -> "Statement":
        incidents, forwards, *used = encoded.tolist()
        return cls(Incident(incidents), forwards, [bool(flag) for flag in used])


def trailer_size(parameters: int, *, with_usage: bool) -> int:
    return 1 + parameters if with_usage else 1


def write_trailer(tail: Tensor, *, incident: bool, used: Sequence[bool] | None) -> None:
    """``used`` is None where usage is not asked for."""
    if used is None:
        tail.fill_(float(incident))
    else:
        tail.copy_(torch.tensor([incident, *used], dtype=tail.dtype))


def has_incident(tail: Tensor) -> bool:
    return bool(tail[0] != 0)


def usage(tail: Tensor) -> list[bool]:
    """For each parameter, whether any rank used it."""
    return [count != 0 for count in tail[1:].tolist()]


def usage_counts(tail: Tensor) -> Tensor:
    """For each parameter, how many ranks used it."""
    return tail[1:].real.to(torch.int32) if tail.is_complex() else tail[1:].to(torch.int32)
