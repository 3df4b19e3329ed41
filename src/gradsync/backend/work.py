"""What a collective under way looks like to torch."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import (
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from gradsync.backend import _native
from gradsync.backend.dynamo import leave_alone
from gradsync.backend.flows import Flow
from gradsync.errors import (
    AbortedError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
    StateError,
)

_FORGOTTEN: deque[object] = deque(maxlen=256)
Finish = Callable[[], object]
SHORT_GOODBYE = 0.5  # seconds


class Handle(Protocol):
    """What is under way below: a native operation, or something made of several."""

    @property
    def done(self) -> bool:
        """Would ``wait`` return at once?"""

    def wait(self) -> None:
        """Wait for it, and raise if it failed."""


@leave_alone
class SharedMemoryWork(dist.Work):
    """One operation: waits for it, then does what is left to do for the user's tensors.

    [Note: works in C++] torch's C++ may hold a work that Python has let go: DDP's does with that of
    a join. Without this object it would wait for ever, on a work that nobody completes. So a work
    that nobody has waited for lives on for a while.
    """

    def __init__(
        self,
        handle: Handle,
        outputs: Sequence[Tensor],
        kept: object,
        finish: Finish | None,
        notifier: "Notifier",
    ) -> None:
        super().__init__()
        self.handle = handle
        self._outputs = list(outputs)
        self._kept = kept  # memory that is written and read meanwhile
        self._finish = finish
        self.notifier = notifier
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()
        self._is_left_to_background = False
        self.record: Record | None = None
        self._is_over = False

    def __del__(self) -> None:
        if not self._is_over:
            _FORGOTTEN.append(self)  # [Note: works in C++]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the outputs are there, or raise what went wrong.

        The deadline of an operation is set when it begins. With ``timeout`` this call gives up
        earlier; the operation goes on, and can be waited for again.
        """
        if self._error is not None:
            raise self._error
        limit = None if timeout is None or timeout <= timedelta(0) else timeout  # as torch has it
        if limit is not None and not isinstance(self.handle, Flow):
            self._await(limit)
        try:
            if isinstance(self.handle, Flow):
                self.handle.wait(limit)
            else:
                self.handle.wait()
        except Exception as error:
            self._error = translate(error)
            if self._error is error:
                raise
            raise self._error from None
        finally:
            self._is_over = True
            if self.record is not None:
                self.record.end()
        if self._finish is not None:
            with self._lock:  # whoever waits too has to wait for this
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
        self._kept = None
        return True

    def _await(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        pause = 1e-5
        while not self.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineError(f"The operation has not completed in {timeout}.")
            time.sleep(min(pause, left))
            pause = min(2 * pause, 1e-3)

    @property
    def done(self) -> bool:
        """As of a handle."""
        return self.is_completed()

    def is_completed(self) -> bool:
        """Are the outputs there, or has it failed? Asking lets it go on in the background."""
        if not self.handle.done:
            if not self._is_left_to_background:
                self._is_left_to_background = True
                self.notifier.leave_to_background()
            return False
        with suppress(Exception):
            self.wait()
        return True

    def is_success(self) -> bool:
        """Is it done, and well?"""
        return self.exception() is None and self.is_completed()

    def exception(self) -> Exception | None:
        """What went wrong, if it is known by now."""
        self.is_completed()
        return self._error

    def synchronize(self) -> None:
        """For torch: the same as ``wait``, as there are no streams."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that it has filled."""
        return self._outputs

    def source_rank(self) -> int:
        """Whose message was received."""
        return int(getattr(self.handle, "source", -1))

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future with the outputs. It completes whether or not anybody waits."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.is_completed():
                self.complete_future()
            else:
                self.notifier.add(self)
        return self._future

    def complete_future(self) -> None:
        """Wait, and let the future know."""
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            # The future would keep us, by the frames of the error, and we keep the future.
            for each in (error, error.__cause__, error.__context__):
                if each is not None:
                    each.__traceback__ = None
            self._future.set_exception(error)  # type: ignore[arg-type]
        else:
            self._future.set_result(self._outputs)


@leave_alone
class DoneWork(dist.Work):
    """An operation that was waited for before torch could ask, whichever it was.

    There is one for all: to make one costs as much as to reduce 4 kB. torch asks nothing of it but
    to wait, and lets a backend give none at all; but its C++ would fall over that, and so would a
    program that was written for gloo.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It was one."""
        return True

    def exception(self) -> None:
        """Nothing went wrong."""
        return

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def result(self) -> list[Tensor]:
        """Nothing: whoever has waited has the tensors."""
        return []

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """A future that is complete."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


DONE = DoneWork()


class All:
    """Several operations as one. They are works, or what works wait for."""

    def __init__(self, parts: Sequence[Handle]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """Are all of them?"""
        return all(part.done for part in self._parts)

    def wait(self) -> None:
        """Wait for all of them."""
        for part in self._parts:
            part.wait()


class Notifier:
    """Completes futures, in the order in which they were asked for.

    [Note: callbacks that wait] What users hang on a future runs when it completes, and may wait for
    another future of the same group: some of torch's own hooks do. So the thread that is about to
    run callbacks leaves the waiting to another. There are as many threads as callbacks that wait
    for each other, and one more.
    """

    def __init__(self, leave_to_background: Callable[[], None]) -> None:
        self.leave_to_background = leave_to_background
        self._works: deque[SharedMemoryWork] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._in_gloo: set[threading.Thread] = set()  # who may have to wait for a deadline there
        self._free = 0  # threads that run no callback
        self._stopped = False

    def add(self, work: SharedMemoryWork) -> None:
        """Complete the future of ``work`` when it is done."""
        self.leave_to_background()
        with self._changed:
            self._works.append(work)
            self._share()

    def stop(self) -> None:
        """End the threads, after what they still have to do."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(SHORT_GOODBYE if thread in self._in_gloo else None)

    def _share(self) -> None:
        """See that somebody takes the next work; to be called with the lock."""
        if self._free:
            self._changed.notify()
            return
        self._free += 1
        thread = threading.Thread(target=self._run, name="gradsync-futures", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._works:
                    if self._stopped:
                        return
                    self._changed.wait()
                work = self._works.popleft()
            if isinstance(work.handle, Flow):
                self._in_gloo.add(threading.current_thread())
            with suppress(Exception):  # it is raised again below, to the future
                work.wait()
            self._in_gloo.discard(threading.current_thread())
            with self._changed:
                self._free -= 1
                if self._works:
                    self._share()
            work.complete_future()
            del work
            with self._changed:
                self._free += 1


class Record:
    """An operation as the profiler shows it: a span that begins here and ends elsewhere."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._handle = _record_function_with_args_enter(name, *tensors)

    def end(self) -> None:
        """Close the span. In another thread: so the profiler knows that it is asynchronous."""
        handle, self._handle = self._handle, None
        if handle is not None:
            thread = threading.Thread(target=_record_function_with_args_exit, args=(handle,))
            thread.start()
            thread.join()


def translate(error: Exception) -> Exception:
    """The native part's exceptions, as those that users know."""
    text = str(error)
    if isinstance(error, _native.PeerLostError):
        return PeerLostError(text, rank=error.rank, host=error.host, pid=error.pid)
    if isinstance(error, _native.DeadlineError):
        return DeadlineError(text, ranks=error.missing)
    if isinstance(error, _native.AbortedError | _native.InterruptedError):
        return AbortedError(text)
    if isinstance(error, _native.BrokenError | _native.InvalidError | _native.SystemError):
        return FaultError(text)
    if isinstance(error, _native.StateError):
        return StateError(text)
    if isinstance(error, _native.MismatchError):
        return CollectiveMismatchError(text)
    return error
