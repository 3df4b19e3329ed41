"""``gradsync bench hybrid``: its statistics, its table, and the command from end to end."""

from __future__ import annotations

import csv
import io
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from commands import interrupt, run
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from gradsync.bench import cli, compare, files, hybrid_sheet, tables
from gradsync.bench.board import Board
from gradsync.bench.hybrid_race import OURS, REFERENCE, HybridHeat, contenders
from gradsync.bench.hybrid_styles import BAGS, BATCHES, Shape, batches
from gradsync.bench.result import BENCH_HYBRID, Case, Result

SHAPE = Shape(trainers=2, servers=4, embeddings=300, embedding_dim=16)
HEAT = HybridHeat(shape=SHAPE, contenders=contenders("both"))
seconds = st.lists(st.floats(0.001, 10), min_size=1, max_size=8)


def case_of(*trainers: list[float], style: str = OURS, **more: object) -> Case:
    return Case(
        model="hybrid",
        batch_size=70,
        implementation=style,
        ranks=tuple(range(len(trainers))),
        measurements=tuple(value for each in trainers for value in each),
        steps_by_rank=tuple(len(each) for each in trainers),
        **more,
    )


# ------------------------------------------------------------------------- numbers


@given(st.lists(seconds, min_size=1, max_size=4))
def test_trainers_with_different_numbers_of_epochs_are_pooled(trainers: list[list[float]]) -> None:
    case = case_of(*trainers)
    assert case.by_rank() == tuple(map(tuple, trainers))
    *each, everyone = hybrid_sheet.sheets_of(Result(cases=[case]))[0].rows
    pooled = [value for trainer in trainers for value in trainer]
    assert (everyone["who"], everyone["epochs"]) == ("all", len(pooled))
    assert everyone["p50"] == pytest.approx(statistics.median(pooled))
    assert everyone["epochs_per_second"] == pytest.approx(1 / statistics.median(pooled))
    assert everyone["p95"] <= max(pooled) + 1e-9
    for row, trainer in zip(each, trainers, strict=True):
        assert row["p50"] == pytest.approx(statistics.median(trainer))


@given(st.lists(seconds, min_size=1, max_size=4))
def test_the_file_keeps_who_measured_what(trainers: list[list[float]]) -> None:
    result = Result(kind=BENCH_HYBRID, cases=[case_of(*trainers)])
    document = files.document(result)
    again = files.parse(files.dumps(document))
    assert again.cases[0].by_rank() == tuple(map(tuple, trainers))
    assert again.kind == BENCH_HYBRID
    (series,) = document["benchmark_results"]
    by_rank = series["result"][1]["summary"]["by_rank"]
    assert [row["p50"] for row in by_rank] == [
        pytest.approx(statistics.median(each)) for each in trainers
    ]


def test_rounds_of_different_lengths_are_joined_by_trainer() -> None:
    console = Console(file=io.StringIO())
    board = Board(Result(), [HEAT], console=console, path=None)
    for number, times in enumerate(([[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0]])):
        board.handle(0, {"event": "measured", "contender": 1, "round": number, "seconds": times})
    (case,) = board.result.cases
    assert case.by_rank() == ((1.0, 2.0, 5.0, 6.0), (3.0, 4.0, 7.0))
    assert case.by_round() == ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0))
    board.fail(0, "trainer1 died with exit code -9.")
    assert "hybrid: 4 servers, 300 × 16 on each, 2 trainers: trainer1 died" in " ".join(
        console.file.getvalue().split()
    )


def test_the_ratio_is_said_with_its_interval_and_compares_with_the_plain_way() -> None:
    slow = [0.2, 0.21, 0.19, 0.2, 0.22, 0.2]
    rounds = {"steps_by_round": (1,) * 6}
    plain = case_of(slow, style=REFERENCE, backend="gloo", **rounds)
    ours = case_of([value / 2 for value in slow], backend="gradsync", **rounds)
    (sheet,) = hybrid_sheet.sheets_of(Result(cases=[plain, replace(ours, complete=False)]))
    assert sheet.rows[-1]["verdict"] == "faster"
    assert sheet.rows[0]["ratio"] is sheet.rows[2]["ratio"] is None
    assert sheet.notes == [
        "gradsync/gradsync has 2.00 times the epochs a second of reference/gloo (95 % interval "
        "2.00 to 2.00), by the medians of one run in which they took turns: faster.",
        "*: stopped before its last round.",
    ]
    assert "gradsync/gradsync*" in tables.markdown([sheet])


