"""The JSON file of results: written in one move, read with care. docs/bench.md documents it.

[Note: torch can read it]
The file is a superset of what torch's ``benchmarks/distributed/ddp/benchmark.py`` writes, so that
torch's ``diff.py`` reads ours. That script takes ``benchmark_results`` by position and skips the
first entry of each ``result`` as "no ddp". So each entry of ``benchmark_results`` is a series: one
model under one implementation, with all its numbers of ranks; and the first entry of its
``result`` repeats the times of one rank without DDP. It says ``"baseline": true``, and we skip it
when we read. What has no measurement goes to ``failed``, since ``diff.py`` would stumble over it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from gradsync import UsageError
from gradsync.bench.result import (
    BENCH,
    NO_DDP,
    PERCENTS,
    SCHEMA,
    SCHEMA_VERSION,
    SERIES,
    TORCH,
    Case,
    CommCase,
    Result,
    Timeline,
)
from gradsync.bench.stats import median, percentile

_HEADER: Final = (
    "created", "command", "status", "pytorch_version", "cuda_version", "distributed_backend",
    "bucket_size", "header", "notes",
)  # fmt: skip


class ResultFileError(UsageError, ValueError):
    """A file that cannot be read as results; the message names the file and what is wrong.

    >>> try:
    ...     parse("{}", source="a.json")
    ... except ResultFileError as error:
    ...     print(error)
    a.json: no results of gradsync bench or of torch's benchmark.py ('benchmark_results' is missing)
    """


# ------------------------------------------------------------------------- writing


def write(path: Path | str, result: Result) -> None:
    """Replace the file in one move: a reader, or a crash, never sees half of it.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/a.json", Result(command="gradsync bench"))
    ...     read(f"{folder}/a.json").command
    'gradsync bench'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, (dumps(document(result)) + "\n").encode())


def replace(path: Path, content: bytes) -> None:
    """Write a file in one move; what was there stays until all of the new one is."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def dumps(content: object) -> str:
    """JSON text as we write it.

    >>> dumps({"a": 1})
    '{\\n "a": 1\\n}'
    """
    return json.dumps(content, indent=1, allow_nan=False)


def document(result: Result) -> dict[str, Any]:
    """The JSON document. Seconds and bytes throughout; ``summary`` follows from the rest."""
    measured = [case for case in result.cases if case.measurements]
    failed = [case for case in result.cases if not case.measurements]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "kind": result.kind,
        **{name: getattr(result, name) for name in _HEADER},
        "benchmark_results": [
            _series_document(list(series), _baseline(measured, series_key))
            for series_key, series in groupby(
                sorted(measured, key=_first_seen(measured)), key=lambda case: case.series
            )
        ],
        "comm_results": [_comm_document(case) for case in result.comm_cases],
        "failed": [asdict(case) for case in failed],
    }


def _series_document(series: Sequence[Case], baseline: Case | None) -> dict[str, Any]:
    common = {name: getattr(series[0], name) for name in SERIES}
    no_ddp = {
        "baseline": True,
        "ranks": list(baseline.ranks) if baseline else [],
        "measurements": list(baseline.measurements) if baseline else [],
    }
    return {**common, "result": [no_ddp, *(_case_document(case) for case in series)]}


def _case_document(case: Case) -> dict[str, Any]:
    own = {name: value for name, value in asdict(case).items() if name not in SERIES}
    summary: dict[str, Any] = {f"p{p}": case.seconds(p) for p in PERCENTS}
    summary["by_rank"] = [
        {f"p{p}": percentile(rank, p) for p in PERCENTS} for rank in case.by_rank() if rank
    ]
    summary["examples_per_second"] = case.examples_per_second()
    summary["exposed"] = case.exposed
    return {**own, "summary": summary}


def _comm_document(case: CommCase) -> dict[str, Any]:
    if not case.seconds:
        return asdict(case)
    summary = {"seconds": median(case.seconds), "algbw": case.algbw, "busbw": case.busbw}
    return {**asdict(case), "summary": summary}


def _baseline(cases: Iterable[Case], series: tuple[Any, ...]) -> Case | None:
    """The same model, batch and type on one rank without DDP."""
    wanted = dict(zip(SERIES, series, strict=True))
    same = ("model", "batch_size", "dtype", "seed", "threads")
    for case in cases:
        is_same = all(getattr(case, name) == wanted[name] for name in same)
        if is_same and case.implementation == NO_DDP and case.world == 1:
            return case
    return None


def _first_seen(cases: Sequence[Case]) -> Any:
    order: dict[tuple[Any, ...], int] = {}
    for case in cases:
        order.setdefault(case.series, len(order))
    return lambda case: order[case.series]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ------------------------------------------------------------------------- reading


def read(path: Path | str) -> Result:
    """The results in a file of ours or of torch's benchmark.py; else a ``ResultFileError``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ResultFileError(f"{path}: cannot be read: {reason}") from error
    return parse(text, source=str(path))


