"""What the race of the collectives concludes, and that it runs from end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import collectives  # noqa: E402
from race import collective_report as report  # noqa: E402
from race import ranks, targets  # noqa: E402
from race.cases import BUSY, Case  # noqa: E402
from race.exercises import BARE, COPIED, FRONT, GLOO, OPENMPI, PERSISTENT, SYMMETRIC  # noqa: E402
from race.stats import median_interval  # noqa: E402

KB, MB = 1024, 1024**2


def measured(operation: str = "all_reduce", size: int = 4 * MB, **seconds: float) -> Case:
    case = Case(operation=operation, world=2, bytes=size, complete=True)
    case.seconds = {name: [value] * 7 for name, value in seconds.items()}
    return case


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(BENCHMARKS / "collectives.py"), *arguments]


def environment() -> dict[str, str]:
    """Not that of a rank of the launcher that may run this test."""
    ours = ("TORCHELASTIC_", "OMPI_", "PMIX_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)}


# ------------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([12.0] * 7, "met"), ([11.9] * 7, "missed"), ([11, 11, 11, 12, 13, 13, 13], "open")],
)
def test_a_target_is_met_or_missed_by_the_whole_interval(
    ratios: list[float], expected: str
) -> None:
    assert targets.verdict(median_interval(ratios), 12) == expected


def test_too_few_rounds_leave_a_target_open() -> None:
    assert targets.verdict(median_interval([99.0] * 5), 12) == "open"


def test_every_ratio_has_the_target_of_its_size_and_ranks() -> None:
    case = measured(gloo=12.0, symmetric=1.0, copied=2.5, openmpi=1.5, bare=0.75, persistent=0.9)
    found = {(c.contender, c.ratio.versus): (c.target, c.verdict) for c in report.comparisons(case)}
    assert found[SYMMETRIC, GLOO] == (12, "met")
    assert found[SYMMETRIC, OPENMPI] == (1.5, "met")
    assert found[SYMMETRIC, BARE] == (0.75, "met")
    assert found[PERSISTENT, BARE] == (0.75, "met")
    assert found[COPIED, GLOO] == (6, "missed")
    assert found[COPIED, OPENMPI] == (None, None)


def test_a_size_outside_the_table_has_no_target() -> None:
    (comparison,) = report.comparisons(measured(size=MB, gloo=2.0, symmetric=1.0))
    assert comparison.target is None


def test_the_other_collectives_are_to_be_twice_as_fast_as_gloo() -> None:
    for name, size in (("scatter", 4 * KB), ("scatter", 4 * MB), ("barrier", 0)):
        (comparison,) = report.comparisons(measured(name, size, gloo=3.0, copied=1.0))
        assert (comparison.target, comparison.verdict) == (2, "met")


# ------------------------------------------------------------------------- tables


def test_the_table_says_that_openmpi_is_absent() -> None:
    text = report.markdown([measured(gloo=12.0, symmetric=1.0)], ["openmpi does not race: why."])
    assert "no openmpi" in text
    assert "openmpi does not race: why." in text


def test_a_wrong_result_is_told() -> None:
    case = measured(gloo=12.0, symmetric=1.0)
    case.is_right = {GLOO: True, SYMMETRIC: False}
    assert "symmetric did not give the right result" in report.markdown([case], [])


def test_numbers_of_a_busy_or_another_machine_are_marked() -> None:
    assert report.notes_on_machine(cores=2, load=0.3) == []
    (note,) = report.notes_on_machine(cores=2, load=4.0)
    assert "load 4.0 on 2 cores" in note
    assert "for 2 cores; here there are 8" in report.notes_on_machine(cores=8, load=0.3)[0]


def test_cpu_time_is_compared_beside_the_time_of_a_step() -> None:
    case = measured(BUSY, gloo=4.0, symmetric=2.0)
    case.cpu_seconds = {GLOO: [9.0] * 7, SYMMETRIC: [3.0] * 7}
    assert report.cpu_ratios(case)[SYMMETRIC].median == 3.0
    assert all(comparison.target is None for comparison in report.comparisons(case))


def test_a_case_that_was_stopped_counts_its_whole_rounds() -> None:
    case = measured(gloo=12.0, symmetric=1.0)
    case.complete = False
    case.seconds[SYMMETRIC].pop()
    (comparison,) = report.comparisons(case)
    assert len(comparison.ratio.per_round) == 6
    assert "stopped after 6 rounds" in report.markdown([case], [])


# ------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("4kB", 4096), ("256 KB", 262144), ("25MB", 26214400)]
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert collectives.parse(["--sizes", text]).sizes == (size,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "large"], "'large' is no size; write 4096, 4kB or 25MB"),
        (["--sizes", "6"], "'6' is no whole number of float32"),
        (["--ranks", "1"], "numbers of ranks are 2 to 64"),
        (["--contenders", "nccl"], "no such contender: nccl; known: gloo, symmetric"),
        (["--collectives", "scan"], "no such collective: scan; known: all_reduce, broadcast"),
        (["--rounds", "6"], "--rounds must be 7 or more, or 1 or more with --quick"),
        (["--slot-seconds", "0"], "--slot-seconds must be positive"),
        (["--busy", "--all"], "--busy is a race of its own"),
        (["--json", "/"], "--json: / is a directory"),
    ],
)
def test_an_argument_that_cannot_be_is_told(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(SystemExit) as ended:
        collectives.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------- launching


def test_openmpi_is_absent_without_mpirun_and_the_reason_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    name, reason = ranks.find_openmpi()
    assert name is None
    assert "no mpirun" in (reason or "")
    assert "apt install openmpi-bin" in (reason or "")


def test_with_openmpi_mpirun_starts_the_ranks_and_else_torchrun() -> None:
    script = Path("race.py")
    assert ranks.command(2, script, ["--quick"], with_mpi=True)[:3] == ["mpirun", "-n", "2"]
    assert "torch.distributed.run" in ranks.command(2, script, [], with_mpi=False)


# ------------------------------------------------------------------------- from end to end


def test_all_reduce_races_and_the_result_is_written(tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    finished = subprocess.run(
        command("--quick", "--ranks", "2", "--sizes", "4kB", "--json", str(result), "--markdown"),
        env=environment(), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "| 4 kB | symmetric |" in finished.stdout
    document = json.loads(result.read_text())
    assert document["schema_version"] == 1
    assert not document["interrupted"]
    (case,) = document["cases"]
    assert case["complete"]
    assert {GLOO, SYMMETRIC, COPIED, PERSISTENT, BARE, FRONT} <= case["seconds"].keys()
    assert all(case["is_right"].values())
    if OPENMPI not in case["seconds"]:
        assert any("openmpi does not race" in note for note in document["notes"])


@pytest.mark.slow
def test_the_other_collectives_race_without_openmpi(tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    names = "broadcast,all_gather,reduce_scatter,all_to_all,gather,scatter,reduce,barrier,ping_pong"
    finished = subprocess.run(
        command(
            "--quick", "--rounds", "1", "--ranks", "2", "--sizes", "4kB", "--collectives", names,
            "--json", str(result),
        ),
        env=environment(), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    cases = json.loads(result.read_text())["cases"]
    assert [case["operation"] for case in cases] == names.split(",")
    assert all(case["is_right"] == {GLOO: True, COPIED: True} for case in cases)


@pytest.mark.slow
def test_busy_steps_have_a_cpu_time(tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    finished = subprocess.run(
        command("--quick", "--busy", "--ranks", "2", "--sizes", "4kB", "--json", str(result)),
        env=environment(), capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (case,) = json.loads(result.read_text())["cases"]
    assert all(value > 0 for values in case["cpu_seconds"].values() for value in values)
    assert case["cpu_ratios"].keys() == {SYMMETRIC, COPIED}


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    result = tmp_path / "race.json"
    race = subprocess.Popen(
        command(
            "--ranks", "2", "--sizes", "4kB,64MB", "--contenders", "gloo,copied", "--quick",
            "--rounds", "30", "--json", str(result),
        ),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert race.stdout is not None
    assert any("4 kB: done" in line for line in race.stdout)
    race.send_signal(signal.SIGINT)
    output, _ = race.communicate(timeout=80)
    assert race.returncode == 130, output
    document = json.loads(result.read_text())
    assert document["interrupted"]
    assert [case["complete"] for case in document["cases"]] == [True, False]
    assert "64 MB: stopped after" in output
