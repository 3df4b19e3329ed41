"""Models on disk: from any number of servers to any other, by any sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradsync import ArgumentError, StateError, hybrid
from gradsync.hybrid import checkpoint

ROWS, COLUMNS = 57, 6
LAYOUTS = [(1, "hash"), (3, "hash"), (2, "range"), (5, "range"), (2, "column"), (4, "column")]


def make(sharding: str, **options: object) -> hybrid.RemoteEmbeddingBag:
    optimizer = options.pop("optimizer", hybrid.Adam(lr=0.1))
    return hybrid.RemoteEmbeddingBag(
        ROWS, COLUMNS, name="t", mode="sum", sharding=sharding, optimizer=optimizer, **options
    )


def train(table: hybrid.RemoteEmbeddingBag, steps: range) -> Tensor:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        table(torch.randint(0, ROWS, (6, 4), generator=generator)).square().sum().backward()
        table.step()
    with torch.no_grad():
        return table(torch.arange(ROWS)[:, None])


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", [(2, "hash"), (3, "range"), (3, "column")])
def test_training_goes_on_with_other_servers_as_if_nothing_had_happened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[int, str],
    after: tuple[int, str],
) -> None:
    monkeypatch.setattr(checkpoint, "_PIECE", 300)  # several pieces
    with hybrid.local(servers=2):
        expected = train(make("hash"), range(6))
    with hybrid.local(servers=before[0]):
        table = make(before[1])
        train(table, range(3))
        seen: list[hybrid.Progress] = []
        dense = {"weight": torch.ones(2)}
        hybrid.save(tmp_path / "model", [table], dense=dense, progress=seen.append)
        assert [each.rows for each in seen] == sorted({each.rows for each in seen})
        assert len(seen) > 2
        assert seen[-1].fraction == 1
    with hybrid.local(servers=after[0]):
        table = make(after[1], seed=9)
        seen.clear()
        loaded = hybrid.load(tmp_path / "model", [table], progress=seen.append)
        assert torch.equal(loaded["weight"], dense["weight"])
        assert seen[-1].fraction == 1
        torch.testing.assert_close(train(table, range(3, 6)), expected)


def test_a_later_checkpoint_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    with hybrid.local(servers=2):
        table = make("hash")
        for steps in (range(1), range(1, 2)):
            weight = train(table, steps)
            hybrid.save(tmp_path / "model", [table])
        assert [each.name for each in tmp_path.iterdir()] == ["model"]
    with hybrid.local():
        table = make("range")
        hybrid.load(tmp_path / "model", [table])
        assert torch.equal(train(table, range(0)), weight)


def test_a_step_during_a_save_is_noticed(tmp_path: Path) -> None:
    with hybrid.local(servers=2):
        table = make("hash")
        with pytest.raises(StateError, match="table t was changed"):
            hybrid.save(tmp_path / "model", [table], progress=lambda _: train(table, range(1)))
        assert not (tmp_path / "model").exists()


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with hybrid.local():
        hybrid.save(tmp_path / "model", [make("hash")])
    with hybrid.local():
        with pytest.raises(ArgumentError, match="optimizer 'Adam' and has 'SGD'"):
            hybrid.load(tmp_path / "model", [make("hash", optimizer=hybrid.SGD(lr=1))])
        other = hybrid.RemoteEmbeddingBag(4, 4, name="other")
        with pytest.raises(ArgumentError, match="no table other; it has t"):
            hybrid.load(tmp_path / "model", [other])
