"""The Python face of the native part: tensors go in, operations under way come out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import AllreduceOptions

from gradsync.backend import _native
from gradsync.backend._native import DType, Element, Kind, ReduceOp
from gradsync.backend.arguments import REDUCE_OPS, check_flat
from gradsync.backend.places import Places, address_of, in_place, one, plain, to_fill, to_read
from gradsync.backend.work import All, Finish, Handle, translate
from gradsync.errors import ArgumentError, GradsyncError

DTYPES = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
}
NO_ELEMENT = Element()


@dataclass(slots=True)
class Started:
    """An operation under way, and what it needs."""

    handle: Handle
    kept: object  # memory in use until it is done
    finish: Finish | None = None  # what to do then
    later: bool = True  # or does the caller wait for it at once?

    def wait(self) -> None:
        """Wait for it, and see to the results."""
        try:
            self.handle.wait()
        except GradsyncError:  # of what runs on a thread of ours: with its cause
            raise
        except Exception as error:
            raise translate(error) from None
        if self.finish is not None:
            self.finish()


def together(parts: Sequence[Started]) -> Started:
    """Several operations as one."""
    finishes = [part.finish for part in parts if part.finish is not None]
    finish = (lambda: [each() for each in finishes]) if finishes else None
    later = any(part.later for part in parts)
    return Started(
        All([part.handle for part in parts]), [part.kept for part in parts], finish, later
    )


@cache
def named(dtype: torch.dtype) -> Element:
    """What other ranks are told of elements that are moved as bytes.

    Complex numbers are pairs, as torch's functions take them before they call us.
    """
    real = dtype.to_real()
    return Element(str(real).removeprefix("torch."), real.itemsize)


def element_of(dtype: torch.dtype) -> Element:
    """The same for those that may have a native dtype of their own, which says it all."""
    return NO_ELEMENT if dtype.to_real() in DTYPES else named(dtype)


def can_reduce(tensor: Tensor, op: ReduceOp) -> bool:
    """Is there a kernel for this? Complex numbers can be added up, part by part."""
    if tensor.is_complex():
        return op in (ReduceOp.SUM, ReduceOp.AVG)
    dtype = DTYPES.get(tensor.dtype)
    return dtype is not None and _native.can_reduce(dtype, op)


# The native numbers of a dtype and an operation, where there is a kernel.
KERNELS = {
    (dtype, op): (int(native), int(op))
    for dtype, native in DTYPES.items()
    for op in ReduceOp
    if _native.can_reduce(native, op)
}


# What takes a whole call of torch's: neither of us has to look into it in Python.
TORCH_CALL = _native.TorchCall(
    getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),  # since torch 2.10
    {number: int(op) for number, op in REDUCE_OPS.items()},
    AllreduceOptions().timeout,
    _profiler_enabled,
)


def is_dense(tensor: Tensor) -> bool:
    """Does it have memory that we can move?"""
    return tensor.is_cpu and tensor.layout is torch.strided


def symmetric_empty(count: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor that peers can map: they do so when they first meet it."""  # 1D
    check_flat(count, dtype)
    size = max(count, 1)
    try:
        memory = _native.Memory(size * dtype.itemsize)
    except Exception as error:
        raise translate(error) from None
    return torch.frombuffer(memory, dtype=dtype, count=size)[:count]


class HasTimeout(Protocol):
    """A group: how long its operations may take from now on."""

    timeout_seconds: float


class Reduction:
    """An all-reduce of ours under way; keeps the memory."""

    __slots__ = ("handle", "tensor")

    def __init__(self, handle: _native.Op, tensor: Tensor) -> None:
        self.handle = handle
        self.tensor = tensor

    def wait(self) -> None:
        """Wait for it, and raise what went wrong."""
        try:
            self.handle.wait()
        except Exception as error:
            raise translate(error) from None

    def is_completed(self) -> bool:
        """Would ``wait`` return at once?"""
        return self.handle.done