def test_what_failed_is_listed_and_what_it_measured_before_shown() -> None:
    broken = case_of([0.1], style=REFERENCE, error="trainer0 died")
    measured, failed = hybrid_sheet.sheets_of(Result(cases=[broken, case_of([0.1])]))
    assert [row["who"] for row in measured.rows] == ["trainer0", "all"] * 2
    assert measured.rows[-1]["ratio"] is None
    assert failed.rows[0]["error"] == "trainer0 died"


def test_batches_are_alike_for_both_styles_and_have_no_empty_bag() -> None:
    left, right = (list(batches(random.Random(3), 300)) for _ in range(2))
    for one, other in zip(left, right, strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))
        indices, offsets, target = one
        assert 20 <= len(indices) <= 50
        assert len(offsets) == len(target)
        assert offsets[0] == 0
        assert bool((offsets.diff() > 0).all())
        assert offsets[-1] < len(indices)
    numbers = random.Random(0)
    bags = [len(target) for _ in range(50) for _, _, target in batches(numbers, 300)]
    assert statistics.fmean(bags) == pytest.approx(BAGS, abs=0.5)
    sizes = {len(target) for _, _, target in batches(numbers, 300, 12)}
    assert sizes == {12}
    assert replace(SHAPE, batch_size=12).examples == 12 * BATCHES


# ------------------------------------------------------------------------- the command


def test_both_styles_are_raced_in_one_run_and_two_files_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    done = run(
        "bench", "hybrid", "--trainers=2", "--servers=2", "--embeddings=50", "--embedding-dim=4",
        "--warmup=1", "--epochs=2", "--rounds=5", "--batch-size=3", f"--json={path}",
        "--format=csv",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = files.read(path)
    assert (result.kind, result.status) == (BENCH_HYBRID, "complete")
    assert [case.label for case in result.cases] == ["reference/gloo", "gradsync/gradsync"]
    for case in result.cases:
        assert (case.model, case.world) == ("hybrid: 2 servers, 50 × 4 on each", 2)
        assert (len(case.measurements), case.steps_by_round) == (20, (2,) * 5)
        assert case.batch_size == 30
        assert case.complete
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["who"] for row in rows] == ["trainer0", "trainer1", "all"] * 2
    assert float(rows[-1]["ratio_low"]) <= float(rows[-1]["ratio"]) <= float(rows[-1]["ratio_high"])
    same = compare.compare(result, files.read(path))
    assert {row["verdict"] for row in same.rows} == {"no difference"}


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    case, output = interrupt(
        "bench", "hybrid", "--style=gradsync", "--trainers=1", "--servers=1", "--warmup=1",
        "--epochs=2", "--rounds=100000", path=tmp_path / "a.json",
    )  # fmt: skip
    assert len(case.measurements) == 2 * len(case.steps_by_round) > 0
    assert "gradsync/gradsync*" in output
    assert "stopped before its last round" in output


def test_a_trainer_that_fails_is_told_with_what_it_raised() -> None:
    done = run(
        "bench", "hybrid", "--style=gradsync", "--trainers=1", "--servers=1",
        "--embeddings=4000000000", "--format=csv",
    )  # fmt: skip
    assert done.returncode == 1
    assert "trainer0: ArgumentError: table benchmark: at most 3,000,000,000 rows" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainers", "0"], "'--trainers'"),
        (["--servers", "-1"], "'--servers'"),
        (["--embeddings", "many"], "'--embeddings'"),
        (["--embedding-dim", "0"], "'--embedding-dim'"),
        (["--warmup", "0"], "'--warmup'"),
        (["--style", "plain"], "unknown: plain; known: both, gradsync, reference"),
        (["--backend", "tcp"], "unknown: tcp"),
        (["--json", "/no/such/folder/a.json"], "is not a folder"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["gradsync", "bench", "hybrid", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_under_torchrun_it_says_that_it_starts_its_own_processes(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["gradsync", "bench", "hybrid"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "leave torchrun away" in capsys.readouterr().err


def test_help_explains_all_that_can_be_set() -> None:
    text = CliRunner().invoke(cli.app, ["bench", "hybrid", "--help"], env={"COLUMNS": "200"}).output
    for option in (
        "--trainers", "--servers", "--embeddings", "--embedding-dim", "--warmup", "--json",
        "--epochs", "--rounds", "--batch-size", "--seed", "--style",
    ):  # fmt: skip
        assert option in text
    assert "DistributedOptimizer" in text
