"""What hooks remember from step to step, for each parameter.

[Note: whose numbers]
DDP lays its buckets out anew after the first backward, and again when parameters are frozen. So
nothing is remembered by bucket. The numbers of a parameter live in a flat tensor with those of
its bucket, which is fast to use, and move with the parameter when it gets into another bucket.
What a hook does with a parameter must not depend on its neighbours either: blocks of int8 start
anew with each parameter, and top-k selects within one. Then a run that was saved and resumed,
whose buckets are those of a first step again, goes on with the same bits.

A saved state has to name parameters, and a hook does not know their names. It goes by the order
in which it first saw them: that of the first backward, which is the same for the same model,
class and bucket sizes. The state holds them bucket by bucket, so that other sizes are noticed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

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


class PerBucket(Generic[T]):
    """What follows from a bucket's layout; built again when another layout has its index."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[object, T]] = {}

    def get(self, bucket: GradBucket, build: Callable[[list[Tensor]], T]) -> T:
        """What ``build`` made, of the parameters of ``bucket``, when it last was laid out."""
        parameters = bucket.parameters()
        buffer = bucket.buffer()
        key = ([id(p) for p in parameters], buffer.numel(), buffer.dtype, buffer.device)
        kept = self._kept.get(bucket.index())
        if kept is None or kept[0] != key:
            # The parameters are kept as well: an id is free again when its object is gone.
            kept = self._kept[bucket.index()] = (key, build(parameters))
        return kept[1]


class ParameterMemory:
    """Some numbers for each parameter; see [Note: whose numbers].

    ``fresh`` fills in the numbers of the n-th parameter that appears, zeros by default.
    """

    def __init__(self, fresh: Callable[[Tensor, int], object] | None = None) -> None:
        self._fresh = fresh
        self._places: dict[int, Tensor] = {}
        self._arrivals: list[list[Tensor]] = []  # parameters, as they came bucket by bucket
        self._saved: list[list[Tensor]] = []

    def lay_out(
        self, owners: Sequence[Owner], length: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A flat tensor with the numbers of ``owners`` at their places, and zeros elsewhere."""
        flat = torch.zeros(length, dtype=dtype, device=device)
        newcomers = []
        for parameter, start, size in owners:
            place = flat[start : start + size]
            known = self._places.get(id(parameter))
            if known is None:
                newcomers.append(parameter)
            else:
                place.copy_(known)
            self._places[id(parameter)] = place
        if newcomers:
            self._welcome(newcomers)
        return flat

    def state(self) -> list[list[Tensor]]:
        """Copies of the numbers, in the order in which their parameters first appeared."""
        seen = [[self._places[id(p)].clone() for p in arrival] for arrival in self._arrivals]
        return seen + self._saved[len(seen) :]

    def load(self, saved: list[list[Tensor]]) -> None:
        """Take over what `state` returned; parameters that are still to appear get theirs then."""
        self._saved = [[numbers.clone() for numbers in arrival] for arrival in saved]
        for index in range(len(self._arrivals)):
            if not self._restore(index):
                raise _no_fit([self._places[id(p)] for p in self._arrivals[index]], [])

    def reset(self, parameters: Sequence[Tensor]) -> None:
        """Back to how they began."""
        for index, parameter in enumerate(parameters):
            place = self._places[id(parameter)]
            if self._fresh is None:
                place.zero_()
            else:
                self._fresh(place, index)

    def _welcome(self, newcomers: list[Tensor]) -> None:
        self._arrivals.append(newcomers)
        if self._restore(len(self._arrivals) - 1) or self._fresh is None:
            return
        before = sum(len(arrival) for arrival in self._arrivals[:-1])
        for ordinal, parameter in enumerate(newcomers, start=before):
            self._fresh(self._places[id(parameter)], ordinal)

    def _restore(self, index: int) -> bool:
        if index >= len(self._saved):
            return False
        places = [self._places[id(p)] for p in self._arrivals[index]]
        saved = self._saved[index]
        if [place.numel() for place in places] != [numbers.numel() for numbers in saved]:
            raise _no_fit(places, saved)
        for place, numbers in zip(places, saved, strict=True):
            place.copy_(numbers)
        return True


def _no_fit(places: Sequence[Tensor], saved: Sequence[Tensor]) -> StateError:
    def sizes(tensors: Sequence[Any]) -> str:
        return str([tensor.numel() for tensor in tensors])

    return StateError(
        "the loaded state of this hook does not fit the model: a bucket of the first backward "
        f"has numbers of sizes {sizes(places)}, and the state has {sizes(saved)}. Load it with the "
        "model, the class and the bucket sizes that it was saved with."
    )


def places_of(bucket: GradBucket) -> list[Owner]:
    """The parameters of a bucket and where their gradients are in its buffer."""
    origin = bucket.buffer().storage_offset()
    return [
        Owner(parameter, int(gradient.storage_offset() - origin), gradient.numel())
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
    ]
