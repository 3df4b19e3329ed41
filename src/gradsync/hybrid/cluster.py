"""``Cluster``: what a trainer, or the master, knows of the others and how it talks to them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from gradsync.errors import ArgumentError, FaultError, ServerLostError, StateError
from gradsync.hybrid.slow import SlowWatch
from gradsync.hybrid.sockets import Address, SocketTransport
from gradsync.hybrid.transport import Message, Peer, Transport

Report = Callable[[str, dict[str, Any]], None]

_logger = logging.getLogger("gradsync")


class Cluster:
    """The servers, as one trainer or the master sees them; functions of roles get one.

    ``rank`` is the trainer's among the ``trainers``; ``servers`` are the servers' names.

    >>> from gradsync import hybrid
    >>> with hybrid.local(servers=2) as cluster:
    ...     cluster.name, cluster.servers
    ('trainer0', ('server0', 'server1'))
    """

    def __init__(
        self,
        transport: Transport,
        servers: Sequence[str],
        *,
        rank: int,
        trainers: int,
        role: Literal["trainer", "master"] = "trainer",
        timeout: float = 60.0,
        slow_after: float = 0.05,
        report: Report | None = None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.trainers = trainers
        self.servers = tuple(servers)
        self.timeout = timeout
        self.watch = SlowWatch(servers, threshold=slow_after)
        self._transport = transport
        self._report = report
        self._left = False
        if role == "trainer":
            names = [f"trainer{each}" for each in range(trainers)]
            self.ask_all({s: Message("begin", {"trainers": names}) for s in servers})

    @property
    def name(self) -> str:
        """How others call this process.

        >>> from gradsync import hybrid
        >>> with hybrid.local() as cluster:
        ...     cluster.name
        'trainer0'
        """
        return f"trainer{self.rank}" if self.role == "trainer" else "master"

    # ---------------------------------------------------------------- messages

    def send(self, messages: Mapping[str, Message], *, hold: bool = False) -> dict[str, int]:
        """Ask servers, all at once, without waiting; ``hold``: with the next message to each."""
        request = self._transport.request
        return {server: request(server, each, hold=hold) for server, each in messages.items()}

    def answers(self, requests: Mapping[str, int]) -> dict[str, Message]:
        """Wait for what was asked."""
        found = {}
        for server, message, waited in self._transport.replies(requests, self.timeout):
            found[server] = message
            self.watch.record(server, max(0.0, waited - message.values.get("held", 0.0)))
        return found

    def ask_all(self, messages: Mapping[str, Message]) -> dict[str, Message]:
        """Ask servers and wait for all answers."""
        return self.answers(self.send(messages))

    def post(self, messages: Mapping[str, Message]) -> None:
        """Tell servers; nobody answers."""
        for server, message in messages.items():
            self._transport.post(server, message)

    def pick(self, servers: Iterable[str] | None) -> tuple[str, ...]:
        """Those servers, or all; raises for one that does not exist."""
        if servers is None:
            return self.servers
        chosen = tuple(servers)
        for name in chosen:
            if name not in self.servers:
                raise ArgumentError(
                    f"there is no server {name!r}; there are {', '.join(self.servers)}."
                )
        if not chosen or len(set(chosen)) != len(chosen):
            raise ArgumentError(f"servers must be different ones and at least one, got {chosen}.")
        return chosen

    # ---------------------------------------------------------------- progress

    def report(self, **values: Any) -> None:
        """Tell the master how far this trainer is: it gets the values at once, by name.

        >>> from gradsync import hybrid
        >>> with hybrid.local(on_report=print) as cluster:
        ...     cluster.report(step=1, loss=0.5)
        trainer0 {'step': 1, 'loss': 0.5}
        """
        if self._report is not None:
            self._report(self.name, values)

    # ---------------------------------------------------------------- end

    def lost(self) -> list[str]:
        """Servers that are gone, as far as is known without asking them.

        >>> from gradsync import hybrid
        >>> with hybrid.local() as cluster:
        ...     cluster.lost()
        []
        """
        return self._transport.lost()

    def leave(self, *, stops: bool = False) -> None:
        """Take leave: the other trainers' steps no longer wait for this one.

        With ``stops`` servers end after the last trainer, or at once if the master says so.
        """
        if self._left:
            return
        self._left = True
        farewell = Message("leave", {"stops": stops}) if self.role == "trainer" else Message("stop")
        if self.role == "trainer" or stops:
            with suppress(FaultError):
                self.ask_all(dict.fromkeys(self.servers, farewell))

    def close(self) -> None:
        """Let go of the servers."""
        self._transport.close()

    @contextmanager
    def blame(self) -> Iterator[None]:
        """If the body fails and a server is gone, that is the reason, whatever was noticed first.

        A trainer that waits for another in a collective learns of a lost server only from that
        one's end.
        """
        try:
            yield
        except ServerLostError:
            raise
        except Exception as error:
            lost = []
            with suppress(Exception):
                lost = self.lost()
            if lost:
                raise ServerLostError(
                    f"{' and '.join(lost)} is gone; this was noticed by: "
                    f"{type(error).__name__}: {error}",
                    name=lost[0],
                ) from error
            raise


_current: list[Cluster] = []


@contextmanager
def entered(cluster: Cluster) -> Iterator[Cluster]:
    """Let ``cluster`` be the current one.

    >>> from gradsync import hybrid
    >>> with hybrid.local() as cluster:
    ...     hybrid.current() is cluster
    True
    """
    _current.append(cluster)
    try:
        yield cluster
    finally:
        _current.remove(cluster)


def current() -> Cluster:
    """The cluster that this process is in.

    >>> from gradsync import hybrid
    >>> with hybrid.local(servers=3):
    ...     len(hybrid.current().servers)
    3
    """
    if not _current:
        raise StateError(
            "this process is in no cluster: start it by hybrid.run, or use hybrid.local() to try "
            "things out in one process."
        )
    return _current[-1]


class Reporter:
    """Sends reports to the master; training goes on without it if it is gone.

    >>> callable(Reporter)
    True
    """

    def __init__(self, name: str, generation: str, address: Address) -> None:
        self._transport: SocketTransport | None = SocketTransport(
            Peer(name, generation), {"master": address}
        )

    def __call__(self, name: str, values: dict[str, Any]) -> None:
        """Send one report."""
        if self._transport is None:
            return
        try:
            self._transport.post("master", Message("report", {"name": name, "values": values}))
        except FaultError as error:
            _logger.warning("%s reports no more: %s", name, error)
            self.close()

    def close(self) -> None:
        """Report no more."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None
