"""The race of hybrid training: ours against the plain way, in one launch.

The model is that of torch's own benchmark of DDP with parameter servers: on each server a table of
``embeddings`` × ``embedding_dim``, looked up with the same indices, and a linear layer on all of
their outputs, under DDP. An epoch is ten batches. The styles take turns, round by round, so that
what disturbs the machine disturbs both, and the processes of the other one stand still meanwhile.
"""

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.ddp.wrapper import DistributedDataParallel
from gradsync.errors import ArgumentError
from gradsync.hybrid import launch, optimizers, plain
from gradsync.hybrid.cluster import Cluster
from gradsync.hybrid.table import RemoteEmbeddingBag

OURS, REFERENCE = "gradsync", "reference"
CLASSES = 8
BATCHES = 10  # an epoch
LR = 0.05
PERCENTILES = (50, 75, 90, 95, 99)

Batch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is raced, as on the command line.

    >>> Settings(trainers=2, servers=4).styles
    ('gradsync', 'reference')
    """

    trainers: int = 2
    servers: int = 4
    embeddings: int = 300
    embedding_dim: int = 16
    warmup: int = 5  # epochs
    epochs: int = 20  # in a round
    rounds: int = 5
    styles: tuple[str, ...] = (OURS, REFERENCE)
    backend: str = "gradsync"  # of our DDP; the reference's is torch's on gloo

    def __post_init__(self) -> None:
        for name in ("trainers", "servers", "embeddings", "embedding_dim", "epochs", "rounds"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for style in self.styles:
            if style not in (OURS, REFERENCE):
                raise ArgumentError(f"style must be {OURS} or {REFERENCE}, got {style!r}.")


def measure(settings: Settings) -> dict[str, Any]:
    """Run the race; the result is plain values, for JSON.

    ``styles`` has, for each style, the seconds of all epochs by trainer, the percentiles of each
    trainer and of all, and epochs a second; ``ratio`` is ours over the reference, from the medians
    of the rounds.

    >>> callable(measure)
    True
    """
    with ExitStack() as stack:
        contenders = {
            style: stack.enter_context(_Contender(style, settings)) for style in settings.styles
        }
        for style in settings.styles:
            contenders[style].take_turn()  # the warm-up
        for turn in range(settings.rounds):
            for style in settings.styles if turn % 2 == 0 else settings.styles[::-1]:
                contenders[style].take_turn()
        found = [each.finish() for each in contenders.values()]
    return summarize(
        settings, [dict(chain(*(each.items() for each in one))) for one in zip(*found, strict=True)]
    )


class _Contender:
    """The processes of one style, which stand still while it is not their turn.

    Torch's RPC polls, and takes a good part of a core in each idle process: so it is stopped.
    """

    def __init__(self, style: str, settings: Settings) -> None:
        self._style, self._settings = style, settings
        context = launch.process_context()
        self._begin, self._done = context.Semaphore(0), context.Semaphore(0)
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-hybrid-")
        init_method = f"file://{self._folder.name}/rpc"
        self._servers: list[BaseProcess] = []
        self._pids: list[int] = []
        if style == REFERENCE:
            world = settings.trainers + settings.servers
            for at in range(settings.servers):
                arguments = (at, settings.trainers + at, world, init_method)
                self._servers.append(
                    context.Process(target=plain.serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
                )
        roles = launch.Roles(
            trainer=_trainer,
            trainers=settings.trainers,
            servers=settings.servers if style == OURS else 1,
        )
        self._result: Future[list[dict[str, list[list[float]]]]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(roles, (style, settings, init_method, self._begin, self._done))
        )

    def __enter__(self) -> Self:
        for server in self._servers:
            server.start()
            assert server.pid is not None
            self._pids.append(server.pid)
        self._thread.start()
        self._wait()
        self._signal(signal.SIGSTOP)
        return self

    def _run(self, roles: launch.Roles, arguments: tuple[Any, ...]) -> None:
        try:
            self._result.set_result(
                launch.run(
                    roles,
                    args=arguments,
                    backend=self._settings.backend,
                    timeout=600.0,
                    on_report=lambda _name, values: self._pids.append(values["pid"]),
                )
            )
        except BaseException as error:
            self._result.set_exception(error)

    def take_turn(self) -> None:
        """Run some epochs, alone."""
        self._signal(signal.SIGCONT)
        for _ in range(self._settings.trainers):
            self._begin.release()
        self._wait()
        self._signal(signal.SIGSTOP)

    def _wait(self) -> None:
        """Until all trainers are through."""
        for _ in range(self._settings.trainers):
            while not self._done.acquire(timeout=0.2):
                if self._result.done():
                    self._result.result()

    def finish(self) -> list[dict[str, list[list[float]]]]:
        """What was measured, by trainer."""
        self._signal(signal.SIGCONT)
        for _ in range(self._settings.trainers):
            self._begin.release()
        return self._result.result()

    def _signal(self, number: int) -> None:
        if self._style == REFERENCE:
            for pid in self._pids:
                os.kill(pid, number)

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
        for server in self._servers:
            server.kill()
            server.join(5.0)
        self._thread.join(30.0)
        self._folder.cleanup()


def summarize(settings: Settings, found: Sequence[dict[str, list[list[float]]]]) -> dict[str, Any]:
    """Statistics of the seconds of epochs, by trainer, style and round.

    Trainers may have different numbers of measurements: those of all are pooled, not added up.

    >>> one = {"gradsync": [[0.1, 0.1], [0.2]]}
    >>> two = {"gradsync": [[0.1], [0.2]]}
    >>> result = summarize(Settings(trainers=2, styles=("gradsync",)), [one, two])
    >>> result["styles"]["gradsync"]["percentiles"]["all"]["count"]
    5
    """
    styles = {}
    for style in settings.styles:
        by_trainer = [[second for turn in each[style] for second in turn] for each in found]
        pooled = [second for each in by_trainer for second in each]
        styles[style] = {
            "seconds": by_trainer,
            "percentiles": {
                **{f"trainer{at}": percentiles(each) for at, each in enumerate(by_trainer)},
                "all": percentiles(pooled),
            },
            "epochs_per_second": 1 / statistics.fmean(pooled),
        }
    result: dict[str, Any] = {"schema": 1, "settings": asdict(settings), "styles": styles}
    if OURS in styles and REFERENCE in styles:
        result["ratio"] = statistics.median(_ratios(found))
    return result


def _ratios(found: Sequence[dict[str, list[list[float]]]]) -> list[float]:
    """How many times as many epochs a second ours has, round by round."""
    rounds = range(len(found[0][OURS]))

    def typical(style: str, turn: int) -> float:
        return statistics.median(second for each in found for second in each[style][turn])

    return [typical(REFERENCE, turn) / typical(OURS, turn) for turn in rounds]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Of one list of measurements, by linear interpolation.

    >>> percentiles([1.0, 2.0, 3.0])["p50"]
    2.0
    """
    values = torch.tensor(seconds, dtype=torch.float64)
    at = torch.tensor([each / 100 for each in PERCENTILES], dtype=torch.float64)
    found = torch.quantile(values, at).tolist()
    return {
        "count": len(seconds),
        "mean": float(values.mean()),
        **{f"p{each}": value for each, value in zip(PERCENTILES, found, strict=True)},
    }


