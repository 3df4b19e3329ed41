"""Several machines: shared memory inside each, one flow of gloo's between them.

The first rank of a machine is its leader. A tensor goes in chunks: the ranks of a machine reduce a
chunk into the leader's, the leaders reduce it over the network, and each leader gives it to its
machine, while the next chunk is reduced and the one after it is on the way.

[Note: flows]
gloo cannot be told to give up a collective. Leaders wait for it in slices and listen to the other
machines meanwhile (see board.py); one that is not waited for any more keeps what it works on, which
is therefore memory of ours and never the user's.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from gradsync.backend._native import ReduceOp
from gradsync.backend.board import GRACE_SECONDS, Board
from gradsync.backend.engines import let_go
from gradsync.backend.members import Member, fetch
from gradsync.backend.shared_memory import SharedMemory, Started
from gradsync.backend.work import translate
from gradsync.errors import (
    AbortedError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)

CHUNK_BYTES = 1024 * 1024
SLICE = timedelta(milliseconds=100)
GLOO_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
WIDER = {torch.bfloat16: torch.float32, torch.int16: torch.int32}  # what gloo cannot reduce


class Clock:
    """How long an operation may still take. It begins when the operation is issued."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """In seconds, and never nothing: what looks once more finds what is already there."""
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def timeout(self) -> timedelta:
        """The same, for gloo."""
        return timedelta(seconds=self.left)

    @property
    def is_over(self) -> bool:
        """Has the deadline passed?"""
        return time.monotonic() >= self._deadline


class Task:
    """An operation in several parts, under way on the hierarchy's thread."""

    def __init__(self, number: int, name: str, run: Callable[[], None]) -> None:
        self.number = number
        self.name = f"collective {number}, {name}"
        self.run = run
        self._ended = threading.Event()
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Has it ended, well or not?"""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for it, and raise what went wrong."""
        while not self._ended.wait(0.1):  # in slices, so that Ctrl-C gets through
            pass
        if self._error is not None:
            raise self._error

    def end(self, error: Exception | None) -> None:
        """Let those who wait go on."""
        self._error = error
        self._ended.set()


