"""Start ranks with torch's elastic launcher, hear from them, and learn how they ended.

[Note: who draws]
The process that the user started keeps the terminal, the result file and Ctrl-C. The launcher and
its ranks are in a session of their own, so that Ctrl-C does not reach them, and their output goes
to files. They share a folder with us: rank 0 appends events to a file, which we read; a file
named ``stop`` asks the ranks to stop. If we die, the kernel ends the launcher, and it its ranks.

This module is both sides: ``launch`` for the user's process, and a program for the other two,
``python -m gradsync.bench.launch start FOLDER`` and ``... rank FOLDER``. Hybrid training starts
processes of its own: there is one process, ``... drive FOLDER``, in place of launcher and ranks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from gradsync import hybrid
from gradsync.bench.comm import CommHeat, run_comm_heat
from gradsync.bench.hybrid_race import HybridHeat, run_hybrid_heat
from gradsync.bench.meeting import Meeting, Stopped
from gradsync.bench.worker import Emit, Heat, run_heat

AnyHeat = Heat | CommHeat | HybridHeat
OnEvent = Callable[[int, dict[str, Any]], None]  # the heat's number, the event

POLL_SECONDS: Final = 0.1
STOP_SECONDS: Final = 60  # for the turn under way, and to leave, after which they are ended
RENDEZVOUS: Final = timedelta(minutes=5)
_MODULE: Final = "gradsync.bench.launch"  # its name also when it runs as the program
_HEATS, _EVENTS, _STOP, _FAILURE = "heats.pickle", "events.jsonl", "stop", "failure.json"
_DIE_WITH_PARENT: Final = 1  # prctl's PR_SET_PDEATHSIG


class Stop:
    """Ctrl-C asks once; the second time it is not a question."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._ask)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def is_asked(self) -> bool:
        """At least once."""
        return self.asked > 0

    def _ask(self, *_: object) -> None:
        self.asked += 1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a launch ended that did not end well."""

    message: str
    rank: int | None = None


# ------------------------------------------------------------------------- the user's process


def launch(heats: Sequence[AnyHeat], *, stop: Stop, on_event: OnEvent) -> Failure | None:
    """Run the heats, all of one number of ranks, one after the other in the same ranks."""
    (world,) = {heat.world for heat in heats}
    threads = max((heat.threads for heat in heats), default=1)
    with tempfile.TemporaryDirectory(prefix="gradsync-bench-") as name:
        folder = Path(name)
        (folder / _HEATS).write_bytes(pickle.dumps((world, tuple(heats))))
        events = folder / _EVENTS
        events.touch()
        output = (folder / "launcher.log").open("wb")
        launcher = subprocess.Popen(
            [sys.executable, "-m", _MODULE, _role_for(heats), name],
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with output, events.open() as lines:
                _follow(launcher, lines, folder, stop, on_event)
        finally:
            _end(launcher)
        if (folder / _FAILURE).exists():
            return Failure(**json.loads((folder / _FAILURE).read_text()))
        if launcher.returncode and not stop.is_asked():
            tail = _tail((folder / "launcher.log").read_text(errors="replace"))
            return Failure(message=f"the launcher ended with code {launcher.returncode}: {tail}")
        return None


def _role_for(heats: Sequence[AnyHeat]) -> str:
    return "drive" if any(isinstance(heat, HybridHeat) for heat in heats) else "start"


def _follow(
    launcher: subprocess.Popen[bytes], lines: Any, folder: Path, stop: Stop, on_event: OnEvent
) -> None:
    rest = ""
    stop_at: float | None = None
    while True:
        has_ended = launcher.poll() is not None
        rest += lines.read()
        *whole, rest = rest.split("\n")
        for line in whole:
            event = json.loads(line)
            on_event(event["heat"], event)
        if has_ended:
            return
        if stop.asked and stop_at is None:
            (folder / _STOP).touch()
            stop_at = time.monotonic() + STOP_SECONDS
        if stop.asked > 1 or (stop_at is not None and time.monotonic() > stop_at):
            return
        time.sleep(POLL_SECONDS)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is not None:
        return
    launcher.terminate()
    try:
        launcher.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


# ------------------------------------------------------------------------- the launcher


def start(folder: Path) -> int:
    """Run the ranks to their end, and write down who failed first."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _die_with_parent()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")
    world, _ = pickle.loads((folder / _HEATS).read_bytes())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": RENDEZVOUS.total_seconds()},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=POLL_SECONDS,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, sys.executable)("-m", _MODULE, "rank", str(folder))
    except SignalException:
        return 1
    except ChildFailedError as error:
        (folder / _FAILURE).write_text(json.dumps(asdict(_first_failure(folder, error.failures))))
        return 1
    return 0


