"""Several machines: what all are told of a rank that is lost, late, or calls something else."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Ending, Nursery
from hosts import DEADLINE, machines, set_deadline, store_of_group
from operations import OPERATIONS, once_waiting
from promptness import SECONDS, Delays

from gradsync import (
    AbortedError,
    DeadlineError,
    FaultError,
    PeerLostError,
)
from gradsync.backend.members import is_alive

SOON = 1.0  # from a death to the error; see promptness.py
ENDED = (AbortedError, PeerLostError)


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
        ("aab", 1, "all_gather, large"),  # through gloo
        ("aabb", 3, "all_to_all, small"),
        ("aab", 2, "reduce, small"),
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
            while is_alive(dist.group.WORLD.members[0]):  # the test has a time-out
                time.sleep(0.01)
            with pytest.raises(ENDED, match="rank 0 "):
                dist.all_reduce(torch.ones(3))
            return sent
        if rank == 0:
            try:
                once_waiting(lambda: store.set("waits", ""))
                dist.all_reduce(torch.ones(3))
            except KeyboardInterrupt:
                os._exit(1)
        with pytest.raises(ENDED, match="rank 0 "):
            dist.all_reduce(torch.ones(3))
        return None

    first, second, third = nursery.run(run, **machines("aab"))
    assert first.ended - third.unwrap() < SECONDS
    second.unwrap()


def test_a_rank_that_has_done_its_part_and_ends_is_no_loss(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        if rank == 3:
            time.sleep(1.0)  # in which rank 2 is done
        outputs = [torch.empty(3) for _ in range(world)] if rank == 1 else None
        dist.gather(torch.ones(3), outputs, 1)
        if rank == 2:
            dist.destroy_process_group()
            os._exit(0)

    endings = nursery.run(run, **machines("aaab"))
    for ending in endings:
        if ending.rank != 2:
            ending.unwrap()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_reduce_scatter_that_fails_between_machines_ends(nursery: Nursery, how: str) -> None:
    """gloo's work for it never says that it has completed."""

    def run(rank: int, world: int) -> Any:
        call = OPERATIONS["reduce_scatter, large"](rank, world)
        call(False)
        set_deadline(DEADLINE)
        if rank == 1:
            os.kill(os.getpid(), getattr(signal, how))
        with pytest.raises(FaultError, match="rank 1 ") as caught:
            call(False)
        return caught.value

    endings = nursery.run(run, expendable=[1], **machines("ab"))
    error = endings[0].unwrap()
    assert isinstance(error, PeerLostError if how == "SIGKILL" else DeadlineError)


def test_only_who_is_late_is_blamed_at_the_deadline(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        store = store_of_group()
        dist.barrier()
        set_deadline(DEADLINE)
        if rank == 1:  # a leader, whose neighbour is there
            store.wait(["0", "2"], timedelta(seconds=20))
            return None
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(10))
        store.set(str(rank), "")
        return caught.value.ranks

    endings = nursery.run(run, **machines("abb"))
    assert [ending.unwrap() for ending in endings] == [(1,), None, (1,)]


def test_a_message_has_the_deadline_of_its_group_and_of_its_wait(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        tensor = torch.ones(1)
        if rank == 1:
            dist.send(tensor, 0)
            store_of_group().wait(["done"], timedelta(seconds=30))
            return
        assert dist.irecv(tensor, 1).wait(timedelta(seconds=20))
        set_deadline(DEADLINE)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="recv"):
            dist.recv(tensor, 1)
        assert DEADLINE * 0.9 <= time.monotonic() - began < SECONDS
        store_of_group().set("done", "")

    for ending in nursery.run(run, **machines("ab")):
        ending.unwrap()


