"""Heats on real ranks: what they report, who is caught, how they stop."""

from __future__ import annotations

import pytest

from gradsync.bench.comm import COLLECTIVES, CommHeat
from gradsync.bench.contenders import Contender
from gradsync.bench.launch import describe
from gradsync.bench.meeting import turns
from gradsync.bench.worker import Heat
from gradsync.bench.workloads import load

TINY = """
import torch
from gradsync.bench import Benchmark

class Tiny(Benchmark):
    batch_size = 4
    def create_model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    def generate_inputs(self):
        return [torch.rand(self.batch_size, 8)]
    def generate_target(self):
        return torch.randint(3, (self.batch_size,))
"""
EVERY = (
    Contender(implementation="torch", backend="gloo"),
    Contender(implementation="torch-tuned", backend="gloo"),
    Contender(implementation="gradsync", backend="gradsync"),
    Contender(implementation="gradsync-tuned", backend="gloo"),
    Contender(implementation="none"),
)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return f"{path}:Tiny"


def run_on_rank(rank, world, heat, stop_after=None):
    """Run the heat; rank 0 returns its events. Asked to stop after so many events."""
    import torch

    from gradsync.bench.launch import run_any
    from gradsync.bench.meeting import Meeting, Stopped

    events = []
    meeting = Meeting(
        heat.world,
        heat.backends,
        is_asked_to_stop=lambda: stop_after is not None and len(events) >= stop_after,
    )
    if rank >= heat.world:
        return "not in it"
    try:
        run_any(heat, meeting, torch.device("cpu"), events.append)
    except Stopped:
        events.append({"event": "stopped"})
    return events


def test_a_heat_reports_every_turn_of_every_contender(pool, tiny):
    heat = Heat(
        workload=tiny, world=2, contenders=EVERY, steps_by_round=(3, 2), warm_up=2, bucket_cap_mb=1
    )
    events, others = pool.run(run_on_rank, ranks=2, args=(heat,))
    assert others == []
    assert not [event for event in events if event["event"] == "astray"]
    order = [(e["round"], e["contender"]) for e in events if e["event"] == "measured"]
    assert order == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (1, 3), (1, 2), (1, 1), (1, 0)]
    for event in events:
        if event["event"] == "measured":
            steps = heat.steps_by_round[event["round"]]
            assert [len(rank) for rank in event["seconds"]] == [steps, steps]
    (ready,) = [event for event in events if event["event"] == "ready"]
    assert (ready["batch_size"], ready["parameters"]) == (4, 8 * 8 + 8 + 8 * 3 + 3)
    watched = {e["contender"]: e["timelines"] for e in events if e["event"] == "watched"}
    for index in range(4):
        assert [each["rank"] for each in watched[index]] == [0, 1]
        assert all(each["communication"] >= each["exposed"] >= 0 for each in watched[index])
    assert events[-1] == {"event": "done"}


def test_a_contender_that_skips_the_exchange_is_caught(pool, tiny):
    cheat = Contender(implementation="none", backend="gloo")  # says it is synced, and is not
    heat = Heat(workload=tiny, world=2, contenders=(EVERY[0], cheat), steps_by_round=(1,))
    events, _ = pool.run(run_on_rank, ranks=2, args=(heat,))
    assert {"event": "astray", "contender": 1} in events


def test_ranks_that_are_not_in_a_heat_stand_by(pool, tiny):
    heat = Heat(workload=tiny, world=1, contenders=EVERY[:1], steps_by_round=(1,))
    events, other = pool.run(run_on_rank, ranks=2, args=(heat,))
    assert (events[-1], other) == ({"event": "done"}, "not in it")


def test_all_ranks_stop_after_the_same_turn(pool, tiny):
    heat = Heat(workload=tiny, world=2, contenders=EVERY[:1], steps_by_round=(1,) * 1000)
    events, others = pool.run(run_on_rank, ranks=2, args=(heat, 10))
    assert events[-1] == others[-1] == {"event": "stopped"}
    assert 1 <= sum(event["event"] == "measured" for event in events) < 10


def test_hooks_and_types_run_on_both_classes(pool, tiny):
    heat = Heat(
        workload=tiny, world=2, contenders=EVERY[:3], steps_by_round=(1,), comm_hook="bf16",
        dtype="float64",
    )  # fmt: skip
    events, _ = pool.run(run_on_rank, ranks=2, args=(heat,))
    assert sum(event["event"] == "measured" for event in events) == 3


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_of_any_two_contenders_each_is_first_equally_often(count):
    orders = [turns(range(count), number) for number in range(2 * count)]
    for a in range(count):
        for b in range(a):
            assert sum(order.index(a) < order.index(b) for order in orders) == count


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_right_on_both_backends(pool, collective):
    heat = CommHeat(
        collective=collective, bytes=1000, world=2, backends=("gloo", "gradsync"), rounds=2,
        warm_up=1, turn_seconds=0.001,
    )  # fmt: skip
    events, _ = pool.run(run_on_rank, ranks=2, args=(heat,))
    assert [event["correct"] for event in events if event["event"] == "calibrated"] == [True, True]
    assert sum(event["event"] == "timed" for event in events) == 4


def test_an_error_in_a_users_file_is_told_with_its_place(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(TINY.replace("return torch.nn.Sequential", "return 1 / 0, torch.nn.Sequential"))
    benchmark = load(f"{path}:Tiny")
    with pytest.raises(ZeroDivisionError) as caught:
        benchmark.create_model()
    message = describe(caught.value, rank=3)
    assert message == "rank 3: ZeroDivisionError: division by zero (own.py, line 8)"


def test_sizes_are_a_multiple_of_the_ranks_where_each_has_a_part():
    heat = CommHeat(collective="all_gather", bytes=1000, world=3, backends=())
    assert (heat.count, CommHeat(collective="reduce", bytes=2, world=3, backends=()).count) == (
        249,
        1,
    )
