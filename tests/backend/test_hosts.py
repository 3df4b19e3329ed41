"""Several machines, feigned by ``GRADSYNC_MACHINE``: shared memory inside, gloo between them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Ending, Nursery
from operations import OPERATIONS, once_waiting, perform
from promptness import SECONDS, Delays

from gradsync import AbortedError, DeadlineError, FaultError, PeerLostError
from gradsync.backend import hierarchy

SOON = 1.5  # from a death to the error; see promptness.py
DEADLINE = 1.5  # set when all have met: to meet may take longer
LAYOUTS = {"2+1": "aab", "mixed 2+2": "abab", "1+1+2": "abcc"}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
]


def machines(layout: str) -> dict[str, Any]:
    return {"ranks": len(layout), "env": [{"GRADSYNC_MACHINE": name} for name in layout]}


def store_of_group() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def set_deadline(seconds: float) -> None:
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


def uses_hierarchy() -> bool:
    return dist.group.WORLD._hierarchy is not None


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: exact in every type and order."""
    made = (torch.arange(count) + rank) % 3 + 1
    return made.to(dtype)


def expected(op: Any, world: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    all_values = torch.stack([values(rank, count, dtype).to(wide) for rank in range(world)])
    if op == dist.ReduceOp.SUM:
        return all_values.sum(0).to(dtype)
    if op == dist.ReduceOp.AVG:
        rounding = None if dtype.is_floating_point else "trunc"
        return all_values.sum(0).div(world, rounding_mode=rounding).to(dtype)
    if op == dist.ReduceOp.PRODUCT:
        return all_values.prod(0).to(dtype)
    if op == dist.ReduceOp.MIN:
        return all_values.amin(0).to(dtype)
    if op == dist.ReduceOp.MAX:
        return all_values.amax(0).to(dtype)
    bitwise = {
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }[op]
    result = all_values[0]
    for each in all_values[1:]:
        result = bitwise(result, each)
    return result.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_reduce_gives_the_same_as_on_one_machine(nursery: Nursery, layout: str) -> None:
    def run(rank: int, world: int) -> None:
        assert uses_hierarchy()
        floats = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT]
        floats += [dist.ReduceOp.MIN, dist.ReduceOp.MAX]
        bits = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
        for dtype in DTYPES:
            for op in floats if dtype.is_floating_point else floats + bits:
                tensor = values(rank, 1000, dtype)
                dist.all_reduce(tensor, op)
                wanted = expected(op, world, 1000, dtype)
                exact = not dtype.is_floating_point
                assert torch.allclose(tensor.double(), wanted.double(), 0 if exact else 1e-2), op
        for count in (0, 1, 3, 262_144, 262_145, 900_000):  # none, a part, and several chunks
            tensor = values(rank, count, torch.float32)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected(dist.ReduceOp.SUM, world, count, torch.float32)), (
                count
            )

    for ending in nursery.run(run, **machines(LAYOUTS[layout])):
        ending.unwrap()


