"""The process group: which way an operation takes.

Ranks of one machine go through shared memory, ranks of several through the hierarchy, and what has
no way there goes to an inner gloo group, which is made when it is first needed.
"""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
)

from gradsync.backend import _native
from gradsync.backend._native import ReduceOp
from gradsync.backend.attach import attach
from gradsync.backend.hierarchy import Hierarchy
from gradsync.backend.members import by_machine, exchange, myself
from gradsync.backend.shared_memory import (
    SharedMemory,
    Started,
    can_reduce,
    is_dense,
    symmetric_empty,
)
from gradsync.backend.work import Notifier, SharedMemoryWork
from gradsync.errors import ArgumentError, StateError

REDUCE_OPS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.AVG,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}
Work = Any  # ours, or gloo's
CPU = torch.device("cpu")
DEFAULT_TIMEOUT = timedelta(minutes=30)


class SharedMemoryGroup(dist.ProcessGroup):
    """Ranks that exchange tensors through memory that they share.

    Made by ``torch.distributed.init_process_group("gradsync")`` or ``new_group``.

    >>> import torch, torch.distributed as dist, gradsync
    >>> group = dist.new_group(backend="gradsync")
    >>> tensor = torch.ones(3)
    >>> dist.all_reduce(tensor, group=group)
    >>> tensor
    tensor([1., 1., 1.])
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        names: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._closed = False
        self._inner: Any = None
        self._pending: deque[SharedMemoryWork] = deque()
        self._memory: SharedMemory | None = None
        self._hierarchy: Hierarchy | None = None
        own = myself(rank, names[rank] if names else rank)
        self.members = exchange(store, own, size)
        machines = by_machine(self.members)
        local = next(machine for machine in machines if own in machine)
        context = attach(store, own, local)
        self._context = context
        self._notifier = Notifier(self._leave_to_background)
        if context is not None and len(machines) == 1:
            self._memory = SharedMemory(context, rank, size)
        elif len(machines) > 1:
            memory = None
            if context is not None:
                memory = SharedMemory(context, local.index(own), len(local))
            self._hierarchy = Hierarchy.build(store, own, machines, memory, timeout)

    # ---------------------------------------------------------------- what torch asks for

    def rank(self) -> int:
        """Which rank of the group this process is."""
        return self._rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Of the backend."""
        return "gradsync"

    def getBackendName(self) -> str:
        """Of the backend."""
        return "gradsync"

    def __repr__(self) -> str:
        return f"SharedMemoryGroup(rank={self._rank}, size={self._size})"

    @property
    def options(self) -> "SharedMemoryGroup":
        """For torch, which writes a gloo group's options after it has made it."""
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> "SharedMemoryGroup":
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"The gradsync backend has no collectives for {device}.")
        return self

    def _get_backend_name(self) -> str:
        return "gradsync"

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations from now on take no longer than this."""
        self._timeout = timeout
        if self._inner is not None:
            self._inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: our collectives have numbers anyway."""

    def _get_sequence_number_for_group(self) -> int:
        return 0 if self._context is None else self._context.issued

    # ---------------------------------------------------------------- more than torch asks for

    @property
    def shares_memory(self) -> bool:
        """Do all ranks share memory, so that ``symmetric_empty`` works?"""
        return self._memory is not None and not self._closed

    def symmetric_empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in memory that the other ranks can map: its all-reduce copies nothing.

        Every rank makes its own. A reduction is in place if the tensors of all ranks are of this
        kind; where in such memory they are may differ.
        """  # 1D
        if not self.shares_memory:
            raise StateError("The ranks of this group do not share memory.")
        return symmetric_empty(count, dtype)

    def counters(self) -> dict[str, int]:
        """How many all-reduces ran in place (``symmetric``), how many with copies, of how much."""
        return {} if self._context is None else self._context.counters()

    # ---------------------------------------------------------------- reductions

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: AllreduceOptions | None = None
    ) -> Work:
        opts = opts or AllreduceOptions()
        tensor = _only(tensors)
        op = _reduce_op(opts)
        ways = self._memory or self._hierarchy
        if ways is None or op is None or not is_dense(tensor) or not can_reduce(tensor, op):
            return self._gloo.allreduce([tensor], opts)
        started = ways.all_reduce(tensor, op, self._seconds(opts), later=opts.asyncOp)
        return self._work(started, [tensor])

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> Work:
        opts = opts or AllreduceCoalescedOptions()
        return _last([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: ReduceOptions | None = None) -> Work:
        opts = opts or ReduceOptions()
        tensor = _only(tensors)
        op = _reduce_op(opts)
        if self._memory is None or op is None or not is_dense(tensor) or not can_reduce(tensor, op):
            return self._gloo.reduce([tensor], opts)
        started = self._memory.reduce(
            tensor, op, opts.rootRank, self._seconds(opts), later=opts.asyncOp
        )
        return self._work(started, [tensor])

    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        output, pieces = _only(output_tensors), _only(input_tensors)
        op = _reduce_op(opts)
        if self._memory is None or op is None or not is_dense(output) or not can_reduce(output, op):
            return self._gloo.reduce_scatter([output], [list(pieces)], opts)
        self._check_pieces("input", pieces, [output.shape.numel()] * self._size)
        started = self._memory.reduce_scatter(
            output, pieces, op, self._seconds(opts), later=opts.asyncOp
        )
        return self._work(started, [output])

    def reduce_scatter_single(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        self._check_whole("input", inputTensor, outputTensor)
        pieces = inputTensor.contiguous().view(-1).chunk(self._size)
        if outputTensor.numel() == 0:
            pieces = (inputTensor.view(-1),) * self._size
        if self._memory is None and self._gloo is not None:
            return self._gloo._reduce_scatter_base(outputTensor, inputTensor, opts)
        return self.reduce_scatter([outputTensor], [list(pieces)], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        return _last(
            [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---------------------------------------------------------------- moving

    def broadcast(
        self, tensors: Sequence[Tensor] | Tensor, opts: BroadcastOptions | None = None
    ) -> Work:
        opts = opts or BroadcastOptions()
        tensor = _only(tensors)
        ways = self._memory or self._hierarchy
        if ways is None or not is_dense(tensor):
            return self._gloo.broadcast([tensor], opts)
        started = ways.broadcast(tensor, opts.rootRank, self._seconds(opts), later=opts.asyncOp)
        return self._work(started, [tensor])

    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        opts = opts or AllgatherOptions()
        outputs, tensor = _only(output_tensors), _only(input_tensors)
        if self._memory is None or not is_dense(tensor):
            return self._gloo.allgather([list(outputs)], [tensor], opts)
        self._check_pieces("output", outputs, [tensor.numel()] * self._size)
        started = self._memory.all_gather(outputs, tensor, self._seconds(opts), later=opts.asyncOp)
        return self._work(started, outputs)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        self._check_whole("output", output, input)
        if self._memory is None:
            return self._gloo._allgather_base(output, input, opts)
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        pieces = list(whole.view(-1).chunk(self._size)) or [whole.view(-1)]
        if input.numel() == 0:
            pieces = [whole.view(-1)] * self._size
        started = self._memory.all_gather(pieces, input, self._seconds(opts), later=opts.asyncOp)
        if whole is not output:
            started.finish = partial(output.copy_, whole)
        return self._work(started, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        return _last(
            [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        return _last(
            [
                self.allgather([[row[index] for row in output_lists]], [tensor], opts)
                for index, tensor in enumerate(input_list)
            ]
        )

    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: GatherOptions | None = None,
    ) -> Work:
        opts = opts or GatherOptions()
        tensor = _only(input_tensors)
        outputs: Sequence[Tensor] = ()
        if self._memory is None or not is_dense(tensor):
            return self._gloo.gather(list(output_tensors), [tensor], opts)
        if self._rank == opts.rootRank:
            outputs = _only(output_tensors)
            self._check_pieces("output", outputs, [tensor.numel()] * self._size)
        started = self._memory.gather(
            outputs, tensor, opts.rootRank, self._seconds(opts), later=opts.asyncOp
        )
        return self._work(started, outputs)

    def scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ScatterOptions | None = None,
    ) -> Work:
        opts = opts or ScatterOptions()
        output = _only(output_tensors)
        pieces: Sequence[Tensor] = ()
        if self._memory is None or not is_dense(output):
            return self._gloo.scatter([output], list(input_tensors), opts)
        if self._rank == opts.rootRank:
            pieces = _only(input_tensors)
            self._check_pieces("input", pieces, [output.numel()] * self._size)
        started = self._memory.scatter(
            output, pieces, opts.rootRank, self._seconds(opts), later=opts.asyncOp
        )
        return self._work(started, [output])

    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        if self._memory is None:
            return self._gloo.alltoall(list(output_tensors), list(input_tensors), opts)
        if len(output_tensors) != self._size or len(input_tensors) != self._size:
            raise ArgumentError(
                f"all_to_all takes {self._size} tensors of each kind, one for each rank; got "
                f"{len(output_tensors)} outputs and {len(input_tensors)} inputs."
            )
        started = self._memory.all_to_all(
            output_tensors, input_tensors, self._seconds(opts), later=opts.asyncOp
        )
        return self._work(started, output_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: AllToAllOptions | None = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        if self._memory is None:
            return self._gloo.alltoall_base(
                output, input, list(output_split_sizes or ()), list(input_split_sizes or ()), opts
            )
        whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        started = self._memory.all_to_all(
            self._split("output", whole, output_split_sizes),
            self._split("input", input.contiguous(), input_split_sizes),
            self._seconds(opts),
            later=opts.asyncOp,
        )
        if whole is not output:
            started.finish = partial(output.copy_, whole)
        return self._work(started, [output])

    alltoall_base = all_to_all_single

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        opts = opts or BarrierOptions()
        ways = self._memory or self._hierarchy
        if ways is None:
            return self._gloo.barrier(opts)
        return self._work(ways.barrier(self._seconds(opts), later=opts.asyncOp), [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and say which have not come, without breaking the group."""
        self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)

    # ---------------------------------------------------------------- point to point

    def send(self, tensors: Sequence[Tensor] | Tensor, dstRank: int, tag: int = 0) -> Work:
        tensor = _only(tensors)
        if self._memory is None or not is_dense(tensor):
            return self._gloo.send([tensor], dstRank, tag)
        return self._work(self._memory.send(tensor, dstRank, tag, self._seconds()), [tensor])

    def recv(self, tensors: Sequence[Tensor] | Tensor, srcRank: int, tag: int = 0) -> Work:
        tensor = _only(tensors)
        if self._memory is None or not is_dense(tensor):
            return self._gloo.recv([tensor], srcRank, tag)
        return self._work(self._memory.recv(tensor, srcRank, tag, self._seconds()), [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor] | Tensor, tag: int = 0) -> Work:
        tensor = _only(tensors)
        if self._memory is None or not is_dense(tensor):
            return self._gloo.recv_anysource([tensor], tag)
        started = self._memory.recv(tensor, _native.ANY_SOURCE, tag, self._seconds())
        return self._work(started, [tensor])

    # ---------------------------------------------------------------- the end

    def abort(self) -> None:
        """Make what is under way fail, here and on the other ranks. Nothing works afterwards."""
        if self._context is not None:
            self._context.abort()
        if self._hierarchy is not None:
            self._hierarchy.abort()
        if self._inner is not None:
            self._inner.abort()

    def shutdown(self) -> None:
        """Leave the group. What is still under way fails."""
        if self._closed:
            return
        self._closed = True
        if self._hierarchy is not None:
            self._hierarchy.close()
        if self._context is not None:
            self._context.close()
        self._notifier.stop()
        self._pending.clear()
        if self._inner is not None:
            self._inner.shutdown()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.shutdown()

    # ---------------------------------------------------------------- helpers

    @property
    def _gloo(self) -> Any:
        """For what has no way of ours. All ranks come here at the same collective."""
        if self._inner is None:
            if self._closed:
                raise StateError("The process group has been destroyed.")
            store = PrefixStore("gloo/", self._store)
            self._inner = ProcessGroupGloo(store, self._rank, self._size, self._timeout)
        return self._inner

    def _work(self, started: Started, outputs: Sequence[Tensor]) -> SharedMemoryWork:
        work = SharedMemoryWork(
            started.handle, outputs, started.kept, started.finish, self._notifier
        )
        pending = self._pending
        while pending and pending[0].handle.done:
            pending.popleft()
        if not started.handle.done:
            pending.append(work)  # its memory stays, also if the caller forgets the work
        return work

    def _leave_to_background(self) -> None:
        if self._context is not None:
            self._context.leave_to_background()

    def _seconds(self, opts: Any = None) -> float:
        """How long an operation may take: what it asks for itself, or else what the group does."""
        own = opts.timeout.total_seconds() if opts is not None else 0.0
        return own if own > 0 else self._timeout.total_seconds()

    def _check_pieces(self, kind: str, pieces: Sequence[Tensor], counts: Sequence[int]) -> None:
        got = [piece.numel() for piece in pieces]
        if got != list(counts):
            raise ArgumentError(
                f"The {kind} tensors must be {len(counts)}, with {list(counts)} elements; got "
                f"{len(got)} with {got}."
            )

    def _check_whole(self, kind: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise ArgumentError(
                f"The {kind} tensor must have {self._size} times the {part.numel()} elements of "
                f"the other, and its dtype, {part.dtype}; got {whole.numel()} of {whole.dtype}."
            )

    def _split(self, kind: str, whole: Tensor, sizes: Sequence[int] | None) -> list[Tensor]:
        """Cut along the first dimension, evenly without ``sizes``."""
        rows = whole.shape[0] if whole.dim() else 0
        if not sizes:
            if rows % self._size:
                raise ArgumentError(
                    f"Tensor's dim 0 does not divide equally across group size: {kind} has {rows} "
                    f"rows for {self._size} ranks."
                )
            sizes = [rows // self._size] * self._size
        if sum(sizes) != rows or len(sizes) != self._size:
            raise ArgumentError(
                f"Split sizes doesn't match total dim 0 size: {kind} has {rows} rows, the split "
                f"sizes are {list(sizes)} for {self._size} ranks."
            )
        return list(whole.split(list(sizes)))


def _reduce_op(opts: Any) -> ReduceOp | None:
    return REDUCE_OPS.get(opts.reduceOp.op)


def _only(items: Any) -> Any:
    """The one tensor, or list of tensors, of a call that takes one for each device."""
    if isinstance(items, Tensor):
        return items
    if len(items) != 1:
        raise ArgumentError(f"Exactly one tensor a rank is supported, got {len(items)}.")
    return items[0]


class _All:
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    @property
    def done(self) -> bool:
        """Are all of them?"""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def _last(works: Sequence[Work]) -> Work:
    """One work for several; they are done in order."""
    assert works, "a coalesced collective has at least one tensor"
    if len(works) == 1 or not isinstance(works[-1], SharedMemoryWork):
        return works[-1]
    last = works[-1]
    outputs = [tensor for work in works for tensor in work.result()]
    return SharedMemoryWork(_All(works), outputs, None, None, last._notifier)


def create(options: Any, _backend_options: object) -> SharedMemoryGroup:
    """What torch calls for ``backend="gradsync"``."""
    return SharedMemoryGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout or DEFAULT_TIMEOUT,
        options.global_ranks_in_group or (),
    )


def register() -> None:
    """Make ``backend="gradsync"`` known to torch."""
    if not hasattr(dist.Backend, "GRADSYNC"):
        dist.Backend.register_backend("gradsync", create, extended_api=True, devices=["cpu"])
