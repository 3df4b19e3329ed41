"""Start-up: who is a trainer, who a server, and how they find each other.

``run`` starts the processes of all roles on this machine; under ``torchrun`` it plays, in each
process, the role that falls to its rank.
"""

import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as meet

from gradsync.errors import ArgumentError, FaultError, ServerLostError
from gradsync.hybrid import children, process
from gradsync.hybrid.children import START_SECONDS, Servers, process_context, start_servers
from gradsync.hybrid.cluster import Cluster, Report, Reporter, entered
from gradsync.hybrid.process import Outcome, TrainerPlan
from gradsync.hybrid.rpc import RpcTransport, abandon_rpc, serve_rpc, start_rpc, stop_rpc
from gradsync.hybrid.server import ParameterServer
from gradsync.hybrid.sockets import Address, Listener, SocketTransport
from gradsync.hybrid.transport import Message, Peer, Transport

_LOOK = 0.1  # seconds between two looks whether the trainers are done


@dataclass(frozen=True, kw_only=True)
class Roles:
    """Who does what: ``trainers`` processes call ``trainer(cluster, *args)``, ``servers`` serve.

    ``master(cluster)``, if there is one, runs in the process that starts the others, while they
    train; under torchrun it is a process of its own, the last one.

    >>> from gradsync import hybrid
    >>> hybrid.Roles(trainer=print, trainers=2, servers=1).world
    3
    """

    trainer: Callable[..., Any]
    trainers: int = 1
    servers: int = 1
    master: Callable[[Cluster], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("trainers", "servers"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)!r}.")

    @property
    def world(self) -> int:
        """How many processes torchrun has to start."""
        return self.trainers + self.servers + (self.master is not None)

    def role_of(self, rank: int) -> tuple[Literal["trainer", "server", "master"], int]:
        """Trainers come first, then servers, then the master.

        >>> from gradsync import hybrid
        >>> hybrid.Roles(trainer=print, trainers=2, servers=1).role_of(2)
        ('server', 0)
        """
        if rank < self.trainers:
            return "trainer", rank
        if rank < self.trainers + self.servers:
            return "server", rank - self.trainers
        return "master", 0


class RoleFailure(FaultError):
    """A trainer failed; ``role`` names it, and the exception it raised is the cause.

    >>> from gradsync import hybrid
    >>> issubclass(hybrid.RoleFailure, RuntimeError)
    True
    """

    def __init__(self, text: str, *, role: str = "") -> None:
        super().__init__(text)
        self.role = role


def run(
    roles: Roles,
    *,
    args: Sequence[Any] = (),
    servers: Servers | None = None,
    on_report: Report | None = None,
    backend: str = "gloo",
    timeout: float = 60.0,
    slow_after: float = 0.05,
    rendezvous: str | None = None,
    transport: Literal["sockets", "rpc"] = "sockets",
    start_method: str = "forkserver",
) -> Any:
    """Train with parameter servers; returns what the trainers' functions return, by rank.

    Under ``torchrun`` with ``roles.world`` processes each plays its role: a trainer returns its own
    value, a server None when all trainers are done.

    A trainer's default process group has the trainers and nobody else, so that its
    ``DistributedDataParallel`` is made as always.

    Args:
        roles: who does what. Its functions have to be importable, as for ``multiprocessing``.
        args: for the trainers' function.
        servers: servers that run already (``start_servers``), which stay; default new ones.
        on_report: called in this process with the name of a trainer and what it reports.
        backend: of the trainers' process group.
        timeout: seconds after which a silent server is an error.
        slow_after: seconds of waiting that count as slow, see ``SlowServerWarning``.
        rendezvous: an ``init_method`` of torch.distributed under which all processes meet: for a
            launcher other than torchrun. RANK and WORLD_SIZE are taken from the environment.
        transport: "sockets", or "rpc" for torch's RPC, which needs torchrun or ``rendezvous``.
        start_method: of ``multiprocessing``.

    Raises:
        RoleFailure: a trainer raised or died. Its cause is the trainer's exception; if a server is
            gone that is a ``ServerLostError`` which names it.

    >>> from gradsync import hybrid
    >>> hybrid.run(hybrid.Roles(trainer=hybrid.rank_of, trainers=2, servers=1))
    [0, 1]
    """
    settings = _Settings(backend, timeout, slow_after, on_report)
    if rendezvous is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        return _play(roles, tuple(args), settings, rendezvous or "env://", transport)
    if transport != "sockets":
        raise ArgumentError(
            f"transport={transport!r} needs processes that are started together: use torchrun, or "
            'transport="sockets".'
        )
    context = process_context(start_method)
    with ExitStack() as stack:
        if servers is None:
            servers = stack.enter_context(start_servers(roles.servers, start_method=start_method))
        return _run_trainers(roles, tuple(args), servers, settings, context)


