"""The engines for what has no way through shared memory: gloo, and for other devices NCCL.

[Note: one group, several devices]
torch takes a process group that is written in Python as the whole group, and makes no other backend
of a configuration such as ``cpu:gradsync,cuda:nccl``. But it keeps the configuration, so we look
there when the first tensor of another device comes, and make the engine then. All ranks come there
at the same collective, as all ranks have to.
"""

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from gradsync.errors import ArgumentError, StateError

CPU = torch.device("cpu")
LONGEST_GOODBYE = 0.5  # seconds
PERIOD_SECONDS = 0.1  # between two looks


_ALL: "weakref.WeakSet[Engines]" = weakref.WeakSet()


def keep_all() -> None:
    """Let no engine end before the process does: gloo's end waits for what is under way."""
    for engines in list(_ALL):
        for engine in list(engines._made.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


def is_gloo_used() -> bool:
    """Has any engine been made that is still there?"""
    return any("gloo" in engines._made for engines in _ALL)


class Engines:
    """Backends of torch's for one group, each made when it is first needed."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._made: dict[str, Any] = {}
        self._closed = False
        _ALL.add(self)

    def gloo(self, look: Callable[[], None] | None = None) -> Any:
        """For tensors of the CPU, and wherever gloo was asked for.

        To make it waits for all ranks. ``look`` is called meanwhile, and may raise.
        """
        if look is None or "gloo" in self._made:
            return self._made.get("gloo") or self._make("gloo")
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._try_to_make, args=("gloo", made), daemon=True).start()
        while True:
            try:
                result = made.get(timeout=PERIOD_SECONDS)
            except queue.Empty:
                look()
                continue
            if isinstance(result, Exception):
                raise result
            return result

    def nccl(self, group: dist.ProcessGroup) -> Any:
        """For CUDA tensors. No test of ours has run it: that takes GPUs."""
        return self._made.get("nccl") or self._make("nccl", group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations from now on take no longer than this."""
        self._timeout = timeout
        for engine in list(self._made.values()):
            engine.set_timeout(timeout)

    def abort(self) -> None:
        """Make what is under way fail."""
        for engine in list(self._made.values()):
            engine.abort()

    def shutdown(self) -> None:
        """End them; no others are made.

        gloo's end waits for what is under way. Nobody needs to wait for that.
        """
        self._closed = True
        if "nccl" in self._made:
            self._made.pop("nccl").shutdown()
        if self._made:
            thread = threading.Thread(target=self._let_go, name="gradsync-engines", daemon=True)
            thread.start()
            thread.join(LONGEST_GOODBYE)

    def _let_go(self) -> None:
        gloo = self._made.pop("gloo", None)
        if gloo is not None:
            gloo.shutdown()  # its connections are closed when nobody has it any more

    def _try_to_make(self, name: str, made: "queue.SimpleQueue[Any]") -> None:
        try:
            made.put(self._make(name))
        except Exception as error:
            made.put(error)

    def _make(self, name: str, group: dist.ProcessGroup | None = None) -> Any:
        if self._closed:
            raise StateError("The process group has been destroyed.")
        store = PrefixStore(f"{name}/", self._store)
        if group is None:
            engine: Any = ProcessGroupGloo(store, self._rank, self._size, self._timeout)
        else:
            engine = self._make_nccl(store, group)
        if self._closed:  # meanwhile
            raise StateError("The process group has been destroyed.")
        self._made[name] = engine
        return engine

    def _make_nccl(self, store: Store, group: dist.ProcessGroup) -> Any:
        """As torch does for a group of NCCL alone."""
        if not dist.is_nccl_available():
            raise StateError("CUDA tensors need NCCL, which this build of torch does not have.")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.group_name = group.group_name
        options.global_ranks_in_group = dist.get_process_group_ranks(group)
        engine = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        engine._set_sequence_number_for_group()
        return engine


def configured(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend was asked for, by type of device. [Note: one group, several devices]."""
    config = dist.distributed_c10d._world.pg_backend_config.get(group, "")
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def engine_for(group: dist.ProcessGroup, engines: Engines, device: torch.device) -> Any:
    """The engine that takes tensors of ``device`` in this group."""
    if device.type == "cpu":
        return engines.gloo()
    name = configured(group).get(device.type)
    if name == "gloo":
        return engines.gloo()
    if name == "nccl":
        return engines.nccl(group)
    raise ArgumentError(
        f"This group has no collectives for tensors on {device}. Ask for a backend for them, as "
        'in init_process_group("cpu:gradsync,cuda:nccl").'
    )
