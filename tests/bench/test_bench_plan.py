"""What is to run, without running it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync import ArgumentError
from gradsync.bench.machine import describe_machine, differences
from gradsync.bench.plan import Place, Settings, plan, plan_comm, split_steps

TWO_CORES = Place(slots=2, why="this machine has 2 cores")


@given(st.integers(1, 500), st.integers(1, 50))
@settings(deadline=None)
def test_steps_are_split_evenly_and_none_is_lost(steps, rounds):
    if steps < rounds:
        with pytest.raises(ArgumentError):
            split_steps(steps, rounds)
        return
    split = split_steps(steps, rounds)
    assert (sum(split), len(split)) == (steps, rounds)
    assert max(split) - min(split) <= 1


def test_worlds_are_powers_of_two_up_to_what_fits():
    assert TWO_CORES.worlds() == (1, 2)
    assert Place(slots=8, why="").worlds() == (1, 2, 4, 8)
    assert Place(slots=6, why="").worlds() == (1, 2, 4, 6)
    assert Place(slots=1, why="").worlds() == (1,)


def test_what_cannot_run_fails_alone():
    wanted = Settings(
        workloads=("nosuch", "mlp"), worlds=(1, 64), implementations=("torch", "none")
    )
    heats, failed = plan(wanted, TWO_CORES)
    assert [(heat.workload, heat.world) for heat in heats] == [("mlp", 1)]
    found = {(case.model, case.world, case.error.split(";")[0]) for case in failed}
    assert found == {
        ("nosuch", 1, "there is no model 'nosuch'"),
        ("nosuch", 64, "there is no model 'nosuch'"),
        ("mlp", 64, "64 ranks do not fit: this machine has 2 cores"),
    }
    assert len(failed) == 6


def test_more_ranks_than_fit_can_be_allowed():
    place = Place(slots=2, why="", allows_more=True)
    heats, failed = plan(Settings(workloads=("mlp",), worlds=(4,)), place)
    assert ([heat.world for heat in heats], failed) == ([4], [])


def test_collectives_start_with_two_ranks():
    heats, failed = plan_comm(
        collectives=["reduce"], sizes=[4, 8], backends=["gloo"], worlds=None, place=TWO_CORES,
        rounds=1, warm_up=0, turn_seconds=0.01,
    )  # fmt: skip
    assert [(heat.bytes, heat.world) for heat in heats] == [(4, 2), (8, 2)]
    assert failed == []


def test_the_machines_facts_do_not_change_and_tell_no_names():
    facts = describe_machine()
    assert differences([facts, describe_machine()]) == []
    other = {**facts, "torch": "1.0"}
    assert "host 1: torch is '1.0'" in differences([facts, other])[0]
    assert not {"hostname", "user"} & facts.keys()
