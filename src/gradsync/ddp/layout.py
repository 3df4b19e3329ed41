"""Which buckets there are: laid out at first by guess, then in the order of the gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.ddp import messages
from gradsync.ddp.bucket import Bucket, Packing, Slot
from gradsync.ddp.plan import MIB, BucketCaps, Item, Plan, initial_plan, make_plan
from gradsync.ddp.rollcall import trailer_size
from gradsync.ddp.special_buckets import SparseBucket, make_buckets
from gradsync.errors import ArgumentError


@dataclass(frozen=True)
class ReducerOptions:
    """What the constructor of DDP asked for, as far as the reducer is concerned."""

    caps: Callable[[bool], BucketCaps]  # given whether buckets will be rebuilt
    find_unused: bool = False
    as_views: bool = False
    skip_unused: bool = False
    mean: bool = True  # else the sum
    reduce_dtype: torch.dtype | None = None


class Layout:
    """Makes the buckets of a reducer.

    ``trailer_apart`` gives what the ranks report a bucket of its own: a hook must not see it,
    unless it carries it.
    """

    def __init__(self, slots: Sequence[Slot], packing: Packing, options: ReducerOptions) -> None:
        self._slots = slots
        self._packing = packing
        self._options = options
        self._rows: dict[Slot, Tensor] = {}  # of sparse gradients, where they are announced
        self.static_graph = False
        self.trailer_apart = False

    @property
    def will_rebuild(self) -> bool:
        """Are the buckets laid out anew after the first step?"""
        return self.static_graph or not self._options.find_unused

    @property
    def caps(self) -> BucketCaps:
        """How large buckets may grow."""
        return self._options.caps(self.will_rebuild)

    @property
    def _solo_bytes(self) -> float:
        """From which size on a gradient has a bucket for itself, and is not copied."""
        if self._packing.memory is not None and self._options.as_views:
            return math.inf  # it is copied once anyway: to where all ranks can map it
        return max(self.caps.cap_bytes / 4, MIB)

    def initial(self, *, with_usage: bool) -> list[Bucket]:
        """The buckets before any gradient has been seen."""
        return self._make(initial_plan(self._items(), self.caps.initial), with_usage)

    def in_order(self, order: Sequence[int], *, with_usage: bool) -> list[Bucket]:
        """The buckets for gradients that come in ``order``."""
        return self._make(make_plan(self._items(), order, self.caps.rebuilt), with_usage)

    def expect_rows(self, rows: Mapping[str, Tensor], buckets: Sequence[Bucket]) -> None:
        """Announce the rows of sparse gradients, by parameter; they hold until set anew."""
        by_name = {slot.name: slot for slot in self._slots if slot.sparse}
        for name in rows:
            if name not in by_name:
                raise ArgumentError(messages.no_sparse_parameter(name, list(by_name)))
        self._rows = {by_name[name]: each for name, each in rows.items()}
        self._announce_rows(buckets)

    def _announce_rows(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if isinstance(bucket, SparseBucket) and bucket.slots[0] in self._rows:
                bucket.expect_rows(self._rows[bucket.slots[0]])

    def _items(self) -> list[Item]:
        return [
            Item(
                slot.nbytes,
                (slot.param.dtype, slot.param.device),
                alone=slot.sparse or slot.nbytes >= self._solo_bytes,
            )
            for slot in self._slots
        ]

    def _make(self, plan: Plan, with_usage: bool) -> list[Bucket]:
        buckets = make_buckets(
            plan,
            self._slots,
            self._packing,
            solo_bytes=self._solo_bytes,
            extra=trailer_size(len(self._slots), with_usage=with_usage),
            extra_apart=self.trailer_apart,
        )
        self._announce_rows(buckets)
        return buckets
