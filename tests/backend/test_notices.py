"""Errors that go through the store: the same on the other side, and nothing that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gradsync import (
    AbortedError,
    CollectiveError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)
from gradsync.backend.notices import LONGEST_NOTICE, LONGEST_TEXT, Told, decode, encode

ERRORS = [
    FaultError("something"),
    AbortedError("aborted"),
    CollectiveMismatchError("rank 0: barrier; rank 1: all_reduce"),
    PeerLostError("rank 1 has ended", rank=1, host="a", pid=17),
    PeerLostError("somebody has ended"),
    DeadlineError("late", ranks=[3, 1]),
    DeadlineError("late"),
    DeadlineError("é\n\x00\U0001f600", ranks=range(5000)),
]
GOOD = {"kind": "PeerLostError", "text": "t", "rank": 1, "host": "a", "pid": 17}
LATE = {"kind": "DeadlineError", "text": "t", "ranks": [1]}


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_arrives_as_it_was(error: Told) -> None:
    found = decode(encode(error).encode())
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_a_kind_that_is_not_known_arrives_as_a_fault() -> None:
    found = decode(encode(CollectiveError("bucket 3")).encode())
    assert type(found) is FaultError
    assert str(found) == "bucket 3"


def test_a_long_text_is_cut_and_can_be_read() -> None:
    notice = encode(FaultError("\U0001f600" * 10**6)).encode()
    assert len(notice) < LONGEST_NOTICE
    assert str(decode(notice)) == "\U0001f600" * LONGEST_TEXT


@pytest.mark.parametrize(
    "notice",
    [
        b"",
        b"\x00\xff",
        b"null",
        b"7",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'"' + b"x" * LONGEST_NOTICE + b'"',
        *(
            json.dumps(values).encode()
            for values in (
                GOOD | {"text": 3},
                GOOD | {"text": "x" * (LONGEST_TEXT + 1)},
                GOOD | {"kind": ["PeerLostError"]},
                GOOD | {"rank": "1"},
                GOOD | {"rank": True},
                GOOD | {"rank": -1},
                GOOD | {"rank": 2**31},
                GOOD | {"pid": 1.5},
                GOOD | {"pid": 2**22 + 1},
                GOOD | {"host": ["a"]},
                GOOD | {"host": "h" * 256},
                {"kind": "PeerLostError", "text": "t"},
                LATE | {"ranks": 3},
                LATE | {"ranks": "12"},
                LATE | {"ranks": [[1]]},
                LATE | {"ranks": [None]},
                LATE | {"ranks": {"1": 2}},
            )
        ),
    ],
    ids=lambda notice: repr(notice[:60]),
)
def test_garbage_is_a_fault_that_says_so(notice: bytes) -> None:
    found: Any = decode(notice)
    assert type(found) is FaultError
    assert "not written by gradsync" in str(found)
