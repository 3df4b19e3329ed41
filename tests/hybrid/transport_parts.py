"""The two processes of `test_transport`: a server whose answers tell what came, and a client."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.distributed import FileStore

from gradsync import ArgumentError
from gradsync.hybrid.rpc import RpcTransport, abandon_rpc, serve_rpc, start_rpc, stop_rpc
from gradsync.hybrid.sockets import Address, Listener, SocketTransport
from gradsync.hybrid.transport import Later, Message, Peer


class Server:
    def __init__(self) -> None:
        self.noted: list[int] = []
        self.later: list[tuple[int, Later]] = []
        self.is_now = False
        self.lock = threading.Lock()  # RPC serves several messages at once, in any order
        self.ended = threading.Event()

    def handle(self, peer: Peer, message: Message) -> Message | Later | None:
        assert peer == Peer("trainer0", "g")
        return getattr(self, f"on_{message.op}")(message)

    def on_echo(self, message: Message) -> Message:
        return message

    def on_note(self, message: Message) -> None:
        self.noted.append(message.values["number"])

    def on_noted(self, message: Message) -> Message:
        return Message("noted", {"numbers": self.noted})

    def on_later(self, message: Message) -> Message | Later:
        with self.lock:
            if self.is_now:
                return Message("rows", message.values)
            later: Later = Future()
            self.later.append((message.values["n"], later))
            return later

    def on_now(self, message: Message) -> None:
        with self.lock:
            self.is_now = True
        for n, later in self.later:
            later.set_result(Message("rows", {"n": n}))

    def on_refuse(self, message: Message) -> None:
        raise ArgumentError("no such row")

    def on_break(self, message: Message) -> None:
        1 / 0  # noqa: B018

    def on_die(self, message: Message) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_end(self, message: Message) -> None:
        self.ended.set()


def play(rank: int, kind: str, client: Callable[[Any], Any]) -> Any:
    """Rank 0 is the client, rank 1 the server."""
    store = FileStore(os.environ["GRADSYNC_INIT_METHOD"].removeprefix("file://"), 2)
    if kind == "rpc":
        start_rpc("server0" if rank else "trainer0", rank, 2, store, timeout=20.0)
    try:
        value = _serve(kind, store) if rank else _ask(kind, store, client)
    except BaseException:
        if kind == "rpc":
            abandon_rpc()
        raise
    if kind == "rpc":
        stop_rpc(timeout=20.0)
    return value


def _serve(kind: str, store: FileStore) -> None:
    server = Server()
    listener = Listener(server.handle, "token")
    if kind == "rpc":
        serve_rpc(server.handle)
    store.set("address", json.dumps(listener.address.as_dict()))
    assert server.ended.wait(60)
    time.sleep(0.1)  # the answer to the last message
    listener.close()


def _ask(kind: str, store: FileStore, client: Callable[[Any], Any]) -> Any:
    address = Address(**json.loads(store.get("address")))
    me = Peer("trainer0", "g")
    transport = (
        RpcTransport(me, {"server0": (address.host, address.pid)})
        if kind == "rpc"
        else SocketTransport(me, {"server0": address})
    )
    value = client(transport)
    transport.post("server0", Message("end"))
    transport.close()
    return value