class Hierarchy:
    """Collectives over the ranks of ``machines``; all of them run in order on one thread."""

    def __init__(
        self,
        store: Store,
        own: Member,
        machines: Sequence[Sequence[Member]],
        memory: SharedMemory,
        timeout: timedelta,
    ) -> None:
        self._own = own
        self._machines = machines
        self._memory = memory
        self._world = sum(map(len, machines))
        self._here = next(index for index, machine in enumerate(machines) if own in machine)
        self._is_leader = memory.rank == 0
        self._leaders: Any = None
        if self._is_leader:
            leaders = PrefixStore("leaders/", store)
            self._leaders = ProcessGroupGloo(leaders, self._here, len(machines), timeout)
        self._issued = self._ended = 0
        self._board = Board(
            PrefixStore("board/", store),
            self._here,
            is_leader=self._is_leader,
        )
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._stop: AbortedError | None = None
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="gradsync-hosts", daemon=True)
        self._thread.start()

    @classmethod
    def build(
        cls,
        store: Store,
        own: Member,
        machines: Sequence[Sequence[Member]],
        memory: SharedMemory | None,
        timeout: timedelta,
    ) -> "Hierarchy | None":
        """A hierarchy, if the ranks share memory on every machine."""
        if own == next(machine for machine in machines if own in machine)[0]:
            store.set(f"machine/{own.rank}", "" if memory is None else "shares")
        if not all(fetch(store, [f"machine/{machine[0].rank}" for machine in machines])):
            return None
        assert memory is not None
        return cls(store, own, machines, memory, timeout)

    # ---------------------------------------------------------------- collectives

    def all_reduce(self, tensor: Tensor, op: ReduceOp, seconds: float, *, later: bool) -> Started:
        """Reduce ``tensor`` in place over all ranks of all machines."""
        del later  # a thread does it in any case: the network is waited for
        flat = tensor.detach().contiguous()
        if op is ReduceOp.AVG and flat.dtype is torch.float16:
            flat = flat.float()  # the sum of a machine might be too large
        chunks = _chunks(torch.view_as_real(flat) if flat.is_complex() else flat)
        clock = Clock(seconds)
        name = f"all_reduce({op.name.lower()}, {_shape(tensor)})"
        task = self._start(name, lambda: self._all_reduce(chunks, op, clock))
        return Started(task, (tensor, flat), _finish(tensor, flat))

    def _all_reduce(self, chunks: Sequence[Tensor], op: ReduceOp, clock: Clock) -> None:
        inside = ReduceOp.SUM if op is ReduceOp.AVG else op
        flows: list[tuple[dist.Work, Tensor]] = []
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                chunk = chunks[index]
                self._memory.reduce(chunk, inside, 0, clock.left, later=False).handle.wait()
                if self._is_leader:
                    flows.append(self._reduce_between(chunk, op, clock))
            if index > 0:
                chunk = chunks[index - 1]
                if self._is_leader:
                    flow, copy = flows.pop(0)
                    self._await(flow)
                    if op is ReduceOp.AVG:
                        rounding = None if copy.is_floating_point() else "trunc"
                        copy.div_(self._world, rounding_mode=rounding)
                    chunk.copy_(copy)
                self._memory.broadcast(chunk, 0, clock.left, later=False).handle.wait()

    def _reduce_between(
        self, chunk: Tensor, op: ReduceOp, clock: Clock
    ) -> tuple[dist.Work, Tensor]:
        copy = chunk.to(WIDER.get(chunk.dtype, chunk.dtype), copy=True)
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(GLOO_OPS[op])
        options.timeout = clock.timeout
        return self._leaders.allreduce([copy], options), copy

    def broadcast(self, tensor: Tensor, root: int, seconds: float, *, later: bool) -> Started:
        """Overwrite ``tensor`` on all machines with that of rank ``root`` of the group."""
        del later
        flat = tensor.detach().contiguous()
        chunks = _chunks(flat.view(-1).view(torch.uint8))
        source = next(
            index
            for index, machine in enumerate(self._machines)
            if any(member.rank == root for member in machine)
        )
        at = [member.rank for member in self._machines[source]].index(root)
        clock = Clock(seconds)
        name = f"broadcast(root {root}, {_shape(tensor)})"
        task = self._start(name, lambda: self._broadcast(chunks, source, at, clock))
        return Started(task, (tensor, flat), _finish(tensor, flat))

    def _broadcast(self, chunks: Sequence[Tensor], source: int, at: int, clock: Clock) -> None:
        flows: list[tuple[dist.Work, Tensor]] = []
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                chunk = chunks[index]
                if self._here == source:
                    self._memory.broadcast(chunk, at, clock.left, later=False).handle.wait()
                if self._is_leader:
                    flows.append(self._broadcast_between(chunk, source, clock))
            if index > 0:
                chunk = chunks[index - 1]
                if self._is_leader:
                    flow, copy = flows.pop(0)
                    self._await(flow)
                    if self._here != source:
                        chunk.copy_(copy)
                if self._here != source:
                    self._memory.broadcast(chunk, 0, clock.left, later=False).handle.wait()

    def _broadcast_between(
        self, chunk: Tensor, source: int, clock: Clock
    ) -> tuple[dist.Work, Tensor]:
        copy = chunk.clone() if self._here == source else torch.empty_like(chunk)
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = clock.timeout
        return self._leaders.broadcast([copy], options), copy

    def barrier(self, seconds: float, *, later: bool) -> Started:
        """Wait until all ranks of all machines have come here."""
        del later
        clock = Clock(seconds)
        return Started(self._start("barrier", lambda: self._barrier(clock)), None)

    def _barrier(self, clock: Clock) -> None:
        self._memory.barrier(clock.left, later=False).handle.wait()
        if self._is_leader:
            options = BarrierOptions()
            options.timeout = clock.timeout
            self._await(self._leaders.barrier(options))
        self._memory.barrier(clock.left, later=False).handle.wait()

    def _await(self, flow: dist.Work) -> None:
        """Wait for the network, and for news. [Note: flows]."""
        while True:
            with suppress(RuntimeError):  # of gloo's, or because the slice is over
                flow.wait(SLICE)
                return
            if flow.is_completed():
                flow.wait()  # raises what went wrong
                return
            if self._stop is not None:
                raise self._stop
            if self._board.notice is not None:
                raise self._board.notice

    # ---------------------------------------------------------------- the thread

    def _start(self, name: str, run: Callable[[], None]) -> Task:
        with self._lock:
            self._issued += 1
            task = Task(self._issued, name, run)
            if self._is_closed:
                task.end(AbortedError("The group has been closed."))
            else:
                self._tasks.put(task)
        return task

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._board.progress = task.number
            error = self._broken or self._stop
            if error is None:
                try:
                    task.run()
                except Exception as problem:
                    error = translate(problem)
                    if not isinstance(error, CollectiveMismatchError):
                        error = self._broken = self._explain(task, error)
            self._ended = task.number  # first: who waits may close the group at once
            task.end(error)
            del task

    def _explain(self, task: Task, error: Exception) -> Exception:
        """What happened, as one rank has found out and told all others."""
        if self._stop is not None:
            error = self._stop
        elif error is self._board.notice:
            pass
        elif isinstance(error, AbortedError) and "aborted the group" not in str(error):
            self.abort()  # by another thread of ours
        elif isinstance(error, DeadlineError) and not self._is_leader:
            # Our leader is late, since it waits for another machine: it will know for which.
            error = self._board.read(3 * GRACE_SECONDS) or error
        elif isinstance(error, FaultError) and type(error) is not FaultError:
            error.args = (f"{task.name}: {error}",)  # the native part has told of its part of it
        elif isinstance(error, FaultError):  # a neighbour gave up, for a reason that it has posted
            error = self._board.read() or error
        else:
            error = self._board.notice or self._roll_call(task, error)
        self._memory.context.fail(str(error))  # so that nobody on this machine waits for us
        if self._stop is None:
            self._board.post(error)
        return error

    def _roll_call(self, task: Task, error: Exception) -> FaultError:
        """The flow is cut, or has not come in time. Whose fault is it?"""
        reason = str(error).splitlines()[0]
        answers = self._board.roll_call(len(self._machines))
        if self._board.notice is not None:
            return self._board.notice
        absent = [index for index, number in answers.items() if number is None]
        if "timed out" in reason.lower() or "timeout" in reason.lower():
            behind = [index for index, number in answers.items() if (number or 0) < task.number]
            late = [member for index in behind for member in self._machines[index]]
            text = f"{task.name}: the deadline has passed (timeout in the network). Not arrived: "
            who = ", ".join(member.label for member in late) or "not known"
            return DeadlineError(f"{text}{who}.", ranks=[member.rank for member in late])
        if absent:
            lost = self._machines[absent[0]][0]
            return PeerLostError(
                f"{lost.label} does not answer any more, and its connection was closed while "
                f"{task.name}, waited for it: {reason}",
                rank=lost.rank,
                host=lost.host,
                pid=lost.pid,
            )
        leaders = ", ".join(machine[0].label for machine in self._machines)
        unknown = f" No more is known, as the store fails: {self._board.trouble}."
        return FaultError(
            f"{task.name} failed in the flow between {leaders}: {reason}."
            f"{unknown if self._board.trouble else ''}"
        )

    # ---------------------------------------------------------------- the end

    def abort(self) -> None:
        """Make what is under way fail, here and on other machines."""
        if self._stop is None:
            self._stop = AbortedError("The group was aborted.")
            self._board.post(AbortedError(f"{self._own.label} aborted the group."))

    def close(self) -> None:
        """End the thread. What is still under way fails."""
        with self._lock:
            self._is_closed = True
            is_busy = self._ended < self._issued
            self._tasks.put(None)
        if is_busy and self._broken is None:
            self._memory.context.abort()
            self.abort()
        self._thread.join()
        self._board.close()
        if self._is_leader:
            leaders, self._leaders = {"gloo": self._leaders}, None
            let_go(leaders)


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.reshape(-1)  # 1D
    return list(flat.split(max(1, CHUNK_BYTES // flat.element_size()))) if flat.numel() else [flat]


def _finish(tensor: Tensor, flat: Tensor) -> Callable[[], object] | None:
    """What brings the result to the user's tensor, where it is not there."""
    if flat.data_ptr() == tensor.data_ptr() and flat.dtype == tensor.dtype:
        return None
    return lambda: tensor.detach().copy_(flat)


def _shape(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}"