def rank_of(cluster: Cluster) -> int:
    """The smallest trainer: returns its rank.

    >>> from gradsync import hybrid
    >>> with hybrid.local() as cluster:
    ...     hybrid.rank_of(cluster)
    0
    """
    return cluster.rank


@contextmanager
def local(
    *, servers: int = 1, on_report: Report | None = None, timeout: float = 60.0
) -> Iterator[Cluster]:
    """A cluster in this process: servers on threads, and one trainer, which is the caller.

    >>> from gradsync import hybrid
    >>> with hybrid.local(servers=2) as cluster:
    ...     cluster.trainers
    1
    """
    token = secrets.token_hex(8)
    made = {f"server{at}": ParameterServer(f"server{at}", token=token) for at in range(servers)}
    addresses = {name: server.listen() for name, server in made.items()}
    try:
        transport = SocketTransport(Peer("trainer0", token), addresses)
        cluster = Cluster(
            transport, list(addresses), rank=0, trainers=1, timeout=timeout, report=on_report
        )
        try:
            with entered(cluster):
                yield cluster
        finally:
            cluster.leave()
            cluster.close()
    finally:
        for server in made.values():
            server.close()


@dataclass(frozen=True)
class _Settings:
    backend: str
    timeout: float
    slow_after: float
    on_report: Report | None


# ------------------------------------------------------------------------------ on this machine


def _run_trainers(
    roles: Roles,
    args: tuple[Any, ...],
    servers: Servers,
    settings: _Settings,
    context: BaseContext,
) -> list[Any]:
    generation = secrets.token_hex(8)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync-hybrid-"))
        listener = None
        if settings.on_report is not None:
            listener = Listener(_reports_to(settings.on_report), generation)
            stack.callback(listener.close)
        pipes: dict[str, Connection] = {}
        processes: dict[str, BaseProcess] = {}
        stack.callback(children.end_all, processes)
        for rank in range(roles.trainers):
            plan = TrainerPlan(
                rank=rank,
                trainers=roles.trainers,
                generation=generation,
                servers=servers.addresses,
                master=None if listener is None else listener.address,
                store=f"{folder}/store",
                backend=settings.backend,
                timeout=settings.timeout,
                slow_after=settings.slow_after,
            )
            name = f"trainer{rank}"
            pipes[name], processes[name] = children.start(
                context, name, process.train, roles.trainer, args, plan
            )
        if roles.master is None:
            outcomes = children.collect(pipes, processes)
        else:
            outcomes = _with_master(roles.master, roles, servers, settings, pipes, processes)
    return _values(outcomes)


def _with_master(
    master: Callable[[Cluster], Any],
    roles: Roles,
    servers: Servers,
    settings: _Settings,
    pipes: dict[str, Connection],
    processes: dict[str, BaseProcess],
) -> dict[str, Outcome]:
    """Run the master's function on a thread while the trainers are watched."""
    raised: list[BaseException] = []

    def play() -> None:
        cluster = Cluster(
            SocketTransport(Peer("master", "master"), servers.addresses),
            list(servers.addresses),
            rank=0,
            trainers=roles.trainers,
            role="master",
            timeout=settings.timeout,
        )
        try:
            master(cluster)
        except BaseException as error:
            raised.append(error)
        finally:
            cluster.close()

    thread = threading.Thread(target=play, name="hybrid-master", daemon=True)
    thread.start()
    outcomes = children.collect(pipes, processes)
    thread.join(settings.timeout)
    if raised:
        raise RoleFailure(f"master raised {raised[0]!r}", role="master") from raised[0]
    return outcomes


def _values(outcomes: dict[str, Outcome]) -> list[Any]:
    failed = {name: each for name, each in outcomes.items() if each.failed}
    if not failed:
        return [each.value for each in outcomes.values()]
    # The loss of a server is the cause of what others say.
    first = min(failed, key=lambda name: not isinstance(failed[name].error, ServerLostError))
    lines = [f"{len(failed)} of {len(outcomes)} trainers failed."]
    lines += [f"--- {name} ---\n{each.text.rstrip()}" for name, each in failed.items()]
    raise RoleFailure("\n".join(lines), role=first) from failed[first].error


def _reports_to(on_report: Report) -> Callable[[Peer, Message], None]:
    def handle(peer: Peer, message: Message) -> None:
        if message.op == "report":
            on_report(message.values["name"], message.values["values"])

    return handle


