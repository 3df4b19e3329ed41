"""Which server has which rows: pure, so by properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync import ArgumentError
from gradsync.hybrid.partition import SHARDINGS, Partition

sizes = st.integers(1, 300)
servers = st.integers(1, 9)


@given(sizes, servers, st.sampled_from(["hash", "range"]))
def test_each_row_is_on_one_server_at_the_place_that_its_slot_says(
    rows: int, count: int, sharding: str
) -> None:
    partition = Partition(sharding, rows=rows, columns=3, servers=count)
    found = []
    for server, part in enumerate(partition.parts):
        here = partition.rows_at(server)
        assert len(here) == part.rows
        slots = partition.slots(here)
        assert partition.local(slots, server).tolist() == list(range(part.rows))
        found += here.tolist()
    assert sorted(found) == list(range(rows))


@given(sizes, servers, st.sampled_from(["hash", "range"]), st.data())
def test_sorted_slots_are_grouped_by_server(
    rows: int, count: int, sharding: str, data: st.DataObject
) -> None:
    partition = Partition(sharding, rows=rows, columns=3, servers=count)
    chosen = data.draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=30))
    slots = partition.slots(torch.tensor(chosen, dtype=torch.int64)).sort().values
    start = 0
    for server, end in enumerate(partition.split(slots)):
        local = partition.local(slots[start:end], server)
        assert set(partition.rows_at(server)[local].tolist()) <= set(chosen)
        start = end
    assert start == len(chosen)


@given(st.integers(1, 40), servers)
def test_columns_are_shared_out_without_gap(columns: int, count: int) -> None:
    if columns < count:
        with pytest.raises(ArgumentError, match="fewer servers"):
            Partition("column", rows=5, columns=columns, servers=count)
        return
    parts = Partition("column", rows=5, columns=columns, servers=count).parts
    assert [c for part in parts for c in range(columns)[part.columns]] == list(range(columns))


def test_neighbours_and_multiples_are_spread_by_hash() -> None:
    partition = Partition("hash", rows=100_000, columns=4, servers=4)
    for rows in (torch.arange(400), torch.arange(0, 100_000, 250), torch.arange(0, 1600, 4)):
        counts = torch.bincount(partition.slots(rows) // partition._height, minlength=4)
        assert counts.min() > 60


def test_an_unknown_sharding_is_named() -> None:
    assert "diagonal" not in SHARDINGS
    with pytest.raises(ArgumentError, match="diagonal"):
        Partition("diagonal", rows=5, columns=2, servers=1)
