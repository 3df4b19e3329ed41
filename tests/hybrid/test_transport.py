"""What every transport has to do, on each of them: one server and one client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsync import hybrid
from gradsync.testing import WorkerPool

TRANSPORTS = ("sockets", "rpc")


@pytest.fixture(params=TRANSPORTS)
def play(request: pytest.FixtureRequest, pool: WorkerPool) -> Iterator[Callable[..., Any]]:
    """Runs ``client(transport)`` against the server of `transport_parts`; returns its value."""

    def run(client: Callable[..., Any], *, timeout: float = 40.0) -> Any:
        def role(rank: int, world: int, kind: str) -> Any:
            import transport_parts as parts

            return parts.play(rank, kind, client)

        outcomes = pool.run(
            role, ranks=2, backend=None, args=(request.param,), timeout=timeout, grace=10.0
        )
        return outcomes[0]

    return run


def test_one_file_of_hybrid_training_knows_torchs_rpc() -> None:
    files = Path(hybrid.__file__).parent.glob("*.py")
    imports = ("from torch.distributed import rpc", "torch.distributed.rpc")
    found = [file.name for file in files if any(each in file.read_text() for each in imports)]
    assert found == ["rpc.py"]


def test_answers_come_from_the_server_that_was_asked_with_values_and_tensors(play) -> None:
    def client(transport: Any) -> Any:
        import torch

        from gradsync.hybrid.transport import Message

        sent = [torch.arange(6).view(2, 3), torch.ones(0, 4), torch.tensor(2.5)]
        number = transport.request("server0", Message("echo", {"x": [1, "ü"]}, sent))
        ((server, answer, waited),) = transport.replies({"server0": number}, timeout=20)
        same = all(torch.equal(a, b) for a, b in zip(sent, answer.tensors, strict=True))
        return server, answer.op, answer.values, same, waited >= 0

    assert play(client) == ("server0", "echo", {"x": [1, "ü"]}, True, True)


def test_posts_keep_their_order(play) -> None:
    def client(transport: Any) -> Any:
        from gradsync.hybrid.transport import Message

        for number in range(50):
            transport.post("server0", Message("note", {"number": number}))
        asked = transport.request("server0", Message("noted"))
        ((_, answer, _),) = transport.replies({"server0": asked}, timeout=20)
        return answer.values["numbers"]

    assert play(client) == list(range(50))


def test_answers_that_come_later_hold_up_nobody_however_many_they_are(play) -> None:
    """As lookups ahead of a step do, which is complete by a message that comes after them."""

    def client(transport: Any) -> Any:
        from gradsync.hybrid.transport import Message

        asked = [transport.request("server0", Message("later", {"n": n})) for n in range(40)]
        transport.post("server0", Message("now"))
        found = []
        for number in asked:
            ((_, answer, _),) = transport.replies({"server0": number}, timeout=20)
            found.append(answer.values["n"])
        return found

    assert play(client) == list(range(40))


def test_errors_of_the_server_are_raised_by_their_class_with_its_name(play) -> None:
    def client(transport: Any) -> Any:
        from gradsync import ArgumentError, FaultError
        from gradsync.hybrid.transport import Message

        found = []
        for op, kind in (("refuse", ArgumentError), ("break", FaultError)):
            number = transport.request("server0", Message(op))
            try:
                list(transport.replies({"server0": number}, timeout=20))
            except kind as error:
                found.append(str(error))
        return found

    assert play(client) == ["server0: no such row", "server0: ZeroDivisionError: division by zero"]


def test_a_server_that_does_not_answer_is_named_after_the_time_out(play) -> None:
    def client(transport: Any) -> Any:
        import time

        from gradsync import DeadlineError
        from gradsync.hybrid.transport import Message

        number = transport.request("server0", Message("later", {"n": 0}))
        start = time.monotonic()
        try:
            list(transport.replies({"server0": number}, timeout=0.3))
        except DeadlineError as error:
            took = time.monotonic() - start
            transport.post("server0", Message("now"))
            return str(error), took
        return None

    text, took = play(client)
    assert text.startswith("server0 did not answer within 0.3 s")
    assert 0.3 <= took < 10


def test_a_server_that_dies_is_named_and_not_by_the_time_out(play) -> None:
    def client(transport: Any) -> Any:
        import time

        from gradsync.hybrid import ServerLostError
        from gradsync.hybrid.transport import Message

        number = transport.request("server0", Message("die"))
        start = time.monotonic()
        try:
            list(transport.replies({"server0": number}, timeout=20))
        except ServerLostError as error:
            took = time.monotonic() - start
            raise RuntimeError(f"{error.name} {error} {transport.lost()} {took:.2f} s") from None

    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"server0 server0 \(pid \d+ on .*\['server0'\]") as told:
        play(client)
    took = float(str(told.value).split(" s\n")[0].rsplit(" ", 1)[1])
    assert took < 10
    assert time.monotonic() - start < 30
