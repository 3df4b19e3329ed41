"""A soak of a minute in all with every test run; `make soak SECONDS=3600` is the long one."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak import soak


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_programs_of_many_threads_and_groups_are_right(pool, ranks):
    seed = int(os.environ.get("GRADSYNC_SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"GRADSYNC_SOAK_SEED={seed}")
    counts = soak(pool, seed, ranks, seconds=20)
    assert sum(counts.values()) > 100
