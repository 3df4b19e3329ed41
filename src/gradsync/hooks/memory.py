"""What hooks remember from step to step, for each parameter.

[Note: whose numbers]
DDP lays its buckets out anew after the first backward, and again when parameters are frozen. So
nothing is remembered by bucket. The numbers of a parameter live in a flat tensor with those of
its bucket, which is fast to use, and move with the parameter when it gets into another bucket.
What a hook does with a parameter must not depend on its neighbours either: blocks of int8 start
anew with each parameter, and top-k selects within one. Then a run that was saved and resumed,
whose buckets are those of a first step again, goes on with the same bits.

A saved state has to name parameters, and a hook does not know their names. It numbers them in the
order in which it first sees them: that of the first backward, which is the same for the same
model, class and bucket sizes. The state tells the sizes of the parameters, bucket by bucket, so
that another model or other buckets are noticed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsync.errors import StateError

T = TypeVar("T")


class Owner(NamedTuple):
    """A parameter and where its numbers are in a flat tensor."""

    parameter: Tensor
    start: int
    size: int


class Roster:
    """The number of each parameter; see [Note: whose numbers]."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        # The parameters are kept: an id is free again when its object is gone.
        self._arrivals: list[list[Tensor]] = []
        self._saved: list[list[int]] = []

    def meet(self, parameters: Sequence[Tensor]) -> None:
        """Give numbers to those of a bucket that have none."""
        newcomers = [p for p in parameters if id(p) not in self._numbers]
        if not newcomers:
            return
        self._arrivals.append(newcomers)
        self._compare(len(self._arrivals) - 1)
        for parameter in newcomers:
            self._numbers[id(parameter)] = len(self._numbers)

    def number(self, parameter: Tensor) -> int:
        """The number of a parameter that was met."""
        return self._numbers[id(parameter)]

    def state(self) -> list[list[int]]:
        """The sizes of the parameters, as they came bucket by bucket."""
        sizes = [[p.numel() for p in arrival] for arrival in self._arrivals]
        return sizes + self._saved[len(sizes) :]

    def load(self, saved: list[list[int]]) -> None:
        """From now on the parameters have to be those whose sizes `state` returned."""
        self._saved = saved
        for index in range(len(self._arrivals)):
            self._compare(index)

    def _compare(self, index: int) -> None:
        if index >= len(self._saved):
            return
        sizes = [parameter.numel() for parameter in self._arrivals[index]]
        if sizes != self._saved[index]:
            raise StateError(
                "the loaded state of this hook does not fit the model: in its first backward, "
                f"bucket {index} has parameters of {sizes} elements, and in the state they have "
                f"{self._saved[index]}. Load it with the model, the class and the bucket sizes "
                "that it was saved with."
            )


class PerBucket(Generic[T]):
    """What follows from a bucket's layout; built again when another layout has its index."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._kept: dict[int, tuple[object, T]] = {}

    def get(self, bucket: GradBucket, build: Callable[[], T]) -> T:
        """What ``build`` made when ``bucket`` was last laid out."""
        parameters = bucket.parameters()
        buffer = bucket.buffer()
        key = ([id(p) for p in parameters], buffer.numel(), buffer.dtype, buffer.device)
        kept = self._kept.get(bucket.index())
        if kept is None or kept[0] != key:
            self._roster.meet(parameters)
            kept = self._kept[bucket.index()] = (key, build())
        return kept[1]

    def keep_first(self, buckets: int) -> None:
        """Drop what belongs to buckets that there no longer are."""
        if len(self._kept) > buckets:
            self._kept = {index: kept for index, kept in self._kept.items() if index < buckets}


class ParameterMemory:
    """Some numbers for each parameter of a roster.

    ``fresh`` fills in those that the n-th parameter begins with, zeros by default.
    """

    def __init__(
        self, roster: Roster, fresh: Callable[[Tensor, int], object] | None = None
    ) -> None:
        self._roster = roster
        self._fresh = fresh or (lambda place, number: place.zero_())
        self._places: dict[int, Tensor] = {}
        self._saved: dict[int, Tensor] = {}

    def lay_out(
        self, owners: Sequence[Owner], length: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A flat tensor with the numbers of ``owners`` at their places, and zeros elsewhere."""
        flat = torch.zeros(length, dtype=dtype, device=device)
        for parameter, start, size in owners:
            number = self._roster.number(parameter)
            place = flat[start : start + size]
            known = self._places.get(number)
            if known is None:
                self._begin(place, number)
            else:
                place.copy_(known)
            self._places[number] = place
        return flat

    def state(self) -> dict[int, Tensor]:
        """Copies of the numbers, by the number of the parameter."""
        return self._saved | {number: place.clone() for number, place in self._places.items()}

    def load(self, saved: dict[int, Tensor]) -> None:
        """Take over what `state` returned; parameters that are still to come get theirs then."""
        self._saved = {number: numbers.clone() for number, numbers in saved.items()}
        for number, place in self._places.items():
            self._begin(place, number)

    def begin_anew(self, parameters: Iterable[Tensor], salt: int = 0) -> None:
        """Back to what they began with; another ``salt`` gives another beginning."""
        for parameter in parameters:
            number = self._roster.number(parameter)
            self._fresh(self._places[number], number + salt * 1_000_003)

    def _begin(self, place: Tensor, number: int) -> None:
        if number in self._saved:
            place.copy_(self._saved.pop(number))
        else:
            self._fresh(place, number)


def places_of(bucket: GradBucket) -> list[Owner]:
    """The parameters of a bucket and where their gradients are in its buffer."""
    origin = bucket.buffer().storage_offset()
    return [
        Owner(parameter, int(gradient.storage_offset() - origin), gradient.numel())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
