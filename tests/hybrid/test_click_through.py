"""The click-through example runs as a program, reaches its area and equals one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "examples" / "click_through.py"


def start(*arguments: str, cwd: Path, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *launcher, PROGRAM, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_two_trainers_and_two_servers_reach_the_target_and_equal_one_process(
    tmp_path: Path,
) -> None:
    code, output = start(cwd=tmp_path)
    assert code == 0, output
    assert len(re.findall(r"^step +\d+/300  loss", output, re.MULTILINE)) == 6
    areas = [float(each) for each in re.findall(r"  (0\.\d{4})", output)]
    assert areas[-3] >= 0.84
    assert abs(areas[-3] - areas[-2]) < 1e-3
    assert areas[-1] > areas[-3]  # with hidden vectors


def test_a_target_that_is_missed_is_told_and_under_torchrun_too(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
    code, output = start("--steps=20", "--target-auc=0.99", cwd=tmp_path, launcher=torchrun)
    assert code == 1
    assert "is below the target of 0.9900" in output
    assert "2 trainers, 2 servers" in output
