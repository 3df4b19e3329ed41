"""What the wrapper adds: that it runs, and says what it cannot do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "wrapper_cost.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_prints_what_forward_and_backward_cost_more() -> None:
    done = run("--workloads", "policy", "--steps", "20")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "policy" in line]
    assert len(rows) == 2
    for row, phase in zip(rows, ("forward", "backward"), strict=True):
        assert phase in row
        plain, ours, more = (float(cell) for cell in row.strip("│").split("│")[2:])
        assert plain > 0
        assert abs(ours - plain - more) < 0.11


def test_a_workload_that_does_not_exist_is_named() -> None:
    done = run("--workloads", "huge")
    assert done.returncode == 2
    assert "no such workload: huge" in done.stderr
