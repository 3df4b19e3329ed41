"""Several machines: shared memory inside each, one flow of gloo's between them.

The first rank of a machine is its leader. A tensor goes in chunks: the ranks of a machine reduce a
chunk into the leader's, the leaders reduce it over the network, and each leader gives it to its
machine, while the next chunk is reduced and the one after it is on the way.
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
from gradsync.backend.members import Member
from gradsync.backend.shared_memory import SharedMemory, Started
from gradsync.backend.work import translate
from gradsync.errors import AbortedError, CollectiveMismatchError, FaultError, PeerLostError

CHUNK_BYTES = 1024 * 1024
GRACE_SECONDS = 0.5  # for the news of a loss to get about
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


class Task:
    """An operation in several parts, under way on the hierarchy's thread."""

    def __init__(self, run: Callable[[], None]) -> None:
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
        self._store = store
        self._own = own
        self._machines = machines
        self._memory = memory
        self._world = sum(map(len, machines))
        self._here = next(index for index, machine in enumerate(machines) if own in machine)
        self._leaders: Any = None
        if memory.rank == 0:
            leaders = PrefixStore("leaders/", store)
            self._leaders = ProcessGroupGloo(leaders, self._here, len(machines), timeout)
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
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
        if not all(store.get(f"machine/{machine[0].rank}") for machine in machines):
            return None
        assert memory is not None
        return cls(store, own, machines, memory, timeout)

    # ---------------------------------------------------------------- collectives

    def all_reduce(self, tensor: Tensor, op: ReduceOp, seconds: float, *, later: bool) -> Started:
        """Reduce ``tensor`` in place over all ranks of all machines."""
        flat = tensor.detach().contiguous()
        parts = torch.view_as_real(flat) if flat.is_complex() else flat
        chunks = _chunks(parts)
        finish = None if flat.data_ptr() == tensor.data_ptr() else lambda: tensor.copy_(flat)
        task = self._start(lambda: self._all_reduce(chunks, op, seconds), later)
        return Started(task, flat, finish)

    def _all_reduce(self, chunks: Sequence[Tensor], op: ReduceOp, seconds: float) -> None:
        inside = ReduceOp.SUM if op is ReduceOp.AVG else op
        flows: list[tuple[dist.Work, Tensor]] = []
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                chunk = chunks[index]
                self._memory.reduce(chunk, inside, 0, seconds, later=False).handle.wait()
                if self._leaders is not None:
                    wide = chunk.to(WIDER.get(chunk.dtype, chunk.dtype))
                    options = AllreduceOptions()
                    options.reduceOp = dist.ReduceOp(GLOO_OPS[op])
                    options.timeout = timedelta(seconds=seconds)
                    flows.append((self._leaders.allreduce([wide], options), wide))
            if index > 0:
                chunk = chunks[index - 1]
                if self._leaders is not None:
                    flow, wide = flows[index - 1]
                    flow.wait()
                    if op is ReduceOp.AVG:
                        rounding = None if wide.is_floating_point() else "trunc"
                        wide.div_(self._world, rounding_mode=rounding)
                    if wide is not chunk:
                        chunk.copy_(wide)
                self._memory.broadcast(chunk, 0, seconds, later=False).handle.wait()

    def broadcast(self, tensor: Tensor, root: int, seconds: float, *, later: bool) -> Started:
        """Overwrite ``tensor`` on all machines with that of rank ``root`` of the group."""
        flat = tensor.detach().contiguous()
        finish = None if flat.data_ptr() == tensor.data_ptr() else lambda: tensor.copy_(flat)
        chunks = _chunks(flat.view(-1).view(torch.uint8))
        source = next(
            index
            for index, machine in enumerate(self._machines)
            if any(member.rank == root for member in machine)
        )
        at = [member.rank for member in self._machines[source]].index(root)
        task = self._start(lambda: self._broadcast(chunks, source, at, seconds), later)
        return Started(task, flat, finish)

    def _broadcast(self, chunks: Sequence[Tensor], source: int, at: int, seconds: float) -> None:
        flows = []
        options = BroadcastOptions()
        options.rootRank = source
        options.timeout = timedelta(seconds=seconds)
        for chunk in chunks:
            if self._here == source:
                self._memory.broadcast(chunk, at, seconds, later=False).handle.wait()
            if self._leaders is not None:
                flows.append(self._leaders.broadcast([chunk], options))
        for index, chunk in enumerate(chunks):
            if flows:
                flows[index].wait()
            if self._here != source:
                self._memory.broadcast(chunk, 0, seconds, later=False).handle.wait()

    def barrier(self, seconds: float, *, later: bool) -> Started:
        """Wait until all ranks of all machines have come here."""
        return Started(self._start(lambda: self._barrier(seconds), later), None)

    def _barrier(self, seconds: float) -> None:
        self._memory.barrier(seconds, later=False).handle.wait()
        if self._leaders is not None:
            options = BarrierOptions()
            options.timeout = timedelta(seconds=seconds)
            self._leaders.barrier(options).wait()
        self._memory.barrier(seconds, later=False).handle.wait()

    # ---------------------------------------------------------------- the thread

    def _start(self, run: Callable[[], None], later: bool) -> Task:
        del later  # a thread does it in any case: the network is waited for
        task = Task(run)
        self._tasks.put(task)
        return task

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            error = self._broken
            if error is None:
                try:
                    task.run()
                except CollectiveMismatchError as mismatch:
                    error = mismatch
                except Exception as problem:
                    error = self._broken = self._explain(translate(problem))
                    self._give_up(error)
            task.end(error)

    def _explain(self, error: Exception) -> Exception:
        """What happened, told to the other machines, or heard from them."""
        if isinstance(error, PeerLostError):
            with suppress(Exception):
                self._store.set("lost", str(error))
            return error
        deadline = time.monotonic() + GRACE_SECONDS
        with suppress(Exception):
            while not self._store.check(["lost"]) and time.monotonic() < deadline:
                time.sleep(0.02)
            if self._store.check(["lost"]):
                return PeerLostError(self._store.get("lost").decode(errors="replace"))
        if isinstance(error, FaultError):
            return error
        hosts = ", ".join(machine[0].host for machine in self._machines)
        return FaultError(f"The flow between the machines ({hosts}) failed: {error}")

    def _give_up(self, error: Exception) -> None:
        """Let nobody wait for us, on this machine or another."""
        self._memory.context.fail(str(error))
        if self._leaders is not None:
            self._leaders.abort()

    def abort(self) -> None:
        """Make what is under way fail."""
        if self._leaders is not None:
            self._leaders.abort()

    def close(self) -> None:
        """End the thread. What is still under way fails."""
        if self._broken is None and not self._tasks.empty():
            self._broken = AbortedError("The group was closed with this on its way.")
            self._memory.context.abort()
            self.abort()
        self._tasks.put(None)
        self._thread.join()
        if self._leaders is not None:
            self._leaders.shutdown()


def _chunks(tensor: Tensor) -> list[Tensor]:
    flat = tensor.reshape(-1)  # 1D
    return (
        list(flat.split(max(1, CHUNK_BYTES // tensor.element_size()))) if flat.numel() else [flat]
    )
