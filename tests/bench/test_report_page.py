"""The page of ``gradsync report``, its pictures, and what the command says of bad input."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_results as made

from gradsync.bench import cli, files
from gradsync.bench.report import png, write_report
from gradsync.bench.report.data import collect
from gradsync.bench.result import BENCH_HYBRID, Result, Timeline


class Reader(HTMLParser):
    """The tables as text, the ids, and whatever refers to something outside."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.scripts = 0
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.scripts += tag == "script"
        for name, value in attrs:
            assert not name.startswith("on"), "no scripts in attributes"
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action", "srcset", "data"):
                self.links.append(value)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture
def folder(tmp_path):
    files.write(tmp_path / "a.json", made.bench())
    files.write(tmp_path / "b.json", made.bench(speed=1.4))
    files.write(tmp_path / "comm.json", made.bench_comm())
    (tmp_path / "torch.json").write_text(made.torchs_own())
    return tmp_path


def report(folder: Path, *names: str, **options: object) -> str:
    write_report([folder / name for name in names], folder / "r.html", **options)
    return (folder / "r.html").read_text()


def figures(page: str) -> list[str]:
    return re.findall(r'<figure id="([^"]+)"', page)


def run(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["gradsync", "report", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


# ------------------------------------------------------------------------- what is on it


def test_a_run_has_all_plots_and_its_numbers_in_tables_without_scripts(folder):
    page = report(folder, "a.json")
    assert figures(page) == [
        "mlp-32-float32-scaling",
        "mlp-32-float32-ratios",
        "mlp-32-float32-4-steps",
        "mlp-32-float32-2-steps",
        "mlp-32-float32-1-steps",
        "mlp-32-float32-4-timeline",
        "mlp-32-float32-2-timeline",
    ]
    measured, timelines, facts = Reader(page).tables
    assert measured[0][:3] == ["ranks", "case", "p50"]
    assert len(measured) == 1 + 12
    row = next(row for row in measured if row[:2] == ["4", "gradsync/gradsync"])
    assert row[-1] == "▲ faster"
    assert timelines[0] == [
        "ranks", "case", "rank", "forward", "backward", "communication", "exposed",
    ]  # fmt: skip
    assert len(timelines) == 1 + 4 * (1 + 2 + 4)
    assert ["cpu", "Some CPU"] in facts
    assert re.search(r"Faster than torch/gloo: .*gradsync/gradsync \(1\.4", page)


def test_the_page_asks_for_nothing_from_outside(folder):
    page = report(folder, "a.json", "b.json", "comm.json", "torch.json")
    reader = Reader(page)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", page)
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    assert len(reader.ids) == len(set(reader.ids))
    assert reader.scripts == 1
    assert "default-src 'none'" in page


def test_collectives_have_time_bandwidths_and_ratios(folder):
    page = report(folder, "comm.json")
    assert figures(page) == [
        "all_reduce-4-float32-time",
        "all_reduce-4-float32-algbw",
        "all_reduce-4-float32-busbw",
        "all_reduce-4-float32-ratios",
        "broadcast-4-float32-time",
        "broadcast-4-float32-algbw",  # busbw is the same
        "broadcast-4-float32-ratios",
    ]
    assert "gradsync is 2.00 to 2.00 times as fast as gloo" in page


def test_a_file_of_torchs_benchmark_has_what_it_tells_and_says_what_it_does_not(folder):
    page = report(folder, "torch.json")
    assert [name.rpartition("-")[2] for name in figures(page)] == ["scaling", "steps", "steps"]
    assert "the files do not tell the parts of a step, so there is no timeline" in page
    assert "written by torch's benchmark.py" in Reader(page).text


def test_hybrid_training_has_words_of_its_own(folder):
    ours, plain = (
        replace(made.case(name, 2), model="hybrid: 4 servers", timelines=())
        for name in ("gradsync", "torch")
    )
    cases = [replace(plain, implementation="reference"), ours]
    files.write(folder / "hybrid.json", Result(kind=BENCH_HYBRID, cases=cases))
    page = report(folder, "hybrid.json")
    assert "time of an epoch on 2 trainers" in page
    assert "Faster than reference/gloo: gradsync/gradsync" in page
    assert "Not drawn" not in page
    assert Reader(page).tables[0][1][:3] == ["reference/gloo", "trainer0", "50"]


def test_a_second_run_is_compared_with_the_first_that_has_the_same_cases(folder):
    page = report(folder, "comm.json", "a.json", "b.json")
    assert "b-2-against-a" in figures(page)
    assert not any(name.endswith("against-comm") for name in figures(page))
    assert "gradsync/gradsync, b" in page  # rows name the run where there are several


def test_files_of_one_name_and_cases_of_one_name_are_kept_apart(folder):
    result = made.bench(2)
    others = [replace(case, batch_size=64) for case in result.cases]
    (folder / "x").mkdir()
    files.write(folder / "x" / "a.json", replace(result, cases=[*result.cases, *others]))
    reader = Reader(page := report(folder, "a.json", "x/a.json"))
    assert len(reader.ids) == len(set(reader.ids))
    assert "<strong>a (2)</strong>" in page
    assert ">mlp, batch size 64 a rank, float32</a>" in page


def test_one_number_of_ranks_gives_no_scaling_curve_and_says_so(folder):
    files.write(folder / "one.json", made.bench(2))
    page = report(folder, "one.json")
    assert "one number of ranks only, so there is no scaling curve" in page
    assert not any(name.endswith("scaling") for name in figures(page))


def test_text_from_the_file_cannot_become_markup(folder):
    evil = "<script>alert(1)</script>"
    cases = [replace(case, model=evil) for case in made.bench().cases]
    cases.append(replace(made.case("torch", 2), measurements=(), error=evil))
    result = Result(command=evil, header={"cpu": evil, "topology": evil}, notes=[evil], cases=cases)
    files.write(folder / "evil.json", result)
    reader = Reader(page := report(folder, "evil.json", title=evil))
    assert evil not in page
    assert reader.scripts == 1
    assert evil in reader.text


def test_impossible_values_are_listed_and_the_rest_is_drawn(folder):
    good, *others = made.bench(1, 2).cases
    step = Timeline(rank=0, forward=float("nan"), backward=1, communication=0, exposed=0)
    cases = [
        replace(good, timelines=(step,)),
        replace(others[0], measurements=(0.0, 1.0)),
        replace(others[1], ranks=()),
        replace(others[2], batch_size=0),
    ]
    text = json.dumps(files.document(Result(cases=cases[:1])))  # NaN, as Python writes it
    (folder / "odd.json").write_text(text)
    assert figures(report(folder, "odd.json")) == ["mlp-32-float32-1-steps"]
    content = collect([(folder / "x.json", Result(cases=cases))])
    assert len(content.models[0].members) == 1
    assert len(content.runs[0].result.failed) == 3


def test_a_case_that_failed_half_way_is_in_the_tables_but_not_drawn(folder):
    result = made.bench(1, 2)
    result.cases[-1] = replace(result.cases[-1], error="rank 1 was killed by SIGKILL")
    files.write(folder / "half.json", result)
    page = report(folder, "half.json")
    failed = next(table for table in Reader(page).tables if table[0][0] == "what")
    assert failed[1] == ["mlp", "2", "gradsync/gradsync", "rank 1 was killed by SIGKILL"]
    assert len(Reader(page).tables[0]) == 1 + 8
    assert "gradsync/gradsync" not in _figure(page, "mlp-32-float32-2-steps")


def _figure(page: str, name: str) -> str:
    return page.partition(f'<figure id="{name}">')[2].partition("</figure>")[0]


# ------------------------------------------------------------------------- the command


def test_the_command_replaces_the_page_and_says_how_much_it_drew(folder, monkeypatch, capsys):
    page = folder / "r.html"
    page.write_text("old")
    assert run(folder / "a.json", "-o", page, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == f"{page}: 7 plots\n"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def test_nothing_to_draw_is_said_on_the_page_and_by_the_command(folder, monkeypatch, capsys):
    failed = replace(made.case("torch", 2), measurements=(), timelines=(), error="no such model")
    files.write(folder / "none.json", Result(cases=[failed]))
    code = run(folder / "none.json", "-o", folder / "r.html", monkeypatch=monkeypatch)
    assert code == 1
    assert "no measurements: nothing to draw" in capsys.readouterr().err
    page = (folder / "r.html").read_text()
    assert "there is nothing to draw" in page
    assert "no such model" in page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "is empty"),
        ('{"schema": "gradsync.bench", "benchm', "is not JSON, or was cut short"),
        ('{"a": 1}', "no results of gradsync bench"),
        (
            '{"schema": "gradsync.bench", "schema_version": 99, "benchmark_results": []}',
            "schema version 99 is not known",
        ),
    ],
)
def test_a_file_that_is_no_result_is_named(content, message, folder, monkeypatch, capsys):
    if content is not None:
        (folder / "bad.json").write_text(content)
    page = folder / "r.html"
    page.write_text("old")
    assert run(folder / "a.json", folder / "bad.json", "-o", page, monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "bad.json" in error
    assert message in error
    assert page.read_text() == "old"


def test_an_output_that_cannot_be_is_named(folder, monkeypatch, capsys):
    for output, message in (
        (folder / "no" / "r.html", "there is no folder"),
        (folder, "this is a folder"),
        (folder / "a.json", "this is one of the results"),
    ):
        assert run(folder / "a.json", "-o", output, monkeypatch=monkeypatch) == 2
        assert message in capsys.readouterr().err
    assert files.read(folder / "a.json").cases


# ------------------------------------------------------------------------- pictures


def test_each_plot_becomes_a_picture_with_its_words(folder, monkeypatch, capsys):
    pytest.importorskip("resvg_py", reason="resvg-py is not installed")
    try:
        png.load()
    except png.PngError as error:
        pytest.skip(str(error))
    code = run(
        folder / "a.json", "-o", folder / "r.html", "--png", folder / "new" / "png",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert code == 0
    names = figures((folder / "r.html").read_text())
    found = sorted(path.name for path in (folder / "new" / "png").iterdir())
    assert found == sorted(f"{name}.png" for name in names)
    for path in (folder / "new" / "png").iterdir():
        header = path.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        assert int.from_bytes(header[16:20], "big") == 920


def test_without_the_library_for_pictures_the_command_says_how_to_get_it(
    folder, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code = run(
        folder / "a.json", "-o", folder / "r.html", "--png", folder / "png", monkeypatch=monkeypatch
    )
    assert code == 2
    assert "pip install 'gradsync[bench]'" in capsys.readouterr().err
    assert not (folder / "r.html").exists()


def test_without_any_font_the_command_says_so_and_draws_no_mute_pictures(monkeypatch):
    resvg = pytest.importorskip("resvg_py", reason="resvg-py is not installed")
    draw = resvg.svg_to_bytes
    monkeypatch.setattr(resvg, "svg_to_bytes", lambda **o: draw(skip_system_fonts=True, **o))
    with pytest.raises(png.PngError, match="need a font"):
        png.load()


def test_any_font_without_serifs_will_do(monkeypatch):
    resvg = pytest.importorskip("resvg_py", reason="resvg-py is not installed")
    draw = resvg.svg_to_bytes

    def only_dejavu(sans_serif_family=None, **options):
        if sans_serif_family != "DejaVu Sans":
            options["skip_system_fonts"] = True
        return draw(sans_serif_family=sans_serif_family, **options)

    monkeypatch.setattr(resvg, "svg_to_bytes", only_dejavu)
    try:
        found = png.load()
    except png.PngError:
        pytest.skip("DejaVu Sans is not installed")
    assert found.keywords == {"sans_serif_family": "DejaVu Sans"}
