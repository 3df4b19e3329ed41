"""The seam to the network: messages between named processes.

A server has a handler; a client sends requests, which are answered, and posts, which are not. That
is all that parameter servers need. `gradsync.hybrid.sockets` has the implementation that is used
by default; `gradsync.hybrid.rpc` has the other one, and is the only file of hybrid training that
knows torch's RPC.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradsync import errors
from gradsync.errors import FaultError, GradsyncError


@dataclass
class Message:
    """What travels: the name of an operation, plain values, tensors.

    >>> Message("lookup", {"table": "words"}).tensors
    []
    """

    op: str
    values: dict[str, Any] = field(default_factory=dict)  # as JSON can hold them
    tensors: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Peer:
    """Who sends, as its handler sees it.

    >>> Peer("trainer0", "g1").name
    'trainer0'
    """

    name: str
    generation: str  # of trainers: those that were started together


# An answer that comes later: the server goes on with other messages of the same client.
Later = Future[Message]

# What a server does with a message; the answer goes to the sender, if it has asked for one.
Handler = Callable[[Peer, Message], "Message | Later | None"]


class Transport(ABC):
    """The client's side of connections to all servers.

    >>> sorted(Transport.__abstractmethods__)
    ['close', 'lost', 'post', 'replies', 'request']
    """

    @abstractmethod
    def request(self, server: str, message: Message, *, hold: bool = False) -> int:
        """Send a message that will be answered; returns its number.

        With ``hold`` it may travel with the next message to the server, which wakes once then.
        """

    @abstractmethod
    def post(self, server: str, message: Message) -> None:
        """Send a message that will not be answered. Messages to one server keep their order."""

    @abstractmethod
    def replies(
        self, requests: Mapping[str, int], timeout: float
    ) -> Iterator[tuple[str, Message, float]]:
        """The answers to one request a server, as they come, each with the seconds waited.

        Raises what the server raised, `ServerLostError` if it is gone, and `DeadlineError` if it
        has not answered in ``timeout`` seconds.
        """

    @abstractmethod
    def lost(self) -> list[str]:
        """Servers that are known to be gone, without waiting for anything."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the servers."""


# ------------------------------------------------------------------------------ errors that travel


def describe_error(error: BaseException) -> Message:
    """An exception as an answer.

    >>> describe_error(ValueError("no")).values["text"]
    'ValueError: no'
    """
    ours = isinstance(error, GradsyncError)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    return Message("error", {"kind": type(error).__name__ if ours else "", "text": text})


def raise_error(server: str, message: Message) -> None:
    """Raise what a server has answered with, if it is an error.

    >>> raise_error("server0", Message("rows"))
    """
    if message.op != "error":
        return
    kind = getattr(errors, message.values["kind"] or "FaultError", FaultError)
    raise kind(f"{server}: {message.values['text']}")
