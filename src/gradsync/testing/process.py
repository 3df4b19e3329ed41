"""One worker process as the pool sees it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from gradsync.testing import transfer
from gradsync.testing.worker import STACK_SIGNAL

_serial = count()
_BOOTSTRAP = (
    "import sys; sys.path[0] = sys.argv[1]; from gradsync.testing.worker import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])"
)


class WorkerProcess:
    """A spawned interpreter for one rank: its connection, its captured output, its end.

    The pool makes them; they are of use by themselves only in tests of the pool.

    >>> import tempfile
    >>> worker = WorkerProcess(0, Path(tempfile.mkdtemp()))
    >>> worker.alive
    True
    >>> worker.kill()
    'was killed by SIGKILL'
    >>> worker.alive
    False
    """

    def __init__(self, rank: int, directory: Path, preload: Sequence[str] = ()) -> None:
        self.rank = rank
        self.greeted = False
        stem = directory / f"rank{rank}-{next(_serial)}"
        self._output = stem.with_suffix(".out")
        self._stacks = stem.with_suffix(".stacks")
        self.connection, theirs = multiprocessing.Pipe()
        lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), lifeline)
        arguments = [str(transfer.source_root()), *map(str, fds), str(self._stacks), *preload]
        with open(self._output, "ab") as output, theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                env=_environment(),
                start_new_session=True,  # a Ctrl-C is for the caller; kill() reaches children
            )
        os.close(lifeline)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def alive(self) -> bool:
        """True until the process has ended; does not reap it."""
        if self._popen.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def send(self, message: object) -> bool:
        """Send a message; False if the worker is gone."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def receive(self) -> Any:
        """The next message if there is one, None if not; EOFError if there will be none."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except OSError as error:
            raise EOFError from error
        if not self.alive:
            raise EOFError
        return None

    def forget_output(self) -> None:
        """Start with an empty output: the next run's own."""
        os.truncate(self._output, 0)

    def output(self) -> str:
        """What the worker has printed since `forget_output`."""
        return self._output.read_text(errors="replace")

    def ask_for_stack(self) -> None:
        """Make the worker write its threads' stacks, whatever it is doing; see `stack`."""
        self._stacks.write_bytes(b"")
        with suppress(ProcessLookupError):
            os.kill(self.pid, STACK_SIGNAL)

    def stack(self, patience: float = 10.0) -> str:
        """The stacks asked for with `ask_for_stack`, once they are written."""
        deadline = time.monotonic() + patience
        before = ""
        while time.monotonic() < deadline:
            text = self._stacks.read_text(errors="replace")
            if text and text == before:
                return text
            if self._is_stopped():
                return "(no stack: the process is stopped, as by SIGSTOP)"
            before = text
            time.sleep(0.05)
        return before or "(no stack: the process did not answer)"

    def close(self) -> None:
        """Tell the worker to end once it is idle."""
        self.connection.close()

    def kill(self, patience: float = 0.0) -> str:
        """End the process and its children; returns how it ended.

        Waits up to ``patience`` seconds for it to end by itself first.
        """
        deadline = time.monotonic() + patience
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        code = self._popen.wait(timeout=30)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self.connection.close()
        return _ending(code)

    def _is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _environment() -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    defaults = {"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback}
    return {**defaults, **os.environ, "OMP_NUM_THREADS": "1"}


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
