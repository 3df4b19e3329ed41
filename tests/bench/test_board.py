"""What the display and the file make of the ranks' events, and the tables at the end."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from rich.console import Console

from gradsync.bench import files, tables
from gradsync.bench.board import Board
from gradsync.bench.comm import CommHeat
from gradsync.bench.contenders import Contender
from gradsync.bench.result import Case, Result
from gradsync.bench.worker import Heat

TORCH = Contender(implementation="torch", backend="gloo")
NONE = Contender(implementation="none")
HEATS = [Heat(workload="mlp", world=world, contenders=(TORCH, NONE)) for world in (1, 2)]


def measured(contender, number, *ranks):
    return {"event": "measured", "contender": contender, "round": number, "seconds": list(ranks)}


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=30)


def test_measurements_are_kept_by_rank_and_round(terminal, tmp_path):
    path = tmp_path / "a.json"
    board = Board(Result(), HEATS, console=terminal, path=path)
    board.handle(1, {"event": "begun"})
    board.handle(1, {"event": "ready", "batch_size": 4, "parameters": 9})
    board.handle(1, measured(0, 0, [1.0, 2.0], [3.0, 4.0]))
    board.handle(1, measured(0, 1, [5.0], [6.0]))
    board.finish(is_interrupted=True)
    (case,) = files.read(path).cases
    assert case.by_rank() == ((1.0, 2.0, 5.0), (3.0, 4.0, 6.0))
    assert case.by_round() == ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0))
    assert (case.batch_size, case.complete) == (4, False)
    assert files.read(path).status == "interrupted"


def test_a_heat_that_fails_keeps_its_measurements_and_names_the_error(terminal):
    result = Result(
        cases=[Case(model="x", batch_size=1, ranks=(0,), implementation="torch", error="no")]
    )
    board = Board(result, HEATS, console=terminal, path=None)
    board.handle(0, measured(1, 0, [1.0]))
    board.fail(0, "rank 0 was killed")
    board.handle(1, measured(0, 0, [1.0], [1.0]))
    board.handle(1, {"event": "done"})
    board.finish(is_interrupted=False)
    found = [(case.model, case.label, case.error, case.complete) for case in result.cases]
    assert found == [
        ("x", "torch", "no", True),
        ("mlp", "torch/gloo", "rank 0 was killed", False),
        ("mlp", "none", "rank 0 was killed", False),
        ("mlp", "torch/gloo", None, True),
    ]
    assert (board.is_done(0), board.is_done(1)) == (False, True)


def test_the_display_shows_what_runs_what_is_left_and_what_was_measured(terminal):
    board = Board(Result(), HEATS, console=terminal, path=None)
    with board:
        board.handle(0, {"event": "begun"})
        board.handle(0, measured(0, 0, [0.002]))
        board.handle(0, {"event": "turn", "contender": 1, "round": 2})
        board._drawn = 0.0
        board.handle(0, measured(1, 0, [0.001]))
        shown = re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.file.getvalue())
    assert "mlp, 1 rank: none, round 1" in shown
    assert "torch/gloo" in shown
    assert "2.00 ms" in shown
    assert "× 2.00" in shown
    assert "left: mlp on 2" in shown


def test_without_a_terminal_the_display_is_a_log():
    log = Console(file=io.StringIO(), width=120)
    heat = CommHeat(collective="reduce", bytes=4096, world=2, backends=("gloo",))
    board = Board(Result(), [heat], console=log, path=None)
    with board:
        board.handle(0, {"event": "begun"})
        board.handle(0, {"event": "calibrated", "contender": 0, "correct": True, "repetitions": 9})
        board.handle(0, {"event": "timed", "contender": 0, "round": 0, "seconds": 1e-5})
        board.handle(0, {"event": "done"})
    assert log.file.getvalue() == "reduce 4 kB, 2 ranks ...\n  gloo: median 10.0 µs\n"


# ------------------------------------------------------------------------- tables


def case(implementation, world, seconds):
    return Case(
        model="mlp", batch_size=8, implementation=implementation, ranks=tuple(range(world)),
        backend=None if implementation == "none" else "gloo",
        measurements=(seconds, seconds * 1.01) * 6 * world, steps_by_round=(2,) * 6,
    )  # fmt: skip


def test_a_table_has_scaling_ratio_and_verdict():
    result = Result(
        cases=[
            case("torch", 1, 1.0), case("none", 1, 0.8), case("torch", 2, 2.0),
            case("gradsync", 2, 1.0),
        ]
    )  # fmt: skip
    (sheet,) = tables.sheets_of(result)
    one, _, two, ours = sheet.rows
    assert (one["ratio"], one["efficiency_of_1_rank"]) == (None, 1.0)
    assert two["efficiency_of_1_rank"] == pytest.approx(0.5)
    assert two["efficiency_of_no_ddp"] == pytest.approx(0.4)
    assert (ours["ratio"], ours["verdict"]) == (pytest.approx(2.0), "faster")
    assert ours["examples_per_second"] == pytest.approx(16 / 1.005)


def test_every_format_has_every_row(capsys):
    sheets = tables.sheets_of(Result(cases=[case("torch", 2, 2.0), case("gradsync", 2, 1.0)]))
    assert len(list(csv.DictReader(io.StringIO(tables.csv_text(sheets))))) == 2
    assert len(json.loads(tables.json_text(sheets))["tables"][0]["rows"]) == 2
    assert tables.markdown(sheets).count("\n| 2 |") == 2
    for how in tables.FORMATS:
        tables.show(sheets, how)
        assert "gradsync/gloo" in capsys.readouterr().out
