"""The file of results: what is written is read back, by us and by torch's diff.py; bad files."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.bench import files
from gradsync.bench.result import SCHEMA_VERSION, Case, CommCase, Result, Timeline

seconds = st.floats(min_value=1e-6, max_value=1e3)


@st.composite
def cases(draw):
    world, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    implementation = draw(st.sampled_from(["none", "torch", "gradsync"]))
    return Case(
        model=draw(st.sampled_from(["mlp", "resnet50"])),
        batch_size=draw(st.sampled_from([8, 32])),
        implementation=implementation,
        backend=None if implementation == "none" else draw(st.sampled_from(["gloo", "gradsync"])),
        bucket_cap_mb=None if implementation == "none" else 25.0,
        ranks=tuple(range(world)),
        measurements=tuple(draw(st.lists(seconds, min_size=world * steps, max_size=world * steps))),
        steps_by_round=(steps,),
        peak_memory=tuple(range(world)),
        timelines=tuple(
            Timeline(rank=r, forward=1.0, backward=2.0, communication=1.0, exposed=0.5)
            for r in range(world)
        ),
        complete=draw(st.booleans()),
    )


def identity(case):
    return *map(str, case.series), case.world


@given(st.lists(cases(), max_size=6, unique_by=identity), st.lists(st.booleans(), max_size=2))
@settings(deadline=None)
def test_what_is_written_is_read_back(measured, failures):
    failed = [
        Case(model="m", batch_size=1, ranks=(0,), implementation="torch", seed=i, error="lost")
        for i, _ in enumerate(failures)
    ]
    comm = [CommCase(collective="reduce", bytes=4, backend="gloo", world=2, seconds=(1.0, 2.0))]
    result = Result(cases=[*measured, *failed], comm_cases=comm, header={"cores": 2}, notes=["n"])
    again = files.parse(json.dumps(files.document(result)))
    assert sorted(again.cases, key=identity) == sorted(result.cases, key=identity)
    assert replace(again, cases=[]) == replace(result, cases=[])


def test_a_file_is_replaced_in_one_move_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "a.json"
    files.write(path, Result(command="one"))
    files.write(path, Result(command="two"))
    assert files.read(path).command == "two"
    assert os.listdir(path.parent) == ["a.json"]
    with pytest.raises(ValueError, match="JSON"):
        files.write(path, Result(header={"bad": float("nan")}))
    assert files.read(path).command == "two"
    assert os.listdir(path.parent) == ["a.json"]


# What torch's diff.py does with two files: keys, order of access and arithmetic are its own.
def diff_as_torch_does(ja, jb):
    rows = []
    for ra, rb in zip(ja["benchmark_results"], jb["benchmark_results"], strict=False):
        if ra["model"] != rb["model"] or ra["batch_size"] != rb["batch_size"]:
            continue
        for i, (xa, xb) in enumerate(zip(ra["result"], rb["result"], strict=False)):
            if i == 0 or len(xa["ranks"]) != len(xb["ranks"]):
                continue
            ma, mb = sorted(xa["measurements"]), sorted(xb["measurements"])
            for p in (75, 95):
                va, vb = np.percentile(ma, p), np.percentile(mb, p)
                examples = int(int(ra["batch_size"]) / vb)
                change = -100 * ((vb - va) / va)
                rows.append((ra["model"], len(xa["ranks"]), p, examples, round(change, 1)))
    for key in (set(ja) | set(jb)) - {"benchmark_results"}:
        f"{key + ':':20s} {ja.get(key, '-')!s:>20s}  vs  {jb.get(key, '-')!s:>20s}"
    return rows


def run_of(*, scale):
    def case(implementation, world, value):
        return Case(
            model="mlp", batch_size=8, implementation=implementation, ranks=tuple(range(world)),
            backend=None if implementation == "none" else "gloo",
            measurements=(value * scale,) * 4 * world, steps_by_round=(2, 2),
        )  # fmt: skip

    failed = Case(model="x", batch_size=1, ranks=(0,), implementation="torch", error="lost")
    measured = [case("torch", 1, 1.0), case("torch", 2, 2.0), case("none", 1, 0.5)]
    return Result(cases=[failed, *measured, case("gradsync", 2, 1.0)])


def test_torchs_diff_reads_our_files():
    before, after = (
        json.loads(json.dumps(files.document(run_of(scale=scale)))) for scale in (1.0, 0.5)
    )
    assert diff_as_torch_does(before, after) == [
        ("mlp", ranks, percent, examples, 50.0)
        for ranks, examples in ((1, 16), (2, 8), (1, 32), (2, 16))
        for percent in (75, 95)
    ]
    first = before["benchmark_results"][0]["result"][0]  # which diff.py takes for "no ddp"
    assert (first["ranks"], first["measurements"]) == ([0], [0.5] * 4)


TORCHS = {
    "pytorch_version": "1.13.0",
    "cuda_version": "11.7",
    "distributed_backend": "nccl",
    "bucket_size": 25,
    "benchmark_results": [
        {
            "model": "resnet50",
            "batch_size": 32,
            "result": [
                {"ranks": [0], "measurements": [1.0, 1.1]},
                {"ranks": [0], "measurements": [1.2, 1.3]},
                {"ranks": [0, 1], "measurements": [1.4, 1.5, 1.6, 1.7]},
            ],
        }
    ],
}


def test_files_of_torchs_benchmark_are_read():
    result = files.parse(json.dumps(TORCHS))
    assert result.pytorch_version == "1.13.0"
    assert result.schema_version is None
    found = [(case.implementation, case.backend, case.world) for case in result.cases]
    assert found == [("none", None, 1), ("torch", "nccl", 1), ("torch", "nccl", 2)]
    assert result.cases[2].by_rank() == ((1.4, 1.5), (1.6, 1.7))
    assert result.cases[2].by_round() == ((1.4, 1.6), (1.5, 1.7))


def damaged(**changes):
    return json.dumps({**files.document(run_of(scale=1.0)), **changes})


WHOLE = json.dumps(files.document(run_of(scale=1.0)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (WHOLE[: len(WHOLE) // 2], "is not JSON, or was cut short"),
        ("[1, 2]", "no results of gradsync bench"),
        ('{"a": 1}', "'benchmark_results' is missing"),
        (damaged(schema_version=SCHEMA_VERSION + 1), r"schema version 2 is not known"),
        (damaged(schema="pytest-benchmark"), "its schema is 'pytest-benchmark'"),
        (damaged(benchmark_results=3), "benchmark_results is not a list"),
        (damaged(benchmark_results=[3]), r"benchmark_results\[0\] is not an object"),
        (
            damaged(comm_results=[{"collective": "reduce", "bytes": "many"}]),
            r"comm_results\[0\].bytes is 'many', not int",
        ),
        (damaged(failed=[{"model": "m"}]), r"failed\[0\] lacks 'batch_size'"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text, message, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(files.ResultFileError, match=rf"a\.json: .*{message}"):
        files.read(tmp_path / "a.json")


@given(st.integers(0, len(WHOLE) - 2))
@settings(deadline=None)
def test_a_file_that_was_cut_anywhere_is_an_error_of_ours(length):
    with pytest.raises(files.ResultFileError):
        files.parse(WHOLE[:length])


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    with pytest.raises(files.ResultFileError, match=r"b\.json: cannot be read: No such file"):
        files.read(tmp_path / "b.json")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(files.ResultFileError, match=r"c\.json: cannot be read: it is not text"):
        files.read(tmp_path / "c.json")
