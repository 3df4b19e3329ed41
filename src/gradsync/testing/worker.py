"""The process on the other side of a `WorkerPool`: waits for calls, runs them, cleans up.

[Note: release]
A call ends in two steps. The worker reports, keeps its process group, and destroys it only
when the pool says that all ranks have reported: a group torn down early could take a
peer's last bytes along, and hide the peer's own error behind "connection closed".

[Note: file store]
Groups meet in a file and not in a TCPStore: that one looks up the names of IPv4 addresses
mapped to IPv6, which no hosts file has, and on a machine whose name server does not answer
about one connection in ten takes 5 seconds.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import importlib
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from gradsync.testing import transfer
from gradsync.testing.protocol import Done, Hello, Ready, Report, Request

STACK_SIGNAL = signal.SIGUSR2

_THREAD_PATIENCE = 1.0

_modules_frozen = 0


def main(control_fd: int, lifeline_fd: int, stack_file: str, preload: Sequence[str] = ()) -> None:
    """Serve calls until the pool closes the control connection (the pool starts this)."""
    for fd in (control_fd, lifeline_fd):
        os.set_inheritable(fd, False)
    _die_with_parent(lifeline_fd)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=open(stack_file, "a"), all_threads=True)  # noqa: SIM115
    torch.set_num_interop_threads(4)  # a distributed backward holds one until it is reduced
    control = Connection(control_fd)
    for name in preload:
        importlib.import_module(name)
    _reset_torch()
    _freeze_imports()
    control.send(Hello())
    while True:
        try:
            request = control.recv()
        except EOFError:
            return
        _serve(control, request)


def _serve(control: Connection, request: Request) -> None:
    threads_before = set(threading.enumerate())
    with _pristine(request):
        report = _perform(request)
        request.report.write_bytes(pickle.dumps(report))
        control.send(Done(when=time.monotonic()))
        with suppress(EOFError):
            control.recv()  # [Note: release]
        leftovers = _tear_down()
    sys.stdout.flush()
    sys.stderr.flush()
    leftovers += _leftover_threads(threads_before)
    control.send(Ready(tuple(leftovers), doubtful=_group_count() > 0))


def _perform(request: Request) -> Report:
    try:
        fn, args, kwargs = transfer.load(request.call.read_bytes())
        if request.backend is not None:
            _init_group(request)
        return _report_value(fn(request.rank, request.world, *args, **kwargs), request.rank)
    except BaseException as error:
        return _report_error(error)


def _init_group(request: Request) -> None:
    timeout = timedelta(seconds=request.group_timeout)
    store = FileStore(str(request.store), request.world)  # [Note: file store]
    store.set_timeout(timeout)
    dist.init_process_group(
        request.backend,
        store=store,
        rank=request.rank,
        world_size=request.world,
        timeout=timeout,
    )


def _report_value(value: object, rank: int) -> Report:
    try:
        return Report(ok=True, payload=transfer.dump_result(value))
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that cannot be pickled "
            f"({type(error).__name__}: {error}); return plain values or tensors"
        ) from error


def _report_error(error: BaseException) -> Report:
    text = "".join(traceback.format_exception(error))
    payload = None
    with suppress(Exception):
        payload = transfer.dump_result(error)
    report = Report(
        ok=False,
        payload=payload,
        type_name=type(error).__qualname__,
        message=_text_of(error),
        traceback=text,
    )
    while error.__traceback__ is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
    return report


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"<str() of the exception raised {type(second).__name__}>"


def _tear_down() -> list[str]:
    """Let go of the call's objects, then of the process group; returns what went wrong."""
    gc.collect()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        return [f"destroy_process_group() raised {type(error).__name__}: {error}"]
    finally:
        gc.collect()
        _freeze_imports()
    return []


def _group_count() -> int:
    """How many groups torch counts; after a failed start more than there are.

    The count names the next group, so ranks whose counts differ cannot find each other.
    """
    return int(dist.distributed_c10d._world.group_count)


def _freeze_imports() -> None:
    """Keep what imports created out of later collections, which take 0.2 s otherwise."""
    global _modules_frozen
    if len(sys.modules) != _modules_frozen:
        _modules_frozen = len(sys.modules)
        gc.freeze()


def _leftover_threads(before: set[threading.Thread]) -> list[str]:
    def left() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and not t.daemon]

    deadline = time.monotonic() + _THREAD_PATIENCE
    for thread in left():
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"the non-daemon thread {t.name!r} is still running" for t in left()]


@contextmanager
def _pristine(request: Request) -> Iterator[None]:
    """The same starting point for every call, whatever the calls before it have set."""
    environ = dict(os.environ)
    os.environ.update(_torchrun_environment(request))
    for name, value in (request.env or {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.path[:] = request.search_path
    sys.excepthook = sys.__excepthook__  # init_process_group adds a layer each time
    with suppress(OSError):
        os.chdir(request.directory)
    _reset_torch()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environ)


def _torchrun_environment(request: Request) -> dict[str, str]:
    """What torchrun would set, so that ``env://`` works in calls without a group of ours."""
    return {
        "RANK": str(request.rank),
        "LOCAL_RANK": str(request.rank),
        "WORLD_SIZE": str(request.world),
        "LOCAL_WORLD_SIZE": str(request.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(request.port),
        "GRADSYNC_INIT_METHOD": request.store.with_suffix(".init").as_uri(),
    }


def _reset_torch() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    if torch.are_deterministic_algorithms_enabled():  # the setter imports the compiler: slow
        torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]


def _die_with_parent(lifeline_fd: int) -> None:
    """Die when the pool's process does, even while hung in C or stopped.

    Only the pool's process holds the other end of the lifeline. When it is gone, the kernel
    sends SIGKILL; where it cannot be told to (not Linux), a thread watches.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        if select.select([lifeline_fd], [], [], 0)[0]:
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(lifeline_fd,), daemon=True).start()


def _watch(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(1)
