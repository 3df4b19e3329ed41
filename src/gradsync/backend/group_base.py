"""A group without its collectives: who is in it, what torch asks it, how it ends."""

import os
import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Store

from gradsync.backend import _native
from gradsync.backend.arguments import check_rank
from gradsync.backend.attach import alone, attach, settle
from gradsync.backend.calls import CALLS, describe, in_words, piece_sizes, tensors_in
from gradsync.backend.detour import Detour
from gradsync.backend.dynamo import leave_alone
from gradsync.backend.engines import CPU, Engines, configured, engine_for
from gradsync.backend.flows import Clock, Flow, connect
from gradsync.backend.hierarchy import Hierarchy
from gradsync.backend.lane import check_process
from gradsync.backend.members import Member, by_machine, exchange, myself, without_store
from gradsync.backend.monitored_barrier import MonitoredBarrier
from gradsync.backend.places import for_gloo
from gradsync.backend.shared_memory import Reduction, SharedMemory, Started
from gradsync.backend.work import DONE, Notifier, Record, SharedMemoryWork
from gradsync.errors import StateError

Work = Any  # ours, or gloo's
Pending = SharedMemoryWork | Reduction | Started
DEFAULT_TIMEOUT = timedelta(minutes=30)
_OF_PARENTS: list[object] = []  # what a child after a fork has let go, and must not tidy up


