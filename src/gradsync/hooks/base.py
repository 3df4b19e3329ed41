"""What all hooks share: the call that DDP makes, and the order of collectives.

[Note: rounds]
A hook reduces a bucket in one or two rounds, each of them one collective. It is written as a
generator, which yields a round when it has started and goes on when that is done.

The last round ends in a callback on a thread of the process group, so that backward goes on
meanwhile. A second round must not be *started* there: process groups match collectives by the
order in which each rank starts them, and callbacks of several buckets run in another order on
each rank. (torch's ``powerSGD_hook`` does it, which is safe only where callbacks run at once, as
with NCCL.) So the first round of bucket n is followed, in the same call, by the second round of
bucket n-1, whose first is likely to be done by then; the last bucket waits for its own. All
collectives start on the thread of the backward pass, in an order that is the same on all ranks.
"""

# No `from __future__ import annotations`: torch compares the annotations of a hook's
# signature with its own types, and strings are not equal to them.
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsync.errors import ArgumentError, StateError
from gradsync.hooks.wire import Work

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Round(NamedTuple):
    """A collective that has started; ``last`` says that no other follows for this bucket.

    >>> import gradsync
    >>> class Average(gradsync.hooks.Hook):
    ...     name = "average"
    ...     def reduce(self, bucket, buffer, group):
    ...         work = group.allreduce([buffer], dist.AllreduceOptions())
    ...         yield gradsync.hooks.Round(work, last=True)
    ...         buffer.div_(group.size())
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(4, 4))
    >>> ddp.register_comm_hook(None, Average())
    >>> ddp(torch.ones(1, 4)).sum().backward()
    """

    work: Work
    last: bool


Rounds = Generator[Round, None, None]


class Hook(ABC):
    """A communication hook that holds its own state: ``ddp.register_comm_hook(None, hook)``.

    One instance serves one model. ``process_group`` has to be the group that DDP uses, and is
    the default group where DDP's is. With one rank nothing is sent, so nothing is compressed.

    To write one, derive from it and give `reduce`.

    >>> import gradsync
    >>> isinstance(gradsync.hooks.Int8(), gradsync.hooks.Hook)
    True
    """

    name: ClassVar[str]
    # All collectives start in the call, see [Note: rounds]: DDP need not wait to start its own.
    issues_at_once: ClassVar[bool] = True

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self._in_step = False
        self._second_rounds: list[_Flight] = []
        self._scratch: dict[tuple[int, str], Tensor] = {}
        # register_comm_hook reads these of what it takes to be a function.
        self.__name__ = self.__qualname__ = type(self).__qualname__

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging ``bucket`` over the ranks; ``state`` is not used."""
        buffer = bucket.buffer()
        group = self._group or dist.group.WORLD
        if group is None:
            raise StateError("there is no default process group: call init_process_group first")
        _check(buffer, bucket, self.__name__)
        if bucket.index() == 0 and self._in_step:
            self._abandon_step()
        self._in_step = not bucket.is_last()
        if group.size() == 1 or buffer.numel() == 0:
            future = _done(buffer)
        else:
            with torch.no_grad():
                future = self._depart(_Flight(self.reduce(bucket, buffer, group), buffer))
        if bucket.is_last():
            self._land_all()
            self.end_step(bucket.index() + 1)
        return future

    @abstractmethod
    def reduce(self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup) -> Rounds:
        """Put the mean over the ranks into ``buffer``; a generator, see [Note: rounds]."""

    def carries_report(self, world: int) -> bool:
        """Does `reduce` average all of the buffer, also numbers that are behind the gradients?

        gradsync's DDP then puts there what the ranks report of a step, and saves a message: the
        buffer is longer than the gradients. The numbers are 0 or ``world``; what counts is whether
        their mean is 0. A class that does something else with the buffer must say no.

        >>> import gradsync
        >>> gradsync.hooks.BF16().carries_report(4), gradsync.hooks.TopK().carries_report(4)
        (True, False)
        """
        return False

    def end_step(self, buckets: int) -> None:
        """All ``buckets`` of a step have been started; what belonged to more of them is dropped."""
        if any(index >= buckets for index, _ in self._scratch):
            self._scratch = {k: kept for k, kept in self._scratch.items() if k[0] < buckets}

    def scratch(
        self, bucket: GradBucket, role: str, size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A flat tensor of any content, the same one in each step.

        Memory that is taken and given back in every step costs a page fault every 4 kB.
        """
        kept = self._scratch.get((bucket.index(), role))
        if kept is None or (kept.numel(), kept.dtype, kept.device) != (size, dtype, device):
            kept = torch.empty(size, dtype=dtype, device=device)
            self._scratch[bucket.index(), role] = kept
        return kept

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs, with weights and optimizer, to go on as if never interrupted.

        Every rank has its own. See [Note: whose numbers] for what it goes by.

        >>> import gradsync
        >>> gradsync.hooks.BF16().state_dict()
        {'hook': 'bf16'}
        """
        return {"hook": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, on the same rank, before or between steps.

        >>> import gradsync
        >>> saved = gradsync.hooks.Int8().state_dict()
        >>> gradsync.hooks.Int8().load_state_dict(saved)
        """
        if state.get("hook") != self.name:
            raise ArgumentError(
                f"this is the state of a hook named {state.get('hook')!r}, "
                f"and {self.__name__} is named {self.name!r}"
            )

    def __repr__(self) -> str:
        return f"{self.__name__}()"

    def _depart(self, flight: "_Flight") -> torch.futures.Future[torch.Tensor]:
        earlier, self._second_rounds = self._second_rounds, []
        future = flight.start()
        if not flight.round.last:
            self._second_rounds.append(flight)
        _start_second_rounds(earlier)
        return future

    def _abandon_step(self) -> None:
        """The step before broke off. Its collectives may still use the memory they were given."""
        self._second_rounds.clear()
        self._scratch.clear()

    def _land_all(self) -> None:
        waiting, self._second_rounds = self._second_rounds, []
        with torch.no_grad():
            _start_second_rounds(waiting)


