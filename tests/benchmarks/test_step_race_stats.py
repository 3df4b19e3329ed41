"""What step_race concludes from its times, and that the race runs from end to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from race import report, stats  # noqa: E402
from race.track import Lap  # noqa: E402
from race.workloads import WORKLOADS  # noqa: E402


def rows(times: stats.Times) -> dict[str, stats.Row]:
    return {row.contender: row for row in stats.summarise(times)}


def test_ratio_is_paired_within_rounds() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]  # the machine slows down all the time
    times = {"torch": [2 * t for t in drift], "gradsync": [1.6 * t for t in drift]}
    ratio = rows(times)["gradsync"].ratio
    assert ratio is not None
    assert ratio.median == pytest.approx(1.25)
    assert (ratio.spread.low, ratio.spread.high) == pytest.approx((1.25, 1.25))
    assert ratio.verdict == stats.FASTER


def test_ratio_is_against_the_torch_variant_with_the_lower_median() -> None:
    times = {
        "torch": [1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0],  # luckier once, slower on the whole
        "torch-tuned": [5.0] * 7,
        "gradsync": [6.0] * 7,
    }
    ratio = rows(times)["gradsync"].ratio
    assert ratio is not None
    assert ratio.versus == "torch-tuned"
    assert ratio.verdict == stats.SLOWER


def test_ratios_on_both_sides_of_one_are_within_the_spread() -> None:
    times = {"torch": [1.0] * 7, "gradsync": [0.94, 1.06, 0.95, 1.05, 1.0, 0.98, 1.02]}
    ratio = rows(times)["gradsync"].ratio
    assert ratio is not None
    assert ratio.verdict == stats.AS_FAST


def test_a_wide_spread_around_one_is_no_finding() -> None:
    times = {"torch": [1.0] * 7, "gradsync": [0.6, 2.0, 1.8, 1.7, 1.9, 1.5, 0.9]}
    ratio = rows(times)["gradsync"].ratio
    assert ratio is not None
    assert ratio.verdict == stats.TOO_NOISY


def test_only_gradsync_contenders_get_a_ratio() -> None:
    table = rows({"local": [1.0] * 7, "torch": [2.0] * 7, "gradsync-tuned": [1.5] * 7})
    assert table["local"].ratio is None
    assert table["torch"].ratio is None
    assert table["gradsync-tuned"].ratio is not None
    assert table["torch"].share_of_local == pytest.approx(0.5)


def test_without_torch_there_is_no_ratio_and_without_local_no_share() -> None:
    row = rows({"gradsync": [1.0] * 7})["gradsync"]
    assert row.ratio is None
    assert row.share_of_local is None


@pytest.mark.parametrize(
    ("rounds", "low", "high", "coverage"),
    [(6, 0, 5, 0.96875), (7, 0, 6, 0.984375), (9, 1, 7, 0.9609375), (15, 3, 11, 0.96484375)],
)
def test_interval_takes_the_order_statistics_of_the_binomial_law(
    rounds: int, low: int, high: int, coverage: float
) -> None:
    interval = stats.median_interval([float(value) for value in reversed(range(rounds))])
    assert (interval.low, interval.high) == (low, high)
    assert interval.coverage == pytest.approx(coverage)


def test_too_few_rounds_give_no_verdict() -> None:
    ratio = rows({"torch": [2.0] * 5, "gradsync": [1.0] * 5})["gradsync"].ratio
    assert ratio is not None
    assert ratio.verdict == stats.TOO_FEW


def test_a_stopped_race_counts_only_the_rounds_that_all_finished() -> None:
    times = {"local": [1.0, 1.0, 50.0], "torch": [2.0, 2.0]}
    assert rows(times)["local"].median_seconds == 1.0
    assert stats.summarise({"local": [1.0], "torch": []}) == []


def test_interval_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        stats.median_interval([])


def test_the_table_of_the_readme_is_what_the_command_prints() -> None:
    laps = [
        Lap(
            workload=workload.name, summary=workload.summary, parameters=1, tensors=1, buffers=0,
            seconds_per_step={
                "local": [0.5] * 7, "torch": [1.0] * 7, "torch-tuned": [1.1] * 7,
                "gradsync": [0.8] * 7, "gradsync-tuned": [1.25] * 7,
            },
        )
        for workload in WORKLOADS.values()
    ]  # fmt: skip
    printed = report.readme(laps).splitlines()
    assert printed[2] == ("| policy, 6 k parameters | 1.25 [1.25 … 1.25] | 0.80 [0.80 … 0.80] |")
    readme = (BENCHMARKS.parent / "README.md").read_text().splitlines()
    start = readme.index(printed[0])
    assert readme[start + 1] == printed[1]
    number = re.compile(r"\d+\.\d\d")
    for mine, theirs in zip(printed[2:], readme[start + 2 :], strict=False):
        assert number.sub("", mine) == number.sub("", theirs)


def test_race_runs_on_two_ranks_and_writes_its_result(tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    # Not a rank of the launcher that may run this test.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    finished = subprocess.run(
        [
            sys.executable, str(BENCHMARKS / "step_race.py"), "--quick", "--workloads", "policy",
            "--rounds", "2", "--impls", "local,torch,gradsync", "--json", str(result), "--markdown",
        ],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "| policy | torch |" in finished.stdout
    document = json.loads(result.read_text())
    assert document["schema"] == 1
    assert document["settings"]["world"] == 2
    (lap,) = document["workloads"]
    assert lap["workload"] == "policy"
    assert lap["complete"]
    assert lap["tensors"] == 6
    assert {"local", "torch"} <= lap["seconds_per_step"].keys()
    for seconds in lap["seconds_per_step"].values():
        assert len(seconds) == 2
        assert all(value > 0 for value in seconds)
    assert all(lap["same_weights"].values())
