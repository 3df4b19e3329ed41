"""Messages over sockets: a Unix one on the same host, TCP between hosts.

The client has no threads: whoever waits for an answer, or for room to send, reads what comes from
any server. So nothing waits for a thread to be scheduled, and two sides that both have much to send
do not wait for each other. The server has a thread for each client, so that one that has stopped
holds up nobody else. A process that ends closes its sockets, which the other side sees at once.

[Note: whom a server believes] Who knows the token of a cluster may connect. It is made at random by
the process that starts the cluster and travels through its store; it keeps strangers and stale
processes out, not an attacker who can listen. Messages are data, never code.
"""

import hmac
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice

import torch

from gradsync.errors import DeadlineError, FaultError, ServerLostError
from gradsync.hybrid import wire
from gradsync.hybrid.transport import (
    Handler,
    Later,
    Message,
    Peer,
    Transport,
    describe_error,
    raise_error,
)

_BUFFER = 4 * 1024 * 1024
_PIECES = 64  # in one call


@dataclass(frozen=True)
class Address:
    """Where a server listens.

    >>> Address(host="a", ip="127.0.0.1", port=1, local="x", pid=7, token="t").pid
    7
    """

    host: str
    ip: str
    port: int
    local: str  # of its Unix socket, for the same host
    pid: int
    token: str

    def connect(self, timeout: float) -> socket.socket:
        """A connection, by the shorter way where there is one."""
        if self.host == socket.gethostname():
            with suppress(OSError):  # a container of the same name: TCP then
                unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                unix.connect("\0" + self.local)
                return unix
        return socket.create_connection((self.ip, self.port), timeout)

    def as_dict(self) -> dict[str, str | int]:
        """For JSON."""
        return asdict(self)


