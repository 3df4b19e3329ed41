"""What a module may return: any vessel for its tensors."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from oracles import Net, batch, check, loss_of, seeded
from output_parts import LIMIT, MODES, TwoHeads
from replicas import both_kinds
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


Old = namedtuple("Old", ["left", "right", "note"])


@dataclass
class Data:
    left: Tensor
    right: Tensor | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    left: Tensor
    inner: Data


class Custom(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Plain:
    """An object of a program's own, with attributes of all kinds."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left = left
        self.more = {"right": [right, None]}
        self.name = "plain"
        self.itself = self


def slotted(left: Tensor, right: Tensor) -> Any:
    class Slots:  # made on the worker: a class that is sent there gets a __dict__
        __slots__ = ("left", "right", "unset")

    output = Slots()
    output.left, output.right = left, right
    assert not hasattr(output, "__dict__")
    return output


VESSELS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    # name: (how the module wraps its tensors, how the program gets at them)
    "tuple": (lambda a, b: (a, b), list),
    "list_of_lists": (lambda a, b: [[a], [[b]], []], lambda o: [o[0][0], o[1][0][0]]),
    "nested_dicts": (
        lambda a, b: {"a": a, "b": {"c": [None, {"d": b}]}, 3: "text"},
        lambda o: [o["a"], o["b"]["c"][1]["d"]],
    ),
    "ordered_dict": (lambda a, b: OrderedDict(a=a, b=b), lambda o: list(o.values())),
    "default_dict": (
        lambda a, b: defaultdict(list, a=[a], b=[b]),
        lambda o: [o["a"][0], o["b"][0]],
    ),
    "user_dict": (lambda a, b: UserDict(a=a, b=b), lambda o: [o["a"], o["b"]]),
    "mapping_proxy": (
        lambda a, b: MappingProxyType({"a": a, "b": b}),
        lambda o: [o["a"], o["b"]],
    ),
    "custom_mapping": (lambda a, b: Custom(a=a, b=(b, 1.5)), lambda o: [o["a"], o["b"][0]]),
    "named_tuple": (Pair, list),
    "old_named_tuple": (lambda a, b: Old(a, [b], "note"), lambda o: [o.left, o.right[0]]),
    "dataclass": (Data, lambda o: [o.left, o.right]),
    "frozen_dataclass": (
        lambda a, b: Frozen(a, Data(b)),
        lambda o: [o.left, o.inner.left],
    ),
    "plain_object": (Plain, lambda o: [o.left, o.more["right"][0]]),
    "object_with_slots": (slotted, lambda o: [o.left, o.right]),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b=b), lambda o: [o.a, o.b]),
    "none_and_other_things": (
        lambda a, b: (None, a, "text", 3, {"b": b, "none": None}, torch.float32, object()),
        lambda o: [o[1], o[4]["b"]],
    ),
    "deque": (lambda a, b: deque([a, b]), list),
    "set": (lambda a, b: {a, b}, lambda o: sorted(o, key=lambda t: -t.shape[1])),
    "generator": (lambda a, b: (t for t in (a, b)), list),
    "function": (lambda a, b: lambda: (a, b), lambda o: list(o())),
    "the_same_tensor_twice": (
        lambda a, b: {"a": a, "again": a, "b": [b, b]},
        lambda o: [o["a"], o["b"][0]],
    ),
    "twelve_levels_deep": (
        lambda a, b: [[[[[[[[[[[[a, b]]]]]]]]]]]],
        lambda o: o[0][0][0][0][0][0][0][0][0][0][0],
    ),
}


