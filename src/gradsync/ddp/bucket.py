"""One bucket: gradients of one or several parameters, reduced by one collective.

A bucket knows where its gradients are brought together and how many are still to come. It
knows nothing of steps and ranks: those are the reducer's. The kind here has dense gradients side
by side in one flat buffer; ``special_buckets`` has the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import is_

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.backend.shared_memory import PersistentReduction
from gradsync.ddp.autograd import GradientWatch
from gradsync.ddp.collectives import Work
from gradsync.ddp.distributed_autograd import IN_GRAD, Home
from gradsync.errors import StateError

LARGE_BYTES = 64 * 1024
SERIES = 8  # so many gradients of one shape are worth a call of their own
NOWHERE = torch.empty(0)


class Slot:
    """One parameter's place: which bucket it is in, and what it did in this step.

    ``fires`` counts the gradients of this step, ``due`` how many make it ready: 1, or, under
    a static graph, as many as in the first step. A slot that is not waited for (frozen, or
    unused in a static graph) is due 0.
    """

    __slots__ = (
        "bucket",
        "due",
        "eager",
        "fires",
        "frozen",
        "index",
        "lendable",
        "name",
        "nbytes",
        "packed",
        "param",
        "shares",
        "sparse",
        "used_unsynced",
        "view",
    )

    def __init__(self, index: int, name: str, param: Parameter, *, sparse: bool = False) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.sparse = sparse
        self.nbytes = param.numel() * param.element_size()  # of its gradient
        self.fires = 0
        self.due = 1
        self.frozen = False  # requires_grad was switched off: its .grad is left alone
        self.used_unsynced = False  # has a gradient from no_sync that is not reduced yet
        self.eager = False  # large: goes into its bucket as soon as it is ready
        self.packed = False  # is in its bucket, in this step
        self.shares = False  # its gradient came on the memory of another's
        self.lendable: bool | None = None  # its gradient shares no memory; None: not looked at
        self.bucket: Bucket
        self.view: Tensor  # its part of the bucket's buffer

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.name!r})"


@dataclass
class Packing:
    """How gradients go into buckets; shared by all buckets of a reducer."""

    scale: float = 1.0  # what they are multiplied with
    dtype: torch.dtype | None = None  # what they are reduced in, if not their own
    as_views: bool = False  # let .grad be the place in the bucket
    home: Home = IN_GRAD  # where the gradients of this step are
    # Memory that the other ranks can map, if the group has such: it is reduced without a copy.
    memory: Callable[[int, torch.dtype], Tensor] | None = None
    by_shape: bool = True  # put small ones of one shape side by side; a hook may mind
    fused: bool = False  # the reduction averages: nothing is to be scaled before
    # Large gradients of this step by address, see [Note: lending]: those lent, and the others.
    lent: dict[int, Slot] = field(default_factory=dict)
    kept: dict[int, Slot] = field(default_factory=dict)


class Bucket:
    """Slots whose dense gradients lie in one flat buffer, in the order of ``slots``.

    [Note: large and small] A large gradient is scaled into the buffer when it is ready: in one
    pass, while it is in the cache, and with views its own memory is free at once. Small ones
    wait until the bucket is full and are copied together, since for them the calls cost more
    than the bytes. They come first in the buffer, so that they can be scaled together too, and
    those of one shape side by side: many of them (``SERIES``) are concatenated, which takes less
    than half the time of as many copies.

    ``extra`` elements behind the gradients travel with them: see [Note: the trailer]. A bucket
    of nothing but extra elements has no slots.
    """

    reuses_buffer = True  # what is reduced lies in the same memory in every step

    def __init__(
        self, slots: Sequence[Slot], packing: Packing, like: Tensor, *, extra: int = 0
    ) -> None:
        self.index = 0  # in the order of launch
        self.is_last = False  # of those with gradients
        self.packing = packing
        self.slots = _in_order(slots, by_shape=packing.by_shape)
        casts = packing.dtype is not None and like.is_floating_point()
        self.dtype = packing.dtype if casts and packing.dtype is not None else like.dtype
        self.device = like.device
        self.numel = sum(slot.param.numel() for slot in slots)
        self.extra = extra
        self.pending = 0
        self.missing: list[Slot] = []  # had no gradient in this step, and sent zeros
        self.skipped = False  # only the extra elements are sent in this step
        self.work: Work = None
        self.is_symmetric = False  # the buffer is memory that peers map, and used again
        self.prepared: PersistentReduction | None = None  # its sum then
        for slot in self.slots:
            slot.bucket = self
            slot.view = NOWHERE  # lets go of an earlier bucket's buffer
            slot.eager = slot.nbytes >= LARGE_BYTES
        self._small = [slot for slot in self.slots if not slot.eager]
        self._large = [slot for slot in self.slots if slot.eager]
        self._storage: Tensor | None = None
        self._as_views = packing.as_views
        self.refresh()

    @property
    def nbytes(self) -> int:
        """The size of the gradients."""
        return self.numel * self.dtype.itemsize

    @property
    def payload(self) -> Tensor:
        """What is reduced: the gradients and the extra elements, flat."""  # 1D
        self.allocate()
        assert self._storage is not None
        return self._tail if self.skipped else self._storage

    @property
    def tail(self) -> Tensor:
        """The extra elements behind the gradients."""  # 1D
        self.allocate()
        return self._tail

    @property
    def is_averaged(self) -> bool:
        """Is it the reduction that divides by the number of ranks?"""
        return self.packing.fused and bool(self.slots)

    def describe(self) -> str:
        """Which parameters are in it, for messages."""
        names = [slot.name for slot in self.slots]
        if len(names) > 2:
            return f"{len(names)} parameters, {names[0]} to {names[-1]}"
        return ", ".join(names) or "no parameters, only what ranks report"

    def refresh(self) -> None:
        """Take note that slots have become due or frozen, or are so no more."""
        self._expected = sum(1 for slot in self.slots if slot.due)
        self._frozen = any(slot.frozen for slot in self.slots)

    def arm(self) -> None:
        """Wait for the gradients of a new step."""
        self.pending = self._expected
        self.skipped = False
        self.work = None
        if self.missing:
            self.missing = []
        for slot in self._large:
            slot.packed = False

    @property
    def reached(self) -> bool:
        """Has any slot a gradient to send?"""
        return any(slot.fires or slot.used_unsynced for slot in self.slots)

    def release(self, slot: Slot) -> None:
        """Let a gradient that is a view have memory of its own."""
        if slot.param.grad is slot.view:
            slot.param.grad = slot.view.clone()

    def skip(self) -> None:
        """Send no gradients in this step."""
        self.skipped = True

    def pack(self) -> None:
        """Bring in the gradients that are not there yet."""
        self.allocate()
        if self._small:
            self._pack_small()
        large = [slot for slot in self._large if not slot.packed]
        if large:
            for slot, gradient in zip(large, self.packing.home.of(large), strict=True):
                self._pack_large(slot, gradient)

    def pack_large(self, slot: Slot) -> None:
        """Bring in one gradient, scaled."""
        self._pack_large(slot, self.packing.home.of([slot])[0])

    def _pack_large(self, slot: Slot, gradient: Tensor | None) -> None:
        self.allocate()
        slot.packed = True
        if gradient is None or slot.frozen:
            slot.view.zero_()
            self.missing.append(slot)
            return
        self._check(slot, gradient)
        self._check_not_lent(slot, gradient)
        other = self.packing.kept.setdefault(gradient.untyped_storage().data_ptr(), slot)
        if other is not slot:
            other.shares = slot.shares = True
        if self.packing.fused:
            slot.view.copy_(gradient)
        elif gradient.dtype == self.dtype:
            torch.mul(gradient, self.packing.scale, out=slot.view)
        else:
            slot.view.copy_(gradient).mul_(self.packing.scale)  # rounded once
        if self._gives_views and gradient is not slot.view:
            slot.param.grad = slot.view

    @property
    def _gives_views(self) -> bool:
        return self._as_views and self.packing.home.holds_views

    def _pack_small(self) -> None:
        slots, views = self._small, self._small_views
        gradients = self.packing.home.of(slots)
        if self._frozen:
            gradients = [
                None if slot.frozen else gradient
                for slot, gradient in zip(slots, gradients, strict=True)
            ]
        if self._as_views and any(map(is_, gradients, views)):
            new = [
                each for each in zip(slots, views, gradients, strict=True) if each[2] is not each[1]
            ]
            slots = [slot for slot, _, _ in new]
            views = [view for _, view, _ in new]
            gradients = [gradient for _, _, gradient in new]
        self._copy(slots, views, gradients)
        if self._gives_views:
            for slot, gradient in zip(slots, gradients, strict=True):
                if gradient is not None:
                    slot.param.grad = slot.view
        if self.packing.scale != 1.0 and not self.packing.fused:
            self._small_flat.mul_(self.packing.scale)

    def _copy(self, slots: list[Slot], views: list[Tensor], gradients: list[Tensor | None]) -> None:
        if slots is self._small and self._concatenate(gradients):
            return
        try:
            if slots:
                torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
        except TypeError:  # a None among them, which is rare: so it is not looked for first
            if all(gradient is not None for gradient in gradients):
                raise
            there = []
            for slot, view, gradient in zip(slots, views, gradients, strict=True):
                if gradient is None:
                    view.zero_()
                    self.missing.append(slot)
                else:
                    there.append((slot, view, gradient))
            self._copy([s for s, _, _ in there], [v for _, v, _ in there], [g for _, _, g in there])
        except RuntimeError:
            for slot, gradient in zip(slots, gradients, strict=True):
                if gradient is not None:
                    self._check(slot, gradient)
            raise

    def _concatenate(self, gradients: list[Tensor | None]) -> bool:
        """Copy the small ones in series; False if they have to be copied one by one.

        So it is if one is None, lies in the buffer already, or has the wrong shape.
        """
        if not self._series:
            return False
        try:
            for place, shape, members in self._series:
                torch.cat(gradients[members], out=place)  # type: ignore[arg-type]
                if place.shape != shape:  # a gradient of another shape: it has been resized
                    self._find_series()
                    return False
            singles = [gradient for part in self._singles for gradient in gradients[part]]
            if singles:
                torch._foreach_copy_(self._single_views, singles)  # type: ignore[arg-type]
        except (TypeError, RuntimeError):
            return False
        return True

    def unpack(self) -> None:
        """Write the reduced values into the gradients that are not views."""
        if not self._gives_views and not self.missing and self.slots:
            torch._foreach_copy_(self.packing.home.of(self.slots), self._views)  # type: ignore[arg-type]
            return
        if self._gives_views and not self._frozen:
            return
        for slot, gradient in zip(self.slots, self.packing.home.of(self.slots), strict=True):
            if gradient is not None and gradient is not slot.view and not slot.frozen:
                gradient.copy_(slot.view)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The gradients in a tensor that is laid out like the payload, by slot."""
        views, offset = [], 0
        for slot in self.slots:
            views.append(view_like(slot.param, flat, offset))
            offset += slot.param.numel()
        return views

    def receive(self, result: Tensor) -> None:
        """Take ``result`` for the reduced payload: a hook may return any tensor."""
        payload = self.payload
        if result.is_set_to(payload):
            return
        if result.numel() != payload.numel():
            raise StateError(
                f"the hook returned a tensor of {result.numel()} elements for a bucket of "
                f"{payload.numel()}. It has to return one value for each element of "
                "bucket.buffer()."
            )
        payload.copy_(result.reshape(payload.shape))

    def zero(self) -> None:
        """Contribute nothing."""
        self.payload.zero_()

    def give(self, slot: Slot) -> None:
        """Set the reduced value as the gradient of a slot that had none on this rank."""
        self.packing.home.put(slot, slot.view if self._gives_views else slot.view.clone())

    def allocate(self) -> None:
        """Make the buffer, if it is not there. It is made at first use, but better before."""
        if self._storage is not None:
            return
        # A gradient that another reducer works on too must stay where both can read it.
        shared = any(GradientWatch.is_shared(slot.param) for slot in self.slots)
        self._as_views = self.packing.as_views and not shared
        # Whole multiples of 64 elements: gloo's ring is slower on an odd end.
        size = -(-(self.numel + self.extra) // 64) * 64 if self.extra else self.numel
        if self.packing.memory is not None and self.device.type == "cpu":
            storage = self.packing.memory(size, self.dtype)
            self.is_symmetric = self.reuses_buffer and not self.dtype.is_complex
        else:
            storage = torch.zeros(size, dtype=self.dtype, device=self.device)
        self._views = self.views_of(storage)
        for slot, view in zip(self.slots, self._views, strict=True):
            slot.view = view
        self._small_views = self._views[: len(self._small)]
        self._small_flat = storage[: sum(slot.param.numel() for slot in self._small)]
        self._find_series()
        self._tail = storage[self.numel : self.numel + self.extra]
        self._storage = storage

    def _find_series(self) -> None:
        """Tell the small gradients that are concatenated from those that are copied singly."""
        self._series: list[tuple[Tensor, torch.Size, slice]] = []
        self._singles: list[slice] = []
        self._single_views: list[Tensor] = []
        first = 0
        for _, run in groupby(self._small, key=lambda slot: slot.param.shape):
            slots = list(run)
            members = slice(first, first + len(slots))
            views = self._small_views[members]
            first = members.stop
            if len(slots) < SERIES or not _can_be_concatenated(slots, self.dtype):
                self._singles.append(members)
                self._single_views += views
                continue
            start, size, shape = views[0].storage_offset(), views[0].numel(), views[0].shape
            place = self._small_flat[start : start + len(slots) * size]
            place = place.view(len(slots) * shape[0], *shape[1:])
            self._series.append((place, place.shape, members))

    def _check_not_lent(self, slot: Slot, gradient: Tensor) -> None:
        other = self.packing.lent.get(gradient.untyped_storage().data_ptr())
        if other is not None:
            raise StateError(
                f"the gradients of parameters {other.name} and {slot.name} share memory since this "
                "step, and the first is being reduced in place. Let the graph be the same from the "
                "first step on, or pass a larger bucket_cap_mb: then they are copied."
            )

    def _check(self, slot: Slot, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise StateError(
                f"parameter {slot.name} got a sparse gradient where a dense one was planned for. "
                "Only nn.Embedding and nn.EmbeddingBag that have sparse=True when the module is "
                "wrapped are reduced as sparse."
            )
        if gradient.shape != slot.param.shape:
            raise StateError(
                f"the gradient of parameter {slot.name} has shape {tuple(gradient.shape)} and the "
                f"parameter {tuple(slot.param.shape)}. Do not set .grad to a tensor of another "
                "shape."
            )


def _in_order(slots: Sequence[Slot], *, by_shape: bool) -> list[Slot]:
    """The small ones first, those of one shape side by side: see [Note: large and small]."""
    shapes: dict[torch.Size, int] = {}
    for slot in slots:
        shapes.setdefault(slot.param.shape, len(shapes))

    def place(slot: Slot) -> tuple[bool, int]:
        is_large = slot.nbytes >= LARGE_BYTES
        return is_large, shapes[slot.param.shape] if by_shape and not is_large else 0

    return sorted(slots, key=place)


def _can_be_concatenated(slots: Sequence[Slot], dtype: torch.dtype) -> bool:
    return all(
        slot.param.dim() > 0
        and slot.nbytes > 0
        and slot.param.dtype == dtype
        and slot.param.is_contiguous()
        for slot in slots
    )


def view_like(param: Tensor, storage: Tensor, offset: int) -> Tensor:
    """A part of ``storage`` with the shape, and if they are dense the strides, of ``param``.

    [Note: strides] Autograd gives a gradient the strides of its parameter where those are
    dense, so that optimizers run over both in memory order; a view must keep to that. The
    elements of a bucket are thus in each parameter's memory order, which is why strides have
    to be the same on all ranks.
    """
    shape = param.shape
    strides = param.stride() if is_dense(param) else torch.empty(shape, device="meta").stride()
    return storage.as_strided(shape, strides, offset)


def to_full_precision(param: Parameter) -> None:
    """Undo the cast of mixed precision, if the parameter is under it just now."""
    full = getattr(param, "_fp_param", None)
    if full is not None and param.dtype != full.dtype:
        param.data = full


def is_dense(tensor: Tensor) -> bool:
    """Do the elements fill a block of memory, in whatever order, without gap or overlap?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
