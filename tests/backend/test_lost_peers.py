"""A rank is killed, at every point of every operation: what the others are told, and how soon."""

from __future__ import annotations

import os
import signal
import socket
import time
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import Ending, Nursery, state_of
from operations import OPERATIONS, perform
from promptness import SECONDS, Delays

from gradsync import PeerLostError
from gradsync.backend import _native

SOON = 1.0  # from a death to the error; see promptness.py
PHASES = ("POST", "POSTED", "ARRIVED", "TICKED", "FINISHED")
MODES = ("sync", "wait", "future", "late")
# At which points the others do not need a rank any more: they succeed, and fail in what comes next.
CAN_DO_WITHOUT = {
    "small": {"POSTED", "ARRIVED", "FINISHED"},
    "large": {"FINISHED"},
    "symmetric": {"POSTED", "ARRIVED", "TICKED", "FINISHED"},
    "first symmetric": {"FINISHED"},
}


def can_do_without(operation: str, phase: str) -> bool | None:
    """None: that depends on how far they are."""
    size = operation.split(", ")[1]
    if (size, phase) == ("first symmetric", "TICKED"):  # have they mapped its memory?
        return None
    return phase in CAN_DO_WITHOUT[size]


def cases(operations: Any = OPERATIONS) -> list[Any]:
    found = []
    for at, operation in enumerate(operations):
        for phase in PHASES:
            if phase == "TICKED" and "small" in operation:
                continue
            mode = MODES[(at + PHASES.index(phase)) % len(MODES)]
            found.append(pytest.param(operation, phase, mode, id=f"{operation}, {phase}, {mode}"))
    return found


def survive(rank: int, world: int, operation: str, phase: str, modes: list[str]) -> Any:
    """What the operation and the one after it came to. Rank 1 does not live to tell."""
    call = OPERATIONS[operation](rank, world)
    dist.barrier()
    before = dist.group.WORLD._get_sequence_number_for_group()
    if rank == 1:
        _native.signal_at(getattr(_native.Phase, phase), 1, signal.SIGKILL)
        perform(call, "sync")
        time.sleep(10)
    if modes[rank] == "late":
        time.sleep(0.3)
    began = time.monotonic()
    results: list[Exception | None] = []
    for each in (call, lambda later: dist.barrier(async_op=later)):
        try:
            perform(each, modes[rank])
            results.append(None)
        except PeerLostError as error:
            results.append(error)
            break
    return results, began, time.monotonic(), before


def check(endings: list[Ending], pids: list[int], operation: str, phase: str) -> list[float]:
    victim = endings[1]
    assert victim.code == -signal.SIGKILL, victim
    times = []
    for ending in endings:
        if ending is victim:
            continue
        results, began, learned, before = ending.unwrap()
        succeeds = can_do_without(operation, phase)
        if succeeds is None:
            succeeds = len(results) > 1
        assert [result is None for result in results] == ([True, False] if succeeds else [False])
        error = results[-1]
        text = str(error)
        assert f"rank 1 (pid {pids[1]} on {socket.gethostname()}) has ended" in text
        name = "barrier" if succeeds else operation.split(",")[0]
        assert f"collective {before + 1 + succeeds}, {name}" in text
        assert (error.rank, error.host, error.pid) == (1, socket.gethostname(), pids[1])
        times.append(learned - max(victim.ended, began))
    return times


def is_typical(operation: str) -> bool:
    """Those that differ in their way through shared memory; `make slow` takes all."""
    return operation.startswith("all_reduce") or operation in (
        "all_to_all, small",
        "broadcast, large",
        "barrier, small",
    )


TYPICAL = cases(filter(is_typical, OPERATIONS))


def kill_in(
    nursery: Nursery, delays: Delays, operation: str, phase: str, modes: list[str]
) -> list[float]:
    with nursery.start(survive, len(modes), args=(operation, phase, modes)) as run:
        times = check(run.endings(), run.pids, operation, phase)
    for seconds, mode in zip(times, filter(None, modes), strict=True):
        delays.add(seconds, operation, phase, mode)
    return times


