"""Several machines: ranks that call something else are shown, on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import seccomp
import torch
import torch.distributed as dist
from forked import Nursery
from hosts import apart, machines
from promptness import SECONDS

from gradsync import CollectiveMismatchError


def gather_two(sizes: tuple[int, int]) -> Any:
    """Two tensors of these sizes at once."""
    group, world = dist.group.WORLD, dist.get_world_size()
    inputs = [torch.ones(size) for size in sizes]
    outputs = [[torch.empty(size) for size in sizes] for _ in range(world)]
    return group.allgather_coalesced(outputs, inputs).wait()


def exchange(rows: list[int], expected: list[int]) -> Any:
    output = torch.empty(sum(expected))
    return dist.all_to_all_single(output, torch.ones(sum(rows)), expected, rows)


# What one rank calls, and the others; both have to be told.
MISMATCHES: dict[str, tuple[str, Callable[[], Any], str, Callable[[], Any]]] = {
    "size": (
        "all_reduce(sum, 5 x float32)", lambda: dist.all_reduce(torch.ones(5)),
        "all_reduce(sum, 6 x float32)", lambda: dist.all_reduce(torch.ones(6)),
    ),
    "dtype": (
        "all_reduce(sum, 5 x int32)",
        lambda: dist.all_reduce(torch.ones(5, dtype=torch.int32)),
        "all_reduce(sum, 5 x float32)", lambda: dist.all_reduce(torch.ones(5)),
    ),
    "op": (
        "all_reduce(max, 5 x float32)", lambda: dist.all_reduce(torch.ones(5), dist.ReduceOp.MAX),
        "all_reduce(avg, 5 x float32)", lambda: dist.all_reduce(torch.ones(5), dist.ReduceOp.AVG),
    ),
    "root": (
        "broadcast(root 0, 5 x float32)", lambda: dist.broadcast(torch.ones(5), 0),
        "broadcast(root 1, 5 x float32)", lambda: dist.broadcast(torch.ones(5), 1),
    ),
    "kind": (
        "barrier", dist.barrier, "broadcast(root 1, 5 x float32)",
        lambda: dist.broadcast(torch.ones(5), 1),
    ),
    "way": (
        "all_reduce(max, 5 x bool) through gloo",
        lambda: dist.all_reduce(torch.ones(5, dtype=torch.bool), dist.ReduceOp.MAX),
        "all_reduce(max, 5 x int8)",
        lambda: dist.all_reduce(torch.ones(5, dtype=torch.int8), dist.ReduceOp.MAX),
    ),
    "size through gloo": (
        "reduce(sum, root 0, 5 x float32) through gloo", lambda: dist.reduce(torch.ones(5), 0),
        "reduce(sum, root 0, 9 x float32) through gloo", lambda: dist.reduce(torch.ones(9), 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("odd", [0, 1, 2], ids="rank {}".format)
@pytest.mark.parametrize("difference", MISMATCHES)
def test_ranks_that_call_something_else_are_shown_on_all_machines(
    nursery: Nursery, difference: str, odd: int
) -> None:
    one, call_one, other, call_other = MISMATCHES[difference]

    def run(rank: int, world: int) -> tuple[str, float]:
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(CollectiveMismatchError) as caught:
            call_one() if rank == odd else call_other()
        elapsed = time.monotonic() - began
        with pytest.raises(CollectiveMismatchError):
            dist.barrier()
        return str(caught.value), elapsed

    for ending in nursery.run(run, **machines("aab")):
        text, elapsed = ending.unwrap()
        assert "collective 2 is not the same on all" in text
        assert f": {one}" in text
        assert f": {other}" in text
        assert "cannot be used any more" in text
        assert elapsed < SECONDS


@seccomp.needed
@pytest.mark.parametrize("difference", MISMATCHES)
def test_ranks_that_cannot_share_memory_are_shown_too_and_the_group_can_be_used_on(
    nursery: Nursery, difference: str
) -> None:
    one, call_one, other, call_other = MISMATCHES[difference]

    def run(rank: int, world: int) -> str:
        dist.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            call_one() if rank == 1 else call_other()
        tensor = torch.full((2,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.eq(6.0).all()
        return str(caught.value)

    for ending in nursery.run(run, **apart(3)):
        text = ending.unwrap()
        assert "collective 2 is not the same on all ranks" in text
        assert text.count(f": {other}") == 2
        assert text.count(f": {one}") == 1
        for rank in range(3):
            assert f"rank {rank} (pid " in text


@pytest.mark.parametrize("layout", ["abba", "aab"])
def test_ranks_that_do_not_lead_are_not_let_into_gloo_before_the_machines_agree(
    nursery: Nursery, layout: str
) -> None:
    def run(rank: int, world: int) -> str:
        reduce = lambda count: dist.reduce(torch.ones(count), 0)  # noqa: E731
        reduce(3)  # gloo is there
        with pytest.raises(CollectiveMismatchError) as caught:
            reduce(5 if rank == world - 1 else 900_000)
        return str(caught.value)

    for ending in nursery.run(run, **machines(layout)):
        assert "5 x float32" in ending.unwrap()
        assert "900000 x float32" in ending.unwrap()


@pytest.mark.parametrize(
    ("where", "leaders"),
    [(machines("aab"), 2), pytest.param(apart(3), 3, marks=seccomp.needed)],
    ids=["aab", "apart"],
)
def test_sizes_that_only_two_ranks_share_are_compared(
    nursery: Nursery, where: dict[str, Any], leaders: int
) -> None:
    def run(rank: int, world: int) -> list[str]:
        texts = []
        exchange([1, 2, 3], [rank + 1] * 3)
        groups = [dist.new_group(backend="gradsync") for _ in range(2)]
        rows = [1, 2, 3] if rank else [1, 2, 4]
        for group, call in (
            (groups[0], lambda: exchange(rows, [rank + 1] * 3)),
            (groups[1], lambda: gather_two((3, 4 + (rank == 2)))),
        ):
            before, dist.group.WORLD = dist.group.WORLD, group
            with pytest.raises(CollectiveMismatchError) as caught:
                call()
            dist.group.WORLD = before
            texts.append(str(caught.value))
        return texts

    for ending in nursery.run(run, **where):
        exchanged, gathered = ending.unwrap()
        assert "sends 16 bytes to rank 2 (pid" in exchanged
        assert "expects 12" in exchanged
        assert gathered.count("all_gather(3 x float32, and 1 more (") == leaders
