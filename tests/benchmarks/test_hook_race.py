"""The race of hooks: each of ours has its own rival, and it runs from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from race import stats  # noqa: E402


def test_a_contender_with_a_rival_is_compared_with_it() -> None:
    times = {"torch-bf16": [1.0] * 7, "torch-other": [9.0] * 7, "gradsync-bf16": [0.5] * 7}
    row = stats.summarise(times, {"gradsync-bf16": "torch-bf16"})[2]
    assert row.ratio is not None
    assert (row.ratio.versus, row.ratio.median) == ("torch-bf16", 2.0)


def test_a_contender_whose_rival_does_not_race_has_no_ratio() -> None:
    (row,) = stats.summarise({"gradsync-bf16": [1.0] * 7}, {"gradsync-bf16": "torch-bf16"})
    assert row.ratio is None


@pytest.mark.slow
def test_hooks_race_on_two_ranks(tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    finished = subprocess.run(
        [
            sys.executable, str(BENCHMARKS / "step_race.py"), "--hooks", "--quick", "--rounds", "1",
            "--workloads", "policy", "--json", str(result),
        ],
        env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (lap,) = json.loads(result.read_text())["workloads"]
    assert lap["rivals"]["gradsync-int8"] == "torch-bf16"
    assert lap["rivals"]["gradsync-power-sgd-1"] == "torch-power-sgd-1"
    assert all(lap["same_weights"].values())