@pytest.mark.parametrize(("operation", "phase", "mode"), TYPICAL)
def test_a_rank_killed_at_any_point_is_named_by_the_other(
    nursery: Nursery, delays: Delays, operation: str, phase: str, mode: str
) -> None:
    kill_in(nursery, delays, operation, phase, [mode, ""])


@pytest.mark.parametrize("phase", PHASES)
def test_of_three_ranks_both_others_name_the_one_that_was_killed(
    nursery: Nursery, delays: Delays, phase: str
) -> None:
    kill_in(nursery, delays, "all_reduce, large", phase, ["sync", "", "late"])


def test_who_dies_before_it_begins_is_not_missed_though_another_is_slow(nursery: Nursery) -> None:
    ends = {0: ("ARRIVED", "SIGSTOP"), 1: ("ARRIVED", "SIGKILL"), 2: ("TAKEN", "SIGSTOP")}

    def run(rank: int, world: int) -> Any:
        tensor = dist.group.WORLD.symmetric_empty(300_000, torch.float32)
        dist.all_reduce(tensor.fill_(0.0))  # all have mapped it by now
        tensor.fill_(rank + 1.0)
        dist.barrier()
        phase, number = ends[rank]
        _native.signal_at(getattr(_native.Phase, phase), 1, getattr(signal, number))
        dist.all_reduce(tensor)
        assert torch.all(tensor == 6.0)
        with pytest.raises(PeerLostError, match="rank 1"):
            dist.barrier()

    with nursery.start(run, 3) as going:
        for rank in (0, 2):
            while state_of(going.pids[rank]) != "T":  # the test has a time-out
                time.sleep(0.01)
        os.kill(going.pids[0], signal.SIGCONT)
        time.sleep(0.5)  # in which it looks for the dead, more than once
        os.kill(going.pids[2], signal.SIGCONT)
        first, dead, slow = going.endings()
    assert dead.code == -signal.SIGKILL
    first.unwrap()
    slow.unwrap()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_every_point_and_every_way_to_wait(
    nursery: Nursery, delays: Delays, operation: str, ranks: int
) -> None:
    times = []
    for case in cases([operation]):
        for at, mode in enumerate(MODES):
            others = [MODES[(at + step) % len(MODES)] for step in range(1, ranks - 1)]
            times += kill_in(nursery, delays, operation, case.values[1], [mode, "", *others])
    middle = sorted(times)[len(times) // 2]
    print(f"{operation}, {ranks} ranks, {len(times)} errors: {middle:.3f} s, {max(times):.3f} s")


# ---------------------------------------------------------------- messages


def receive(rank: int, world: int, how: str, count: int, source: int | None) -> Any:
    tensor = torch.full((count,), float(rank))
    dist.barrier()
    if rank == 1:
        _native.signal_at(_native.Phase.MESSAGE, 1, signal.SIGKILL)
        dist.send(tensor, 0)
    began = time.monotonic()
    try:
        if how == "recv":
            dist.recv(tensor, source)
        elif how == "wait":
            dist.irecv(tensor, source).wait()
        else:
            dist.irecv(tensor, source).get_future().wait()
    except PeerLostError as error:
        return error, began, time.monotonic()
    return None


@pytest.mark.parametrize(
    ("how", "count", "source"),
    [
        ("recv", 1, 1),
        ("recv", 1_000_000, None),
        ("wait", 1, None),
        ("wait", 1_000_000, 1),
        ("future", 1, 1),
        ("future", 1_000_000, None),
    ],
)
def test_a_sender_killed_in_a_message_is_named_by_the_receiver(
    nursery: Nursery, delays: Delays, how: str, count: int, source: int | None
) -> None:
    with nursery.start(receive, 2, args=(how, count, source)) as run:
        receiver, sender = run.endings()
    assert sender.code == -signal.SIGKILL
    error, began, learned = receiver.unwrap()
    delays.add(learned - max(sender.ended, began), "recv", "message")
    assert f"rank 1 (pid {run.pids[1]} on {socket.gethostname()}) has ended" in str(error)
    assert f"{count} x float32" in str(error)
    assert "message 1, recv(" in str(error)
    assert (error.rank, error.pid) == (1, run.pids[1])


@pytest.mark.parametrize("how", ["send", "wait", "future"])
def test_a_receiver_that_is_killed_is_named_by_the_sender(
    nursery: Nursery, delays: Delays, how: str
) -> None:
    def run(rank: int, world: int) -> Any:
        tensor = torch.zeros(1_000_000)
        dist.barrier()
        if rank == 1:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            if how == "send":
                dist.send(tensor, 1)
            elif how == "wait":
                dist.isend(tensor, 1).wait()
            else:
                dist.isend(tensor, 1).get_future().wait()
        except PeerLostError as error:
            return error, began, time.monotonic()

    sender, receiver = nursery.run(run)
    error, began, learned = sender.unwrap()
    delays.add(learned - max(receiver.ended, began), "message")
    assert error.rank == 1
    assert "message 1, send(to group rank 1, 1000000 x float32)" in str(error)


def test_a_message_sent_before_its_sender_died_arrives(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        tensor = torch.full((1000,), float(rank))
        dist.barrier()
        if rank == 1:
            dist.send(tensor, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        dist.recv(tensor, 1)
        assert tensor.eq(1).all()
        with pytest.raises(PeerLostError, match=r"rank 1 .* has ended"):
            dist.recv(tensor, 1)

    survivor, _ = nursery.run(run)
    survivor.unwrap()


def test_ranks_that_exchange_messages_do_not_mind_a_third_one_that_died(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        tensor = torch.full((100_000,), float(rank))
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
        other = 2 - rank
        received = torch.empty_like(tensor)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, received, other)]
        ):
            work.wait()
        assert received.eq(other).all()

    first, _, third = nursery.run(run, 3)
    first.unwrap()
    third.unwrap()


# ---------------------------------------------------------------- groups inside groups


def test_a_lost_rank_is_called_by_its_rank_in_the_group_and_by_its_global_one(
    nursery: Nursery,
) -> None:
    def run(rank: int, world: int) -> Any:
        group = dist.new_group([1, 2], backend="gradsync")
        dist.barrier()
        if rank == 0:
            return None
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 2 ") as caught:
            dist.all_reduce(torch.ones(1), group=group)
        return caught.value

    _, survivor, _ = nursery.run(run, 3)
    assert survivor.unwrap().rank == 1


def test_a_rank_that_dies_with_a_piece_that_it_has_taken_is_missed(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        tensor = dist.group.WORLD.symmetric_empty(300_000, torch.float32)
        dist.all_reduce(tensor.fill_(0.0))  # all have mapped it by now
        dist.barrier()
        # Rank 0 stops, so that it leaves pieces for rank 1.
        how = signal.SIGKILL if rank else signal.SIGSTOP
        _native.signal_at(_native.Phase.TAKEN, 1, how)
        with pytest.raises(PeerLostError) as caught:
            dist.all_reduce(tensor)
        return caught.value

    with nursery.start(run, 2, expendable=[1]) as started:
        deadline = time.monotonic() + 30.0
        while [state_of(pid) for pid in started.pids] != ["T", "Z"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(started.pids[0], signal.SIGCONT)
        survivor, _ = started.endings()
    assert survivor.unwrap().rank == 1


def test_after_a_loss_every_operation_fails_at_once(nursery: Nursery) -> None:
    def run(rank: int, world: int) -> Any:
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        calls = [make(rank, world) for name, make in OPERATIONS.items() if "symm" not in name]
        with pytest.raises(PeerLostError):
            dist.barrier()
        times = []
        for call in calls:
            for mode in ("sync", "wait", "future"):
                began = time.monotonic()
                with pytest.raises(PeerLostError) as caught:
                    perform(call, mode)
                times.append(time.monotonic() - began)
                assert caught.value.rank == 1
        assert median(times) < SOON / len(times), times
        assert max(times) < SECONDS, times
        began = time.monotonic()
        dist.destroy_process_group()
        assert time.monotonic() - began < SECONDS

    survivor, _ = nursery.run(run)
    survivor.unwrap()
