"""One server's part of a table: rows, the optimizer's state, and the step that is under way.

A step is complete when every trainer has committed its gradients; then they are applied, once. A
lookup says how many steps it wants to have been applied, and is answered when they are.
"""

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsync.errors import ArgumentError, FaultError
from gradsync.hybrid import optimizers
from gradsync.hybrid.partition import Partition
from gradsync.hybrid.transport import Later, Message

_INITIAL_ROWS = 4096  # that are drawn together, whatever the servers are


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """What a table is; the same on all trainers and servers.

    >>> TableSpec(name="t", rows=4, columns=2, optimizer={}, servers=("server0",)).update
    'sync'
    """

    name: str
    rows: int
    columns: int
    optimizer: dict[str, Any]
    servers: tuple[str, ...]
    sharding: str = "hash"
    dtype: str = "float32"
    update: str = "sync"  # all trainers' gradients in one step, or "async": each as it comes
    mean: bool = True  # gradients are divided by the number of trainers
    seed: int = 0
    std: float = 1.0  # of the initial values

    @property
    def partition(self) -> Partition:
        """Who has what."""
        return Partition(
            self.sharding,  # type: ignore[arg-type]
            rows=self.rows,
            columns=self.columns,
            servers=len(self.servers),
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the rows."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"servers": list(self.servers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TableSpec":
        """From JSON."""
        return cls(**(values | {"servers": tuple(values["servers"])}))

    def differs_from(self, other: "TableSpec") -> list[str]:
        """The fields that are not the same, for messages."""
        mine, theirs = self.as_dict(), other.as_dict()
        return [
            f"{key} {mine[key]!r}, not {theirs[key]!r}" for key in mine if mine[key] != theirs[key]
        ]


@dataclass
class _Contribution:
    """What one trainer has given to the step under way."""

    rows: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    committed: bool = False


class Shard:
    """The part of ``spec`` that the server at ``index`` has.

    >>> spec = TableSpec(
    ...     name="t", rows=4, columns=2, optimizer=optimizers.SGD(lr=1.0).describe(), servers=("s",)
    ... )
    >>> shard = Shard(spec, 0)
    >>> shard.weight.shape
    torch.Size([4, 2])
    """

    def __init__(self, spec: TableSpec, index: int) -> None:
        self.spec = spec
        self._partition = spec.partition
        self._index = index
        self._optimizer = optimizers.from_description(spec.optimizer)
        part = self._partition.parts[index]
        self._columns = part.columns
        width = part.columns.stop - part.columns.start
        self.weight = _initial(spec, self._partition.rows_at(index), part.columns)
        self.state = {
            name: torch.full(
                (part.rows, *shape), self._optimizer.initial(name), dtype=spec.torch_dtype
            )
            for name, shape in self._optimizer.state_shapes(width).items()
        }
        self.version = 0  # steps applied
        self._lock = threading.Lock()
        self._trainers: Sequence[str] = ()  # that a step waits for, in the order of the sums
        self._divisor = 1
        self._given: dict[str, _Contribution] = {}
        self._waiting: list[tuple[int, Tensor, Later, float]] = []

    # ---------------------------------------------------------------- trainers come and go

    def begin(self, trainers: Sequence[str]) -> None:
        """New trainers: what the old ones had not committed together is forgotten."""
        with self._lock:
            self._give_up("other trainers have taken over")
            self._trainers = tuple(trainers)
            self._divisor = len(trainers) if self.spec.mean else 1
            self._given = {}

    def leave(self, trainer: str) -> None:
        """A trainer has no more steps: the others go on without it."""
        with self._lock:
            self._trainers = tuple(name for name in self._trainers if name != trainer)
            self._step_if_complete()

    def give_up(self, why: str) -> None:
        """The step under way will never be complete: tell those who wait for it."""
        with self._lock:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        waiting, self._waiting = self._waiting, []
        for _, _, later, _ in waiting:
            later.set_exception(FaultError(f"{why}: the step that was waited for is incomplete."))

    # ---------------------------------------------------------------- lookups and gradients

    def lookup(self, rows: Tensor, version: int) -> Message | Later:
        """The rows when ``version`` steps are applied."""
        with self._lock:
            if self.version >= version:
                return _rows(self.weight[rows], 0.0)
            later: Later = Future()
            self._waiting.append((version, rows, later, time.perf_counter()))
            return later

    def push(
        self, trainer: str, rows: list[Tensor], gradients: list[Tensor], *, commit: bool
    ) -> None:
        """Take gradients of a trainer for the step under way."""
        with self._lock:
            mine = self._given.setdefault(trainer, _Contribution())
            mine.rows += rows
            mine.gradients += gradients
            if not commit:
                return
            mine.committed = True
            if self.spec.update == "async":
                self._step([self._given.pop(trainer)])
            else:
                self._step_if_complete()

    def drop(self, trainer: str) -> None:
        """Forget what a trainer has given to the step under way."""
        with self._lock:
            self._given.pop(trainer, None)

    def _step_if_complete(self) -> None:
        given = self._given
        if not self._trainers or not any(each.committed for each in given.values()):
            return
        if all(name in given and given[name].committed for name in self._trainers):
            self._given = {}
            self._step([given[name] for name in sorted(given, key=_number)])

    def _step(self, contributions: list[_Contribution]) -> None:
        rows = [each for one in contributions for each in one.rows if len(each)]
        gradients = [each for one in contributions for each in one.gradients if len(each)]
        self.version += 1
        if rows:
            self._apply(*optimizers.coalesce(rows, gradients))
        waiting, self._waiting = self._waiting, []
        for version, wanted, later, since in waiting:
            if self.version >= version:
                later.set_result(_rows(self.weight[wanted], time.perf_counter() - since))
            else:
                self._waiting.append((version, wanted, later, since))

    def _apply(self, rows: Tensor, gradient: Tensor) -> None:
        if self._divisor != 1:
            gradient = gradient / self._divisor
        values = self.weight[rows]
        state = {name: each[rows] for name, each in self.state.items()}
        values += self._optimizer.update(values, gradient, state, self.version)
        self.weight[rows] = values
        for name, each in state.items():
            self.state[name][rows] = each

    # ---------------------------------------------------------------- checkpoints

    @property
    def names(self) -> list[str]:
        """What is kept of each row, the values first."""
        return ["weight", *self.state]

    def read(self, rows: Tensor) -> list[Tensor]:
        """All that is kept of rows of this shard."""
        with self._lock:
            return [self.weight[rows], *(each[rows] for each in self.state.values())]

    def write(self, rows: Tensor, names: list[str], values: list[Tensor]) -> None:
        """Set what is kept of rows."""
        with self._lock:
            for name, value in zip(names, values, strict=True):
                (self.weight if name == "weight" else self.state[name])[rows] = value

    def set_version(self, version: int) -> None:
        """After rows were written: go on from the step that they are of."""
        with self._lock:
            self.version = version


def _rows(values: Tensor, held: float) -> Message:
    return Message("rows", {"held": held}, [values])


def _number(trainer: str) -> tuple[int, str]:
    return len(trainer), trainer


def _initial(spec: TableSpec, rows: Tensor, columns: slice) -> Tensor:
    """The same initial values for a row, however the table is sharded."""
    dtype = spec.torch_dtype
    values = torch.zeros((len(rows), columns.stop - columns.start), dtype=dtype)
    if not spec.std:
        return values
    order = torch.argsort(rows)
    sorted_rows = rows[order]
    for first in range(0, spec.rows, _INITIAL_ROWS):
        a, b = torch.searchsorted(
            sorted_rows, torch.tensor([first, first + _INITIAL_ROWS])
        ).tolist()
        if a == b:
            continue
        generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + first // _INITIAL_ROWS)
        block = torch.randn((_INITIAL_ROWS, spec.columns), generator=generator)
        values[order[a:b]] = (block[sorted_rows[a:b] - first, columns] * spec.std).to(dtype)
    return values


def check_spec(spec: TableSpec) -> None:
    """Raise ``ArgumentError`` for a table that cannot be.

    >>> check_spec(
    ...     TableSpec(
    ...         name="t", rows=4, columns=2, optimizer={"kind": "SGD", "lr": 1.0}, servers=("s",)
    ...     )
    ... )
    """
    for name in ("rows", "columns"):
        if getattr(spec, name) < 1:
            raise ArgumentError(f"table {spec.name}: {name} must be at least 1.")
    if spec.rows > 3_000_000_000:
        raise ArgumentError(f"table {spec.name}: at most 3,000,000,000 rows, got {spec.rows:,}.")
    if spec.update not in ("sync", "async"):
        raise ArgumentError(
            f'table {spec.name}: update must be "sync" or "async", got {spec.update!r}.'
        )
    if not math.isfinite(spec.std) or spec.std < 0:
        raise ArgumentError(f"table {spec.name}: std must be a number ≥ 0, got {spec.std!r}.")
    optimizer = optimizers.from_description(spec.optimizer)
    if optimizer.by_row and not spec.partition.by_row:
        raise ArgumentError(
            f"table {spec.name}: {type(optimizer).__name__} needs whole rows, and with "
            'sharding="column" no server has them. Use Adagrad, or sharding="hash".'
        )
