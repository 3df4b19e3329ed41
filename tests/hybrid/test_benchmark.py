"""The race of hybrid training: its statistics, and a small run of both styles."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync import ArgumentError
from gradsync.hybrid import benchmark
from gradsync.hybrid.benchmark import OURS, REFERENCE, Settings, summarize

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "hybrid.py"

seconds = st.lists(st.floats(0.001, 10), min_size=1, max_size=8)


@given(st.lists(seconds, min_size=1, max_size=4))
def test_trainers_with_different_numbers_of_epochs_are_pooled(found: list[list[float]]) -> None:
    settings = Settings(trainers=len(found), styles=(OURS,))
    result = summarize(settings, [{OURS: [each]} for each in found])["styles"][OURS]
    pooled = [second for each in found for second in each]
    percentiles = result["percentiles"]
    assert percentiles["all"]["count"] == len(pooled)
    assert percentiles["all"]["p50"] == pytest.approx(statistics.median(pooled))
    assert percentiles["all"]["p99"] <= max(pooled) + 1e-9
    for at, each in enumerate(found):
        assert percentiles[f"trainer{at}"]["p50"] == pytest.approx(statistics.median(each))
    assert result["epochs_per_second"] == pytest.approx(len(pooled) / sum(pooled))


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    one = {OURS: [[1.0], [1.0], [9.0]], REFERENCE: [[2.0], [3.0], [1.0]]}
    assert summarize(Settings(trainers=1, rounds=3), [one])["ratio"] == 2.0


def test_batches_are_alike_for_both_styles_and_have_no_empty_bag() -> None:
    left, right = (list(benchmark.batches(random.Random(3), 300)) for _ in range(2))
    for one, other in zip(left, right, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
        indices, offsets, target = one
        assert 20 <= len(indices) <= 50
        assert len(offsets) == len(target)
        assert bool((offsets.diff() > 0).all())


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ArgumentError, match="servers"):
        Settings(servers=0)
    with pytest.raises(ArgumentError, match="slow"):
        Settings(styles=("slow",))


def test_both_styles_are_raced_in_one_launch() -> None:
    settings = Settings(trainers=2, servers=1, warmup=1, epochs=2, rounds=2)
    result = json.loads(json.dumps(benchmark.measure(settings)))
    for style in (OURS, REFERENCE):
        assert [len(each) for each in result["styles"][style]["seconds"]] == [4, 4]
        assert set(result["styles"][style]["percentiles"]) == {"trainer0", "trainer1", "all"}
    assert result["settings"]["servers"] == 1
    assert "times the epochs a second of reference" in benchmark.table_of(result)


def test_the_script_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    for option in (
        "--trainers",
        "--servers",
        "--embeddings",
        "--embedding-dim",
        "--warmup",
        "--json",
    ):
        assert option in done.stdout
