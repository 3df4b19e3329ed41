"""The click-through example reaches its area and equals one process; it runs as a program too."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "click_through.py"


def test_two_trainers_and_two_servers_reach_the_target_and_equal_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, whose children start without importing torch anew."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    monkeypatch.setattr(sys, "argv", [str(PROGRAM)])
    code = importlib.import_module(PROGRAM.stem).main()
    output = capsys.readouterr().out
    assert code == 0, output
    assert len(re.findall(r"^step +\d+/300  loss", output, re.MULTILINE)) == 6
    areas = [float(each) for each in re.findall(r"  (0\.\d{4})", output)]
    assert areas[-3] >= 0.84
    assert abs(areas[-3] - areas[-2]) < 1e-3
    assert areas[-1] > areas[-3]  # with hidden vectors


def test_a_target_that_is_missed_is_told_and_under_torchrun_too(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    done = subprocess.run(
        [sys.executable, *torchrun, PROGRAM, "--steps=20", "--target-auc=0.99"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "is below the target of 0.9900" in output
    assert "2 trainers, 2 servers" in output
