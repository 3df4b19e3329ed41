"""What holds between places of either kind: machines, and ranks that cannot share memory."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import seccomp
import torch
import torch.distributed as dist
from belongings import belongings, settled
from forked import Nursery
from hosts import apart, machines, set_deadline, store_of_group
from promptness import SECONDS

from gradsync import (
    AbortedError,
    ArgumentError,
    CollectiveMismatchError,
    DeadlineError,
    FaultError,
    PeerLostError,
)
from gradsync.backend.hierarchy import CHUNK_BYTES
from gradsync.backend.hierarchy_base import ORPHAN_SECONDS

Where = dict[str, Any]
CHUNK = CHUNK_BYTES // 4  # of float32
DATA = 50 * CHUNK  # for some tenths of a second


def kinds(layout: str, *, also: tuple[str, ...] = ()) -> Any:
    """For tests of ranks that are all in a place of their own, and of others ``also``."""
    places = [pytest.param(apart(len(layout)), id="apart", marks=seccomp.needed)]
    places += [pytest.param(machines(each), id=each) for each in (layout, *also)]
    return pytest.mark.parametrize("where", places)


def values(rank: int, count: int) -> torch.Tensor:
    """No two stretches of it are alike, and no two ranks."""
    return torch.arange(count, dtype=torch.float32).remainder(8191.0) + rank


@kinds("abc", also=("aabb",))
@pytest.mark.parametrize("more", [0, 1, CHUNK - 1])
def test_several_chunks_arrive_where_they_belong(nursery: Nursery, where: Where, more: int) -> None:
    def run(rank: int, world: int) -> None:
        count = 4 * CHUNK + more
        tensor = values(rank, count)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(values(each, count) for each in range(world)))
        for root in (0, world - 1):
            tensor = values(rank, count)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, values(root, count))

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab")
def test_integers_wrap_and_are_averaged_as_in_shared_memory(nursery: Nursery, where: Where) -> None:
    def run(rank: int, world: int) -> Any:
        results = []
        for dtype, value in ((torch.int8, 100), (torch.int16, 30_000), (torch.int32, -7)):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                tensor = torch.full((2,), value, dtype=dtype)
                dist.all_reduce(tensor, op)
                results.append(tensor.tolist())
        return results

    wanted = nursery.run(run)[0].unwrap()
    assert [-2768, -2768] in wanted
    for ending in nursery.run(run, **where):
        assert ending.unwrap() == wanted


@kinds("ab")
def test_tensors_are_written_whatever_autograd_thinks_of_them(
    nursery: Nursery, where: Where
) -> None:
    def run(rank: int, world: int) -> None:
        with torch.inference_mode():
            for tensor in (torch.ones(4), torch.ones(8)[::2], torch.ones(4).half()):
                dist.all_reduce(tensor, dist.ReduceOp.AVG)
                dist.all_reduce(tensor, async_op=True).wait()
                assert tensor.eq(2).all()
                tensor.fill_(rank)
                dist.broadcast(tensor, 1)
                assert tensor.eq(1).all()
        leaf = torch.ones(3, requires_grad=True)
        dist.all_reduce(leaf.detach())
        assert leaf.eq(2).all()

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab")
def test_one_element_may_have_any_stride(nursery: Nursery, where: Where) -> None:
    def run(rank: int, world: int) -> None:
        corner = torch.full((2, 3), float(rank)).t()[:1, :1]
        first = torch.full((3,), float(rank))[::3]
        none = torch.ones(6)[:0:2]
        for tensor in (corner, first, none):
            assert tensor.is_contiguous()
            dist.broadcast(tensor, 1)
            assert tensor.eq(1).all()
            dist.all_reduce(tensor)
            assert tensor.eq(2).all()

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab")
def test_the_default_device_does_not_matter(nursery: Nursery, where: Where) -> None:
    def run(rank: int, world: int) -> None:
        with torch.device("meta"):
            group = dist.new_group(backend="gradsync")
            for tensor in (torch.ones(3, device="cpu"), torch.ones(2, 3, device="cpu").t()):
                dist.all_reduce(tensor, group=group)
                assert tensor.eq(2).all()
            outputs = [torch.empty(4, device="cpu")[::2] for _ in range(world)]
            dist.all_gather(outputs, torch.full((2,), rank + 1.0, device="cpu"), group=group)
            assert [output.tolist() for output in outputs] == [[1, 1], [2, 2]]

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("abc", also=("aab",))
def test_sizes_that_cannot_be_are_refused_before_others_are_told(
    nursery: Nursery, where: Where
) -> None:
    def run(rank: int, world: int) -> None:
        three = torch.ones(3)
        if rank == 1:
            with pytest.raises(ArgumentError, match="Split sizes"):
                dist.all_to_all_single(torch.empty(3), three, [1, 2], [1, 2])
            with pytest.raises(ArgumentError, match="one output tensor for each of the 3 ranks"):
                dist.all_gather([torch.empty(3)] * 2, three)
            with pytest.raises(ArgumentError, match="Every input tensor must have 3 elements"):
                dist.reduce_scatter(three, [torch.ones(3), torch.ones(2), torch.ones(3)])
        gathered = [torch.empty(3) for _ in range(world)]
        dist.all_gather(gathered, three + rank)
        assert [each[0] for each in gathered] == [1, 2, 3]

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab", also=("aabb",))
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_what_moves_data_ends_with_its_group(
    nursery: Nursery, where: Where, operation: str, how: str
) -> None:
    def run(rank: int, world: int) -> None:
        group = dist.new_group(backend="gradsync")
        tensor = torch.ones(DATA)
        dist.barrier()
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            if operation == "all_reduce"
            else dist.broadcast(tensor, 0, group=group, async_op=True)
            for _ in range(8)  # more than is done meanwhile
        ]
        if rank == 0:
            time.sleep(0.05)
            began = time.monotonic()
            group.abort() if how == "abort" else group.shutdown()
            assert time.monotonic() - began < SECONDS
        with pytest.raises(AbortedError):
            works[-1].wait()

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab")
def test_a_rank_that_leaves_after_a_mismatch_is_noticed(nursery: Nursery, where: Where) -> None:
    def run(rank: int, world: int) -> None:
        gc.disable()  # an error must not keep what it came from
        group = dist.new_group(backend="gradsync")
        store = store_of_group()
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(torch.ones(3 + rank), group=group)
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group(group)
            store.wait(["noticed"])
            return
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 1 \(pid "):
            dist.all_reduce(torch.ones(3), group=group)
        assert time.monotonic() - began < SECONDS
        store.set("noticed", "")

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("abcd")
@pytest.mark.parametrize("victim", [0, 3])
def test_the_one_that_was_lost_is_blamed_also_if_survivors_end_at_once(
    nursery: Nursery, tmp_path: Path, where: Where, victim: int
) -> None:
    def run(rank: int, world: int) -> None:
        dist.barrier()
        if rank == victim:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(300_000))
        except FaultError as error:
            (tmp_path / f"{rank}").write_text(str(error))
        os._exit(1)

    nursery.run(run, **where)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(told) == 3
    for text in told.values():
        assert text.startswith(f"rank {victim} (pid "), told


@seccomp.needed
def test_a_killed_rank_is_noticed_though_a_child_holds_its_connections(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> float | None:
        dist.barrier()
        if rank == 1:
            if os.fork() == 0:
                time.sleep(30)  # as a process that loads data; it ends with the test
                os._exit(0)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"rank 1 .* has ended while collective 2, all_re"):
            dist.all_reduce(torch.ones(3))
        return time.monotonic() - began

    survivor, _ = nursery.run(run, **apart(2))
    assert ORPHAN_SECONDS <= survivor.unwrap() < SECONDS


@kinds("abc")
def test_a_deadline_that_passes_while_data_moves_is_told_as_one(
    nursery: Nursery, where: Where
) -> None:
    def run(rank: int, world: int) -> None:
        tensor = torch.ones(DATA)
        dist.barrier()
        set_deadline(0.05)
        with pytest.raises(DeadlineError):
            dist.all_reduce(tensor)

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab")
def test_a_forked_child_that_tidies_up_harms_nobody(nursery: Nursery, where: Where) -> None:
    def run(rank: int, world: int) -> None:
        dist.barrier()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            dist.group.WORLD.abort()
            dist.destroy_process_group()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.eq(2).all()

    for ending in nursery.run(run, **where):
        ending.unwrap()


@kinds("ab")
def test_groups_leave_nothing_behind_however_they_end(nursery: Nursery, where: Where) -> None:
    def run(rank: int, world: int) -> Any:
        def once(how: str) -> None:
            group = dist.new_group(backend="gradsync")
            dist.all_reduce(torch.ones(10), group=group)
            dist.all_reduce(torch.ones(10), group=group, async_op=True).get_future().wait()
            if how == "mismatch":
                with pytest.raises(CollectiveMismatchError):
                    dist.all_reduce(torch.ones(10 + rank), group=group)
            dist.barrier()
            if how == "abort":
                if rank == 0:
                    group.abort()
                with pytest.raises(AbortedError):
                    dist.all_reduce(torch.ones(10), group=group)
                dist.barrier()
            dist.destroy_process_group(group)

        for how in ("well", "mismatch", "abort"):
            once(how)
        gc.collect()
        gc.disable()
        dist.barrier()
        before = belongings()
        for how in ("well", "mismatch", "abort") * 2:
            once(how)
        dist.barrier()
        return before, settled(before)

    for ending in nursery.run(run, **where):
        before, after = ending.unwrap()
        assert before["segments"] == 1
        assert after == before
