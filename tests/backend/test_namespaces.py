"""Two and three hosts with networks of their own: `make hosts`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import namespaces
import pytest
import torch
import torch.distributed as dist
from forked import Ending, Nursery
from namespaces import Host, sent_bytes
from operations import OPERATIONS, perform
from promptness import check_best_of_three

from gradsync import DeadlineError, FaultError, PeerLostError

pytestmark = pytest.mark.hosts

PORT = 29_400
MEGABYTE = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def possible() -> None:
    if reason := namespaces.reason_against():
        pytest.skip(reason)


def start(
    nursery: Nursery,
    made: list[Host],
    layout: str,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 20.0,
    **options: Any,
) -> Any:
    """The ranks of ``layout``, as in "aab", on their hosts."""

    def on_host(rank: int, world: int, *args: Any) -> Any:
        made[ord(layout[rank]) - ord("a")].enter()
        os.environ |= {
            "MASTER_ADDR": made[0].address,
            "MASTER_PORT": str(PORT),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        dist.init_process_group("gradsync", timeout=timedelta(seconds=timeout))
        return fn(rank, world, *args)

    return nursery.start(on_host, len(layout), args=args, backend=None, timeout=60, **options)


def run(nursery: Nursery, layout: str, fn: Callable[..., Any], *args: Any) -> list[Ending]:
    with namespaces.hosts(len(set(layout))) as made:
        with start(nursery, made, layout, fn, *args) as under_way:
            return under_way.endings()


def await_files(paths: Iterable[Path]) -> None:
    deadline = time.monotonic() + 30.0
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.02)


@pytest.mark.parametrize("layout", ["ab", "aab", "aabb", "abcc"])
def test_everything_works_between_hosts(nursery: Nursery, layout: str) -> None:
    def body(rank: int, world: int) -> None:
        assert dist.group.WORLD._hierarchy is not None
        for name, make in OPERATIONS.items():
            if "symmetric" not in name:
                perform(make(rank, world), "sync")
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            tensor = torch.full((700_000,), rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            assert tensor.eq(world * (world + 1) // 2).all()
        for root in range(world):
            tensor = torch.full((400_000,), float(rank))
            dist.broadcast(tensor, root)
            assert tensor.eq(root).all()

    for ending in run(nursery, layout, body):
        ending.unwrap()


def test_one_flow_a_host_goes_over_the_network(nursery: Nursery) -> None:
    size = 16 * MEGABYTE

    def measured(rank: int, world: int) -> int:
        tensor = torch.ones(size // 4)
        dist.all_reduce(tensor)
        dist.barrier()
        before = sent_bytes()
        dist.all_reduce(tensor)
        dist.barrier()
        return sent_bytes() - before

    for ending in run(nursery, "aabb", measured):
        count = ending.unwrap()
        print(f"rank {ending.rank}: its host sent {count / MEGABYTE:.1f} MB for 16 MB")
        assert size <= count < 1.2 * size


@pytest.mark.parametrize(("layout", "victim"), [("aabb", 3), ("aabb", 2), ("abcc", 1)])
def test_a_rank_killed_on_one_host_is_named_on_all(
    nursery: Nursery, layout: str, victim: int
) -> None:
    def body(rank: int, world: int) -> Any:
        dist.barrier()
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(torch.ones(500_000))
        return caught.value, time.monotonic()

    def attempt() -> float:
        endings = run(nursery, layout, body)
        last = 0.0
        for ending in endings:
            if ending.rank != victim:
                error, learned = ending.unwrap()
                assert error.rank == victim, error
                last = max(last, learned)
        return last - endings[victim].ended

    check_best_of_three(attempt, 1.0)


def test_when_the_host_of_the_store_dies_what_is_known_is_said(nursery: Nursery) -> None:
    def body(rank: int, world: int) -> Any:
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(FaultError) as caught:
            dist.all_reduce(torch.ones(500_000))
        return str(caught.value), time.monotonic()

    def attempt() -> float:
        first, *others = run(nursery, "abb", body)
        assert all("rank 0 (pid " in ending.unwrap()[0] for ending in others)
        return max(ending.unwrap()[1] for ending in others) - first.ended

    check_best_of_three(attempt, 2.5)


def test_a_host_that_vanishes_is_named_at_the_deadline(nursery: Nursery, tmp_path: Path) -> None:
    deadline, cut = 3.0, tmp_path / "cut"

    def body(rank: int, world: int) -> Any:
        dist.barrier()
        (tmp_path / f"met{rank}").touch()
        await_files([cut])
        began = time.monotonic()
        with pytest.raises(FaultError) as caught:
            dist.all_reduce(torch.ones(500_000))
        return caught.value, time.monotonic() - began

    def attempt() -> float:
        signs = [cut, *(tmp_path / f"met{rank}" for rank in range(4))]
        for sign in signs:
            sign.unlink(missing_ok=True)
        with namespaces.hosts(3) as made:
            with start(nursery, made, "abbc", body, timeout=deadline) as under_way:
                await_files(signs[1:])
                made[2].unplug()
                cut.touch()
                endings = under_way.endings()
        for ending in endings:
            error, _ = ending.unwrap()
            if ending.rank < 3:
                assert isinstance(error, DeadlineError), error
                assert error.ranks == (3,)
        return max(ending.unwrap()[1] for ending in endings) - deadline

    check_best_of_three(attempt, 2.5)


def test_the_namespaces_are_gone() -> None:
    assert f"gradsync{os.getpid()}" not in namespaces.ip("netns", "list")
