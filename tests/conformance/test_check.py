"""The judge of the conformance run, and that a run cleans up after itself."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import check
import pytest

pytestmark = pytest.mark.conformance

TORCH = "torch.nn.parallel:DistributedDataParallel"
QUICK = r"dist::DistGloo.test_ddp_zero_output_features"


def record(id_, outcome="pass", constructed=2, constructed_torch_ddp=0, reason=""):
    return {
        "id": id_,
        "outcome": outcome,
        "constructed": constructed,
        "constructed_torch_ddp": constructed_torch_ddp,
        "reason": reason,
    }


def test_a_listed_test_that_fails_is_lost_with_its_reason():
    verdict = check.judge([record("a"), record("b", "fail", reason="boom")], {"a", "b"}, set())
    assert verdict.passing == ["a"]
    assert verdict.lost == {"b": "fail: boom"}


def test_a_listed_test_that_no_longer_exists_is_lost():
    assert list(check.judge([record("a")], {"a", "gone"}, set()).lost) == ["gone"]


@pytest.mark.parametrize(
    "elsewhere",
    [record("a", constructed=0), record("a", constructed_torch_ddp=1)],
    ids=["no DDP constructed", "torch's DDP constructed"],
)
def test_passing_without_the_candidate_does_not_count(elsewhere):
    verdict = check.judge([elsewhere], {"a"}, set())
    assert verdict.passing == []
    assert list(verdict.lost) == ["a"]


def test_tests_beyond_the_list_and_those_torch_passes_are_named():
    records = [record("a"), record("b"), record("c", "error", reason="timeout")]
    verdict = check.judge(records, {"a"}, {"a", "b", "c"})
    assert verdict.beyond == ["b"]
    assert verdict.missing == {"c": "error: timeout"}
    assert not verdict.lost


def test_the_committed_list_holds_only_tests_of_the_baseline():
    known = {t["id"] for t in json.loads((check.HERE / "baseline.json").read_text())["tests"]}
    listed = json.loads((check.HERE / "expected.json").read_text())["must_pass"]
    assert set(listed) <= known
    assert listed == sorted(set(listed))


def start(tmp_path, expected, *arguments, **environment):
    """check.py from another working directory, with a list and a temporary folder of its own."""
    path = tmp_path / "expected.json"
    path.write_text(json.dumps({"torch": "2.13.0", "must_pass": expected}))
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, check.__file__, "--expected", path, *arguments],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_class_is_judged_by_a_real_run_from_any_directory(tmp_path):
    run = start(tmp_path, [QUICK], "--ddp", TORCH, "--select", f"{QUICK}$")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0, output
    assert "every test on the list passes" in output
    assert os.listdir(tmp_path / "tmp") == []


def test_a_class_that_fails_a_listed_test_fails_the_run(tmp_path):
    (tmp_path / "broken.py").write_text(
        "class DDP:\n    def __init__(self, *args, **kwargs):\n        raise RuntimeError('no')\n"
    )
    run = start(
        tmp_path, [QUICK], "--ddp", "broken:DDP", "--select", f"{QUICK}$", PYTHONPATH=str(tmp_path)
    )
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 1, output
    assert "1 that must pass fail" in output
    assert QUICK in output


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_leaves_no_process_behind(tmp_path, signum):
    (tmp_path / "stuck.py").write_text(
        "import pathlib, time\n"
        "class DDP:\n"
        "    def __init__(self, *args, **kwargs):\n"
        f"        pathlib.Path({str(tmp_path / 'reached')!r}).touch()\n"
        "        time.sleep(600)\n"
    )
    run = start(
        tmp_path, [], "--ddp", "stuck:DDP", "--select", f"{QUICK}$", PYTHONPATH=str(tmp_path)
    )
    wait_until((tmp_path / "reached").exists, seconds=60)
    run.send_signal(signum)
    run.communicate(timeout=20)
    wait_until(lambda: not processes_of(tmp_path), seconds=20)


def processes_of(folder):
    """Processes whose environment names the folder: the run's servers, tests and ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds} s"
        time.sleep(0.05)


def test_the_list_for_our_backend_gives_a_reason_for_every_test_that_does_not_pass():
    expected = json.loads((check.HERE / "expected_backend.json").read_text())
    assert len(expected["must_pass"]) > 100
    assert all(reason for reason in expected["exceptions"].values())
    assert not set(expected["must_pass"]) & expected["exceptions"].keys()
