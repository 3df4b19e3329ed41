"""The command from end to end, with its own ranks."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from commands import ENVIRONMENT, gradsync, interrupt
from typer.testing import CliRunner

from gradsync.bench import cli, files

ROOT = Path(__file__).resolve().parents[2]
OWN = """
import os, signal
import torch
from gradsync.bench import Benchmark

class Tiny(Benchmark):
    batch_size = 4
    def create_model(self):
        return torch.nn.Linear(8, 3)
    def generate_inputs(self):
        return [torch.rand(self.batch_size, 8)]
    def generate_target(self):
        return torch.randint(3, (self.batch_size,))

class Dying(Tiny):
    steps = 0
    def loss(self, output, target):
        Dying.steps += 1
        if Dying.steps == 30 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, target)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_cases_that_cannot_run_or_die_leave_the_others_alone(own, tmp_path):
    finished = subprocess.run(
        gradsync(
            "bench", f"--benchmark={own}:Dying", "--model=nosuch",
            f"--benchmark={own}:Tiny", "--ranks=2,64", "--impl=torch,gradsync,none", "--steps=10",
            "--rounds=5", "--warm-up=2", f"--json={tmp_path / 'a.json'}", "--format=markdown",
        ),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 1, finished.stderr
    result = files.read(tmp_path / "a.json")
    assert result.status == "complete"
    errors = {(case.model, case.world): case.error for case in result.failed}
    assert errors["Dying", 2] == "rank 1 was killed by SIGKILL"
    assert "there is no model 'nosuch'" in errors["nosuch", 2]
    assert errors["Tiny", 64].startswith("64 ranks do not fit: this machine has")
    for error in errors.values():
        assert error in finished.stdout

    died = [case for case in result.cases if (case.model, case.world) == ("Dying", 2)]
    assert any(case.measurements for case in died), "what was measured before is kept"
    torchs, ours, none = (case for case in result.cases if (case.model, case.world) == ("Tiny", 2))
    assert [case.label for case in (torchs, ours, none)] == [
        "torch/gloo", "gradsync/gradsync", "none",
    ]  # fmt: skip
    for case in (torchs, ours, none):
        assert (case.error, case.complete, case.batch_size) == (None, True, 4)
        assert (len(case.measurements), case.steps_by_round) == (20, (2,) * 5)
        assert len(case.timelines) == 2
    assert "| 2 | gradsync/gradsync |" in finished.stdout


def test_ctrl_c_keeps_what_was_measured_and_ends_the_ranks(own, tmp_path):
    case, output = interrupt(
        "bench", f"--benchmark={own}:Tiny", "--ranks=1", "--impl=none", "--steps=100000",
        "--rounds=20000", path=tmp_path / "a.json",
    )  # fmt: skip
    assert len(case.measurements) == sum(case.steps_by_round) > 0
    assert "none*" in output


@pytest.mark.slow
def test_under_torchrun_the_ranks_are_torchruns(own, tmp_path):
    path = tmp_path / "a.json"
    finished = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", *gradsync()[2:], "bench", f"--benchmark={own}:Tiny", "--steps=5", "--rounds=5",
            "--impl=torch,gradsync", f"--json={path}",
        ],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert [(case.label, case.world) for case in files.read(path).cases] == [
        ("torch/gloo", 1), ("torch/gloo", 2), ("gradsync/gradsync", 1), ("gradsync/gradsync", 2),
    ]  # fmt: skip
    assert finished.stdout.count("gradsync/gradsync") == 2


@pytest.mark.slow
def test_collectives_are_timed_in_ranks_of_our_own(tmp_path):
    path = tmp_path / "a.json"
    finished = subprocess.run(
        gradsync(
            "bench-comm", "--collective=all_reduce,reduce", "--size=4k", "--ranks=2",
            "--rounds=5", "--turn-seconds=0.01", f"--json={path}",
        ),
        env=ENVIRONMENT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    found = {(case.collective, case.backend): case for case in files.read(path).comm_cases}
    assert len(found) == 4
    for case in found.values():
        assert (case.bytes, case.correct, len(case.seconds)) == (4096, True, 5)
        assert case.busbw == pytest.approx(case.algbw)  # the factor is 1 for two ranks


# ------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--impl", "horovod"], "unknown: horovod; known: torch"),
        (["bench", "--ranks", "0"], "not a number of 1 or more: 0"),
        (["bench", "--dtype", "int4"], "unknown: int4"),
        (["bench", "--comm-hook", "none"], "unknown: none; known: bf16"),
        (["bench", "--backend", "tcp"], "unknown: tcp"),
        (["bench-comm", "--collective", "gossip"], "unknown: gossip"),
        (["bench-comm", "--size", "4q"], "'4q' is not a size"),
        (["bench", "--json", "/no/such/folder/a.json"], "is not a folder"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gradsync", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_bench_is_a_group_that_can_have_subcommands():
    help_text = CliRunner().invoke(cli.app, ["bench", "--help"], env={"COLUMNS": "200"}).output
    assert "--benchmark" in help_text
    assert "--oversubscribe" in help_text


def test_the_command_is_installed():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["gradsync"].partition(":")
    assert callable(getattr(import_module(module), function))
