"""The process from which ``hybrid.run`` forks has to end with the tests."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_forkserver_left(nothing_left_behind: None) -> Iterator[None]:
    yield
    forkserver._forkserver._stop()