class PersistentReduction:
    """An all-reduce of one symmetric tensor, prepared once and run again and again.

    Made by ``SharedMemoryGroup.persistent_all_reduce``. Each run is a collective of its own, which
    all ranks have to make; either ``run`` or ``start`` and ``wait``. What is between those two on
    this rank overlaps with it.

    >>> import torch, torch.distributed as dist, gradsync
    >>> group = dist.new_group(backend="gradsync")
    >>> average = group.persistent_all_reduce(group.symmetric_empty(3, torch.float32))
    >>> average.tensor.fill_(1.0)
    tensor([1., 1., 1.])
    >>> average.run()
    >>> average.start()
    >>> average.wait()
    >>> average.tensor
    tensor([1., 1., 1.])
    """

    __slots__ = ("_group", "_native", "op", "tensor")

    def __init__(
        self, group: HasTimeout, native: _native.Persistent, tensor: Tensor, op: object
    ) -> None:
        self._group = group
        self._native = native
        self.tensor = tensor
        self.op = op  # torch's

    def run(self) -> None:
        """Reduce the tensor as it is now, and wait for it."""
        try:
            self._native.run(self._group.timeout_seconds)
        except Exception as error:
            raise translate(error) from None

    def start(self) -> None:
        """Begin to reduce the tensor, which is not to be touched until ``wait`` has returned."""
        try:
            self._native.start(self._group.timeout_seconds)
        except Exception as error:
            raise translate(error) from None

    def wait(self) -> None:
        """Wait for what was started last, and raise what went wrong."""
        try:
            self._native.wait()
        except Exception as error:
            raise translate(error) from None

    def is_completed(self) -> bool:
        """Would ``wait`` return at once?"""
        return self._native.done


