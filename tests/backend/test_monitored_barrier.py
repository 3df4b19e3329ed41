"""The monitored barrier: who is named if a rank is late, has ended, or took the store with it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from forked import Nursery, state_of
from promptness import check_best_of_three
from ranks import raised, run, still_works
from torch.distributed import HashStore, TCPStore

import gradsync
from gradsync import AbortedError, DeadlineError, FaultError, PeerLostError, StateError
from gradsync.backend.members import myself
from gradsync.backend.monitored_barrier import MonitoredBarrier
from gradsync.testing import WorkerPool

SOON = 1.0  # from a death to the error; see promptness.py
SHORT = timedelta(seconds=0.4)


def machines(layout: str) -> dict[str, Any]:
    return {"ranks": len(layout), "env": [{"GRADSYNC_MACHINE": name} for name in layout]}


def wait_for_the_end_of(rank: int) -> None:
    while state_of(dist.group.WORLD.members[rank].pid) != "Z":
        time.sleep(0.01)


# ---------------------------------------------------------------- torch's own call


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=20), 20, 20.5], ids=repr)
def test_torchs_call_takes_our_groups_and_every_way_to_tell_a_time(
    pool: WorkerPool, timeout: Any
) -> None:
    def body(rank: int, world: int) -> None:
        dist.monitored_barrier(timeout=timeout)
        dist.monitored_barrier(dist.group.WORLD, timeout, True)
        still_works(rank, world)

    run(pool, body, 3)


def test_ranks_outside_of_a_subgroup_are_warned_and_not_waited_for(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        pair = dist.new_group([0, 2], backend="gradsync")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.monitored_barrier(pair, timedelta(seconds=20))
        assert any("does not belong to" in str(each.message) for each in caught) == (rank == 1)
        if rank == 0:
            text = raised(lambda: dist.monitored_barrier(pair, SHORT), DeadlineError)
            assert "Rank 1 failed to pass" in text  # of the pair
            assert "Not arrived: rank 2 (pid " in text  # of all
        dist.barrier()

    run(pool, body, 3)


def test_a_rank_alone_passes(nursery: Nursery, tmp_path: Path) -> None:
    def body(rank: int, world: int, path: str) -> None:
        join_by_tcp(rank, world, path)
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=0)

    (ending,) = nursery.run(body, 1, backend=None, args=(str(tmp_path / "port"),))
    ending.unwrap()


def test_groups_of_gloos_go_to_torchs_also_after_a_patch_was_undone(pool: WorkerPool) -> None:
    def body(rank: int, world: int) -> None:
        gloo = dist.new_group(backend="gloo")
        gradsync.patch_torch(backend=True)
        gradsync.unpatch_torch()
        dist.monitored_barrier(gloo, timedelta(seconds=20))
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        if rank == 0:
            text = raised(lambda: dist.monitored_barrier(gloo, SHORT), RuntimeError)
            assert "failed to pass monitoredBarrier" in text
            assert "Not arrived" not in text
        dist.barrier()

    run(pool, body)


# ---------------------------------------------------------------- late


@pytest.mark.parametrize("layout", ["aaaa", "aabb", "abab"])
def test_all_who_came_are_told_who_did_not(nursery: Nursery, layout: str) -> None:
    def body(rank: int, world: int) -> tuple[str, tuple[int, ...]] | None:
        found = None
        dist.monitored_barrier()
        if rank in (0, 2):
            with pytest.raises(DeadlineError) as caught:
                dist.monitored_barrier(timeout=SHORT, wait_all_ranks=True)
            found = str(caught.value), caught.value.ranks
        dist.barrier()
        if rank in (1, 3):
            with pytest.raises(DeadlineError, match="successfully reached") as caught:
                dist.monitored_barrier(timeout=SHORT)
            assert caught.value.ranks == (1, 3)
        dist.monitored_barrier()
        return found

    with nursery.start(body, **machines(layout)) as started:
        pids = started.pids
    endings = started.endings()
    for rank in (0, 2):
        text, ranks = endings[rank].unwrap()
        assert ranks == (1, 3)
        assert "[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 400 ms." in text
        for late in (1, 3):
            assert f"rank {late} (pid {pids[late]} on {socket.gethostname()})" in text
        assert ("Please check rank 0 logs" in text) == (rank == 2)
    for ending in endings:
        ending.unwrap()


def test_a_late_rank_is_told_that_it_was_late_though_rank_0_has_ended(nursery: Nursery) -> None:
    def body(rank: int, world: int) -> tuple[str, tuple[int, ...]]:
        if rank == 1:
            wait_for_the_end_of(0)
        with pytest.raises(DeadlineError) as caught:
            dist.monitored_barrier(timeout=SHORT)
        if rank == 0:
            os._exit(0)
        return str(caught.value), caught.value.ranks

    endings = nursery.run(body, 3)
    for ending in endings[1:]:
        text, ranks = ending.unwrap()
        assert ranks == (1,)
        assert "Rank 1 failed to pass monitoredBarrier in 400 ms" in text


def test_a_rank_0_that_does_not_come_is_named(nursery: Nursery) -> None:
    def body(rank: int, world: int) -> None:
        if rank:
            with pytest.raises(DeadlineError, match="Rank 0 has not answered") as caught:
                dist.monitored_barrier(timeout=SHORT)
            assert caught.value.ranks == (0,)
            assert f"rank 0 (pid {dist.group.WORLD.members[0].pid}" in str(caught.value)
        dist.barrier()

    for ending in nursery.run(body):
        ending.unwrap()


# ---------------------------------------------------------------- lost


def die_in_the_second(rank: int, victim: int, timeout: timedelta) -> tuple[float, Any]:
    """When the error came, and what it says."""
    dist.monitored_barrier()
    if rank == victim:
        time.sleep(0.1)  # the others wait by then, as a rule
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(FaultError) as caught:
        dist.monitored_barrier(timeout=timeout)
    error = caught.value
    facts = [getattr(error, name, None) for name in ("rank", "host", "pid")]
    return time.monotonic(), (type(error), str(error), *facts)


def check_all_name(nursery: Nursery, victim: int, body: Any, **options: Any) -> None:
    def kill() -> float:
        with nursery.start(body, **options) as started:
            pids = started.pids
        endings = started.endings()
        last = 0.0
        for rank, ending in enumerate(endings):
            if rank != victim:
                when, (kind, text, *facts) = ending.unwrap()
                assert kind is PeerLostError, text
                host = socket.gethostname()
                assert facts == [victim, host, pids[victim]]
                assert f"rank {victim} (pid {pids[victim]} on {host}) has ended" in text
                assert "monitored_barrier 2" in text
                last = max(last, when - endings[victim].ended)
        return last

    check_best_of_three(kill, SOON)


@pytest.mark.parametrize(
    ("layout", "victim"),
    [("aa", 0), ("aa", 1), ("aaa", 0), ("aaa", 1), ("aab", 0), ("aab", 1), ("abb", 1), ("abab", 3)],
)
def test_a_killed_rank_is_named_by_all_on_every_machine(
    nursery: Nursery, layout: str, victim: int
) -> None:
    def body(rank: int, world: int) -> Any:
        return die_in_the_second(rank, victim, timedelta(seconds=20))

    check_all_name(nursery, victim, body, **machines(layout))


def join_by_tcp(rank: int, world: int, path: str) -> None:
    """Rank 0 has the store."""
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        Path(path + ".part").write_text(str(store.port))
        Path(path + ".part").rename(path)
    else:
        while not Path(path).exists():
            time.sleep(0.01)
        store = TCPStore("127.0.0.1", int(Path(path).read_text()), None, False)
    dist.init_process_group("gradsync", store=store, rank=rank, world_size=world)
    if rank == 0:
        Path(path).unlink()  # all have read it


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_takes_the_store_with_it_is_named(
    nursery: Nursery, tmp_path: Path, world: int
) -> None:
    def body(rank: int, world: int, path: str) -> Any:
        join_by_tcp(rank, world, path)
        return die_in_the_second(rank, 0, timedelta(seconds=20))

    args = (str(tmp_path / "port"),)
    check_all_name(nursery, 0, body, ranks=world, backend=None, args=args)


def test_a_store_that_ends_on_another_machine_is_told(nursery: Nursery, tmp_path: Path) -> None:
    def body(rank: int, world: int, path: str) -> Any:
        join_by_tcp(rank, world, path)
        return die_in_the_second(rank, 0, timedelta(seconds=20))

    _, ending = nursery.run(body, backend=None, args=(str(tmp_path / "port"),), **machines("ab"))
    _, (kind, text, *_) = ending.unwrap()
    assert kind is FaultError
    assert "rank 1 (pid " in text
    assert "while monitored_barrier 2 waited for it" in text
    assert "store" in text


def test_all_pass_though_rank_0_ends_with_the_store_right_after(
    nursery: Nursery, tmp_path: Path
) -> None:
    def body(rank: int, world: int, path: str) -> None:
        join_by_tcp(rank, world, path)
        if rank == 1:
            time.sleep(0.5)  # the others look less often by then
        dist.monitored_barrier()
        if rank == 0:
            os._exit(0)

    for ending in nursery.run(body, 3, backend=None, args=(str(tmp_path / "port"),))[1:]:
        ending.unwrap()


# ---------------------------------------------------------------- threads, closed groups, garbage


def test_threads_take_turns(nursery: Nursery) -> None:
    def body(rank: int, world: int) -> None:
        errors = []

        def work() -> None:
            try:
                for _ in range(10):
                    dist.monitored_barrier(timeout=timedelta(seconds=20))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        dist.monitored_barrier()

    for ending in nursery.run(body):
        ending.unwrap()


def barrier_of(rank: int, store: Any) -> MonitoredBarrier:
    return MonitoredBarrier(store, rank, 2, [myself(each, each) for each in range(2)])


def test_a_closed_group_does_not_ask_the_store() -> None:
    store = HashStore()
    barrier = barrier_of(0, store)
    barrier.close()
    with pytest.raises(StateError, match="destroyed"):
        barrier(SHORT, wait_all_ranks=False)
    assert store.num_keys() == 0


def test_whoever_waits_hears_that_the_group_is_closed() -> None:
    barrier = barrier_of(1, HashStore())
    closer = threading.Timer(0.2, barrier.close)
    closer.start()
    began = time.monotonic()
    with pytest.raises(AbortedError, match="monitored_barrier 1 on rank 1"):
        barrier(timedelta(seconds=20), wait_all_ranks=False)
    assert time.monotonic() - began < 5
    closer.join()


@pytest.mark.parametrize("verdict", ["", "null", "[]", '{"kind": "PeerLostError"}', "x" * 10**6])
def test_a_verdict_that_is_not_ours_is_an_error(verdict: str) -> None:
    store = HashStore()
    store.set("monitored/1/verdict", verdict)
    with pytest.raises(FaultError, match="not written by gradsync"):
        barrier_of(1, store)(SHORT, wait_all_ranks=False)
