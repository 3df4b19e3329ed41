"""Buckets of one gradient, large or sparse, and those that are reduced in another dtype.

``make_buckets`` makes buckets of all kinds from a plan.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.ddp.autograd import GradientWatch, owns_memory
from gradsync.ddp.bucket import NOWHERE, Bucket, Packing, Slot, is_dense, to_full_precision
from gradsync.errors import StateError


def make_buckets(
    plan: Sequence[Sequence[int]],
    slots: Sequence[Slot],
    packing: Packing,
    *,
    solo_bytes: float,
    extra: int,
    extra_apart: bool = False,
) -> list[Bucket]:
    """The buckets of ``plan`` in the order of launch; the last has ``extra`` elements.

    A bucket of one parameter of at least ``solo_bytes`` is solo. Extra elements need a buffer:
    so the last dense bucket that is not solo goes last; else the last solo one has a buffer all
    the same; and where all are sparse, or ``extra_apart`` asks for it, one that has only the
    extra elements is added.
    """
    if not slots:
        return []
    groups = [[slots[index] for index in indices] for indices in plan]
    dense = [group for group in groups if not group[0].sparse]
    kind = Bucket if packing.dtype is None else CastBucket
    solo = [
        group
        for group in dense
        if kind is Bucket and len(group) == 1 and group[0].nbytes >= solo_bytes
    ]
    carriers = [each for each in dense if each not in solo] or dense
    carrier = carriers[-1] if carriers and not extra_apart else []
    buckets: list[Bucket] = []
    for group in groups:
        if group is carrier:
            continue
        if group[0].sparse:
            buckets.append(SparseBucket(group[0], packing))
        elif group in solo:
            buckets.append(SoloBucket(group[0], packing))
        else:
            buckets.append(kind(group, packing, group[0].param))
    buckets.append(kind(carrier, packing, (carrier or slots)[0].param, extra=extra))
    for index, bucket in enumerate(buckets):
        bucket.index = index
        bucket.is_last = bool(bucket.slots) and not any(each.slots for each in buckets[index + 1 :])
    return buckets


class SoloBucket(Bucket):
    """One large dense gradient, which is its own buffer: nothing is copied.

    Only where this rank has no gradient, or one that cannot be lent, is there a real buffer.

    [Note: lending] Autograd may give two parameters gradients on the same memory (``a.t() +
    b.t()``), and while a backward runs nobody can tell. So in the first one nothing is packed: at
    its end each gradient is looked at, and one that shares memory is not lent. From then on
    gradients are lent as they come. Should two that did not share begin to, the second one is an
    error, not a wrong sum.
    """

    reuses_buffer = False

    def __init__(self, slot: Slot, packing: Packing) -> None:
        super().__init__([slot], packing, slot.param)
        slot.eager = True
        self._small, self._large = [], [slot]
        self._lent: Tensor | None = None

    @property
    def payload(self) -> Tensor:
        return super().payload if self._lent is None else self._lent

    def arm(self) -> None:
        super().arm()
        self._lent = None

    def pack(self) -> None:
        slot = self.slots[0]
        if not slot.packed:
            self.pack_large(slot)

    def _pack_large(self, slot: Slot, gradient: Tensor | None) -> None:
        if (
            gradient is None
            or slot.frozen
            or not slot.lendable
            or gradient.layout is not torch.strided
            or gradient.dtype != self.dtype
            or gradient.stride() != slot.param.stride()
            or not is_dense(gradient)
            or GradientWatch.is_shared(slot.param)
        ):
            super()._pack_large(slot, gradient)
            return
        self._check_not_lent(slot, gradient)
        self.packing.lent[gradient.untyped_storage().data_ptr()] = slot
        slot.packed = True
        self._lent = gradient.detach().as_strided((gradient.numel(),), (1,))
        if self.packing.scale != 1.0 and not self.packing.fused:
            self._lent.mul_(self.packing.scale)

    def unpack(self) -> None:
        if self._lent is not None:
            return
        super().unpack()
        self.look()
        slot = self.slots[0]
        if slot.lendable:  # the buffer will not be needed again
            self._storage, self._views, slot.view = None, [], NOWHERE

    def look(self) -> None:
        """At the end of a backward: could the gradient have been lent?"""
        slot = self.slots[0]
        gradient = self.packing.home.of([slot])[0]
        slot.lendable = (
            gradient is not None
            and gradient.layout is torch.strided
            and not slot.shares
            and owns_memory(gradient)
        )

    def allocate(self) -> None:
        super().allocate()
        self._as_views = False  # a view of the whole buffer would only be in the way of lending

    def zero(self) -> None:
        self._lent = None
        super().zero()

    def give(self, slot: Slot) -> None:
        super().give(slot)
        self._storage, self._views, slot.view = None, [], NOWHERE


class CastBucket(Bucket):
    """Dense gradients that are reduced in another dtype than that of the computation.

    Under mixed precision a gradient has the low dtype until it is reduced. With
    ``gradient_as_bucket_view`` it becomes a view then, if buckets have the full dtype.
    """

    def allocate(self) -> None:
        super().allocate()
        self._wants_views, self._as_views = self._as_views or self._wants_views, False

    _wants_views = False

    def unpack(self) -> None:
        for slot in self.slots:
            if slot.param.grad is not None and not slot.frozen:
                self._set(slot)

    def give(self, slot: Slot) -> None:
        self._set(slot)

    def _set(self, slot: Slot) -> None:
        param = slot.param
        to_full_precision(param)
        if self._wants_views and self.dtype == param.dtype:
            param.grad = slot.view
        elif param.grad is not None and param.grad.dtype == param.dtype:
            param.grad.copy_(slot.view)
        else:
            param.grad = slot.view.to(param.dtype, copy=True)


class SparseBucket(Bucket):
    """One parameter whose gradient is a sparse tensor, reduced as it is.

    Where the rows that any rank can have are announced (``expect_rows``) the values of those rows
    are reduced as a dense tensor, which needs no exchange of indices.
    """

    reuses_buffer = False

    def __init__(self, slot: Slot, packing: Packing) -> None:
        super().__init__([slot], packing, slot.param)
        # Under mixed precision too: not every low dtype can be added where it is sparse.
        self.dtype = getattr(slot.param, "_fp_param", slot.param).dtype
        slot.eager = False
        self._gradient: Tensor | None = None
        self._rows: Tensor | None = None  # sorted
        self._values: Tensor | None = None

    @property
    def payload(self) -> Tensor:
        payload = self._gradient if self._rows is None else self._values
        assert payload is not None, "pack comes first"
        return payload

    @property
    def is_averaged(self) -> bool:
        return False

    def expect_rows(self, rows: Tensor) -> None:
        """From now on, all ranks together have gradients for no other rows than these."""
        self._rows = torch.unique(rows.to(self.device))

    def pack(self) -> None:
        slot = self.slots[0]
        gradient = self.packing.home.of([slot])[0]
        if gradient is None or slot.frozen:
            self.zero()
            self.missing.append(slot)
            return
        if not gradient.is_sparse:
            raise StateError(
                f"parameter {slot.name} got a dense gradient where a sparse one was expected, "
                "since its module has sparse=True. Use it only through that module."
            )
        self._gradient = gradient.coalesce().to(self.dtype) * self.packing.scale
        if self._rows is not None:
            self._pack_rows(slot, self._rows, self._gradient.coalesce())

    def _pack_rows(self, slot: Slot, rows: Tensor, gradient: Tensor) -> None:
        indices = gradient.indices()[0]
        at = torch.searchsorted(rows, indices).clamp_(max=len(rows) - 1)
        unexpected = indices[rows[at] != indices] if len(rows) else indices
        if len(unexpected):
            raise StateError(
                f"parameter {slot.name} got a gradient for rows that were not announced to "
                f"_set_sparse_metadata, the first is {int(unexpected[0])}."
            )
        values = gradient.values()
        self._values = values.new_zeros((len(rows), *values.shape[1:]))
        self._values[at] = values

    def views_of(self, flat: Tensor) -> list[Tensor]:
        return [flat]

    def receive(self, result: Tensor) -> None:
        if self._rows is None:
            self._gradient = result.coalesce()
        else:
            self._values = result

    def unpack(self) -> None:
        if self._rows is not None and self._values is not None:
            self._gradient = self._sparse(self._rows, self._values)
        if not self.missing:
            self.give(self.slots[0])

    def zero(self) -> None:
        param = self.slots[0].param
        rows = 0 if self._rows is None else len(self._rows)
        values = torch.zeros((rows, *param.shape[1:]), dtype=self.dtype, device=param.device)
        nowhere = torch.empty(0, dtype=torch.int64, device=param.device)
        self._values = values
        self._gradient = self._sparse(nowhere, values[:0])

    def give(self, slot: Slot) -> None:
        assert self._gradient is not None, "it is reduced"
        to_full_precision(slot.param)
        self.packing.home.put(slot, self._gradient.to(slot.param.dtype))

    def _sparse(self, rows: Tensor, values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(
            rows[None], values, self.slots[0].param.shape, check_invariants=False
        ).coalesce()
