"""The processes that ``hybrid.run`` starts: one function for each role, run in a child.

A child has a pipe to its parent. It says what became of it there, and ends when the parent does.
"""

import os
import pickle
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from gradsync.hybrid.cluster import Cluster, Reporter, entered
from gradsync.hybrid.server import ParameterServer
from gradsync.hybrid.sockets import Address, SocketTransport
from gradsync.hybrid.transport import Peer


@dataclass(frozen=True)
class Outcome:
    """What became of a role's function.

    >>> Outcome(value=3).failed
    False
    """

    value: Any = None
    error: BaseException | None = None  # None if it could not be pickled, too
    text: str = ""  # of the error, with its traceback

    @property
    def failed(self) -> bool:
        """Did it raise?"""
        return bool(self.text)


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """All that a trainer has to know to begin.

    >>> TrainerPlan.__dataclass_params__.frozen
    True
    """

    rank: int
    trainers: int
    generation: str
    servers: dict[str, Address]
    master: Address | None
    store: str
    backend: str
    timeout: float
    slow_after: float


def serve(name: str, token: str, pipe: Connection) -> None:
    """A server's life.

    >>> callable(serve)
    True
    """
    torch.set_num_threads(1)
    server = ParameterServer(name, token=token)
    pipe.send(server.listen())
    _end_with_parent(pipe, server.close)
    server.wait()
    server.close()


def train(
    function: Callable[..., Any], arguments: tuple[Any, ...], plan: TrainerPlan, pipe: Connection
) -> None:
    """A trainer's life.

    >>> callable(train)
    True
    """
    torch.set_num_threads(1)
    _end_with_parent(pipe, lambda: os._exit(1))
    try:
        outcome = Outcome(value=_train(function, arguments, plan))
    except BaseException as error:
        outcome = Outcome(error=error, text="".join(traceback.format_exception(error)))
    pipe.send_bytes(_dump(outcome))
    # What the process still holds (groups, threads) is of no use to anybody: the others must learn
    # now that it has ended.
    os._exit(1 if outcome.failed else 0)


def _train(function: Callable[..., Any], arguments: tuple[Any, ...], plan: TrainerPlan) -> Any:
    limit = timedelta(seconds=plan.timeout)
    store = FileStore(plan.store, plan.trainers)
    dist.init_process_group(
        plan.backend, store=store, rank=plan.rank, world_size=plan.trainers, timeout=limit
    )
    dist.barrier()  # or one with little to do has ended before the last is connected
    name = f"trainer{plan.rank}"
    report = None if plan.master is None else Reporter(name, plan.generation, plan.master)
    cluster = Cluster(
        SocketTransport(Peer(name, plan.generation), plan.servers, timeout=plan.timeout),
        list(plan.servers),
        rank=plan.rank,
        trainers=plan.trainers,
        timeout=plan.timeout,
        slow_after=plan.slow_after,
        report=report,
    )
    with entered(cluster), cluster.blame():
        value = function(cluster, *arguments)
    cluster.leave()
    if report is not None:
        report.close()
    return value


def _dump(outcome: Outcome) -> bytes:
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
        return data
    except Exception as error:
        if outcome.failed:
            return pickle.dumps(Outcome(text=outcome.text))
        return pickle.dumps(Outcome(text=f"the trainer's value cannot be pickled: {error!r}"))


def _end_with_parent(pipe: Connection, end: Callable[[], object]) -> None:
    """Run ``end`` when the parent says so, or has ended."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            pipe.recv()
        end()

    threading.Thread(target=watch, name="hybrid-parent", daemon=True).start()