class _Flight:
    """One bucket on its way."""

    def __init__(self, rounds: Rounds, buffer: Tensor) -> None:
        self._rounds = rounds
        self._buffer = buffer
        self._result: torch.futures.Future[torch.Tensor] | None = None

    def start(self) -> torch.futures.Future[torch.Tensor]:
        self.round = next(self._rounds)
        if self.round.last:
            future: torch.futures.Future[torch.Tensor] = self.round.work.get_future()
            return future.then(self._land)
        self._result = _promise(self._buffer)
        return self._result

    def start_second_round(self) -> None:
        self.round.work.wait()
        self.round = next(self._rounds)
        assert self.round.last
        self.round.work.get_future().then(self._keep_promise)

    def fail(self, error: Exception) -> None:
        """Nobody is to wait for the second round: it does not come."""
        assert self._result is not None
        self._result.set_exception(error)  # type: ignore[arg-type] # torch's annotation errs

    def _land(self, done: torch.futures.Future[Any]) -> Tensor:
        done.value()  # raises if the collective failed
        with torch.no_grad():
            for _ in self._rounds:
                raise AssertionError("a round after the last")
        return self._buffer

    def _keep_promise(self, done: torch.futures.Future[Any]) -> None:
        assert self._result is not None
        try:
            self._result.set_result(self._land(done))
        except Exception as error:
            self.fail(error)


def _start_second_rounds(flights: Sequence[_Flight]) -> None:
    for number, flight in enumerate(flights):
        try:
            flight.start_second_round()
        except Exception as error:
            for lost in flights[number:]:
                lost.fail(error)
            raise


def _promise(buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] = [] if buffer.is_cpu else [buffer.device]
    return torch.futures.Future(devices=devices)


def _done(buffer: Tensor) -> torch.futures.Future[torch.Tensor]:
    future = _promise(buffer)
    future.set_result(buffer)
    return future


def _check(buffer: Tensor, bucket: GradBucket, name: str) -> None:
    if buffer.layout != torch.strided:
        raise StateError(
            f"{name} cannot compress sparse gradients (bucket {bucket.index()}). Make them dense, "
            "as with Embedding(sparse=False), or train without this hook."
        )
    if buffer.dtype not in _FLOATS:
        raise StateError(
            f"{name} cannot compress gradients of {buffer.dtype} (bucket {bucket.index()}): "
            "they have to be real floating point numbers"
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to calculate in: sums and residuals of 16-bit gradients would lose digits."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