class SharedMemory:
    """Collectives between the ranks of one machine. Ranks are those of ``context``."""

    def __init__(self, context: _native.Context, rank: int, size: int) -> None:
        self.context = context
        self.rank = rank
        self.size = size

    # ---------------------------------------------------------------- reductions

    def prepare_all_reduce(self, tensor: Tensor, op: ReduceOp) -> _native.Persistent:
        """What reduces ``tensor``, which has to be symmetric, in place."""
        if not is_dense(tensor) or not tensor.is_contiguous():
            raise ArgumentError("A persistent reduction takes a contiguous tensor on the CPU.")
        if (tensor.dtype, op) not in KERNELS:
            raise ArgumentError(f"There is no {op.name} of {tensor.dtype} in shared memory.")
        try:
            return _native.Persistent(
                self.context, address_of(tensor), tensor.numel(), DTYPES[tensor.dtype], op
            )
        except _native.InvalidError as error:
            raise ArgumentError(
                "A persistent reduction takes a tensor from symmetric_empty, or a part of one: "
                f"{error}."
            ) from error

    def all_reduce_now(self, tensors: object, opts: AllreduceOptions, seconds: float) -> bool:
        """What torch asks of ``allreduce``, if it is plain, and waited for; False if it is not."""
        try:
            return TORCH_CALL.all_reduce(self.context, tensors, opts, seconds)
        except Exception as error:
            raise translate(error) from None

    def start_all_reduce(self, tensor: Tensor, op: ReduceOp, seconds: float) -> "Reduction":
        """Begin to reduce a contiguous ``tensor`` in place, of a dtype that has a kernel."""
        dtype, number = KERNELS[tensor.dtype, op]
        handle = self.context.all_reduce(tensor.data_ptr(), tensor.numel(), dtype, number, seconds)
        return Reduction(handle, tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, seconds: float, *, later: bool) -> Started:
        """Reduce ``tensor`` in place over all ranks."""
        flat, finish = in_place(tensor)
        place = one(flat, finish)
        element = element_of(tensor.dtype)
        return self._reduction(Kind.ALL_REDUCE, op, -1, place, place, flat, element, seconds, later)

    def reduce(
        self, tensor: Tensor, op: ReduceOp, root: int, seconds: float, *, later: bool
    ) -> Started:
        """Reduce ``tensor`` in place on rank ``root``; the others' stay."""
        flat, finish = in_place(tensor)
        place = one(flat, finish if self.rank == root else None)
        element = element_of(tensor.dtype)
        return self._reduction(Kind.REDUCE, op, root, place, place, flat, element, seconds, later)

    def reduce_scatter(
        self, output: Tensor, pieces: Places, op: ReduceOp, seconds: float, *, later: bool
    ) -> Started:
        """Reduce the pieces over all ranks; each rank gets the one that is its own."""
        flat, finish = to_fill(output)
        target, element = one(flat, finish), element_of(output.dtype)
        return self._reduction(
            Kind.REDUCE_SCATTER, op, -1, pieces, target, flat, element, seconds, later
        )

    def _reduction(
        self,
        kind: Kind,
        op: ReduceOp,
        root: int,
        sources: Places,
        target: Places,
        measure: Tensor,
        element: Element,
        seconds: float,
        later: bool,
    ) -> Started:
        handle = self.context.collective(
            kind, DTYPES[measure.dtype], op, root, measure.numel(), element,
            sources.addresses, target.addresses, (), (), seconds, later,
        )  # fmt: skip
        return Started(handle, (sources, target), target.finish, later)

    # ---------------------------------------------------------------- moving bytes

    def broadcast(self, tensor: Tensor, root: int, seconds: float, *, later: bool) -> Started:
        """Overwrite ``tensor`` with that of rank ``root``."""
        flat, finish = in_place(tensor)
        place = one(flat, None if self.rank == root else finish)
        return self._move(
            Kind.BROADCAST, root, place, place, flat, element_of(tensor.dtype), seconds, later
        )

    def all_gather(
        self, outputs: Places, tensor: Tensor, seconds: float, *, later: bool
    ) -> Started:
        """Collect every rank's ``tensor``."""
        source = to_read(tensor)
        element = element_of(source.dtype)
        return self._move(
            Kind.ALL_GATHER, -1, one(source), outputs, source, element, seconds, later
        )

    def gather(
        self, outputs: Places, tensor: Tensor, root: int, seconds: float, *, later: bool
    ) -> Started:
        """Collect every rank's ``tensor`` on rank ``root``; the others have no outputs."""
        source = to_read(tensor)
        element = element_of(source.dtype)
        return self._move(Kind.GATHER, root, one(source), outputs, source, element, seconds, later)

    def scatter(
        self, output: Tensor, pieces: Places, root: int, seconds: float, *, later: bool
    ) -> Started:
        """Give every rank its piece of rank ``root``'s; the others have none."""
        flat, finish = to_fill(output)
        target, element = one(flat, finish), element_of(output.dtype)
        return self._move(Kind.SCATTER, root, pieces, target, flat, element, seconds, later)

    def all_to_all(
        self, outputs: Places, inputs: Places, dtype: torch.dtype, seconds: float, *, later: bool
    ) -> Started:
        """Give rank r the r-th input, and get the own one of every rank."""
        handle = self.context.collective(
            Kind.ALL_TO_ALL, DType.BYTES, ReduceOp.NONE, -1, 0, named(dtype),
            inputs.addresses, outputs.addresses, inputs.sizes, outputs.sizes, seconds, later,
        )  # fmt: skip
        return Started(handle, (inputs, outputs), outputs.finish, later)

    def barrier(self, seconds: float, *, later: bool) -> Started:
        """Wait until all ranks have come here."""
        handle = self.context.collective(
            Kind.BARRIER, DType.BYTES, ReduceOp.NONE, -1, 0, NO_ELEMENT,
            (), (), (), (), seconds, later,
        )  # fmt: skip
        return Started(handle, None, None, later)

    def agree(self, text: str, seconds: float, *, later: bool) -> Started:
        """Wait until all ranks have come here, and see that all say ``text``."""
        return Started(self.context.agree(text, seconds, later), None, None, later)

    def _move(
        self,
        kind: Kind,
        root: int,
        sources: Places,
        targets: Places,
        measure: Tensor,
        element: Element,
        seconds: float,
        later: bool,
    ) -> Started:
        """Let every rank's contribution be as large as ``measure``."""
        dtype = DTYPES.get(measure.dtype)
        handle = self.context.collective(
            kind,
            DType.BYTES if dtype is None else dtype,
            ReduceOp.NONE,
            root,
            measure.nbytes if dtype is None else measure.numel(),
            element,
            sources.addresses,
            targets.addresses,
            (),
            (),
            seconds,
            later,
        )
        return Started(handle, (sources, targets), targets.finish, later)

    # ---------------------------------------------------------------- point to point

    def send(self, tensor: Tensor, to: int, tag: int, seconds: float) -> Started:
        """Send ``tensor`` to rank ``to``."""
        source = plain(tensor)
        handle = self.context.message(
            Kind.SEND, address_of(source), source.nbytes, named(source.dtype), to, tag, seconds
        )
        return Started(handle, source)

    def recv(self, tensor: Tensor, source: int, tag: int, seconds: float) -> Started:
        """Receive into ``tensor`` from rank ``source``, or ``ANY_SOURCE``."""
        target, finish = to_fill(tensor)
        handle = self.context.message(
            Kind.RECV, address_of(target), target.nbytes, named(tensor.dtype), source, tag, seconds
        )
        return Started(handle, target, finish)