def parse(text: str, *, source: str = "results") -> Result:
    """The same from the text; ``source`` is what errors call it."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        what = "is empty" if not text.strip() else "is not JSON, or was cut short"
        raise ResultFileError(
            f"{source}: {what} (line {error.lineno}, column {error.colno}: {error.msg})"
        ) from error
    try:
        return _result(content)
    except _Malformed as error:
        raise ResultFileError(f"{source}: {error}") from error


class _Malformed(Exception):
    pass


def _result(content: object) -> Result:
    if not isinstance(content, dict) or "benchmark_results" not in content:
        raise _Malformed(
            "no results of gradsync bench or of torch's benchmark.py "
            "('benchmark_results' is missing)"
        )
    if "schema" not in content:
        return _torch_result(content)
    if content["schema"] != SCHEMA:
        raise _Malformed(f"its schema is {content['schema']!r}, not {SCHEMA!r}")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise _Malformed(
            f"schema version {version!r} is not known: this gradsync reads version {SCHEMA_VERSION}"
        )
    cases = [
        _make(Case, {**common, **own}, f"benchmark_results[{i}].result[{j}]")
        for i, common, results in _series_of(content)
        for j, own in enumerate(results)
        if not own.get("baseline")
    ]
    failed = _list(content.get("failed", []), "failed")
    cases += [_make(Case, each, f"failed[{i}]") for i, each in enumerate(failed)]
    comm = _list(content.get("comm_results", []), "comm_results")
    header = {name: content[name] for name in _HEADER if name in content}
    return Result(
        kind=str(content.get("kind", BENCH)),
        cases=cases,
        comm_cases=[_make(CommCase, each, f"comm_results[{i}]") for i, each in enumerate(comm)],
        **header,
    )


def _torch_result(content: dict[str, Any]) -> Result:
    """A file of torch's: the first result of a model is "no ddp", the others are torch's DDP."""
    shared = ("pytorch_version", "cuda_version", "distributed_backend", "bucket_size")
    header: dict[str, Any] = {name: content.get(name) for name in shared}
    cases = []
    for i, common, results in _series_of(content):
        for j, own in enumerate(results):
            settings: dict[str, Any] = {"implementation": NO_DDP}
            if j > 0:
                settings = {"implementation": TORCH, "backend": header["distributed_backend"]}
                settings["bucket_cap_mb"] = header["bucket_size"]
            place = f"benchmark_results[{i}].result[{j}]"
            if _list(own.get("measurements", []), place):
                cases.append(_make(Case, {**common, **own, **settings}, place))
    return Result(schema_version=None, created="", cases=cases, **header)


def _series_of(content: dict[str, Any]) -> Iterable[tuple[int, dict[str, Any], list[Any]]]:
    for i, series in enumerate(_list(content["benchmark_results"], "benchmark_results")):
        place = f"benchmark_results[{i}]"
        if not isinstance(series, dict):
            raise _Malformed(f"{place} is not an object")
        results = _list(series.get("result"), f"{place}.result")
        for j, own in enumerate(results):
            if not isinstance(own, dict):
                raise _Malformed(f"{place}.result[{j}] is not an object")
        yield i, {name: value for name, value in series.items() if name != "result"}, results


def _make(kind: type[Any], values: object, place: str) -> Any:
    """A dataclass from an object of the file. Keys that it does not have are left alone."""
    if not isinstance(values, Mapping):
        raise _Malformed(f"{place} is not an object")
    arguments = {}
    for each in fields(kind):
        if each.name in values:
            value = values[each.name]
            check = _CHECKS[str(each.type)]
            if (made := check(value)) is _WRONG:
                raise _Malformed(f"{place}.{each.name} is {value!r:.60}, not {each.type}")
            arguments[each.name] = made
    try:
        return kind(**arguments)
    except TypeError as error:
        missing = str(error).partition("argument")[2].lstrip("s: ")
        raise _Malformed(f"{place} lacks {missing}") from error


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Malformed(f"{place} is not a list")
    return value


_WRONG: Final = object()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple_of(is_right: Any) -> Any:
    def check(value: object) -> object:
        if isinstance(value, list) and all(is_right(each) for each in value):
            return tuple(value)
        return _WRONG

    return check


def _one(is_right: Any, *, optional: bool = False) -> Any:
    def check(value: object) -> object:
        return value if is_right(value) or (optional and value is None) else _WRONG

    return check


def _timelines(value: object) -> object:
    if not isinstance(value, list):
        return _WRONG
    return tuple(_make(Timeline, each, f"timelines[{i}]") for i, each in enumerate(value))


# By the annotations of the dataclasses above.
_CHECKS: Final[dict[str, Any]] = {
    "str": _one(lambda value: isinstance(value, str)),
    "str | None": _one(lambda value: isinstance(value, str), optional=True),
    "int": _one(_is_count),
    "int | None": _one(_is_count, optional=True),
    "float": _one(_is_number),
    "float | None": _one(_is_number, optional=True),
    "bool": _one(lambda value: isinstance(value, bool)),
    "bool | None": _one(lambda value: isinstance(value, bool), optional=True),
    "tuple[int, ...]": _tuple_of(_is_count),
    "tuple[float, ...]": _tuple_of(_is_number),
    "tuple[Timeline, ...]": _timelines,
}