@leave_alone
class GroupBase(dist.ProcessGroup):
    """Base of ``SharedMemoryGroup``: what torch has in every group, besides collectives."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta = DEFAULT_TIMEOUT,
        name: int | None = None,
        known: Sequence[Member] = (),
    ) -> None:
        """``name`` is the rank as users know it. ``known`` are ranks that another group knows."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self.timeout_seconds = timeout.total_seconds()  # the same, for what has to be quick
        self._closed = False
        self._process = os.getpid()
        self._group_name = ""
        self._group_desc = "undefined"
        self.options = SimpleNamespace(_timeout=timeout)  # torch writes more there
        self._engines = Engines(store, rank, size, timeout)
        self._pending: deque[Pending] = deque()
        self._pending_lock = threading.Lock()
        self._memory: SharedMemory | None = None
        self._hierarchy: Hierarchy | None = None
        self._context: _native.Context | None = None
        self._lane: Detour | None = None
        self._monitored_barrier: MonitoredBarrier | None = None
        self._notifier = Notifier(self._leave_to_background)
        own = myself(rank, rank if name is None else name)
        self._local = [member for member in known if member.machine == own.machine]
        try:
            self._meet(own)
        except dist.DistNetworkError as error:
            what = "a group with it was made"
            raise without_store(what, own, error, self._local) from error

    def _meet(self, own: Member) -> None:
        """Find out who is there, and what we share with whom."""
        store, rank, size = self._store, self._rank, self._size
        self.members = exchange(store, own, size, self._local)
        machines = by_machine(self.members)
        self._local = local = next(machine for machine in machines if own in machine)
        self._monitored_barrier = MonitoredBarrier(store, rank, size, self.members)
        context = attach(store, own, local)
        shares = context is not None
        self._context = context = context or alone(own)
        if shares and len(machines) == 1:
            self._memory = SharedMemory(context, rank, size)
            return
        places = settle(store, own, machines, shares=shares)
        here = next(place for place in places if own in place)
        memory = SharedMemory(context, here.index(own), len(here))
        connect(self._engines, local)  # now, as messages between two ranks do not wait for others
        self._hierarchy = Hierarchy(store, own, places, memory, self._timeout, local)

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
        """Of the backend, for torch's C++. There "gloo" would promise a ``ProcessGroupGloo``."""
        return "gradsync"

    def _set_group_name(self, name: Any) -> None:
        self._group_name = name
        super()._set_group_name(name)

    @property
    def group_name(self) -> str:
        """As torch knows the group: what compiled code finds it by."""
        return self._group_name

    def getGroupName(self) -> str:
        """The same, for torch's C++."""
        return self._group_name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description
        super()._set_group_desc(description)

    @property
    def group_desc(self) -> str:
        """What the group is for, in the words of whoever made it."""
        return self._group_desc

    def getGroupDesc(self) -> str:
        """The same, for torch's C++."""
        return self._group_desc

    def __repr__(self) -> str:
        return f"SharedMemoryGroup(rank={self._rank}, size={self._size})"

    @property
    def _device_types(self) -> list[torch.device]:
        others = [torch.device(name) for name in configured(self) if name != "cpu"]
        return [CPU, *others]

    def _get_backend(self, device: torch.device) -> Any:
        """What has the collectives for ``device``: [Note: one group, several devices]."""
        kind = torch.device(device).type
        if kind != "cpu" and configured(self).get(kind) == "nccl":
            return self._engines.nccl(self)
        return self

    def _get_backend_name(self) -> str:
        return self.name()

    def _start_coalescing(self, device: torch.device) -> None:
        if torch.device(device).type != "cpu":
            self._get_backend(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        if torch.device(device).type != "cpu":
            return self._get_backend(device)._end_coalescing()
        return None

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations from now on take no longer than this."""
        self._timeout = self.options._timeout = timeout
        self.timeout_seconds = timeout.total_seconds()
        self._engines.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: our collectives have numbers anyway."""

    def _get_sequence_number_for_group(self) -> int:
        if self._hierarchy is not None:
            return self._hierarchy.issued
        return 0 if self._context is None else self._context.issued

    # ---------------------------------------------------------------- the end

    def abort(self) -> None:
        """Make what is under way fail, here and on the other ranks. Nothing works afterwards.

        Messages through gloo cannot be told, and wait for their deadline.
        """
        if not self._is_owned_here:
            return
        if self._context is not None:
            self._context.abort()
        if self._monitored_barrier is not None:
            self._monitored_barrier.close()
        for lane in (self._hierarchy, self._lane):
            if lane is not None:
                lane.abort()
        self._engines.abort()

    def shutdown(self) -> None:
        """Leave the group. What is still under way fails."""
        if self._closed:
            return
        self._closed = True
        if not self._is_owned_here:
            _OF_PARENTS.append(vars(self).copy())
            return
        if self._monitored_barrier is not None:
            self._monitored_barrier.close()
        for lane in (self._hierarchy, self._lane):
            if lane is not None:
                lane.close()
        if self._context is not None:
            self._context.close()
        self._notifier.stop()
        self._pending.clear()
        self._engines.shutdown()
        # The segment goes with the last work that holds it, and does not wait for the collector.
        self._context = self._memory = self._hierarchy = self._lane = None

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.shutdown()

    @property
    def _is_owned_here(self) -> bool:
        """Not in a child after a fork: it has the group's memory, but none of its threads."""
        return os.getpid() == self._process

    # ---------------------------------------------------------------- helpers

    def _by_engine(self, method: str, *arguments: Any, opts: Any) -> Work:
        """A collective that has no way of ours. All ranks come here at the same one."""
        check_process(self._process)
        outputs = list(tensors_in(arguments[:1]))
        given, finish = for_gloo(arguments)
        tensors = list(tensors_in(given))

        def call(engine: Any) -> Any:
            return getattr(engine, method)(*given, opts)

        if tensors and not tensors[0].is_cpu:
            return call(engine_for(self, self._engines, tensors[0].device))
        name = in_words(method, arguments, opts)
        seconds, later = self._seconds(opts), opts.asyncOp
        if self._hierarchy is not None:
            started = self._hierarchy.collective(
                name, call, self._engines, tensors, seconds, later=later,
                pieces=piece_sizes(method, arguments, self._size),
            )  # fmt: skip
        else:
            detour = self._detour()
            started = detour.collective(name, call, self._engines, tensors, seconds, later=later)
        started.finish = finish
        return self._work(CALLS[method][0], started, outputs, tensors)

    def _message_by_engine(self, method: str, tensor: Tensor, other: int | None, tag: int) -> Work:
        """A message that has no way of ours."""
        check_process(self._process)
        engine = engine_for(self, self._engines, tensor.device)
        rest = (tag,) if other is None else (other, tag)
        (given,), finish = for_gloo([[tensor]])
        begin = partial(getattr(engine, method), given, *rest)
        if not tensor.is_cpu:
            return begin()
        whom = None if other is None else self.members[other]
        words = f"{method}({describe(tensor)}) through gloo"
        clock = Clock(self.timeout_seconds)
        flow = Flow.begin(words, begin, self._local, clock, whom)
        started = Started(flow, given, None if method == "send" else finish)
        return self._work(method, started, [tensor])

    def _detour(self) -> Detour:
        """For ranks that share memory, made when it is first needed."""
        with self._pending_lock:
            if self._memory is None:
                raise StateError("The process group has been destroyed.")
            if self._lane is None:
                self._lane = Detour("gradsync-detour", self._memory, self._local)
            return self._lane

    def _work(
        self,
        name: str,
        started: Started,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor] | None = None,
    ) -> Work:
        if not started.later and not _profiler_enabled():
            self._wait_at_once(started)
            return DONE
        work = SharedMemoryWork(
            started.handle, outputs, started.kept, started.finish, self._notifier
        )
        if _profiler_enabled():
            given = outputs if inputs is None else inputs
            work.record = Record(f"{self.name()}:{name}", given)
        is_kept_by_gloo = isinstance(started.handle, Flow)
        self._keep(None if is_kept_by_gloo or started.handle.done else work)
        return work

    def _wait_at_once(self, started: Started) -> None:
        try:
            started.wait()
        except BaseException:
            if not started.handle.done:  # interrupted, while a thread was at it
                self._keep(started)
                self.abort()
            raise
        if self._pending:
            self._keep(None)

    def _keep(self, work: Pending | None) -> None:
        """Keep its memory until it is done, also if the caller forgets it; let go what is done."""
        with self._pending_lock:
            pending = self._pending
            while pending and pending[0].handle.done:
                pending.popleft()
            if work is not None:
                pending.append(work)

    def _root(self, opts: Any) -> int:
        return check_rank("root", opts.rootRank, self._size)

    def _leave_to_background(self) -> None:
        if self._context is not None:
            self._context.leave_to_background()

    def _seconds(self, opts: Any = None) -> float:
        """How long an operation may take: what it asks for itself, or else what the group does."""
        own = opts.timeout.total_seconds() if opts is not None else 0.0
        return own if own > 0 else self.timeout_seconds
