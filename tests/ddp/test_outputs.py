"""What a module may return: any vessel for its tensors, used in the loss or not."""

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
from oracles import FEATURES, Net, batch, check, loss_of, plain_step, seeded
from replicas import both_kinds
from torch import Tensor, nn

from gradsync import DistributedDataParallel as DDP
from gradsync.testing import WorkerPool

pytestmark = pytest.mark.timeout(60)

LIMIT = 50.0


MODES: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


class TwoHeads(nn.Module):
    """A body and two heads; ``wrap`` makes the output of what the heads give."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap
        self.body = nn.Linear(FEATURES, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self.wrap(self.left(hidden), self.right(hidden))


# ------------------------------------------------------------------ vessels


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
            before = time.monotonic()
            output = model(batch(index, rank))
            assert time.monotonic() - before < 1.0
            loss_of(output.y).backward()

    pool.run(run, timeout=10)


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


# ------------------------------------------------------------------ not all of it in the loss


@both_kinds
def test_an_output_may_be_left_out_of_the_loss_if_its_parameters_get_gradients(
    pool: WorkerPool, views: bool
) -> None:
    class Both(TwoHeads):
        def forward(self, x: Tensor) -> Any:
            left, right = super().forward(x)
            return {"loss": left.sum(1) + right.sum(1), "left": left, "right": right}

    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)["loss"]).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            settings = mode | {"gradient_as_bucket_view": views}
            check(rank, world, lambda: Both(lambda a, b: (a, b)), step=step, ddp=settings)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_a_head_that_the_loss_does_not_use_is_unused_and_stays_without_gradient(
    pool: WorkerPool, views: bool
) -> None:
    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)[0]).backward()

    def changing(model: nn.Module, x: Tensor, index: int) -> None:
        loss_of(model(x)[index % 2]).backward()

    def run(rank: int, world: int) -> None:
        make = lambda: TwoHeads(lambda a, b: (a, b))  # noqa: E731
        settings = {"gradient_as_bucket_view": views}
        for mode in ({"static_graph": True}, {"find_unused_parameters": True}):
            ours = check(rank, world, make, step=step, ddp=settings | mode, against=["single"])
            assert ours.grads[-1]["right.weight"] is None
        # torch takes a parameter behind an output for used, and fails where the loss differs
        for caps in ({}, {"bucket_cap_mb": 0}):
            mode = {"find_unused_parameters": True} | caps | settings
            check(rank, world, make, step=changing, ddp=mode, against=["single"], steps=5)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_ranks_may_use_different_outputs(pool: WorkerPool, views: bool) -> None:
    def run(rank: int, world: int) -> None:
        def step(model: nn.Module, x: Tensor, _index: int) -> None:
            if isinstance(model, DDP):
                loss_of(model(x)[rank]).backward()
            else:
                rows = len(x) // world
                outputs = [model(part)[each] for each, part in enumerate(x.split(rows))]
                (loss_of(outputs) / world).backward()

        make = lambda: TwoHeads(lambda a, b: (a, b))  # noqa: E731
        for mode in ({"find_unused_parameters": True}, {"static_graph": True}):
            settings = mode | {"gradient_as_bucket_view": views}
            check(rank, world, make, step=step, ddp=settings, against=["single"], steps=4)

    pool.run(run, timeout=LIMIT)


def test_without_the_search_an_unused_head_is_an_error_that_names_it_on_all_ranks(
    pool: WorkerPool,
) -> None:
    def run(rank: int, world: int) -> str:
        model = DDP(seeded(lambda: TwoHeads(lambda a, b: (a, b))))
        loss_of(model(batch(0, rank))[0]).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction") as caught:
            model(batch(1, rank))
        return str(caught.value)

    for text in pool.run(run, timeout=LIMIT):
        assert "right.weight, right.bias" in text
        assert "left.weight" not in text


def test_a_loss_on_an_output_without_parameters_behind_it_is_a_step_without_gradients(
    pool: WorkerPool,
) -> None:
    class Passing(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x * 2

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        outputs = model(x.clone().requires_grad_())
        loss_of(outputs[index % 2]).backward()

    def run(rank: int, world: int) -> None:
        mode = {"find_unused_parameters": True}
        check(rank, world, Passing, step=step, ddp=mode, against=["single"], steps=5)

    pool.run(run, timeout=LIMIT)


# ------------------------------------------------------------------ special tensors


class WithParameter(Net):
    """Returns a parameter as it is, as where weights are decayed in the loss."""

    def forward(self, x: Tensor) -> Any:
        return {"y": super().forward(x), "weight": self.first.weight}


class ParameterOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS_OF_ITS_OWN, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


ROWS_OF_ITS_OWN = 2


@both_kinds
def test_an_output_may_be_a_parameter_itself(pool: WorkerPool, views: bool) -> None:
    def decay(model: nn.Module, x: Tensor, _index: int) -> None:
        output = model(x)
        (loss_of(output["y"]) + 0.1 * loss_of(output["weight"])).backward()

    def times_the_batch(model: nn.Module, x: Tensor, _index: int) -> None:
        (model(x) * x.mean(0)).square().sum().backward()

    def half_by_half(model: nn.Module, x: Tensor, index: int) -> None:
        weight = model(x)
        assert weight.is_leaf
        terms = [(weight * part.mean()).square().sum() for part in x.split(4)]
        torch.stack(terms).mean().backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            settings = mode | {"gradient_as_bucket_view": views}
            # with these, torch returns a copy in place of the parameter
            against = ["single"] if "bucket_cap_mb" not in mode and mode else ["torch", "single"]
            check(rank, world, WithParameter, step=decay, ddp=settings, against=against)
            check(rank, world, ParameterOnly, step=half_by_half, ddp=settings, against=["single"])
            if against != ["single"]:
                how = {"step": times_the_batch, "ddp": settings, "against": ["torch"]}
                check(rank, world, ParameterOnly, **how)

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_outputs_that_need_no_gradient_are_passed_beside_those_that_do(
    pool: WorkerPool, views: bool
) -> None:
    class Mixed(Net):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            with torch.no_grad():
                silent = y[:, 0] * 2
            return {"y": y, "detached": y.detach(), "labels": y.argmax(1), "x": x, "n": silent}

    def step(model: nn.Module, x: Tensor, _index: int) -> None:
        output = model(x)
        assert [t.requires_grad for t in output.values()] == [True] + [False] * 4
        loss_of(output["y"] + output["detached"]).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Mixed, step=step, ddp=mode | {"gradient_as_bucket_view": views})

    pool.run(run, timeout=LIMIT)


def test_a_forward_whose_outputs_all_need_no_gradient_is_no_step(pool: WorkerPool) -> None:
    class Sometimes(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.detach() if silent else y

    silent: list[bool] = []

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        silent.append(True)
        assert not model(x).requires_grad
        silent.clear()
        plain_step(model, x, index)

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Sometimes, step=step, ddp=mode, against=["single"])

    pool.run(run, timeout=LIMIT)


def returned_view(y: Tensor) -> Tensor:
    return y.view(-1)


def returned_slice(y: Tensor) -> Tensor:
    return y[:, :2]


def returned_transposed(y: Tensor) -> Tensor:
    return y.t()


def returned_itself(y: Tensor) -> Tensor:
    return y


def view_changed_before(y: Tensor) -> Tensor:
    part = y[:, :2]
    part.mul_(0.5)
    return part


def base_changed_by_a_view(y: Tensor) -> Tensor:
    y[:, 0].mul_(0.5)
    return y


def view_of_a_view_of_a_fresh_tensor(y: Tensor) -> Tensor:
    fresh = torch.zeros(len(y), 4)
    fresh[:, :3] = y
    return fresh.t()[:2]


MADE = [
    returned_view,
    returned_slice,
    returned_transposed,
    returned_itself,
    view_changed_before,
    base_changed_by_a_view,
    view_of_a_view_of_a_fresh_tensor,
]


@both_kinds
@pytest.mark.parametrize("make", MADE, ids=lambda f: f.__name__)
def test_an_output_may_be_a_view_and_be_changed_in_place(
    pool: WorkerPool, make: Callable[[Tensor], Tensor], views: bool
) -> None:
    class Viewing(Net):
        def forward(self, x: Tensor) -> Any:
            return {"y": make(super().forward(x))}

    def left_alone(model: nn.Module, x: Tensor, _index: int) -> None:
        loss_of(model(x)).backward()

    def changed(model: nn.Module, x: Tensor, _index: int) -> None:
        y = model(x)["y"]
        y.mul_(0.5)
        y.narrow(0, 0, len(y)).add_(0.1)
        loss_of(torch.tanh(y)).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            settings = mode | {"gradient_as_bucket_view": views}
            for step in (left_alone, changed):
                # a copy of torch's in these modes is a view that must not be changed
                strict = not mode or "bucket_cap_mb" in mode
                against = ["torch"] if strict or step is left_alone else []
                check(rank, world, Viewing, step=step, ddp=settings, against=[*against, "single"])

    pool.run(run, timeout=LIMIT)


@both_kinds
def test_parts_of_one_tensor_may_be_returned_and_used_apart(pool: WorkerPool, views: bool) -> None:
    class Parts(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).split(1, dim=1)

    def step(model: nn.Module, x: Tensor, index: int) -> None:
        loss_of(model(x)[index % 3]).backward()

    def run(rank: int, world: int) -> None:
        for mode in MODES:
            check(rank, world, Parts, step=step, ddp=mode | {"gradient_as_bucket_view": views})

    pool.run(run, timeout=LIMIT)
