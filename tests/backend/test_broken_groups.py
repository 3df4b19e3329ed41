"""Ranks that stop, abort, leave or are interrupted while others wait for them."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Nursery, state_of
from operations import OPERATIONS, Call, once_waiting, perform
from promptness import SECONDS

from gradsync import AbortedError, DeadlineError, FaultError, PeerLostError
from gradsync.backend import _native

DEADLINE = 1.0  # set when all have met: to meet may take longer


def twice(call: Call) -> None:
    """The first time may succeed, if the one that failed has done its part."""
    perform(call, "sync")
    perform(call, "sync")


def receive(later: bool) -> Any:
    return dist.irecv(torch.ones(1), 1) if later else dist.recv(torch.ones(1), 1)


def store_of_group() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def set_deadline(seconds: float) -> None:
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


# ---------------------------------------------------------------- stopped


def meet_deadline(rank: int, world: int, operation: str, phase: str, modes: list[str]) -> Any:
    call = OPERATIONS[operation](rank, world)
    dist.barrier()
    set_deadline(DEADLINE)
    if rank == 1:
        _native.signal_at(getattr(_native.Phase, phase), 1, signal.SIGSTOP)
        perform(call, "sync")
        time.sleep(60)
    began = time.monotonic()
    try:
        perform(call, modes[rank])
        dist.barrier()
    except DeadlineError as error:
        elapsed = time.monotonic() - began
        set_deadline(20)
        with pytest.raises(DeadlineError):  # at once
            dist.barrier()
        return error, elapsed, time.monotonic() - began
    return None


@pytest.mark.parametrize(
    ("operation", "phase", "mode", "ranks"),
    [
        ("all_reduce, small", "POST", "sync", 2),
        ("all_reduce, large", "POSTED", "wait", 3),
        ("all_reduce, large", "TICKED", "future", 2),
        ("all_reduce, symmetric", "ARRIVED", "sync", 3),
        ("broadcast, large", "TICKED", "wait", 2),
        ("barrier, small", "FINISHED", "sync", 2),
    ],
)
def test_a_rank_that_is_stopped_is_named_at_the_deadline(
    nursery: Nursery, operation: str, phase: str, mode: str, ranks: int
) -> None:
    modes = [mode, "", "sync"][:ranks]
    arguments = (operation, phase, modes)
    with nursery.start(meet_deadline, ranks, args=arguments, expendable=[1]) as run:
        endings = run.endings()
    for ending in endings:
        if ending.rank == 1:
            continue
        error, elapsed, in_all = ending.unwrap()
        assert DEADLINE <= elapsed < SECONDS
        assert in_all - elapsed < SECONDS
        assert error.ranks == (1,)
        assert "the deadline has passed" in str(error)
        assert f"rank 1 (pid {run.pids[1]} on {socket.gethostname()})" in str(error)


def test_a_rank_that_goes_on_after_the_deadline_learns_what_it_missed(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        call = OPERATIONS["all_reduce, large"](rank, world)
        stopped = dist.group.WORLD.members[1].pid
        dist.barrier()
        set_deadline(DEADLINE)
        if rank == 1:
            _native.signal_at(_native.Phase.POST, 1, signal.SIGSTOP)
            with pytest.raises(FaultError, match=r"rank 0 .* gave up: .* deadline has passed"):
                perform(call, "sync")
            return time.monotonic()
        await_state(stopped, "T")  # or it would be told to go on before it stops
        with pytest.raises(DeadlineError):
            perform(call, "sync")
        os.kill(stopped, signal.SIGCONT)
        return time.monotonic()

    first, second = [ending.unwrap() for ending in nursery.run(run)]
    assert second - first < SECONDS


@pytest.mark.parametrize("leaves", [False, True])
def test_the_share_of_a_stopped_rank_is_reduced_by_the_others(
    nursery: Nursery, leaves: bool
) -> None:
    def run(rank: int, world: int) -> Any:
        tensor = dist.group.WORLD.symmetric_empty(300_000, torch.float32)
        stopped = dist.group.WORLD.members[1].pid
        dist.all_reduce(tensor.fill_(0.0))  # all have mapped it by now
        tensor.fill_(rank + 1.0)
        dist.barrier()
        if rank == 1:
            _native.signal_at(_native.Phase.ARRIVED, 1, signal.SIGSTOP)
        dist.all_reduce(tensor)
        assert torch.all(tensor == 3.0)
        if rank == 0:
            await_state(stopped, "T")
            tensor.fill_(5.0)  # who comes late leaves it alone
        if rank == 0 and leaves:
            dist.destroy_process_group()
        if rank == 0:
            os.kill(stopped, signal.SIGCONT)
        if not leaves:
            dist.barrier()
        assert torch.all(tensor == (5.0 if rank == 0 else 3.0))

    for ending in nursery.run(run):
        ending.unwrap()


def await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + 30.0
    while state_of(pid) != state:
        assert time.monotonic() < deadline, state_of(pid)
        time.sleep(0.001)


def test_a_message_that_does_not_come_is_missed_at_the_deadline(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        dist.barrier()
        set_deadline(DEADLINE)
        if rank == 1:
            return  # but it lives on until both have reported
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"recv.*deadline.*rank 1") as caught:
            dist.recv(torch.ones(1), 1)
        assert caught.value.ranks == (1,)
        assert DEADLINE <= time.monotonic() - began < SECONDS

    for ending in nursery.run(run):
        ending.unwrap()


# ---------------------------------------------------------------- aborted, destroyed


def end_by(how: str) -> None:
    if how == "abort":
        dist.group.WORLD.abort()
    elif how == "torch's abort":
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["abort", "torch's abort", "destroy"])
@pytest.mark.parametrize("operation", ["all_reduce, small", "all_reduce, large"])
def test_a_group_ended_with_work_in_flight_fails_it_here_and_there(
    nursery: Nursery, how: str, operation: str
) -> None:
    def run(rank: int, world: int) -> Any:
        call = OPERATIONS[operation](rank, world)
        store = store_of_group()
        dist.barrier()
        if rank == 0:
            work = call(True)
            time.sleep(0.1)
            began = time.monotonic()
            end_by(how)
            store.set("ended", "")
            with pytest.raises(AbortedError):
                work.wait()
            assert time.monotonic() - began < SECONDS
            return
        store.wait(["ended"])
        with pytest.raises(AbortedError, match=r"rank 0 \(pid .*aborted the group"):
            twice(call)

    for ending in nursery.run(run):
        ending.unwrap()


@pytest.mark.parametrize("how", ["abort", "destroy"])
@pytest.mark.parametrize("mode", ["sync", "wait", "recv"])
def test_a_waiting_thread_is_woken_when_another_one_ends_the_group(
    nursery: Nursery, how: str, mode: str
) -> None:
    def run(rank: int, world: int) -> Any:
        call = OPERATIONS["all_reduce, large"](rank, world)
        store = store_of_group()
        dist.barrier()
        if rank == 1:
            store.wait(["ended"])
            with pytest.raises(FaultError, match=r"rank 0 .*(aborted|has left) the group"):
                perform(call, "sync")
            return
        moment: list[float] = []

        def end() -> None:
            moment.append(time.monotonic())
            end_by(how)
            store.set("ended", "")

        ender = once_waiting(end)
        if mode == "recv":
            call = receive
        with pytest.raises(AbortedError):
            perform(call, "wait" if mode == "wait" else "sync")
        assert time.monotonic() - moment[0] < SECONDS
        ender.join()

    for ending in nursery.run(run):
        ending.unwrap()


def test_a_rank_that_leaves_properly_is_lost_to_those_who_need_it(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        dist.barrier()
        if rank == 0:
            dist.destroy_process_group()
            return
        with pytest.raises(PeerLostError, match=r"rank 0 .* has left the group") as caught:
            dist.all_reduce(torch.ones(1))
        assert caught.value.rank == 0

    for ending in nursery.run(run):
        ending.unwrap()


def test_ranks_that_leave_one_after_the_other_lose_nothing(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        tensor = torch.ones(200_000)
        for _ in range(10):
            dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor[0].item()

    for _ in range(5):
        assert [e.unwrap() for e in nursery.run(run, 3)] == [3.0**10] * 3


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("mode", ["sync", "wait", "recv"])
def test_an_interrupt_ends_the_wait_and_the_others_learn_of_it(nursery: Nursery, mode: str) -> None:
    def run(rank: int, world: int) -> Any:
        call = OPERATIONS["all_reduce, large"](rank, world)
        first = dist.group.WORLD.members[0].pid
        store = store_of_group()
        dist.barrier()
        if rank == 0:
            try:
                once_waiting(lambda: store.set("waits", ""))
                perform(receive if mode == "recv" else call, "wait" if mode == "wait" else "sync")
            except KeyboardInterrupt:
                learned = time.monotonic()
                if mode != "sync":  # the work goes on: it is the end of the process that tells
                    os._exit(1)
                store.set("interrupted", "")
                return learned
            return None
        store.wait(["waits"])
        os.kill(first, signal.SIGINT)
        sent = time.monotonic()
        if mode == "sync":
            store.wait(["interrupted"])
        else:
            await_state(first, "Z")
        with pytest.raises(FaultError, match=r"rank 0 \(pid .*(interrupted|has ended)"):
            twice(call)
        return sent

    first, second = nursery.run(run)
    sent = second.unwrap()
    assert first.reported is None or first.unwrap() - sent < SECONDS