class Listener:
    """Answers messages by ``handler``, on a thread for each client.

    ``left(peer)`` is called when a client has ended.

    >>> listener = Listener(lambda peer, message: message, token="t")
    >>> listener.address.pid == os.getpid()
    True
    >>> listener.close()
    """

    def __init__(
        self,
        handler: Handler,
        token: str,
        *,
        ip: str = "127.0.0.1",
        left: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        self._handler, self._token, self._left = handler, token, left
        self._tcp = socket.create_server((ip, 0))
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local = f"gradsync-hybrid-{os.getpid()}-{os.urandom(6).hex()}"
        self._unix.bind("\0" + local)  # abstract: there is no file to be left behind
        self._unix.listen()
        port = self._tcp.getsockname()[1]
        self.address = Address(socket.gethostname(), ip, port, local, os.getpid(), token)
        self._clients: set[socket.socket] = set()
        self._closed = False
        self._stops, self._stopper = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="hybrid-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (self._tcp, self._unix, self._stops):
                selector.register(each, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select():
                    if key.fileobj is self._stops:
                        return
                    assert isinstance(key.fileobj, socket.socket)
                    client, _ = key.fileobj.accept()
                    self._clients.add(client)
                    threading.Thread(
                        target=self._serve, args=(client,), name="hybrid-serve", daemon=True
                    ).start()

    def _serve(self, client: socket.socket) -> None:
        peer: Peer | None = None
        try:
            _tune(client)
            inbox = wire.Inbox(client)
            hello = inbox.receive()
            if hello is None or not hmac.compare_digest(
                str(hello[1].values.get("token")), self._token
            ):
                return
            peer = Peer(hello[1].values["name"], hello[1].values["generation"])
            wire.send(client, wire.encode(Message("welcome"), hello[0]))
            sending = threading.Lock()
            while (received := inbox.receive()) is not None:
                number, message = received
                answer = self._answer(peer, message)
                if isinstance(answer, Future):
                    answer.add_done_callback(partial(_send_later, client, sending, number))
                elif number:
                    with sending:
                        wire.send(client, wire.encode(answer, number))
        except (OSError, FaultError):
            pass  # the client is gone, or none of ours
        finally:
            self._clients.discard(client)
            client.close()
            if peer is not None and not self._closed:
                self._left(peer)

    def _answer(self, peer: Peer, message: Message) -> Message | Later:
        try:
            with torch.no_grad():
                return self._handler(peer, message) or Message("done")
        except Exception as error:
            return describe_error(error)

    def close(self) -> None:
        """Stop listening and let go of the clients."""
        if self._closed:
            return
        self._closed = True
        self._stopper.send(b"x")
        self._thread.join(5.0)
        for each in (self._tcp, self._unix, self._stops, self._stopper):
            each.close()
        for client in list(self._clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)


def _send_later(client: socket.socket, sending: threading.Lock, number: int, later: Later) -> None:
    error = later.exception()
    answer = later.result() if error is None else describe_error(error)
    with suppress(OSError), sending:  # a client that is gone waits for nothing
        wire.send(client, wire.encode(answer, number))


class SocketTransport(Transport):
    """Connections to the servers at ``addresses``.

    >>> listener = Listener(lambda peer, message: Message("same", message.values), token="t")
    >>> client = SocketTransport(Peer("me", "g"), {"server0": listener.address})
    >>> number = client.request("server0", Message("ping", {"x": 1}))
    >>> [reply.values for _, reply, _ in client.replies({"server0": number}, timeout=10)]
    [{'x': 1}]
    >>> client.close(); listener.close()
    """

    def __init__(
        self, me: Peer, addresses: Mapping[str, Address], *, timeout: float = 60.0
    ) -> None:
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._channels: dict[str, _Channel] = {}
        self._last = 0
        hellos = {}
        for name, address in addresses.items():
            try:
                channel = _Channel(name, address, timeout)
            except OSError as error:
                raise _lost(name, address, f"cannot be reached ({error})") from error
            self._channels[name] = channel
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)
            hello = {"token": address.token, "name": me.name, "generation": me.generation}
            hellos[name] = self.request(name, Message("hello", hello))
        for _ in self.replies(hellos, timeout):
            pass

    def request(self, server: str, message: Message, *, hold: bool = False) -> int:
        """Send a message that will be answered."""
        with self._lock:
            self._last += 1
            channel = self._channels[server]
            if hold:
                channel.outgoing.extend(wire.encode(message, self._last))
            else:
                self._send(channel, message, self._last)
            return self._last

    def post(self, server: str, message: Message) -> None:
        """Send a message that will not be answered."""
        with self._lock:
            self._send(self._channels[server], message, 0)

    def _send(self, channel: "_Channel", message: Message, number: int) -> None:
        channel.outgoing.extend(wire.encode(message, number))
        self._flush(channel)

    def _flush(self, channel: "_Channel") -> None:
        channel.flush()
        if channel.outgoing:
            self._selector.modify(
                channel.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, channel
            )
            while channel.outgoing:
                self._pump(None)
                channel.check()
            self._selector.modify(channel.socket, selectors.EVENT_READ, channel)
        channel.check()

    def replies(
        self, requests: Mapping[str, int], timeout: float
    ) -> Iterator[tuple[str, Message, float]]:
        """The answers as they come."""
        start = time.perf_counter()
        waiting = dict(requests)
        with self._lock:
            for server in waiting:
                self._flush(self._channels[server])
        while waiting:
            for server, number in list(waiting.items()):
                channel = self._channels[server]
                if number in channel.answers:
                    del waiting[server]
                    message = channel.answers.pop(number)
                    raise_error(server, message)
                    yield server, message, time.perf_counter() - start
                else:
                    channel.check()
            left = timeout - (time.perf_counter() - start)
            if waiting and left <= 0:
                raise DeadlineError(
                    f"{_and(list(waiting))} did not answer within {timeout:g} s: stopped, "
                    "overloaded, or waiting for the step of another trainer."
                )
            if waiting:
                with self._lock:
                    if not any(
                        number in self._channels[s].answers for s, number in waiting.items()
                    ):
                        self._pump(left)

    def _pump(self, timeout: float | None) -> None:
        """Wait until anything comes or can be sent, and take or send it."""
        for key, events in self._selector.select(timeout):
            channel: _Channel = key.data
            if events & selectors.EVENT_WRITE:
                channel.flush()
            if events & selectors.EVENT_READ and not channel.read():
                self._selector.unregister(channel.socket)

    def lost(self) -> list[str]:
        """Servers that are known to be gone."""
        with self._lock:
            self._pump(0)
            return [name for name, channel in self._channels.items() if channel.error is not None]

    def close(self) -> None:
        """Let go of the servers."""
        with self._lock:
            self._selector.close()
            for channel in self._channels.values():
                channel.socket.close()


class _Channel:
    """One connection of a client, which never blocks."""

    def __init__(self, name: str, address: Address, timeout: float) -> None:
        self.name, self.address = name, address
        self.socket = address.connect(timeout)
        _tune(self.socket)
        self.socket.setblocking(False)
        self.outgoing: deque[memoryview] = deque()
        self.answers: dict[int, Message] = {}
        self.error: ServerLostError | None = None
        self._inbox = wire.Inbox(self.socket)

    def check(self) -> None:
        """Raise if the server is gone."""
        if self.error is not None:
            raise self.error

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self.outgoing:
                sent = self.socket.sendmsg(list(islice(self.outgoing, _PIECES)))
                while self.outgoing and sent >= len(self.outgoing[0]):
                    sent -= len(self.outgoing.popleft())
                if sent:
                    self.outgoing[0] = self.outgoing[0][sent:]
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)

    def read(self) -> bool:
        """Take what has come; False if the server is gone."""
        try:
            if not self._inbox.read():
                self._lose(None)
                return False
            while (found := self._inbox.next()) is not None:
                number, message = found
                self.answers[number] = message
        except BlockingIOError:
            return True
        except OSError as error:
            self._lose(error)
            return False
        return True

    def _lose(self, error: OSError | None) -> None:
        self.outgoing.clear()
        self.error = _lost(self.name, self.address, f"is gone ({error or 'it has ended'})")


def _lost(name: str, address: Address, what: str) -> ServerLostError:
    return ServerLostError(
        f"{name} (pid {address.pid} on {address.host}) {what}.",
        name=name,
        host=address.host,
        pid=address.pid,
    )


def _tune(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    connection.settimeout(None)


def _and(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]
