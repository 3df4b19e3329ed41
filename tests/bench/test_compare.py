"""``gradsync diff``: cases matched by identity, verdicts, formats, exit codes."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from gradsync.bench import cli, files
from gradsync.bench.compare import compare
from gradsync.bench.result import Case, CommCase, Result

NOISE = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0)


def case(seconds=1.0, *, model="mlp", implementation="torch", world=2, **settings):
    backend = None if implementation == "none" else settings.pop("backend", "gloo")
    return Case(
        model=model, batch_size=8, implementation=implementation, backend=backend,
        ranks=tuple(range(world)), steps_by_round=(1,) * len(NOISE),
        measurements=tuple(seconds * noise for noise in NOISE) * world, **settings,
    )  # fmt: skip


def rows_of(before, after):
    return compare(Result(cases=before), Result(cases=after)).rows


def test_a_shorter_time_is_faster_and_its_change_is_positive():
    (row,) = rows_of([case(2.0)], [case(1.0)])
    assert (row["verdict"], row["ratio"], row["median_change"]) == ("faster", 2.0, 50.0)
    assert row["p75_change"] == pytest.approx(50.0)
    assert row["p95_examples_per_second"] == pytest.approx(16 / row["p95"])
    (row,) = rows_of([case(1.0)], [case(2.0)])
    assert (row["verdict"], row["median_change"]) == ("slower", -100.0)


def test_times_within_the_noise_are_no_difference():
    (row,) = rows_of([case(1.0)], [case(1.001)])
    assert row["verdict"] == "no difference"
    assert row["ratio_low"] < 1 < row["ratio_high"]


def test_cases_are_matched_by_identity_not_by_position():
    before = [case(1.0, model="a"), case(2.0, model="b"), case(4.0, model="b", world=4)]
    after = [case(4.0, model="b", world=4), case(9.0, model="c"), case(2.0, model="b")]
    comparison = compare(Result(cases=before), Result(cases=after))
    assert [(row["title"], row["ranks"], row["ratio"]) for row in comparison.rows] == [
        ("b with batch size 8", 2, 1.0),
        ("b with batch size 8", 4, 1.0),
    ]
    assert comparison.only_before == ["a, batch size 8, 2 ranks, torch/gloo, float32"]
    assert comparison.only_after == ["c, batch size 8, 2 ranks, torch/gloo, float32"]


def test_implementations_and_backends_of_one_run_are_kept_apart():
    both = [case(1.0), case(2.0, implementation="gradsync", backend="gradsync")]
    assert [row["case"] for row in rows_of(both, both)] == ["torch/gloo", "gradsync/gradsync"]


def test_a_setting_that_sets_two_runs_apart_as_a_whole_is_what_is_compared():
    before = [case(2.0), case(1.0, implementation="none")]
    after = [case(1.0, backend="gradsync", bucket_cap_mb=50.0), case(1.0, implementation="none")]
    comparison = compare(Result(cases=before), Result(cases=after))
    assert [row["case"] for row in comparison.rows] == ["torch/gloo → torch/gradsync", "none"]
    header = {row["key"]: (row["baseline"], row["test"]) for row in comparison.header}
    assert header["backend"] == ("gloo", "gradsync")
    assert header["bucket_cap_mb"] == ("-", "50.0")


def test_cases_that_failed_are_not_compared():
    lost = replace(case(1.0), error="rank 1 was killed by SIGKILL")
    assert rows_of([case(1.0)], [lost]) == []


def test_collectives_are_compared_too():
    def comm(seconds):
        times = tuple(seconds * noise for noise in NOISE)
        return CommCase(collective="reduce", bytes=4096, backend="gloo", world=2, seconds=times)

    (row,) = compare(Result(comm_cases=[comm(1.0)]), Result(comm_cases=[comm(2.0)])).rows
    assert (row["title"], row["verdict"]) == ("reduce, 4 kB", "slower")


# ------------------------------------------------------------------------- the command


@pytest.fixture
def two_files(tmp_path):
    files.write(tmp_path / "a.json", Result(cases=[case(1.0), case(1.0, model="gone")]))
    files.write(tmp_path / "b.json", Result(cases=[case(1.2)]))
    return str(tmp_path / "a.json"), str(tmp_path / "b.json")


def run_diff(*arguments):
    return CliRunner().invoke(cli.app, ["diff", *arguments])


def test_the_table_shows_header_cases_and_what_is_only_in_one(two_files):
    result = run_diff(*two_files)
    assert result.exit_code == 0
    for text in (
        "baseline",
        "pytorch_version",
        "-20.0 %",
        "slower",
        "only in the baseline",
        "gone",
    ):
        assert text in result.output


@pytest.mark.parametrize(("limit", "code"), [("5%", 1), ("19.9", 1), ("20.1%", 0), ("50%", 0)])
def test_slower_than_the_limit_is_exit_code_1(two_files, limit, code):
    result = run_diff(*two_files, "--fail-if-slower", limit)
    assert result.exit_code == code
    assert ("is slower by 20.0 %" in result.output) == bool(code)


def test_faster_is_never_a_failure(two_files):
    assert run_diff(*two_files[::-1], "--fail-if-slower", "0%").exit_code == 0


def test_every_format_tells_the_same(two_files):
    content = json.loads(run_diff(*two_files, "--format", "json").output)
    (row,) = content["rows"]
    assert row["verdict"] == "slower"
    assert content["only_before"] == ["gone, batch size 8, 2 ranks, torch/gloo, float32"]
    (line,) = csv.DictReader(io.StringIO(run_diff(*two_files, "--format", "csv").output))
    assert float(line["ratio"]) == row["ratio"]
    assert "| slower |" in run_diff(*two_files, "--format", "markdown").output


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.json", "cut.json"],
        ["a.json", "missing.json"],
        ["a.json", "a.json", "--fail-if-slower=x"],
    ],
)
def test_bad_input_is_exit_code_2_with_a_message(
    arguments, two_files, tmp_path, monkeypatch, capsys
):
    (tmp_path / "cut.json").write_text((tmp_path / "a.json").read_text()[:-40])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gradsync", "diff", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "gradsync: " in capsys.readouterr().err
