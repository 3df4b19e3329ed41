"""The protocol of shared memory in every interleaving; and its checker, on wrong protocols."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "csrc" / "model"))

import protocol  # it is run as a script, and so are the files beside it


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("victim", [None, 0, 1])
@pytest.mark.parametrize("name", protocol.SCENARIOS)
def test_two_ranks_never_read_what_is_not_theirs_and_always_end(name, victim, leaves):
    checker = protocol.Checker(2, protocol.SCENARIOS[name], victim=victim, leaves=leaves)
    assert checker.explore() > 1000


THREE = [protocol.SCENARIOS[name] for name in ("scatters", "exchanges", "disagreement")]
THREE += [("reduction of 2 chunks", "reduction of 1 chunk"), ("reduction in place", "small")]


@pytest.mark.parametrize("ops", THREE)
def test_three_ranks_never_read_what_is_not_theirs_and_always_end(ops):
    assert protocol.Checker(3, ops).explore() > 50_000


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("ops", [("small", "reduction of 1 chunk"), ("reduction in place",)])
def test_of_three_ranks_any_one_may_die_at_any_step(ops, victim):
    assert protocol.Checker(3, ops, victim=victim).explore() > 50_000


@pytest.mark.parametrize("name", protocol.SCENARIOS)
def test_of_two_ranks_one_may_abort_at_any_step_while_the_other_does_not_come(name):
    checker = protocol.Checker(2, protocol.SCENARIOS[name], aborter=0, absent=1)
    assert checker.explore() > 10  # not even one collective, of some


ABORTED = [("small", "small"), ("small", "reduction of 1 chunk"), ("reduction in place",)]


@pytest.mark.parametrize("ops", ABORTED)
def test_of_three_ranks_one_may_abort_and_ends_the_wait_of_another_for_the_third(ops):
    assert protocol.Checker(3, ops, aborter=0, absent=2).explore() > 1000


@pytest.mark.parametrize("ops", ABORTED)
def test_the_checker_finds_that_an_abort_is_not_heard_of_a_rank_that_had_come(ops):
    deaf = protocol.Variant(hears_of_aborts=False)
    with pytest.raises(protocol.ProtocolError, match="nobody can go on"):
        protocol.Checker(3, ops, deaf, aborter=0, absent=2).explore()


SMALL = ("small", "small", "small")
CHUNKS = ("reduction of 2 chunks", "small")
MISTAKES = {
    "one slot instead of two": ({"slots": 1}, SMALL, None, "reads slot0"),
    "one slot for chunks": ({"slots": 1}, CHUNKS, None, "reads slot0"),
    "one slot for a scatter": ({"slots": 1}, ("scatter of 2 rounds",), None, "reads slot0"),
    "a scatter finds results that are not yet taken": (
        {"ends_with_the_last_chunk": False},
        ("reduction of 1 chunk", "small scatter"),
        None,
        "reads slot0",
    ),
    "one announcement": ({"announcements": 1}, SMALL, None, "reads announcement0"),
    "rounds do not wait": ({"awaits_rounds": False}, ("exchange of 2 rounds",), None, "reads slot"),
    "chunks do not wait": ({"awaits_chunks": False}, CHUNKS, None, "reads slot"),
    "nobody waits for the end in place": (
        {"awaits_pieces": False},
        ("reduction in place", "reduction in place"),
        None,
        "is not reduced",
    ),
    "a share is looked at and then taken": (
        {"takes_at_once": False},
        ("reduction in place",),
        None,
        "which another has taken",
    ),
    "nobody knows who has begun": (
        {"tells_that_it_begins": False},
        ("reduction in place",),
        1,
        "go on",
    ),
    "pieces count when they are taken": (
        {"counts_what_is_done": False},
        ("reduction in place",),
        None,
        "is not reduced",
    ),
    "a late rank does not ask again when another has left, though all may be done": (
        {"asks_again": False},
        ("reduction in place",),
        None,
        "but all was done",
    ),
    "the clock moves before the count": (
        {"counts_before_clock": False},
        SMALL,
        1,
        "go on",
    ),
    "turns differ after a mismatch": (
        {"all_take_a_turn": False},
        ("mismatch", "small"),
        None,
        "reads slot",
    ),
    "the wake-up is skipped": ({"wakes": False}, SMALL, None, "nobody can go on"),
    "the wake-up comes before the tick": (
        {"wakes_after_tick": False},
        SMALL,
        None,
        "nobody can go on",
    ),
    "sleepers do not look again": ({"sleeps_only_on_seen": False}, SMALL, None, "nobody can go on"),
    "nobody looks for the dead": ({"looks_for_the_gone": False}, SMALL, 1, "go on"),
    "the clock is read before the state": (
        {"looks_for_the_gone_first": False},
        ("small",),
        1,
        "takes rank",
    ),
}


# With two ranks this one does no harm: who had come was the only one to be waited for.
ONLY_OF_THREE = "the clock is read before the state"


@pytest.mark.parametrize(
    ("mistake", "world"),
    [(name, world) for name in MISTAKES for world in (2, 3) if (name, world) != (ONLY_OF_THREE, 2)],
)
def test_the_checker_finds_what_is_wrong_with(mistake, world):
    change, ops, victim, complaint = MISTAKES[mistake]
    variant = protocol.Variant(**change)
    leaves = "left" in mistake  # otherwise a rank that leaves may wake whom the mistake let sleep
    with pytest.raises(protocol.ProtocolError, match=complaint):
        protocol.Checker(world, ops, variant, victim, leaves=leaves).explore()


def test_what_is_wrong_is_told_with_the_steps_that_led_there():
    with pytest.raises(protocol.ProtocolError) as caught:
        protocol.Checker(2, SMALL, protocol.Variant(wakes=False), leaves=False).explore()
    assert "('clock',)" in str(caught.value)
    assert "('await', 'ticks', 2) add" in str(caught.value)
