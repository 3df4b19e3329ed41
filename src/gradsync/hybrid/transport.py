"""The seam to the network: messages between named processes, and torch's RPC behind it.

A server has a handler; a client sends requests, which are answered, and posts, which are not. That
is all that parameter servers need. `gradsync.hybrid.sockets` has the implementation that is used
by default; `RpcTransport` here is the only use that hybrid training makes of torch's RPC.
"""

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed import rpc

from gradsync import errors
from gradsync.errors import FaultError, GradsyncError, ServerLostError


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


# ------------------------------------------------------------------------------ torch's RPC

_handler: Handler | None = None  # of this process, if it is a server


def serve_rpc(handler: Handler) -> None:
    """Let ``handler`` answer what comes over torch's RPC, which has to run.

    >>> serve_rpc(lambda peer, message: message)
    """
    global _handler
    _handler = handler


class RpcTransport(Transport):
    """Messages by ``torch.distributed.rpc``, which has to run under the servers' names.

    The set of processes is fixed when RPC starts, so new trainers cannot come to old servers.

    >>> issubclass(RpcTransport, Transport)
    True
    """

    def __init__(self, me: Peer, servers: Mapping[str, tuple[str, int]]) -> None:
        self._me = me
        self._where = dict(servers)  # host and pid, for messages
        self._pending: dict[int, Any] = {}
        self._last = 0
        self._lost: set[str] = set()

    def request(self, server: str, message: Message, *, hold: bool = False) -> int:
        """Send a message that will be answered."""
        self._last += 1
        arguments = (self._me.name, self._me.generation, message.op, message.values)
        self._pending[self._last] = rpc.rpc_async(
            server, _handle, args=(*arguments, message.tensors), timeout=0
        )
        return self._last

    def post(self, server: str, message: Message) -> None:
        """Send a message that will not be answered."""
        # Calls are served by several threads, so that order is kept only by waiting.
        for _ in self.replies({server: self.request(server, message)}, timeout=60.0):
            pass

    def replies(
        self, requests: Mapping[str, int], timeout: float
    ) -> Iterator[tuple[str, Message, float]]:
        """The answers as they come."""
        start = time.perf_counter()
        waiting = {server: self._pending.pop(number) for server, number in requests.items()}
        while waiting:
            for server, future in list(waiting.items()):
                if future.done() or len(waiting) == 1:
                    del waiting[server]
                    yield server, self._answer(server, future), time.perf_counter() - start
            if time.perf_counter() - start > timeout:
                raise errors.DeadlineError(
                    f"{', '.join(waiting)} has not answered in {timeout:g} s."
                )
            if waiting:
                time.sleep(0.0001)

    def _answer(self, server: str, future: Any) -> Message:
        try:
            op, values, tensors = future.wait()
        except RuntimeError as error:
            self._lost.add(server)
            host, pid = self._where[server]
            raise ServerLostError(
                f"{server} (pid {pid} on {host}) is gone: {error}", name=server, host=host, pid=pid
            ) from error
        message = Message(op, values, tensors)
        raise_error(server, message)
        return message

    def lost(self) -> list[str]:
        """Servers that are known to be gone."""
        return sorted(self._lost)

    def close(self) -> None:
        """Let go of the servers."""
        self._pending.clear()


def _handle(
    name: str, generation: str, op: str, values: dict[str, Any], tensors: list[Tensor]
) -> tuple[str, dict[str, Any], list[Tensor]]:
    assert _handler is not None, f"{socket.gethostname()}, pid {os.getpid()}, serves nothing"
    try:
        answered = _handler(Peer(name, generation), Message(op, values, tensors))
        answer = answered.result() if isinstance(answered, Future) else answered or Message("done")
    except Exception as error:
        answer = describe_error(error)
    return answer.op, answer.values, answer.tensors


def start_rpc(name: str, rank: int, world: int, init_method: str) -> None:
    """Start torch's RPC under ``name``; all ``world`` processes have to.

    >>> callable(start_rpc)
    True
    """
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, num_worker_threads=16)
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def stop_rpc() -> None:
    """End torch's RPC when all processes do.

    >>> callable(stop_rpc)
    True
    """
    rpc.shutdown()