def _first_failure(folder: Path, failures: dict[int, Any]) -> Failure:
    """A killed rank before one that raised; of those that raised, the first."""
    killed = {
        rank: -each.exitcode
        for rank, each in failures.items()
        if each.exitcode < 0 and each.exitcode != -signal.SIGTERM
    }
    if killed:
        rank, number = min(killed.items())
        with suppress(ValueError):
            return Failure(
                rank=rank, message=f"rank {rank} was killed by {signal.Signals(number).name}"
            )
    raised = sorted(
        (json.loads(path.read_text()) for path in folder.glob("error-*.json")),
        key=lambda each: float(each["time"]),
    )
    if raised:
        return Failure(rank=raised[0]["rank"], message=raised[0]["message"])
    rank, first = min(failures.items())
    logs = sorted(folder.glob(f"**/{first.local_rank}/stderr.log"))
    said = _tail(logs[-1].read_text(errors="replace")) if logs else ""
    return Failure(
        rank=rank,
        message=f"rank {rank} ended with code {first.exitcode}" + (f": {said}" if said else ""),
    )


def _tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)


# ------------------------------------------------------------------------- hybrid training


def drive(folder: Path) -> int:
    """Run the heats with processes that we start, and write down how a heat failed."""
    _die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that they are ended, not left
    _, heats = pickle.loads((folder / _HEATS).read_bytes())
    try:
        with (folder / _EVENTS).open("a") as events:
            for number, heat in enumerate(heats):
                emit = _event_writer(events, number)
                emit({"event": "begun"})
                run_hybrid_heat(heat, (folder / _STOP).exists, emit)
                emit({"event": "done"})
    except Stopped:
        pass
    except Exception as error:
        traceback.print_exc()
        (folder / _FAILURE).write_text(json.dumps(asdict(Failure(message=_why(error)))))
        return 1
    return 0


def _why(error: Exception) -> str:
    """In one line; of a trainer that raised, what it raised."""
    if isinstance(error, hybrid.RoleFailure) and error.__cause__ is not None:
        return f"{error.role}: {type(error.__cause__).__name__}: {error.__cause__}"
    if isinstance(error, hybrid.RoleFailure):
        return _tail(str(error))
    return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------- a rank


def rank_main(folder: Path) -> int:
    """Run the heats on this rank, and write down an exception before it ends us."""
    _die_with_parent()
    world, heats = pickle.loads((folder / _HEATS).read_bytes())
    device = own_device()
    dist.init_process_group("gloo", timeout=RENDEZVOUS)
    rank = dist.get_rank()
    try:
        backends = tuple(dict.fromkeys(name for heat in heats for name in heat.backends))
        meeting = Meeting(world, backends, is_asked_to_stop=(folder / _STOP).exists)
        with (folder / _EVENTS).open("a") as events:
            for number, heat in enumerate(heats):
                run_any(heat, meeting, device, _event_writer(events, number))
    except Stopped:
        pass
    except Exception as error:
        message = {"rank": rank, "time": time.time(), "message": describe(error, rank)}
        (folder / f"error-{rank}.json").write_text(json.dumps(message))
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others are in a collective, and wait until we are gone
    # Models keep the group's threads alive, in reference cycles, and a thread of gloo that asks
    # for the GIL while Python shuts down aborts the process.
    gc.collect()
    dist.destroy_process_group()
    return 0


def run_any(heat: AnyHeat, meeting: Meeting, device: torch.device, emit: Emit) -> None:
    """A heat of either kind, from its first event to ``done``."""
    if meeting.rank == 0:
        emit({"event": "begun"})
    if isinstance(heat, CommHeat):
        run_comm_heat(heat, meeting, device, emit)
    else:
        assert isinstance(heat, Heat), "hybrid training is driven by one process"
        run_heat(heat, meeting, device, emit)
    gc.collect()
    if meeting.rank == 0:
        emit({"event": "done"})


def own_device() -> torch.device:
    """The GPU of this rank where there are some, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def describe(error: BaseException, rank: int) -> str:
    """What happened, and where in the user's code if it was there."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parents[1])
    outside = [
        frame
        for frame in frames
        if not frame.filename.startswith(here) and "/torch/" not in frame.filename
    ]
    place = f" ({Path(outside[-1].filename).name}, line {outside[-1].lineno})" if outside else ""
    return f"rank {rank}: {type(error).__name__}: {str(error).strip() or 'no message'}{place}"


def _event_writer(file: Any, heat: int) -> Emit:
    def emit(event: dict[str, Any]) -> None:
        file.write(json.dumps(event | {"heat": heat}) + "\n")
        file.flush()

    return emit


if __name__ == "__main__":
    _, role, where = sys.argv
    sys.exit({"start": start, "rank": rank_main, "drive": drive}[role](Path(where)))
