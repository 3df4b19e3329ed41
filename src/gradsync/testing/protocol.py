"""The few small messages between a pool and its workers; all bulk goes through files.

A message fits a socket buffer, so neither side can block on sending one, and a worker that
is killed half-way leaves no half message behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Request:
    """Pool to worker: run the pickled call in `call` and write the report to `report`.

    >>> files = {"call": Path("c"), "report": Path("r"), "store": Path("s")}
    >>> Request(rank=0, world=1, backend=None, **files).group_timeout
    30.0
    """

    rank: int
    world: int
    call: Path
    report: Path
    store: Path
    backend: str | None
    group_timeout: float = 30.0
    port: int = 0
    env: dict[str, str | None] | None = None
    search_path: tuple[str, ...] = ()
    directory: str = "."


@dataclass(frozen=True)
class Release:
    """Pool to worker: everyone is done, destroy the process group.

    >>> Release()
    Release()
    """


@dataclass(frozen=True)
class Hello:
    """Worker to pool: torch is imported, ready for work.

    >>> Hello()
    Hello()
    """


@dataclass(frozen=True)
class Done:
    """Worker to pool: the report is written.

    >>> Done().when
    0.0
    """

    when: float = 0.0


@dataclass(frozen=True)
class Ready:
    """Worker to pool: cleaned up; `leftovers` says what the call should have ended itself.

    A `doubtful` worker is sound as far as it knows, but not as good as new.

    >>> Ready().leftovers
    ()
    """

    leftovers: tuple[str, ...] = ()
    doubtful: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a call ended, as written to the report file; `payload` is the pickled value or exception.

    >>> Report(ok=True, payload=b"...").type_name
    ''
    """

    ok: bool
    payload: bytes | None
    type_name: str = ""
    message: str = ""
    traceback: str = ""