def table_of(result: dict[str, Any]) -> str:
    """The percentiles as text, a line for each trainer and one for all.

    >>> one = {"gradsync": [[0.1, 0.1]]}
    >>> print(table_of(summarize(Settings(trainers=1, styles=("gradsync",)), [one])))
    style      who           epochs/s  p50 ms  p75 ms  p90 ms  p95 ms  p99 ms
    gradsync   trainer0          10.0   100.0   100.0   100.0   100.0   100.0
    gradsync   all               10.0   100.0   100.0   100.0   100.0   100.0
    """
    names = "".join(f"{f'p{each} ms':>8}" for each in PERCENTILES)
    lines = [f"{'style':<11}{'who':<12}{'epochs/s':>10}{names}"]
    for style, each in result["styles"].items():
        for who, found in each["percentiles"].items():
            times = "".join(f"{found[f'p{at}'] * 1e3:>8.1f}" for at in PERCENTILES)
            lines.append(f"{style:<11}{who:<12}{1 / found['mean']:>10.1f}{times}")
    if "ratio" in result:
        lines.append(f"{OURS} has {result['ratio']:.2f} times the epochs a second of {REFERENCE}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------ in a trainer


def _trainer(
    cluster: Cluster, style: str, settings: Settings, init_method: str, begin: Any, done: Any
) -> dict[str, list[list[float]]]:
    cluster.report(pid=os.getpid())
    if style == REFERENCE:
        plain.join(cluster.rank, settings.trainers + settings.servers, init_method)
    epoch = (_Ours if style == OURS else _Reference)(cluster, settings).epoch
    measured = []
    for count in (settings.warmup, *[settings.epochs] * settings.rounds):
        dist.barrier()
        done.release()
        begin.acquire()
        measured.append(_times(epoch, count))
    done.release()
    begin.acquire()
    del epoch
    if style == REFERENCE:
        plain.leave()
    return {style: measured[1:]}


def _times(epoch: Callable[[], None], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        epoch()
        seconds.append(time.perf_counter() - start)
    return seconds


def batches(numbers: random.Random, embeddings: int) -> Iterator[Batch]:
    """An epoch: ten batches of 20 to 50 indices in bags of 1 to 10, each with a class.

    >>> len(list(batches(random.Random(0), 300)))
    10
    """
    generator = torch.Generator().manual_seed(numbers.randrange(2**31))
    for _ in range(BATCHES):
        count = numbers.randint(20, 50)
        indices = torch.randint(0, embeddings, (count,), generator=generator)
        offsets, start = [], 0
        while start < count:
            offsets.append(start)
            start += numbers.randint(1, 10)
        target = torch.randint(0, CLASSES, (len(offsets),), generator=generator)
        yield indices, torch.tensor(offsets), target


class _Reference:
    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._numbers = random.Random(cluster.rank)
        self._settings = settings
        self._model = plain.PlainTrainer(
            settings.servers,
            settings.embeddings,
            settings.embedding_dim,
            CLASSES,
            LR,
            dist.new_group(backend="gloo"),
        )

    def epoch(self) -> None:
        for batch in batches(self._numbers, self._settings.embeddings):
            self._model.step(*batch)


class _Ours:
    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._numbers = random.Random(cluster.rank)
        self._settings = settings
        width = settings.servers * settings.embedding_dim
        self._table = RemoteEmbeddingBag(
            settings.embeddings,
            width,
            name="benchmark",
            mode="sum",
            sharding="column",
            optimizer=optimizers.SGD(lr=LR),
            step_in_backward=True,
            cluster=cluster,
        )
        self._dense = DistributedDataParallel(nn.Linear(width, CLASSES))
        self._optimizer = torch.optim.SGD(self._dense.parameters(), lr=LR)
        self._criterion = nn.CrossEntropyLoss()

    def epoch(self) -> None:
        table, optimizer = self._table, self._optimizer
        todo = list(batches(self._numbers, self._settings.embeddings))
        lookup = table.prefetch(todo[0][0])
        for at, (_, offsets, target) in enumerate(todo):
            output = self._dense(table(lookup, offsets))
            if at + 1 < len(todo):
                lookup = table.prefetch(todo[at + 1][0], ahead=1)
            optimizer.zero_grad()
            self._criterion(output, target).backward()
            optimizer.step()
