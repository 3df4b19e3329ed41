"""The few collectives that DDP issues, straight on torch's ``ProcessGroup``.

The calls go to the group's own methods and not through ``torch.distributed``'s functions:
those cost several times more per call, and a group need not be registered with them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from gradsync.backend.process_group import SharedMemoryGroup
from gradsync.backend.shared_memory import PersistentReduction
from gradsync.errors import CollectiveError, GradsyncError

NO_TIMEOUT = timedelta(0)  # of its own: the group's holds
Work = Any  # dist.Work, what a custom group returns in its place, or a LocalWork


class LocalWork(ABC):
    """Something under way that ends with work of our own, and so in ``wait``."""

    error: Exception | None = None  # what a function of the user's raised in it

    @abstractmethod
    def wait(self) -> None:
        """Wait for what is under way and do the rest."""

    def is_completed(self) -> bool:
        """Would ``wait`` return without waiting?"""
        return False


def all_reduce(group: dist.ProcessGroup, tensor: Tensor, *, average: bool = False) -> Work:
    """Start summing, or averaging, ``tensor`` in place over the ranks of ``group``."""
    if shares_memory(group) and tensor.layout is torch.strided and tensor.is_cpu:
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return group.start_average(flat, average=average)
    options = dist.AllreduceOptions()
    if average:
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return group.allreduce([tensor], options)


def broadcast(group: dist.ProcessGroup, tensor: Tensor, source: int) -> Work:
    """Start overwriting ``tensor`` with that of rank ``source`` of ``group``."""
    options = dist.BroadcastOptions()
    options.rootRank = source
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def all_gather(group: dist.ProcessGroup, tensor: Tensor) -> tuple[list[Tensor], Work]:
    """Start collecting ``tensor`` from every rank; the list is filled when the work is done."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    return parts, group.allgather([parts], [tensor], AllgatherOptions())


def is_foreign(group: dist.ProcessGroup) -> bool:
    """Is the group a Python subclass, which may do more than its size suggests?

    Such a group sees every collective, also at world size 1.
    """
    return type(group) is not dist.ProcessGroup and not isinstance(group, SharedMemoryGroup)


def shares_memory(group: dist.ProcessGroup) -> TypeGuard[SharedMemoryGroup]:
    """Can the group reduce in memory that its ranks share, and average as it does?"""
    return isinstance(group, SharedMemoryGroup) and group.shares_memory


def wait(
    work: Work, group: dist.ProcessGroup, describe: Callable[[], str], *, by_future: bool = False
) -> None:
    """Wait until ``work`` is done; a failure is raised with what was waited for.

    A group written in Python may count on which of the two ways its works are asked. It is
    torch's: by the future for sums of gradients (``by_future``), else by ``wait`` with a timeout.
    """
    try:
        if (
            type(work) is PersistentReduction  # first what is most often waited for
            or isinstance(work, LocalWork)
            or not is_foreign(group)
        ):
            work.wait()
        elif by_future:
            work.get_future().wait()
        else:
            work.wait(NO_TIMEOUT)
    except GradsyncError as error:  # it says what happened
        error.add_note(f"rank {group.rank()} of {group.size()} waited for {describe()}.")
        raise
    except RuntimeError as error:
        if isinstance(work, LocalWork) and error is work.error:
            raise  # the reducer finds out whether it can still tell the others
        raise CollectiveError(
            f"rank {group.rank()} of {group.size()}: {describe()} failed: {error}\n"
            "Another rank failed, was killed, or is not at the same point of the program; its "
            "own output says why."
        ) from error


class Broadcaster:
    """Overwrites tensors, of any dtypes, with those of one rank.

    Small tensors travel together as bytes, one collective for each device and chunk; a tensor
    larger than a chunk goes alone, and is not copied if it is contiguous. The buffers are kept
    for the next run, as long as that has tensors of the same shapes.
    """

    def __init__(self, chunk_bytes: int = 250 * 1024 * 1024) -> None:
        self._chunk_bytes = chunk_bytes
        self._kinds: Sequence[tuple[object, ...]] = ()
        self._parcels: list[_Parcel] = []

    def run(
        self,
        group: dist.ProcessGroup,
        tensors: Sequence[Tensor],
        source: int,
        describe: Callable[[], str],
    ) -> None:
        """Broadcast ``tensors`` from rank ``source`` and wait for it."""
        with torch.no_grad():
            kinds = [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
            if kinds != self._kinds:
                self._kinds = kinds
                self._parcels = [
                    _Parcel(tensors, part) for part in _split(tensors, self._chunk_bytes)
                ]
            works = [parcel.start(group, tensors, source) for parcel in self._parcels]
            for parcel, work in zip(self._parcels, works, strict=True):
                wait(work, group, describe)
                if group.rank() != source:
                    parcel.unpack(tensors)


class _Parcel:
    """Some of the tensors, all of one device, broadcast by one collective."""

    def __init__(self, tensors: Sequence[Tensor], members: list[int]) -> None:
        self._members = members
        self._bytes: Tensor | None = None
        self._views: list[Tensor] = []
        first = tensors[members[0]]
        if len(members) > 1 or not first.is_contiguous():
            self._bytes, self._views = _byte_views([tensors[index] for index in members])

    def start(self, group: dist.ProcessGroup, tensors: Sequence[Tensor], source: int) -> Work:
        if self._bytes is not None:
            if group.rank() == source:
                torch._foreach_copy_(self._views, [tensors[index] for index in self._members])
            return broadcast(group, self._bytes, source)
        only = tensors[self._members[0]].detach()
        return broadcast(group, only.view(-1).view(torch.uint8), source)

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        if self._views:
            torch._foreach_copy_([tensors[index] for index in self._members], self._views)


def _split(tensors: Sequence[Tensor], chunk_bytes: int) -> list[list[int]]:
    """Which tensors go together, by index; those without elements do not go at all."""
    parts: list[list[int]] = []
    filling: dict[torch.device, tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            continue
        if nbytes >= chunk_bytes:
            parts.append([index])
            continue
        part, size = filling.get(tensor.device, ([], 0))
        if part and size + nbytes > chunk_bytes:
            parts.append(part)
            part, size = [], 0
        part.append(index)
        filling[tensor.device] = (part, size + nbytes)
    return parts + [part for part, _ in filling.values()]


def _byte_views(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A flat byte tensor, and a view into it for each tensor, aligned for any dtype."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() * tensor.element_size() // 16) * 16
    views = []
    with torch.inference_mode(False):  # they are kept, and may be used outside it next time
        payload = torch.empty(end, dtype=torch.uint8, device=tensors[0].device)
        for tensor, offset in zip(tensors, offsets, strict=True):
            nbytes = tensor.numel() * tensor.element_size()
            views.append(payload[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))
    return payload, views