# ------------------------------------------------------------------------------ under torchrun


def _play(
    roles: Roles, args: tuple[Any, ...], settings: _Settings, init_method: str, transport: str
) -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != roles.world:
        raise ArgumentError(
            f"these roles need {roles.world} processes ({roles.trainers} trainers, {roles.servers} "
            f"servers{', a master' if roles.master else ''}), and {world} were started."
        )
    limit = timedelta(seconds=START_SECONDS)
    store, rank, world = next(meet(init_method, rank, world, timeout=limit))
    store.set_timeout(limit)
    store = PrefixStore("gradsync-hybrid", store)
    if rank == 0:
        store.set("token", secrets.token_hex(16))
    token = store.get("token").decode()
    role, index = roles.role_of(rank)
    name = "master" if role == "master" else f"{role}{index}"
    with _rpc_running(name, rank, world, store) if transport == "rpc" else nullcontext():
        if role == "server":
            return _play_server(name, token, store, transport)
        return _play_client(roles, args, settings, role, index, token, store, transport)


@contextmanager
def _rpc_running(name: str, rank: int, world: int, store: Store) -> Iterator[None]:
    start_rpc(name, rank, world, store, timeout=START_SECONDS)
    try:
        yield
    except BaseException:
        abandon_rpc()  # the others must learn at once that this process has failed
        raise
    stop_rpc(timeout=START_SECONDS)


def _play_server(name: str, token: str, store: Store, transport: str) -> None:
    server = ParameterServer(name, token=token)
    if transport == "rpc":
        serve_rpc(server.handle)
    address = server.listen(_own_ip())
    store.set(f"address/{name}", json.dumps(address.as_dict()))
    server.wait()
    server.close()


def _play_client(
    roles: Roles,
    args: tuple[Any, ...],
    settings: _Settings,
    role: Literal["trainer", "master"],
    index: int,
    token: str,
    store: Store,
    transport: str,
) -> Any:
    names = [f"server{at}" for at in range(roles.servers)]
    addresses = {name: _address(store, name) for name in names}
    me = Peer("master" if role == "master" else f"trainer{index}", token)
    client: Transport
    if transport == "rpc":
        client = RpcTransport(me, {name: (each.host, each.pid) for name, each in addresses.items()})
    else:
        client = SocketTransport(me, addresses, timeout=settings.timeout)
    report = settings.on_report
    listener = None
    if roles.master is not None and role == "master" and report is not None:
        listener = Listener(_reports_to(report), token, ip=_own_ip())
        store.set("address/master", json.dumps(listener.address.as_dict()))
    elif roles.master is not None and report is not None:
        report = Reporter(me.name, token, _address(store, "master"))
    cluster = Cluster(
        client,
        names,
        rank=index,
        trainers=roles.trainers,
        role=role,
        timeout=settings.timeout,
        slow_after=settings.slow_after,
        report=report,
    )
    with entered(cluster), cluster.blame():
        if role == "master":
            assert roles.master is not None
            try:
                value = roles.master(cluster)
                _wait_for_trainers(store, roles.trainers, cluster)  # they report until then
            finally:
                cluster.leave(stops=True)
        else:
            dist.init_process_group(
                settings.backend,
                store=PrefixStore("trainers", store),
                rank=index,
                world_size=roles.trainers,
                timeout=timedelta(seconds=settings.timeout),
            )
            try:
                dist.barrier()  # or one with little to do has left before the last is connected
                value = roles.trainer(cluster, *args)
            finally:
                dist.destroy_process_group()
            if roles.master is not None:
                cluster.leave()  # the master may have questions yet: it stops the servers
            store.set(f"done/{index}", "1")
            if roles.master is None:
                _wait_for_trainers(store, roles.trainers, cluster)  # one may host the store
    cluster.leave(stops=True)
    cluster.close()
    if listener is not None:
        listener.close()
    return value


def _wait_for_trainers(store: Store, trainers: int, cluster: Cluster) -> None:
    """Until all are done: they may take hours. The launcher ends us if one of them fails."""
    done = [f"done/{at}" for at in range(trainers)]
    while not store.check(done):
        if lost := cluster.lost():
            raise ServerLostError(f"{' and '.join(lost)} is gone.", name=lost[0])
        time.sleep(_LOOK)


def _address(store: Store, name: str) -> Address:
    return Address(**json.loads(store.get(f"address/{name}")))


def _own_ip() -> str:
    """The address by which others reach this host: the one that it reaches the master from."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
