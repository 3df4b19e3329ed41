"""The command line as a user starts it, for tests of `gradsync bench` and its subcommands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gradsync.bench import files
from gradsync.bench.result import Case

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}


def gradsync(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradsync.bench", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        gradsync(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=110
    )


def interrupt(*arguments: str, path: Path) -> tuple[Case, str]:
    """Press Ctrl-C when the first case is in the file; the case that is kept, and the output."""
    process = subprocess.Popen(
        gradsync(*arguments, f"--json={path}"),
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 80
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and files.read(path).cases:
            break
        time.sleep(0.2)  # between looks at the file
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    result = files.read(path)
    (case,) = result.cases
    assert (result.status, case.complete, case.error) == ("interrupted", False, None)
    return case, output
