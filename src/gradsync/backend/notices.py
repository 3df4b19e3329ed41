"""Errors that ranks tell each other through the store.

What comes from there is checked before it is used: a store may be reached by others than us.
"""

import json
from typing import Any

from gradsync.backend.members import LONGEST_HOST, MAX_PID, MAX_RANK
from gradsync.errors import (
    AbortedError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)

LONGEST_TEXT = 1 << 14  # characters
LONGEST_NOTICE = 1 << 18  # bytes: JSON may need twelve for a character
Told = FaultError | CollectiveMismatchError
KINDS: dict[str, type[Told]] = {
    kind.__name__: kind
    for kind in (AbortedError, CollectiveMismatchError, DeadlineError, FaultError, PeerLostError)
}


def encode(error: Told) -> str:
    """What ``decode`` makes the same error of; of another kind than it knows, a ``FaultError``."""
    text = str(error)[:LONGEST_TEXT].encode(errors="replace").decode()
    notice: dict[str, Any] = {"kind": type(error).__name__, "text": text}
    if isinstance(error, PeerLostError):
        notice |= {"rank": error.rank, "host": error.host, "pid": error.pid}
    if isinstance(error, DeadlineError):
        notice["ranks"] = list(error.ranks)
    return json.dumps(notice)


def decode(notice: bytes) -> Told:
    """The error that another rank has told; believes no more than can be."""
    try:
        if len(notice) > LONGEST_NOTICE:
            raise ValueError(f"{len(notice)} bytes")
        return _build(json.loads(notice))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return FaultError(
            "Another rank has given up, and left a notice that was not written by gradsync. Do all "
            "ranks run the same version, and does nobody else use the store?"
        )


def first_line(error: Exception) -> str:
    """What it says, without a trace."""
    return (str(error).splitlines() or [repr(error)])[0]


def _build(values: dict[str, Any]) -> Told:
    text = values["text"]
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise ValueError("no text")
    text.encode()  # raises if it cannot be told on
    kind = KINDS.get(values["kind"], FaultError)
    if kind is PeerLostError:
        host = values["host"]
        if host is not None and not (isinstance(host, str) and len(host) <= LONGEST_HOST):
            raise ValueError("no host")
        rank, pid = values["rank"], values["pid"]
        return PeerLostError(
            text,
            rank=None if rank is None else _number(rank, MAX_RANK),
            host=host,
            pid=None if pid is None else _number(pid, MAX_PID),
        )
    if kind is DeadlineError:
        return DeadlineError(text, ranks=[_number(rank, MAX_RANK) for rank in values["ranks"]])
    return kind(text)


def _number(value: Any, largest: int) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise ValueError("out of range")
    return value