@both_kinds
@pytest.mark.parametrize("vessel", VESSELS)
def test_tensors_may_come_in_any_vessel(pool: WorkerPool, vessel: str, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        wrap, unwrap = VESSELS[vessel]

        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            tensors = unwrap(model(x))
            assert [t.shape[1] for t in tensors] == [3, 2]
            loss_of(tensors).backward()

        for mode in MODES:
            # torch looks for unused parameters only behind tensors that it finds
            against = ["torch", "single"] if not mode else ["single"]
            settings = mode | {"gradient_as_bucket_view": views}
            make = lambda: TwoHeads(wrap)  # noqa: E731
            check(rank, world, make, step=step, ddp=settings, against=against)

    pool.run(run, timeout=LIMIT)


@pytest.mark.parametrize("vessel", VESSELS)
def test_the_very_object_that_the_module_returned_is_returned(
    pool: WorkerPool, vessel: str
) -> None:
    def run(rank: int, world: int) -> None:
        wrap, unwrap = VESSELS[vessel]
        made: list[Any] = []

        def keeping(a: Tensor, b: Tensor) -> Any:
            made[:] = [wrap(a, b), a, b]
            return made[0]

        for mode in MODES:
            model = DDP(seeded(lambda: TwoHeads(keeping)), **mode)
            for index in range(3):
                output = model(batch(index, rank))
                assert output is made[0]
                assert [id(t) for t in unwrap(output)] == [id(t) for t in made[1:]]
                loss_of(made[1:]).backward()
            with torch.no_grad():
                assert model(batch(3, rank)) is made[0]
            with model.no_sync():
                assert model(batch(3, rank)) is made[0]

    pool.run(run, timeout=LIMIT)


def test_generators_and_iterators_are_left_for_the_program_to_run(pool: WorkerPool) -> None:
    class Lazy(Net):
        """Runs its layers only when it is asked for the next value."""

        def forward(self, x: Tensor) -> Iterator[Tensor]:
            started.append(x)
            return self.layers(x)

        def layers(self, x: Tensor) -> Iterator[Tensor]:
            started.append("running")
            hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
            yield hidden
            yield self.last(hidden)

    started: list[Any] = []

    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        started.clear()
        output = model(x)
        assert len(started) == 1, "the wrapper ran the generator"
        loss_of(list(output)).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Lazy, step=step, ddp=mode, against=["single"])
        check(rank, world, Lazy, step=step, against=["torch"])

    pool.run(run, timeout=LIMIT)


class Node:
    """Refers to others of its kind."""


def a_logger() -> Any:
    loggers = [logging.getLogger(f"gradsync.testing.{index}") for index in range(300)]
    return loggers[0]


def a_web() -> Any:
    nodes = [Node() for _ in range(12)]
    for node in nodes:
        for index, other in enumerate(nodes):
            setattr(node, f"other{index}", other)
    return nodes[0]


def many_numbers() -> Any:
    return list(range(100_000))


@pytest.mark.parametrize("burden", [a_logger, a_web, many_numbers], ids=lambda f: f.__name__)
def test_what_else_hangs_on_an_output_object_is_not_searched_at_length(
    pool: WorkerPool, burden: Callable[[], Any]
) -> None:
    class Loaded(Net):
        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(burden=self.burden, y=super().forward(x))

    def run(rank: int, world: int) -> None:
        model = DDP(seeded(Loaded))
        model.module.burden = burden()
        for index in range(2):
            before = time.thread_time()  # in which a busy machine does not show
            output = model(batch(index, rank))
            assert time.thread_time() - before < 1.0
            loss_of(output.y).backward()

    pool.run(run, timeout=40)


def test_a_mapping_that_cannot_be_read_to_the_end_is_passed_on(pool: WorkerPool) -> None:
    class Reluctant(Custom):
        def __getitem__(self, key: str) -> Any:
            if key == "expensive":
                raise RuntimeError("asked for the expensive value")
            return super().__getitem__(key)

    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        output = model(x)
        loss_of([output["a"], output["b"]]).backward()

    def run(rank: int, world: int) -> None:
        make = lambda: TwoHeads(lambda a, b: Reluctant(expensive=0, a=a, b=b))  # noqa: E731
        check(rank, world, make, step=step)

    pool.run(run, timeout=LIMIT)
