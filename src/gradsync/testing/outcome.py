"""What a rank's run came to: a value, or an error that tells where and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")

ErrorKind = Literal["exception", "died", "timeout", "stuck", "leak"]

_OUTPUT_TAIL = 8000


@dataclass(frozen=True)
class WorkerError:
    """Why one rank failed.

    ``kind`` is ``"exception"`` (the function raised), ``"died"`` (the process ended),
    ``"timeout"`` (still running at the run's deadline), ``"stuck"`` (still running a grace
    period after another rank had failed) or ``"leak"`` (it returned, but left threads or a
    process group behind that would not end). ``traceback`` is the traceback of an
    exception, or the stack on which a process hung. ``exception`` is the original object
    where it can be pickled, ``output`` the end of what the rank printed during the run.

    >>> error = WorkerError(rank=1, kind="exception", type_name="ValueError", message="no")
    >>> error.summary
    'rank 1 raised ValueError: no'
    """

    rank: int
    kind: ErrorKind
    type_name: str
    message: str
    traceback: str = ""
    output: str = ""
    exception: BaseException | None = None
    when: float = 0.0

    @property
    def summary(self) -> str:
        """One line: which rank, what happened."""
        if self.kind == "exception":
            return f"rank {self.rank} raised {self.type_name}: {self.message}"
        return f"rank {self.rank} {self.message}"

    def describe(self) -> str:
        """The summary, the traceback and the captured output."""
        parts = [self.summary]
        if self.traceback and self.kind != "exception":
            parts.append("it was here:")
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.output.strip():
            parts.append(f"output of rank {self.rank}:\n{self.output[-_OUTPUT_TAIL:].rstrip()}")
        return "\n".join(parts)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The value one rank returned, or the error it ended with.

    >>> Outcome(rank=0, value=3).unwrap()
    3
    """

    rank: int
    value: T | None = None
    error: WorkerError | None = None
    output: str = ""

    @property
    def ok(self) -> bool:
        """True if the rank returned."""
        return self.error is None

    def unwrap(self) -> T:
        """The returned value; raises `RankFailure` if there is none."""
        if self.error is not None:
            raise RankFailure([self.error], world=None)
        return self.value  # type: ignore[return-value]


class RankFailure(RuntimeError):
    """One or more ranks of a run failed; the message shows every one of them, first failure first.

    >>> error = WorkerError(rank=1, kind="exception", type_name="ValueError", message="no")
    >>> failure = RankFailure([error], world=2)
    >>> print(failure)
    1 of 2 ranks failed; first: rank 1 raised ValueError: no
    --- rank 1 ---
    rank 1 raised ValueError: no
    >>> failure.failures[1].type_name
    'ValueError'
    """

    def __init__(self, errors: list[WorkerError], world: int | None) -> None:
        ordered = sorted(errors, key=_first_cause_first)
        self.failures: dict[int, WorkerError] = {e.rank: e for e in ordered}
        self.first: WorkerError = ordered[0]
        counted = f"{len(ordered)} of {world} ranks failed" if world else "a rank failed"
        lines = [f"{counted}; first: {self.first.summary}"]
        for error in ordered:
            lines += [f"--- rank {error.rank} ---", error.describe()]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return RankFailure, (list(self.failures.values()), None)


def _first_cause_first(error: WorkerError) -> tuple[bool, float]:
    # A rank is stuck or late because of another rank's failure more often than the reverse.
    return error.kind in ("stuck", "timeout"), error.when