def test_a_group_can_be_destroyed_though_somebody_waits_for_a_message(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        group = dist.new_group(backend="gradsync")
        dist.barrier(group)
        if rank == 0:
            dist.irecv(torch.ones(1), 1, group=group).get_future()
            began = time.monotonic()
            dist.destroy_process_group(group)
            assert time.monotonic() - began < SECONDS
        dist.barrier()

    for ending in nursery.run(run, **machines("ab")):
        ending.unwrap()


def test_what_strangers_post_ends_the_group_and_nothing_else(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> str:
        dist.barrier()
        store = dist.group.WORLD._hierarchy._board._given
        if rank == 0:
            store.set("notice", json.dumps({"kind": "FaultError", "text": "x\ud800"}))
            store.set("alarm", "1")

        def meet_again_and_again() -> None:
            for _ in range(200):
                dist.barrier()
                time.sleep(0.02)

        with pytest.raises(FaultError) as caught:
            meet_again_and_again()
        return str(caught.value)

    for ending in nursery.run(run, **machines("ab")):
        assert "not written by gradsync" in ending.unwrap()


def wait_for_other(store: dist.Store, key: str) -> None:
    store.wait([key], timedelta(seconds=30))


@pytest.mark.parametrize(
    ("layout", "victim", "late", "teller"),
    [
        pytest.param("aab", 1, 2, 0, id="while its leader waits for another machine"),
        pytest.param("aabb", 3, 2, 0, id="while its leader computes"),
        pytest.param("aabb", 1, 3, 2, id="while others wait for a slow neighbour"),
    ],
)
def test_a_rank_killed_in_a_collective_is_named_though_another_has_not_come(
    nursery: Nursery, delays: Delays, layout: str, victim: int, late: int, teller: int
) -> None:
    """``late`` comes when ``teller`` has raised."""

    def run(rank: int, world: int) -> Any:
        store = store_of_group()
        dist.barrier()
        if rank == late:
            wait_for_other(store, "raised")
        if rank == victim:
            once_waiting(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLostError, match=rf"rank {victim} \(pid .* has ended") as caught:
            dist.all_reduce(torch.ones(300_000))
        when = time.monotonic()
        if rank == teller:
            store.set("raised", "")
        return caught.value.rank, when

    endings = nursery.run(run, **machines(layout))
    for ending in endings:
        if ending.rank == victim:
            continue
        lost, when = ending.unwrap()
        assert lost == victim
        if ending.rank != late:
            delays.add(when - endings[victim].ended, layout)


def test_a_rank_that_ends_in_order_is_no_loss_to_who_needs_it_no_more(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> None:
        store = store_of_group()
        dist.all_reduce(torch.ones(10))
        if rank == 3:
            dist.destroy_process_group()
            os._exit(0)
        if rank == 0:
            time.sleep(1.0)  # in which its leader looks after it, and finds it gone
            store.set("later", "")
        wait_for_other(store, "later")
        assert dist.group.WORLD._hierarchy._board.notice is None

    endings = nursery.run(run, **machines("aabb"))
    assert endings[3].code == 0
    for ending in endings[:3]:
        ending.unwrap()


def test_a_stopped_neighbour_is_named_also_by_a_machine_whose_deadline_comes_first(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int) -> Any:
        dist.barrier()
        set_deadline(DEADLINE if rank < 2 else 3 * DEADLINE)
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(DeadlineError) as caught:
            dist.all_reduce(torch.ones(300_000))
        return caught.value

    endings = nursery.run(run, expendable=[3], **machines("aabb"))
    for ending in endings[:3]:
        error = ending.unwrap()
        assert error.ranks == (3,), error
        assert "rank 3 (pid " in str(error)


def test_a_message_from_a_killed_rank_of_another_machine_fails_and_names_it(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int) -> Any:
        if rank == 2:
            dist.send(torch.ones(1), 0)
        if rank == 0:
            dist.recv(torch.ones(1), 2)  # they are connected
        dist.barrier()
        if rank == 2:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            return None
        with pytest.raises(PeerLostError, match=r"rank 2 .*recv\(1 x float32\)") as caught:
            dist.recv(torch.ones(1), 2)
        return caught.value.rank, time.monotonic()

    endings = nursery.run(run, **machines("aab"))
    lost, when = endings[0].unwrap()
    assert lost == 2
    assert when - endings[2].ended < SECONDS
