from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked import Nursery
from promptness import Delays


@pytest.fixture(scope="session")
def nursery(nothing_left_behind: None) -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def delays(request: pytest.FixtureRequest) -> Iterator[Delays]:
    made = Delays(request.module.SOON)
    yield made
    made.check()
