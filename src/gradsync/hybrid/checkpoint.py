"""Whole models on disk: written from any number of servers, read by any other number.

A checkpoint is a directory: ``model.json`` tells what there is, files of rows hold rows of a table
with the optimizer's state, ``dense.pt`` what is not on servers. Rows stream through in pieces, so
that no process needs the memory of a whole table.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradsync.errors import ArgumentError, StateError
from gradsync.hybrid.table import RemoteEmbeddingBag
from gradsync.hybrid.transport import Message

_PIECE = 16 * 1024 * 1024  # bytes


@dataclass(frozen=True)
class Progress:
    """How far a save or a load is.

    >>> Progress("words", rows=50, of=200).fraction
    0.25
    """

    table: str
    rows: int
    of: int

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return self.rows / self.of


def save(
    directory: str | os.PathLike[str],
    tables: Iterable[RemoteEmbeddingBag],
    *,
    dense: Mapping[str, Any] | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Write tables, with the state of their optimizers, and ``dense``, a state dict.

    To be called by one trainer, or the master, while no step is under way. The directory appears
    when it is complete, and takes the place of an earlier one.

    >>> import tempfile
    >>> from gradsync import hybrid
    >>> folder = tempfile.TemporaryDirectory()
    >>> with hybrid.local(servers=2):
    ...     hybrid.save(folder.name + "/model", [hybrid.RemoteEmbeddingBag(8, 2, name="t")])
    >>> with hybrid.local(servers=3):
    ...     hybrid.load(folder.name + "/model", [hybrid.RemoteEmbeddingBag(8, 2, name="t")])
    {}
    """
    target = Path(directory)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    described = [_save_table(partial, number, each, progress) for number, each in enumerate(tables)]
    torch.save(dict(dense or {}), partial / "dense.pt")
    (partial / "model.json").write_text(json.dumps({"format": 1, "tables": described}, indent=2))
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def load(
    directory: str | os.PathLike[str],
    tables: Iterable[RemoteEmbeddingBag],
    *,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Fill tables from what ``save`` wrote, and return what was saved as ``dense``.

    The servers and the sharding may be others; rows, columns, dtype and optimizer must be the same.
    To be called by one trainer; the others call ``attach`` on their tables afterwards, before they
    use them.

    >>> from gradsync import hybrid
    >>> try:
    ...     hybrid.load("nowhere", [])
    ... except ValueError as error:
    ...     print(error)
    nowhere is no checkpoint: it has no model.json.
    """
    source = Path(directory)
    if not (source / "model.json").is_file():
        raise ArgumentError(f"{directory} is no checkpoint: it has no model.json.")
    saved = {
        each["name"]: each for each in json.loads((source / "model.json").read_text())["tables"]
    }
    for table in tables:
        if table.spec.name not in saved:
            raise ArgumentError(
                f"{directory} has no table {table.spec.name}; it has {', '.join(saved) or 'none'}."
            )
        _load_table(source, saved[table.spec.name], table, progress)
    dense: dict[str, Any] = torch.load(source / "dense.pt", weights_only=True)
    return dense


# ------------------------------------------------------------------------------ one table


def _save_table(
    folder: Path, number: int, table: RemoteEmbeddingBag, progress: Callable[[Progress], None]
) -> dict[str, Any]:
    spec = table.spec
    names, version = _describe(table)
    done = 0
    files: list[str] = []
    for rows, values in _pieces(table):
        file = f"table{number}-{len(files):06d}.pt"
        torch.save({"rows": rows, **dict(zip(names, values, strict=True))}, folder / file)
        files.append(file)
        done += len(rows)
        progress(Progress(spec.name, done, spec.rows))
    if _describe(table) != (names, version):
        raise StateError(
            f"table {spec.name} was changed by a step while it was saved: save between two steps, "
            "with a barrier of the trainers before and after."
        )
    return {"name": spec.name, "version": version, "names": names, "files": files, **_fixed(table)}


def _load_table(
    folder: Path,
    saved: dict[str, Any],
    table: RemoteEmbeddingBag,
    progress: Callable[[Progress], None],
) -> None:
    spec, cluster = table.spec, table.cluster
    for key, value in _fixed(table).items():
        if saved[key] != value:
            raise ArgumentError(
                f"table {spec.name} was saved with {key} {saved[key]!r} and has {value!r} now."
            )
    names, done = saved["names"], 0
    for file in saved["files"]:
        piece = torch.load(folder / file, weights_only=True)
        messages = {}
        for server, local, chosen, columns in _spread(table, piece["rows"]):
            values = [
                (piece[name][chosen] if piece[name].dim() == 1 else piece[name][chosen, columns])
                for name in names
            ]
            tensors = [local, *values]
            messages[server] = Message("write", {"table": spec.name, "names": names}, tensors)
        cluster.ask_all(messages)
        done += len(piece["rows"])
        progress(Progress(spec.name, done, spec.rows))
    version = {"table": spec.name, "version": saved["version"]}
    cluster.ask_all({server: Message("set_version", version) for server in spec.servers})
    table.attach()


def _fixed(table: RemoteEmbeddingBag) -> dict[str, Any]:
    """What has to be the same when the table is loaded; the learning rate may change."""
    spec = table.spec
    optimizer = spec.optimizer["kind"]
    return {"rows": spec.rows, "columns": spec.columns, "dtype": spec.dtype, "optimizer": optimizer}


def _describe(table: RemoteEmbeddingBag) -> tuple[list[str], int]:
    """What is kept of each row, and how many steps were applied."""
    answers = table.cluster.ask_all({server: Message("describe") for server in table.spec.servers})
    found = [
        each
        for answer in answers.values()
        for each in answer.values["tables"]
        if each["spec"]["name"] == table.spec.name
    ]
    return found[0]["names"], max(each["version"] for each in found)


def _pieces(table: RemoteEmbeddingBag) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """All rows with what is kept of them, some at a time."""
    spec, partition = table.spec, table.spec.partition
    height = max(1, _PIECE // (spec.columns * spec.torch_dtype.itemsize))
    if not partition.by_row:
        for rows in torch.arange(spec.rows).split(height):
            answers = _read(table, dict.fromkeys(spec.servers, rows))
            parts = zip(*(answers[server] for server in spec.servers), strict=True)
            yield rows, [torch.cat(each, dim=1) for each in parts]
        return
    for at, server in enumerate(spec.servers):
        rows_here = partition.rows_at(at)
        for local in torch.arange(len(rows_here)).split(height):
            if len(local):
                yield rows_here[local], _read(table, {server: local})[server]


def _read(table: RemoteEmbeddingBag, rows: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    answers = table.cluster.ask_all(
        {
            server: Message("read", {"table": table.spec.name}, [each])
            for server, each in rows.items()
        }
    )
    return {server: answer.tensors for server, answer in answers.items()}


def _spread(table: RemoteEmbeddingBag, rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor, slice]]:
    """For each server: its rows, which of ``rows`` they are, and its columns."""
    partition = table.spec.partition
    slots, order = torch.sort(partition.slots(rows))
    start = 0
    ends = partition.split(slots) if partition.by_row else [len(rows)] * partition.servers
    for at, server in enumerate(table.spec.servers):
        a, b = (start, ends[at]) if partition.by_row else (0, len(rows))
        start = ends[at]
        if a < b:
            local = partition.local(slots[a:b], at)
            yield server, local, order[a:b], partition.parts[at].columns
