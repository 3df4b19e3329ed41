"""Ranks that hold different models, or none: every rank is told of it at construction."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from replicas import OurDDP, assert_equal_on_all_ranks, batch, caught, frozen, mixed_devices, small
from torch import nn

from gradsync import ModelMismatchError
from gradsync.testing import WorkerPool

LIMIT = 40.0


def transposed() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.zeros(4, 4).t())
    return module


# Models of rank 0 and of the last rank, and what every rank must be told.
MISMATCHES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "shape": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5)),
        ["1.weight", "[3, 4]", "[5, 4]"],
    ),
    "dtype": (
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 4).double(),
        ["weight", "float32", "float64"],
    ),
    "count": (
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 4, bias=False),
        ["2 parameters", "bias"],
    ),
    "more on the other": (
        lambda: nn.Linear(4, 4, bias=False),
        lambda: nn.Linear(4, 4),
        ["1 parameters", "bias"],
    ),
    "strides": (lambda: nn.Linear(4, 4), transposed, ["weight", "[4, 1]", "[1, 4]"]),
    "sparse": (
        lambda: nn.Embedding(4, 4),
        lambda: nn.Embedding(4, 4, sparse=True),
        ["weight", "sparse"],
    ),
    "name": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda: nn.ModuleDict({"layer": nn.Linear(4, 4)}),
        ["0.weight", "layer.weight"],
    ),
    "frozen": (
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 4).requires_grad_(False).apply(lambda m: m.bias.requires_grad_()),
        ["weight"],
    ),
}

SETTINGS: dict[str, tuple[object, object]] = {
    "find_unused_parameters": (False, True),
    "static_graph": (False, True),
    "bucket_cap_mb": (1, 2),
    "bucket_cap_mb_list": ([1, 2], [1, 3]),
    "skip_all_reduce_unused_params": (False, True),
}


class TestMismatch:
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_every_rank_is_told_which_parameter_differs_between_which_ranks(
        self, pool: WorkerPool, ranks: int
    ) -> None:
        def run(rank: int, world: int) -> dict[str, str]:
            found = {}
            for case, (of_first, of_last, _) in MISMATCHES.items():
                module = of_last() if rank == world - 1 else of_first()
                began = time.monotonic()
                error = caught(lambda: OurDDP(module), RuntimeError)  # noqa: B023
                assert time.monotonic() - began < 5, case
                assert isinstance(error, ModelMismatchError), f"{case}: {error!r}"
                found[case] = str(error)
            OurDDP(nn.Linear(4, 4))(batch(rank)).sum().backward()  # the group is still good
            return found

        for rank, found in enumerate(pool.run(run, ranks=ranks, timeout=LIMIT)):
            for case, (_, _, words) in MISMATCHES.items():
                for word in (f"rank {rank}: ", "rank 0", f"rank {ranks - 1}", *words):
                    assert word in found[case], f"{case}: no {word!r} in {found[case]}"

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_every_rank_is_told_why_one_rank_could_not_construct(
        self, pool: WorkerPool, ranks: int
    ) -> None:
        cases: dict[str, tuple[Callable[[], nn.Module], dict[str, object], str]] = {
            "nothing to train": (frozen, {}, "any parameter that requires a gradient"),
            "two kinds of devices": (mixed_devices, {}, "same type of devices"),
            "bad cap": (small, {"bucket_cap_mb": "big"}, "bucket_cap_mb must be a size"),
            "bad flag": (small, {"static_graph": "no"}, "static_graph must be True or False"),
        }

        def run(rank: int, world: int) -> None:
            for case, (module, settings, words) in cases.items():
                for failing in range(world):
                    alone = rank == failing
                    ddp, began = (module(), settings) if alone else (small(), {}), time.monotonic()
                    error = caught(lambda: OurDDP(ddp[0], **ddp[1]), Exception)  # noqa: B023
                    assert time.monotonic() - began < 5, case
                    assert words in str(error), f"{case}: {error}"
                    assert isinstance(error, ModelMismatchError) != alone, f"{case}: {error!r}"
                    assert alone or f"rank {rank}: rank {failing} could not" in str(error)
            OurDDP(nn.Linear(4, 4))(batch(rank)).sum().backward()  # the group is still good

        pool.run(run, ranks=ranks, timeout=LIMIT)

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_every_rank_is_told_which_argument_differs(self, pool: WorkerPool, ranks: int) -> None:
        def run(rank: int, world: int) -> dict[str, str]:
            found = {}
            for name, (first, last) in SETTINGS.items():
                value = last if rank == world - 1 else first
                error = caught(lambda: OurDDP(small(), **{name: value}))  # noqa: B023
                assert isinstance(error, ModelMismatchError), f"{name}: {error!r}"
                found[name] = str(error)
            return found

        for found in pool.run(run, ranks=ranks, timeout=LIMIT):
            for name, (first, last) in SETTINGS.items():
                for word in (name, f"{first!r} on rank 0", f"{last!r} on rank {ranks - 1}"):
                    assert word in found[name]

    def test_a_rank_that_leaves_gradients_as_they_are_may_differ_in_views(
        self, pool: WorkerPool
    ) -> None:
        def run(rank: int, world: int) -> None:
            ddp = OurDDP(small(), gradient_as_bucket_view=rank == 0)
            for step in range(3):
                ddp.zero_grad()
                ddp(batch(rank, step)).sum().backward()
                assert_equal_on_all_ranks(p.grad for p in ddp.parameters())

        pool.run(run, timeout=LIMIT)


@pytest.mark.parametrize("what", ["frozen", "buffer", "forward_sync_buffers"])
def test_what_is_broadcast_is_compared_too(pool: WorkerPool, what: str) -> None:
    def run(rank: int, world: int) -> str:
        size = 3 if rank == 0 or what == "forward_sync_buffers" else 5
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, size if what == "frozen" else 2))
        model[1].requires_grad_(False)
        model.register_buffer("table", torch.zeros(size if what == "buffer" else 2))
        options = {"forward_sync_buffers": rank == 0} if what == "forward_sync_buffers" else {}
        try:
            OurDDP(model, **options)
        except ModelMismatchError as error:
            return str(error)
        return "nothing was raised"

    named = {"frozen": "1.weight", "buffer": "table"}.get(what, what)
    for text in pool.run(run, timeout=LIMIT, group_timeout=10):
        assert named in text
        assert "rank 1" in text
