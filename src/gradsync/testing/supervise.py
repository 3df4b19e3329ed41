"""Watch one run from its start until every worker is clean again or replaced."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gradsync.testing import transfer
from gradsync.testing.outcome import ErrorKind, Outcome, WorkerError
from gradsync.testing.process import WorkerProcess
from gradsync.testing.protocol import Done, Ready, Release, Report

_POLL = 0.2
_EXIT_PATIENCE = 5.0
_CLEAN_UP_PATIENCE = 30.0  # nobody waits for it where all is well, and a busy machine is not a leak


class Supervisor:
    """Collects the outcome of every rank and decides which workers may be used again.

    ``retire`` is called for each worker that may not: it is dead by then.

    >>> Supervisor([], {}, timeout=1.0, grace=1.0, patient=False, retire=print).outcomes()
    []
    """

    def __init__(
        self,
        workers: Iterable[WorkerProcess],
        reports: dict[int, Path],
        *,
        timeout: float,
        grace: float,
        patient: bool,
        retire: Callable[[WorkerProcess], None],
    ) -> None:
        self._workers = {w.rank: w for w in workers}
        self._reports = reports
        self._timeout = timeout
        self._grace = grace
        self._patient = patient
        self._retire = retire
        self._running = set(self._workers)
        self._unreleased: set[int] = set()
        self._cleaning: set[int] = set()
        self._outcomes: dict[int, Outcome[Any]] = {}

    def outcomes(self) -> list[Outcome[Any]]:
        """Wait for all ranks, at most ``timeout``, then for their clean-up."""
        self._await_reports()
        self._release()
        self._await_clean_up()
        return [self._with_output(self._outcomes[rank]) for rank in sorted(self._outcomes)]

    def _await_reports(self) -> None:
        deadline = time.monotonic() + self._timeout
        grace_ends: float | None = None
        while self._running:
            now = time.monotonic()
            if grace_ends is None and self._failed():
                grace_ends = now + self._grace
            if now >= deadline:
                late = f"was still running after {self._timeout:g} s"
                return self._condemn(self._running, "timeout", late)
            if grace_ends is not None and now >= grace_ends:
                if not self._patient:
                    late = f"was still running {self._grace:g} s after the first failure"
                    return self._condemn(self._running, "stuck", late)
                self._release()
            self._listen(self._running, min(deadline, now + _POLL), self._on_result)
        return None

    def _await_clean_up(self) -> None:
        patience = max(self._grace, _CLEAN_UP_PATIENCE)
        deadline = time.monotonic() + patience
        while self._cleaning and time.monotonic() < deadline:
            self._listen(self._cleaning, deadline, self._on_clean)
        late = f"returned, but its clean-up did not end within {patience:g} s"
        self._condemn(self._cleaning, "leak", late)

    def _listen(
        self, ranks: set[int], until: float, handle: Callable[[WorkerProcess, object], None]
    ) -> None:
        """Pass on one round of messages; a connection at its end is a death."""
        patience = max(0.0, min(until - time.monotonic(), _POLL))
        wait([self._workers[rank].connection for rank in ranks], patience)
        for worker in [self._workers[rank] for rank in sorted(ranks)]:
            try:
                message = worker.receive()
            except EOFError:
                ranks.discard(worker.rank)
                self._bury(worker)
                continue
            if message is not None:
                ranks.discard(worker.rank)
                handle(worker, message)

    def _on_result(self, worker: WorkerProcess, message: object) -> None:
        assert isinstance(message, Done), message
        self._unreleased.add(worker.rank)
        self._outcomes[worker.rank] = self._read_report(worker.rank, message.when)

    def _on_clean(self, worker: WorkerProcess, message: object) -> None:
        assert isinstance(message, Ready), message
        if message.leftovers:
            what = "returned, but " + "; ".join(message.leftovers)
            self._blame(worker, "leak", f"{what}; end what was started before returning")
        if message.leftovers or message.doubtful:
            self._dismiss(worker)

    def _release(self) -> None:
        """[Note: release] in worker.py."""
        for rank in self._unreleased:
            self._workers[rank].send(Release())
        self._cleaning |= self._unreleased
        self._unreleased = set()

    def _condemn(self, ranks: set[int], kind: ErrorKind, message: str) -> None:
        """Blame and kill; all stacks are taken before the first death changes the others."""
        condemned = [self._workers[rank] for rank in sorted(ranks)]
        ranks.clear()
        for worker in condemned:
            worker.ask_for_stack()
        stacks = {worker.rank: worker.stack() for worker in condemned}
        for worker in condemned:
            self._blame(
                worker, kind, f"{message}, and was killed; it was here:", stacks[worker.rank]
            )
            self._dismiss(worker)

    def _bury(self, worker: WorkerProcess) -> None:
        ending = worker.kill(patience=_EXIT_PATIENCE)
        when = "while it ran" if worker.rank not in self._outcomes else "after it had returned"
        self._blame(worker, "died", f"{ending} {when} (pid {worker.pid})")
        self._retire(worker)

    def _dismiss(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._retire(worker)

    def _blame(self, worker: WorkerProcess, kind: ErrorKind, message: str, stack: str = "") -> None:
        """Record an error, unless the rank has failed already: the first error stands."""
        known = self._outcomes.get(worker.rank)
        if known is None or known.ok:
            names = {"died": "WorkerDied", "leak": "WorkerLeak"}
            error = WorkerError(
                rank=worker.rank,
                kind=kind,
                type_name=names.get(kind, "WorkerTimeout"),
                message=message,
                traceback=stack,
                when=time.monotonic(),
            )
            self._outcomes[worker.rank] = Outcome(worker.rank, error=error)

    def _failed(self) -> bool:
        return any(not outcome.ok for outcome in self._outcomes.values())

    def _read_report(self, rank: int, when: float) -> Outcome[Any]:
        report: Report = pickle.loads(self._reports[rank].read_bytes())
        payload, unreadable = None, None
        if report.payload is not None:
            try:
                payload = transfer.load(report.payload)
            except Exception as reason:
                unreadable = reason
        if report.ok and unreadable is None:
            return Outcome(rank, value=payload)
        error = WorkerError(
            rank=rank,
            kind="exception",
            type_name=report.type_name,
            message=report.message,
            traceback=report.traceback,
            exception=payload if isinstance(payload, BaseException) else None,
            when=when,
        )
        if report.ok:
            message = f"returned a value that the caller cannot unpickle: {unreadable!r}"
            error = replace(error, type_name="UnpicklingError", message=message)
        return Outcome(rank, error=error)

    def _with_output(self, outcome: Outcome[Any]) -> Outcome[Any]:
        text = self._workers[outcome.rank].output()
        error = outcome.error and replace(outcome.error, output=text)
        return replace(outcome, output=text, error=error)
