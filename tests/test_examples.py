"""The examples run as their users run them: as programs, from another directory."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = EXAMPLES / "digits.py"
ALONE = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start(launcher, *arguments, cwd, program=DIGITS):
    return subprocess.Popen(
        [*launcher, program, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, seconds=90):
    """Exit code, output and errors; torchrun, told to terminate, takes its ranks with it."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except BaseException:
        process.terminate()
        process.communicate(timeout=40)
        raise
    return process.returncode, output, errors


def test_digits_trains_on_two_ranks_to_equal_weights(tmp_path):
    code, output, errors = finish(start(TWO_RANKS, "--epochs", "6", cwd=tmp_path))
    assert code == 0, output + errors
    assert errors == ""
    assert len(re.findall(r"^epoch +\d/6 ", output, re.MULTILINE)) == 6
    accuracy = re.search(r"test accuracy +│ +([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
    assert "identical on 2 ranks" in output
    first, second = re.findall(r"^rank \d  ([0-9a-f]{64})$", output, re.MULTILINE)
    assert first == second


def test_digits_alone_says_so_and_fails_when_the_target_is_missed(tmp_path):
    code, output, errors = finish(
        start(ALONE, "--epochs", "1", "--lr", "0.001", "--target-accuracy", "1", cwd=tmp_path)
    )
    assert code == 1
    assert "one process (not started by torchrun" in output
    assert "FAILED: test accuracy" in output
    assert "below the target of 100.00%" in output
    assert errors == ""


def test_digits_interrupted_tells_what_it_reached(tmp_path):
    process = start(ALONE, "--epochs", "1000", cwd=tmp_path)
    assert process.stdout is not None
    seen = ""
    while "epoch  2/" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    code, output, errors = finish(process)
    assert code == 130
    assert re.search(r"Interrupted after \d+ steps: epoch \d+, loss", output)
    assert errors == ""


def test_digits_names_an_option_that_cannot_be(tmp_path):
    code, _, errors = finish(start(ALONE, "--batch-size", "5000", cwd=tmp_path))
    assert code == 2
    assert "--batch-size" in errors
    assert "5000 is more than the 1437 training examples" in " ".join(errors.split())


def test_compile_overlap_shows_buckets_sent_early_and_writes_a_trace(tmp_path):
    program = EXAMPLES / "compile_overlap.py"
    arguments = ("--layers", "3", "--width", "512", "--trace", "overlap.json")
    code, output, errors = finish(start(TWO_RANKS, *arguments, cwd=tmp_path, program=program))
    assert code == 0, output + errors
    assert "2 of 4 buckets were sent before the last graph ran backward" in output
    trace = (tmp_path / "overlap.json").read_text()
    assert "CompiledFunctionBackward" in trace
    assert "gloo:all_reduce" in trace
