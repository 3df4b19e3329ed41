"""One bucket: gradients of several parameters in one flat buffer, reduced by one collective.

A bucket knows its buffer, the views into it, and how many gradients are still to come. It
knows nothing of steps and ranks: those are the reducer's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.ddp.collectives import Work
from gradsync.errors import StateError


class Slot:
    """One parameter's place: which bucket it is in, and what it did in this step.

    ``fires`` counts the gradients of this step, ``due`` how many make it ready: 1, or, under
    a static graph, as many as in the first step. A slot that is not waited for (frozen, or
    unused in a static graph) is due 0.
    """

    __slots__ = (
        "bucket",
        "due",
        "fires",
        "frozen",
        "index",
        "name",
        "param",
        "sparse",
        "used_unsynced",
    )

    def __init__(self, index: int, name: str, param: Parameter, *, sparse: bool = False) -> None:
        self.index = index
        self.name = name
        self.param = param
        self.sparse = sparse
        self.fires = 0
        self.due = 1
        self.frozen = False  # requires_grad was switched off: its .grad is left alone
        self.used_unsynced = False  # has a gradient from no_sync that is not reduced yet
        self.bucket: Bucket

    def __repr__(self) -> str:
        return f"Slot({self.index}, {self.name!r})"


class Bucket:
    """Slots whose dense gradients share one buffer of one dtype on one device.

    ``extra`` elements behind the gradients travel with them: see ``trailer``. A bucket of
    nothing but extra elements has no slots.
    """

    def __init__(self, slots: Sequence[Slot], like: Tensor, *, extra: int = 0) -> None:
        self.index = 0  # in the order of launch; given by the reducer
        self.slots = list(slots)
        self.params = [slot.param for slot in slots]
        self.dtype = like.dtype
        self.device = like.device
        self.numel = sum(param.numel() for param in self.params)
        self.extra = extra
        self.pending = 0
        self.work: Work = None
        self.frozen = False  # has a frozen slot
        self.missing: list[Slot] = []  # had no gradient in this step, and sent zeros
        self.views: list[Tensor] = []
        self._storage: Tensor | None = None
        self._flat: Tensor | None = None
        for slot in slots:
            slot.bucket = self

    @property
    def nbytes(self) -> int:
        """The size of the gradients."""
        return self.numel * self.dtype.itemsize

    @property
    def payload(self) -> Tensor:
        """What is reduced: the gradients and the extra elements, flat."""  # 1D
        if self._storage is None:
            self._allocate()
        assert self._storage is not None
        return self._storage

    @property
    def tail(self) -> Tensor:
        """The extra elements behind the gradients."""  # 1D
        return self.payload[self.numel :]

    def describe(self) -> str:
        """Which parameters are in it, for messages."""
        names = [slot.name for slot in self.slots]
        if len(names) > 2:
            return f"{len(names)} parameters, {names[0]} to {names[-1]}"
        return ", ".join(names) or "no parameters, only what ranks report"

    def arm(self) -> None:
        """Wait for the gradients of a new step."""
        self.pending = sum(1 for slot in self.slots if slot.due)
        self.frozen = any(slot.frozen for slot in self.slots)
        self.missing = []
        self.work = None

    def pack(self, scale: float, *, as_views: bool) -> None:
        """Bring the gradients, times ``scale``, into the buffer.

        With ``as_views`` each gradient becomes its view right away, which frees the memory
        that autograd had made for it.
        """
        if self._storage is None:
            self._allocate()
        if not self.slots:
            return
        gradients = [param.grad for param in self.params]
        if self.frozen:
            gradients = [
                None if slot.frozen else gradient
                for slot, gradient in zip(self.slots, gradients, strict=True)
            ]
        try:
            if as_views:
                self._pack_as_views(gradients)
            else:
                self._copy_in(self.slots, self.views, gradients)
        except RuntimeError as error:
            raise self._explain(error) from error
        if scale != 1.0:
            assert self._flat is not None
            self._flat.mul_(scale)

    def _copy_in(
        self, slots: list[Slot], views: list[Tensor], gradients: list[Tensor | None]
    ) -> None:
        try:
            torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
        except TypeError:  # a None among them, which is rare: so it is not looked for first
            self.missing = [s for s, g in zip(slots, gradients, strict=True) if g is None]
            pairs = [(v, g) for v, g in zip(views, gradients, strict=True) if g is not None]
            torch._foreach_zero_([v for v, g in zip(views, gradients, strict=True) if g is None])
            if pairs:
                torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])

    def _pack_as_views(self, gradients: list[Tensor | None]) -> None:
        new = [
            each
            for each in zip(self.slots, self.views, gradients, strict=True)
            if each[2] is not each[1]
        ]
        if not new:
            return
        self._copy_in([s for s, _, _ in new], [v for _, v, _ in new], [g for _, _, g in new])
        for slot, view, gradient in new:
            if gradient is not None:
                slot.param.grad = view

    def unpack(self) -> None:
        """Write the reduced values into the gradients that are not views."""
        targets, sources = [], []
        for slot, view in zip(self.slots, self.views, strict=True):
            gradient = slot.param.grad
            if gradient is not None and gradient is not view and not slot.frozen:
                targets.append(gradient)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def zero(self) -> None:
        """Contribute nothing."""
        self.payload.zero_()

    def give(self, slot: Slot, *, as_view: bool) -> None:
        """Set the reduced value as the gradient of a slot that had none on this rank."""
        view = self.views[self.slots.index(slot)]
        slot.param.grad = view if as_view else view.clone()

    def _allocate(self) -> None:
        storage = torch.zeros(self.numel + self.extra, dtype=self.dtype, device=self.device)
        offset = 0
        for param in self.params:
            self.views.append(_view_like(param, storage, offset))
            offset += param.numel()
        self._storage = storage
        self._flat = storage[: self.numel]

    def _explain(self, error: RuntimeError) -> RuntimeError:
        for slot in self.slots:
            gradient = slot.param.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                return StateError(
                    f"parameter {slot.name} got a sparse gradient where a dense one was planned "
                    "for. Only nn.Embedding and nn.EmbeddingBag that have sparse=True when the "
                    "module is wrapped are reduced as sparse."
                )
            if gradient.shape != slot.param.shape:
                return StateError(
                    f"the gradient of parameter {slot.name} has shape {tuple(gradient.shape)} and "
                    f"the parameter {tuple(slot.param.shape)}. Do not set .grad to a tensor of "
                    "another shape."
                )
        return error


class SparseBucket(Bucket):
    """One parameter whose gradient is a sparse tensor, reduced as it is."""

    def __init__(self, slot: Slot) -> None:
        super().__init__([slot], slot.param)
        self._gradient: Tensor | None = None

    @property
    def payload(self) -> Tensor:
        assert self._gradient is not None, "pack comes first"
        return self._gradient

    def pack(self, scale: float, *, as_views: bool) -> None:
        gradient = self.params[0].grad
        if gradient is None:
            self.zero()
            self.missing = list(self.slots)
            return
        if not gradient.is_sparse:
            raise StateError(
                f"parameter {self.slots[0].name} got a dense gradient where a sparse one was "
                "expected, since its module has sparse=True. Use it only through that module."
            )
        self._gradient = gradient.coalesce() * scale if scale != 1.0 else gradient.coalesce()

    def unpack(self) -> None:
        if not self.missing:
            self.params[0].grad = self._gradient

    def zero(self) -> None:
        param = self.params[0]
        self._gradient = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=param.device),
            torch.empty((0, *param.shape[1:]), dtype=param.dtype, device=param.device),
            param.shape,
            check_invariants=False,
        ).coalesce()

    def give(self, slot: Slot, *, as_view: bool) -> None:
        slot.param.grad = self._gradient


def make_buckets(
    plan: Sequence[Sequence[int]], slots: Sequence[Slot], *, extra: int
) -> list[Bucket]:
    """The buckets of ``plan`` in the order of launch; the last has ``extra`` elements.

    Extra elements need a dense bucket. So sparse ones that would come behind the last dense one
    go before it, and where there is no dense one, one of only extra elements is added.
    """
    groups = [[slots[index] for index in indices] for indices in plan]
    if all(group[0].sparse for group in groups):
        last: list[Slot] = []
    else:
        last = next(group for group in reversed(groups) if not group[0].sparse)
        groups.remove(last)
    buckets = [
        SparseBucket(group[0]) if group[0].sparse else Bucket(group, group[0].param)
        for group in groups
    ]
    buckets.append(Bucket(last, (last or slots)[0].param, extra=extra))
    for index, bucket in enumerate(buckets):
        bucket.index = index
    return buckets


def _view_like(param: Tensor, storage: Tensor, offset: int) -> Tensor:
    """A view of ``storage`` at ``offset`` with the shape, and if it can be the strides, of param.

    [Note: strides] Autograd gives a gradient the strides of its parameter where those are
    dense, so that optimizers run over both in memory order; a view must keep to that. The
    elements of a bucket are thus in each parameter's memory order, which is why strides have
    to be the same on all ranks.
    """
    strides = (
        param.stride() if _is_dense(param) else torch.empty(param.shape, device="meta").stride()
    )
    return storage.as_strided(param.shape, strides, offset)


def _is_dense(tensor: Tensor) -> bool:
    """Do the elements fill a block of memory, in whatever order, without gap or overlap?"""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
