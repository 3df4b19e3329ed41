"""The process group: which way an operation takes.

Ranks of one machine go through shared memory, ranks of several through the hierarchy, and what has
no way there goes to an inner gloo group, which is made when it is first needed.
"""

from collections.abc import Sequence
from datetime import timedelta
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
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from gradsync.backend import _native
from gradsync.backend._native import ReduceOp
from gradsync.backend.arguments import (
    check_alike,
    check_exchange,
    check_peer,
    check_pieces,
    check_whole,
    known_op,
    only,
    reduce_op,
    split,
)
from gradsync.backend.dynamo import leave_alone
from gradsync.backend.group_base import GroupBase, Work
from gradsync.backend.lane import check_process
from gradsync.backend.places import each_to_fill, each_to_read, parts_to_fill, parts_to_read
from gradsync.backend.shared_memory import (
    PersistentReduction,
    Reduction,
    can_reduce,
    is_dense,
    symmetric_empty,
    together,
)
from gradsync.backend.work import DONE, All, SharedMemoryWork
from gradsync.errors import ArgumentError, StateError


@leave_alone
class SharedMemoryGroup(GroupBase):
    """Ranks that exchange tensors through memory that they share.

    Made by ``torch.distributed.init_process_group("gradsync")`` or ``new_group``.

    >>> import torch, torch.distributed as dist, gradsync
    >>> group = dist.new_group(backend="gradsync")
    >>> tensor = torch.ones(3)
    >>> dist.all_reduce(tensor, group=group)
    >>> tensor
    tensor([1., 1., 1.])
    """

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

    def persistent_all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.AVG
    ) -> PersistentReduction:
        """An all-reduce of ``tensor``, which is from ``symmetric_empty``, to be run many times.

        It costs a fraction of ``torch.distributed.all_reduce`` a time, which matters up to some MB.
        """
        if self._memory is None or not self.shares_memory:
            raise StateError("The ranks of this group do not share memory.")
        native = self._memory.prepare_all_reduce(tensor, known_op(op))
        return PersistentReduction(self, native, tensor, op)

    def start_average(self, tensor: Tensor, *, average: bool) -> Reduction:
        """For our DDP: begin to average, or add up, a flat tensor of numbers in place.

        As ``allreduce`` does, without what torch needs around it.
        """
        assert self._memory is not None, "the ranks share memory"
        op = ReduceOp.AVG if average else ReduceOp.SUM
        reduction = self._memory.start_all_reduce(tensor, op, self.timeout_seconds)
        self._keep(reduction)
        return reduction

    def counters(self) -> dict[str, int]:
        """How many all-reduces ran in place (``symmetric``), how many through slots (``copied``).

        In place are those above 32 KiB in symmetric memory. ``copied_bytes``: what this rank has
        put into slots, for any collective. ``helped``: pieces of 32 KiB that this rank reduced in
        place of others, who were late.
        """
        return {} if self._context is None else self._context.counters()

    # ---------------------------------------------------------------- reductions

    def allreduce(
        self, tensors: Sequence[Tensor] | Tensor, opts: AllreduceOptions | None = None
    ) -> Work:
        opts = opts or AllreduceOptions()
        memory = self._memory
        if memory is not None and memory.all_reduce_now(tensors, opts, self.timeout_seconds):
            return DONE
        tensor = only(tensors)
        op = reduce_op(opts)
        ways = memory or self._hierarchy
        if ways is None or op is None or not self._reduces(tensor, op):
            return self._by_engine("allreduce", [tensor], opts=opts)
        started = ways.all_reduce(tensor, op, self._seconds(opts), later=opts.asyncOp)
        return self._work("all_reduce", started, [tensor])

    def allreduce_coalesced(
        self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None
    ) -> Work:
        opts = opts or AllreduceCoalescedOptions()
        op = reduce_op(opts)
        ways = self._memory or self._hierarchy
        if ways is None or op is None or not all(self._reduces(tensor, op) for tensor in tensors):
            return self._by_engine("allreduce_coalesced", list(tensors), opts=opts)
        seconds = self._seconds(opts)
        started = [ways.all_reduce(each, op, seconds, later=opts.asyncOp) for each in tensors]
        return self._work("all_reduce", together(started), tensors)

    def reduce(self, tensors: Sequence[Tensor] | Tensor, opts: ReduceOptions | None = None) -> Work:
        opts = opts or ReduceOptions()
        tensor = only(tensors)
        op = reduce_op(opts)
        if self._memory is None or op is None or not self._reduces(tensor, op):
            return self._by_engine("reduce", [tensor], opts=opts)
        started = self._memory.reduce(
            tensor, op, self._root(opts), self._seconds(opts), later=opts.asyncOp
        )
        return self._work("reduce", started, [tensor])

    def reduce_scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ReduceScatterOptions | None = None,
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        output, pieces = only(output_tensors), only(input_tensors)
        check_pieces("input", pieces, output, self._size)
        op = reduce_op(opts)
        if self._memory is None or op is None or not self._reduces(output, op):
            return self._by_engine("reduce_scatter", [output], [list(pieces)], opts=opts)
        started = self._memory.reduce_scatter(
            output, each_to_read(pieces), op, self._seconds(opts), later=opts.asyncOp
        )
        return self._work("reduce_scatter", started, [output], pieces)

    def reduce_scatter_single(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        check_whole("input", inputTensor, outputTensor, self._size)
        op = reduce_op(opts)
        if self._memory is None or op is None or not self._reduces(outputTensor, op):
            return self._by_engine("_reduce_scatter_base", outputTensor, inputTensor, opts=opts)
        pieces = parts_to_read(inputTensor, [outputTensor.nbytes] * self._size)
        started = self._memory.reduce_scatter(
            outputTensor, pieces, op, self._seconds(opts), later=opts.asyncOp
        )
        return self._work("reduce_scatter", started, [outputTensor], [inputTensor])

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

    def _reduces(self, tensor: Tensor, op: ReduceOp) -> bool:
        return is_dense(tensor) and can_reduce(tensor, op)

    # ---------------------------------------------------------------- moving

    def broadcast(
        self, tensors: Sequence[Tensor] | Tensor, opts: BroadcastOptions | None = None
    ) -> Work:
        opts = opts or BroadcastOptions()
        tensor = only(tensors)
        ways = self._memory or self._hierarchy
        if ways is None or not is_dense(tensor):
            return self._by_engine("broadcast", [tensor], opts=opts)
        started = ways.broadcast(tensor, self._root(opts), self._seconds(opts), later=opts.asyncOp)
        return self._work("broadcast", started, [tensor])

    def allgather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: AllgatherOptions | None = None,
    ) -> Work:
        opts = opts or AllgatherOptions()
        outputs, tensor = only(output_tensors), only(input_tensors)
        check_pieces("output", outputs, tensor, self._size)
        if self._memory is None or not is_dense(tensor):
            return self._by_engine("allgather", [list(outputs)], [tensor], opts=opts)
        places = each_to_fill(outputs)
        started = self._memory.all_gather(places, tensor, self._seconds(opts), later=opts.asyncOp)
        return self._work("all_gather", started, outputs, [tensor])

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        check_whole("output", output, input, self._size)
        if self._memory is None or not is_dense(input):
            return self._by_engine("_allgather_base", output, input, opts=opts)
        places = parts_to_fill(output, [input.nbytes] * self._size)
        started = self._memory.all_gather(places, input, self._seconds(opts), later=opts.asyncOp)
        return self._work("all_gather", started, [output], [input])

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
        opts = opts or AllgatherOptions()
        columns = list(zip(*output_lists, strict=True))
        for outputs, tensor in zip(columns, input_list, strict=True):
            check_pieces("output", outputs, tensor, self._size)
        if self._memory is None or not all(map(is_dense, input_list)):
            rows = [list(row) for row in output_lists]
            return self._by_engine("allgather_coalesced", rows, list(input_list), opts=opts)
        seconds, started = self._seconds(opts), []
        for outputs, tensor in zip(columns, input_list, strict=True):
            places = each_to_fill(outputs)
            started.append(self._memory.all_gather(places, tensor, seconds, later=opts.asyncOp))
        flat = [output for outputs in columns for output in outputs]
        return self._work("all_gather", together(started), flat, input_list)

    def gather(
        self,
        output_tensors: Sequence[Sequence[Tensor]],
        input_tensors: Sequence[Tensor],
        opts: GatherOptions | None = None,
    ) -> Work:
        opts = opts or GatherOptions()
        tensor = only(input_tensors)
        outputs: Sequence[Tensor] = ()
        if self._rank == self._root(opts):
            outputs = only(output_tensors)
            check_pieces("output", outputs, tensor, self._size)
        if self._memory is None or not is_dense(tensor):
            return self._by_engine("gather", list(output_tensors), [tensor], opts=opts)
        started = self._memory.gather(
            each_to_fill(outputs), tensor, self._root(opts), self._seconds(opts), later=opts.asyncOp
        )
        return self._work("gather", started, outputs, [tensor])

    def scatter(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Sequence[Tensor]],
        opts: ScatterOptions | None = None,
    ) -> Work:
        opts = opts or ScatterOptions()
        output = only(output_tensors)
        pieces: Sequence[Tensor] = ()
        if self._rank == self._root(opts):
            pieces = only(input_tensors)
            check_pieces("input", pieces, output, self._size)
        if self._memory is None or not is_dense(output):
            return self._by_engine("scatter", [output], list(input_tensors), opts=opts)
        started = self._memory.scatter(
            output, each_to_read(pieces), self._root(opts), self._seconds(opts), later=opts.asyncOp
        )
        return self._work("scatter", started, [output], pieces)

    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: AllToAllOptions | None = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        check_exchange(output_tensors, input_tensors, self._size)
        first = output_tensors[0]
        if self._memory is None or not is_dense(first):
            inputs, outputs = list(input_tensors), list(output_tensors)
            return self._by_engine("alltoall", outputs, inputs, opts=opts)
        started = self._memory.all_to_all(
            each_to_fill(output_tensors),
            each_to_read(input_tensors),
            first.dtype,
            self._seconds(opts),
            later=opts.asyncOp,
        )
        return self._work("all_to_all", started, output_tensors, input_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: AllToAllOptions | None = None,
    ) -> Work:
        opts = opts or AllToAllOptions()
        check_alike(output, input)
        to_fill = split("output", output, output_split_sizes, self._size)
        to_read = split("input", input, input_split_sizes, self._size)
        if self._memory is None or not is_dense(output):
            splits = list(output_split_sizes or ()), list(input_split_sizes or ())
            return self._by_engine("alltoall_base", output, input, *splits, opts=opts)
        started = self._memory.all_to_all(
            parts_to_fill(output, to_fill),
            parts_to_read(input, to_read),
            output.dtype,
            self._seconds(opts),
            later=opts.asyncOp,
        )
        return self._work("all_to_all", started, [output], [input])

    alltoall_base = all_to_all_single

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        opts = opts or BarrierOptions()
        ways = self._memory or self._hierarchy
        if ways is None:
            return self._by_engine("barrier", opts=opts)
        return self._work("barrier", ways.barrier(self._seconds(opts), later=opts.asyncOp), [])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and say which have not come, without breaking the group."""
        check_process(self._process)
        if timeout is None or timeout < timedelta(0):  # torch's default is below
            timeout = self._timeout
        assert self._monitored_barrier is not None, "it is made with the group"
        self._monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    # ---------------------------------------------------------------- point to point

    def send(self, tensors: Sequence[Tensor] | Tensor, dstRank: int, tag: int = 0) -> Work:
        tensor = only(tensors)
        to = check_peer("receiver", dstRank, self._rank, self._size)
        if self._memory is None or not self._takes_message(tensor):
            return self._message_by_engine("send", tensor, to, tag)
        started = self._memory.send(tensor, to, tag, self._seconds())
        return self._work("send", started, [tensor])

    def recv(self, tensors: Sequence[Tensor] | Tensor, srcRank: int, tag: int = 0) -> Work:
        tensor = only(tensors)
        source = check_peer("sender", srcRank, self._rank, self._size)
        if self._memory is None or not self._takes_message(tensor):
            return self._message_by_engine("recv", tensor, source, tag)
        started = self._memory.recv(tensor, source, tag, self._seconds())
        return self._work("recv", started, [tensor])

    def recv_anysource(self, tensors: Sequence[Tensor] | Tensor, tag: int = 0) -> Work:
        tensor = only(tensors)
        if self._memory is None or not self._takes_message(tensor):
            return self._message_by_engine("recv_anysource", tensor, None, tag)
        started = self._memory.recv(tensor, _native.ANY_SOURCE, tag, self._seconds())
        return self._work("recvAnySource", started, [tensor])

    def _takes_message(self, tensor: Tensor) -> bool:
        if (
            tensor.layout is not torch.strided
        ):  # gloo takes none either, but would wait for all ranks
            raise ArgumentError(f"Messages are dense tensors; got one of {tensor.layout}.")
        return is_dense(tensor)


def _last(works: Sequence[Work]) -> Work:
    """One work for several that are done in order."""
    assert works, "a coalesced collective has at least one tensor"
    last = works[-1]
    if len(works) == 1 or not isinstance(last, SharedMemoryWork):
        return last
    outputs = [tensor for work in works for tensor in work.result()]
    return SharedMemoryWork(All(works), outputs, None, None, last.notifier)
