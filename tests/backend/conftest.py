from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked import Nursery


@pytest.fixture(scope="session")
def nursery(nothing_left_behind: None) -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()
