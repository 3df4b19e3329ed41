"""Messages by torch's RPC, the second transport. No other file of hybrid training uses torch's RPC.

[Note: processes with a past] torch counts, in each process, the starts of RPC, its all-gathers and
its ends, and looks for the others under its own number: processes of which one has used RPC more
often than another wait for each other until the time-out. So they agree on the number of the start
first, names are new in each start (torch counts all-gathers by the names of those who take part),
and the end is a barrier of our own.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from gradsync.errors import DeadlineError, ServerLostError
from gradsync.hybrid.transport import (
    Handler,
    Later,
    Message,
    Peer,
    Transport,
    describe_error,
    raise_error,
)

_Answer = tuple[str, dict[str, Any], list[Tensor]]

_handler: Handler | None = None  # of this process, if it is a server
_start = ""  # tells this start of RPC from others
_running: tuple[int, int, Store] | None = None  # rank, world and store of the one that runs
_POST = 60.0  # seconds in which a message has to be taken


# ------------------------------------------------------------------------------ start and end


def start_rpc(name: str, rank: int, world: int, store: Store, *, timeout: float = 60.0) -> None:
    """Start torch's RPC under ``name``; all ``world`` processes have to, with the same store.

    >>> callable(start_rpc)
    True
    """
    global _start, _running
    # [Note: processes with a past]
    store.set(f"rpc/starts/{rank}", str(rpc._init_counter))
    starts = [int(store.get(f"rpc/starts/{each}")) for each in range(world)]
    rpc._init_counter = max(starts)
    if rank == 0:
        store.set("rpc/start", os.urandom(6).hex())
    _start = store.get("rpc/start").decode()
    _stores[_start] = store
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"{_SCHEME}://{_start}", num_worker_threads=16, rpc_timeout=timeout
    )
    try:
        rpc.init_rpc(rpc_name(name), rank=rank, world_size=world, rpc_backend_options=options)
    finally:
        del _stores[_start]
    _running = rank, world, store


def stop_rpc(*, timeout: float = 60.0) -> None:
    """End torch's RPC when all processes do: nobody may wait for an answer any more.

    >>> callable(stop_rpc)
    True
    """
    assert _running is not None, "RPC was not started"
    rank, world, store = _running
    limit = timedelta(seconds=timeout)
    store.set(f"rpc/ended/{rank}", "1")
    store.wait([f"rpc/ended/{each}" for each in range(world)], limit)
    abandon_rpc()
    # The store may live in the process of rank 0, which therefore leaves last.
    if rank:
        store.set(f"rpc/left/{rank}", "1")
    elif world > 1:
        store.wait([f"rpc/left/{each}" for each in range(1, world)], limit)


def abandon_rpc() -> None:
    """End torch's RPC at once: some of the others may be gone.

    >>> callable(abandon_rpc)
    True
    """
    global _running
    _running = None
    rpc.shutdown(graceful=False)


def rpc_name(name: str) -> str:
    """Under which RPC knows a process.

    >>> rpc_name("server0").startswith("server0-")
    True
    """
    return f"{name}-{_start}"


# RPC meets in the store that the processes have already: no port that another one could take.
_SCHEME = "gradsync-hybrid"
_stores: dict[str, Store] = {}


def _rendezvous(url: str, **_options: Any) -> Iterator[tuple[Store, int, int]]:
    where, _mark, query = url.partition("://")[2].partition("?")
    options = dict(each.split("=") for each in query.split("&"))
    yield _stores[where], int(options["rank"]), int(options["world_size"])


register_rendezvous_handler(_SCHEME, _rendezvous)


# ------------------------------------------------------------------------------ a server


def serve_rpc(handler: Handler) -> None:
    """Let ``handler`` answer what comes over torch's RPC, which has to run.

    >>> serve_rpc(lambda peer, message: message)
    """
    global _handler
    _handler = handler


@rpc.functions.async_execution  # type: ignore[untyped-decorator]
def _handle(
    name: str, generation: str, op: str, values: dict[str, Any], tensors: list[Tensor]
) -> "torch.futures.Future[_Answer]":
    """In a server. An answer that comes later holds no thread of RPC, of which there are few."""
    assert _handler is not None, f"{socket.gethostname()}, pid {os.getpid()}, serves nothing"
    answer: torch.futures.Future[_Answer] = torch.futures.Future()
    try:
        with torch.no_grad():
            found = _handler(Peer(name, generation), Message(op, values, tensors))
    except Exception as error:
        found = describe_error(error)
    if isinstance(found, Future):
        found.add_done_callback(lambda later: answer.set_result(_answer_of(later)))
    else:
        answer.set_result(_plain(found or Message("done")))
    return answer


def _answer_of(later: Later) -> _Answer:
    error = later.exception()
    return _plain(later.result() if error is None else describe_error(error))


def _plain(message: Message) -> _Answer:
    return message.op, message.values, message.tensors


# ------------------------------------------------------------------------------ a client


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
        arguments = (self._me.name, self._me.generation, *_plain(message))
        try:
            self._pending[self._last] = rpc.rpc_async(
                rpc_name(server), _handle, args=arguments, timeout=0
            )
        except RuntimeError as error:
            raise self._lose(server, error) from error
        return self._last

    def post(self, server: str, message: Message) -> None:
        """Send a message that will not be answered."""
        # Calls are served by several threads, so that order is kept only by waiting.
        for _ in self.replies({server: self.request(server, message)}, timeout=_POST):
            pass

    def replies(
        self, requests: Mapping[str, int], timeout: float
    ) -> Iterator[tuple[str, Message, float]]:
        """The answers as they come."""
        start = time.perf_counter()
        waiting = {server: self._pending.pop(number) for server, number in requests.items()}
        while waiting:
            for server in [each for each, future in waiting.items() if future.done()]:
                yield server, self._answer(server, waiting.pop(server)), time.perf_counter() - start
            if waiting and time.perf_counter() - start > timeout:
                raise DeadlineError(
                    f"{' and '.join(waiting)} did not answer within {timeout:g} s: stopped, "
                    "overloaded, or waiting for the step of another trainer."
                )
            if waiting:
                time.sleep(0.0001)

    def _answer(self, server: str, future: Any) -> Message:
        try:
            op, values, tensors = future.wait()  # it is done
        except RuntimeError as error:
            raise self._lose(server, error) from error
        message = Message(op, values, tensors)
        raise_error(server, message)
        return message

    def _lose(self, server: str, error: RuntimeError) -> ServerLostError:
        self._lost.add(server)
        host, pid = self._where[server]
        reason = str(error).partition("\n")[0]
        return ServerLostError(
            f"{server} (pid {pid} on {host}) is gone: {reason}", name=server, host=host, pid=pid
        )

    def lost(self) -> list[str]:
        """Servers that are known to be gone."""
        return sorted(self._lost)

    def close(self) -> None:
        """Let go of the servers."""
        self._pending.clear()