def test_complex_strided_and_half_precision_tensors_are_reduced(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        tensor = torch.full((5,), complex(1, rank))
        dist.all_reduce(tensor)
        assert tensor.tolist() == [complex(3, 3)] * 5
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert tensor.tolist() == [complex(3, 3)] * 5
        strided = torch.zeros(4, 6)
        strided[:, ::2] = rank
        dist.all_reduce(strided[:, ::2])
        assert strided[:, ::2].eq(3).all()
        assert strided[:, 1::2].eq(0).all()
        large = torch.full((10,), 40_000.0, dtype=torch.float16)
        dist.all_reduce(large, dist.ReduceOp.AVG)
        assert large.eq(40_000).all()
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        assert leaf.eq(3).all()
        flags = torch.tensor([rank == 0, False])
        dist.all_reduce(flags, dist.ReduceOp.MAX)  # gloo's business
        assert flags.tolist() == [True, False]

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_broadcast_works_from_any_root(nursery: Nursery, layout: str) -> None:
    def run(rank: int, world: int) -> None:
        for root in range(world):
            for count in (0, 5, 700_000):
                for dtype in (torch.float32, torch.bool, torch.complex64):
                    tensor = torch.full((count,), rank == root, dtype=dtype)
                    dist.broadcast(tensor, root)
                    assert tensor.eq(True).all()
        strided = torch.full((4, 4), float(rank)).t()[::2]
        dist.broadcast(strided, 1)
        assert strided.eq(1).all()

    for ending in nursery.run(run, **machines(LAYOUTS[layout])):
        ending.unwrap()


def test_a_barrier_lets_nobody_through_before_the_last(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> tuple[float, float]:
        dist.barrier()
        if rank == world - 1:
            time.sleep(0.3)
        came = time.monotonic()
        dist.barrier()
        return came, time.monotonic()

    times = [ending.unwrap() for ending in nursery.run(run, **machines("aabc"))]
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_everything_else_goes_through_gloo(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        for name, make in OPERATIONS.items():
            if "symmetric" not in name:
                for mode in ("sync", "wait"):  # gloo has not all futures
                    perform(make(rank, world), mode)
        assert not dist.group.WORLD.shares_memory
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": other} for other in range(world)]
        tensor = torch.full((3,), float(rank))
        if rank == 0:
            dist.send(tensor, world - 1)
        if rank == world - 1:
            dist.recv(tensor, 0)
            assert tensor.eq(0).all()
        group = dist.new_group([0, world - 1], backend="gradsync")
        if rank in (0, world - 1):
            dist.all_reduce(tensor, group=group)

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_many_operations_are_under_way_at_once(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        tensors = [torch.full((100_000,), float(at)) for at in range(12)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works[::3]]
        for future in reversed(futures):
            future.wait()
        for work in works:
            work.wait()
            assert work.is_completed()
        for at, tensor in enumerate(tensors):
            assert tensor.eq(at * world).all()
        forgotten = torch.ones(300_000)
        dist.all_reduce(forgotten, async_op=True)
        del forgotten  # its memory has to stay
        dist.barrier()

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_groups_can_be_used_from_threads(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        groups = [dist.new_group(backend="gradsync") for _ in range(3)]
        failures: list[BaseException] = []

        def loop(group: Any, value: float) -> None:
            try:
                for _ in range(20):
                    tensor = torch.full((5_000,), value)
                    dist.all_reduce(tensor, group=group)
                    assert tensor.eq(value * world).all()
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=loop, args=(group, float(at)))
            for at, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_a_group_of_one_machine_inside_several_shares_memory(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        groups = [dist.new_group(ranks, backend="gradsync") for ranks in ([0, 1], [2, 3])]
        own = groups[rank // 2]
        assert own.shares_memory
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=own)
        assert tensor.eq(1.0 if rank < 2 else 5.0).all()

    for ending in nursery.run(run, **machines("aabb")):
        ending.unwrap()


def test_ranks_that_differ_in_what_they_call_are_told(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        dist.barrier()
        set_deadline(DEADLINE)
        with pytest.raises(FaultError if rank == 2 else RuntimeError, match=r"same|deadline|gave"):
            dist.all_reduce(torch.ones(5 if rank == 0 else 6))

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


# ---------------------------------------------------------------- faults


def lose(rank: int, world: int, victim: int, operation: str, delay: float) -> Any:
    call = OPERATIONS[operation](rank, world)
    dist.barrier()
    if rank == victim:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(delay)
    began = time.monotonic()
    try:
        call(False)
        dist.barrier()
    except FaultError as error:
        when = time.monotonic()
        with pytest.raises(type(error)):
            dist.barrier()
        return error, began, when, time.monotonic() - when
    return None


def times_of(endings: list[Ending], victim: int) -> list[float]:
    times = []
    for ending in endings:
        if ending.rank != victim:
            _, began, when, _ = ending.unwrap()
            times.append(when - max(began, endings[victim].ended))
    return times


@pytest.mark.parametrize(
    ("layout", "victim", "operation"),
    [
        ("aab", 0, "all_reduce, large"),
        ("aab", 1, "barrier, small"),
        ("aab", 2, "all_reduce, large"),
        ("aabb", 3, "all_reduce, large"),
        ("abcc", 1, "barrier, small"),
        ("abcc", 3, "all_reduce, large"),
    ],
)
def test_a_killed_rank_is_named_on_all_machines(
    nursery: Nursery, delays: Delays, layout: str, victim: int, operation: str
) -> None:
    options = machines(layout)
    with nursery.start(lose, args=(victim, operation, 0.0), **options) as run:
        endings = run.endings()
    for seconds in times_of(endings, victim):
        delays.add(seconds, layout, operation)
    for ending in endings:
        if ending.rank == victim:
            continue
        error = ending.unwrap()[0]
        assert isinstance(error, PeerLostError), error
        assert (error.rank, error.pid) == (victim, run.pids[victim]), error
        assert f"rank {victim} (pid {run.pids[victim]} on {socket.gethostname()})" in str(error)
        assert f"collective 2, {operation.split(',')[0]}" in str(error)
        assert ending.unwrap()[3] < SECONDS


def test_a_rank_that_comes_late_learns_who_was_lost(nursery: Nursery, delays: Delays) -> None:
    endings = nursery.run(lose, args=(1, "all_reduce, large", 1.0), **machines("aab"))
    for seconds in times_of(endings, 1):
        delays.add(seconds, "aab")
    assert [endings[rank].unwrap()[0].rank for rank in (0, 2)] == [1, 1]


def stop(rank: int, world: int, victim: int) -> Any:
    dist.barrier()
    set_deadline(DEADLINE)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        dist.all_reduce(torch.ones(300_000))
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stopped_rank_is_named_on_all_machines_at_the_deadline(
    nursery: Nursery, victim: int
) -> None:
    options = {"args": (victim,), "expendable": [victim]}
    for ending in nursery.run(stop, **options, **machines("aab")):
        if ending.rank != victim:
            error, elapsed = ending.unwrap()
            assert DEADLINE <= elapsed < SECONDS
            assert victim in error.ranks
            assert "deadline has passed" in str(error)
            assert f"rank {victim} (pid " in str(error)


def test_a_rank_that_never_calls_is_named_at_the_deadline(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        store = store_of_group()
        dist.barrier()
        set_deadline(DEADLINE)
        if rank == 2:
            store.wait(["0", "1"], timedelta(seconds=20))
            return None
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(10))
        store.set(str(rank), "")
        return caught.value.ranks

    endings = nursery.run(run, **machines("aab"))
    assert [ending.unwrap() for ending in endings] == [(2,), (2,), None]


@pytest.mark.parametrize(
    ("how", "ender"), [("abort", 0), ("abort", 1), ("destroy", 0), ("destroy", 1), ("destroy", 2)]
)
def test_a_group_ended_in_flight_fails_on_all_machines(
    nursery: Nursery, how: str, ender: int
) -> None:
    def run(rank: int, world: int) -> None:
        store = store_of_group()
        dist.barrier()
        if rank != ender:
            store.wait(["ended"])
            with pytest.raises(FaultError, match=rf"rank {ender} .*(aborted|has left) the group"):
                two_barriers()
            return
        work = dist.barrier(async_op=True)
        time.sleep(0.2)
        began = time.monotonic()
        dist.group.WORLD.abort() if how == "abort" else dist.destroy_process_group()
        store.set("ended", "")
        with pytest.raises(AbortedError):
            work.wait()
        assert time.monotonic() - began < SECONDS

    def two_barriers() -> None:
        dist.barrier()
        dist.barrier()

    for ending in nursery.run(run, **machines("aab")):
        ending.unwrap()


def test_an_interrupt_ends_a_wait_for_other_machines(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        store = store_of_group()
        dist.barrier()
        if rank == 2:
            store.wait(["waits"])
            os.kill(dist.group.WORLD.members[0].pid, signal.SIGINT)
            sent = time.monotonic()
            with pytest.raises(PeerLostError, match="rank 0 "):
                dist.barrier()
            return sent
        if rank == 0:
            try:
                once_waiting(lambda: store.set("waits", ""))
                dist.all_reduce(torch.ones(3))
            except KeyboardInterrupt:
                os._exit(1)
        with pytest.raises(PeerLostError, match="rank 0 "):
            dist.all_reduce(torch.ones(3))
        return None

    first, second, third = nursery.run(run, **machines("aab"))
    assert first.ended - third.unwrap() < SECONDS
    second.unwrap()


def test_without_memory_to_share_on_one_machine_all_use_gloo(nursery: Nursery) -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            os.environ["GRADSYNC_TEST_NOTHING"] = "1"

    def run(rank: int, world: int) -> None:
        from gradsync.backend import attach

        original = attach._map

        def fail(*args: Any) -> Any:
            raise OSError("no memory to share") if rank < 2 else AssertionError

        attach._map = fail if rank < 2 else original
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            group = dist.new_group(backend="gradsync", timeout=timedelta(seconds=20))
        told = [str(each.message) for each in caught if "gradsync" in str(each.message)]
        assert group._hierarchy is None
        assert len(told) == (rank == 0), told
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(world).all()

    for ending in nursery.run(run, prepare=prepare, **machines("aab")):
        ending.unwrap()


def test_chunks_cover_a_tensor() -> None:
    tensor = torch.arange(700_000)
    chunks = hierarchy._chunks(tensor)
    assert torch.equal(torch.cat(chunks), tensor)
    assert all(chunk.nbytes <= hierarchy.CHUNK_BYTES for chunk in chunks)
    assert [chunk.numel() for chunk in hierarchy._chunks(torch.empty(0))] == [0]
