"""A real small model learns as well with compressed gradients as without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gradsync import hooks
from gradsync.testing import WorkerPool

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
EPOCHS = 8
SEEDS = (0, 1, 2)  # of one alone, a handful of the 360 images would decide, and with it the machine
ONE_POINT = 0.01

HOOKS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {},
    "int8": {},
    "power_sgd": {"rank": 2, "start_iteration": 20},
    "topk": {"ratio": 0.05},
}


def accuracy(rank: int, world: int, name: str | None) -> float:
    sys.path.insert(0, str(BENCHMARKS))
    from hook_table import digits_accuracy

    def hook() -> hooks.Hook | None:
        return None if name is None else hooks.by_name(name, **HOOKS[name])

    return sum(digits_accuracy(hook(), EPOCHS, seed) for seed in SEEDS) / len(SEEDS)


@pytest.fixture(scope="module")
def uncompressed(pool: WorkerPool) -> float:
    return pool.run(accuracy, args=(None,), timeout=100)[0]


def test_every_hook_is_tried() -> None:
    assert tuple(HOOKS) == hooks.names()


@pytest.mark.parametrize("name", HOOKS)
def test_the_digits_are_learnt_within_a_point(
    pool: WorkerPool, uncompressed: float, name: str
) -> None:
    assert uncompressed > 0.97
    reached = pool.run(accuracy, args=(name,), timeout=100)
    assert reached[0] == reached[1]
    assert reached[0] >= uncompressed - ONE_POINT
