"""Start ranks, under mpirun or torchrun, and hear from them.

[Note: one launch for all sides]
OpenMPI works only between processes that mpirun has started, so where it is there, mpirun starts
all ranks, and the sides that go through torch meet at a file. Otherwise torchrun starts them, and
they meet at the same file. Ranks are not bound to cores: gloo's threads and ours are to have
the whole machine, as under torchrun.

[Note: who draws]
mpirun gives its ranks a terminal of its own making, and ends them on Ctrl-C. So the process that
the user started keeps the terminal, the result file and Ctrl-C; its ranks are in a session of
their own. Rank 0 is connected with it by a socket: results come up, a word to stop goes down.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from race.track import DEADLINE

SOCKET, STORE = "socket", "store"
PROBE = "from mpi4py import MPI; print(MPI.Get_library_version().split(',')[0])"
PROBE_SECONDS = 60
STOP_SECONDS = 60  # for the slot under way, and to leave
HOW_TO_GET_IT = "Debian: apt install openmpi-bin libopenmpi-dev; then pip install mpi4py"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def find_openmpi(python: str = sys.executable) -> tuple[str | None, str | None]:
    """What OpenMPI calls itself, or else why it does not race."""
    if shutil.which("mpirun") is None:
        return None, f"there is no mpirun ({HOW_TO_GET_IT})"
    if importlib.util.find_spec("mpi4py") is None:
        return None, f"there is no mpi4py ({HOW_TO_GET_IT})"
    try:
        probe = subprocess.run(
            [*mpirun(1), python, "-c", PROBE],
            capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, f"mpirun did not start a rank within {PROBE_SECONDS} s"
    name = probe.stdout.strip()
    if probe.returncode or not name.startswith("Open MPI"):
        lines = (probe.stderr.strip() or name or "no output").splitlines()
        return None, f"mpirun with mpi4py does not give Open MPI: {lines[-1]}"
    return name, None


def mpirun(world: int) -> list[str]:
    """A slot a core: then OpenMPI knows by itself whether its ranks may spin."""
    command = ["mpirun", "-n", str(world), "--host", f"localhost:{cores()}", "--oversubscribe"]
    command += ["--bind-to", "none"]
    return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command


def command(world: int, script: Path, arguments: Sequence[str], *, with_mpi: bool) -> list[str]:
    if with_mpi:
        # Run by mpi4py, a rank that fails takes the others along.
        runner = [sys.executable, "-m", "mpi4py", "-rc", "thread_level=funneled"]
        return [*mpirun(world), *runner, str(script), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={world}", str(script), *arguments]


# ------------------------------------------------------------------------- above the ranks


class Stop:
    """Ctrl-C asks once; the second time it is not a question."""

    def __init__(self) -> None:
        self.asked = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked += 1


def run_ranks(
    world: int,
    script: Path,
    arguments: Sequence[str],
    *,
    with_mpi: bool,
    stop: Stop,
    on_message: Callable[[Any], None],
) -> int:
    """Run `script` on `world` ranks, give what rank 0 sends to `on_message`; their exit code."""
    with tempfile.TemporaryDirectory(prefix="gradsync-race-") as folder:
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        listener = Listener(str(Path(folder) / SOCKET), "AF_UNIX")
        link = _Link(listener, inbox)
        ranks = subprocess.Popen(
            command(world, script, [*arguments, f"--ranks-folder={folder}"], with_mpi=with_mpi),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while ranks.poll() is None or not inbox.empty():
                with suppress(queue.Empty):
                    on_message(inbox.get(timeout=0.1))
                if stop.asked == 1:
                    link.say_stop()
                if stop.asked > 1:
                    ranks.terminate()
                    break
        finally:
            if ranks.poll() is None:
                ranks.terminate()
            try:
                ranks.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                ranks.kill()
            listener.close()
        while not inbox.empty():
            on_message(inbox.get())
        return ranks.wait()


class _Link:
    """Waits for rank 0 to connect, on a thread, and puts what it sends into `inbox`."""

    def __init__(self, listener: Listener, inbox: queue.SimpleQueue[Any]) -> None:
        self._listener = listener
        self._inbox = inbox
        self._connection: Any = None
        self._has_said_stop = False
        threading.Thread(target=self._read, daemon=True).start()

    def say_stop(self) -> None:
        if self._connection is not None and not self._has_said_stop:
            self._has_said_stop = True
            with suppress(OSError):
                self._connection.send("stop")

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            self._connection = self._listener.accept()
            while True:
                self._inbox.put(self._connection.recv())


# ------------------------------------------------------------------------- on a rank


class Reporter:
    """Rank 0's end of the socket; the other ranks have nobody to talk to."""

    def __init__(self, folder: Path) -> None:
        self._connection = Client(str(folder / SOCKET)) if dist.get_rank() == 0 else None

    def send(self, message: object) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def is_asked_to_stop(self) -> bool:
        return self._connection is not None and self._connection.poll()


def join_ranks(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rank, world = (
        int(os.environ.get(f"OMPI_COMM_WORLD_{name}", os.environ.get(fallback, "-1")))
        for name, fallback in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE"))
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / STORE}", rank=rank, world_size=world,
        timeout=DEADLINE,
    )  # fmt: skip
