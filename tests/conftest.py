"""One pool of workers for the whole test run, and a check that nothing of ours outlives it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from gradsync.testing import WorkerPool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and the programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis fails an example that takes 200 ms, which on a busy machine says nothing about it.
hypothesis.settings.register_profile("gradsync", deadline=None)
hypothesis.settings.load_profile("gradsync")

_SHARED_MEMORY = Path("/dev/shm")
_OUR_SEGMENTS = ("gradsync", "torch_")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    segments_before = _segments()
    children_before = _children()
    yield
    assert not _children() - children_before, "the session left child processes behind"
    assert not _segments() - segments_before, "the session left shared memory behind"


@pytest.fixture(scope="session")
def pool(nothing_left_behind: None) -> Iterator[WorkerPool]:
    # A wrapper imports Dynamo: on a busy machine that takes longer than a group's time-out here.
    with WorkerPool(max_ranks=4, preload=["torch._dynamo"]) as workers:
        yield workers


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            found |= set((task / "children").read_text().split())
    return {pid for pid in found if not _is_tracker(pid)}


def _is_tracker(pid: str) -> bool:
    """Python's own helper of multiprocessing, which ends with this process."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _segments() -> set[str]:
    """Segments whose maker, the process in the name, is gone: others may be at work as well."""
    if not _SHARED_MEMORY.is_dir():
        return set()
    names = {entry.name for entry in _SHARED_MEMORY.iterdir()}
    return {n for n in names if n.startswith(_OUR_SEGMENTS) and not _has_living_maker(n)}


def _has_living_maker(name: str) -> bool:
    number = re.search(r"\d+", name)
    return number is not None and Path("/proc", number.group()).exists()
