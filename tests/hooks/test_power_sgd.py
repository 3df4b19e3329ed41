"""The parts of PowerSGD that need no processes."""

from __future__ import annotations

import pytest
import torch

from gradsync.hooks.power_sgd import orthogonalise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 2, 4, 8])
def test_rows_become_orthonormal_and_span_the_same(rank: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = torch.randn(5, rank, 30, dtype=dtype)
    after = before.clone()
    orthogonalise(after)
    torch.testing.assert_close(
        after @ after.mT, torch.eye(rank, dtype=dtype).expand(5, -1, -1), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(before @ after.mT @ after, before, atol=1e-4, rtol=1e-4)


def test_a_row_that_depends_on_the_others_becomes_zero() -> None:
    row = torch.randn(1, 1, 1000)
    rows = torch.cat([row, 3 * row, torch.zeros_like(row)], dim=1)
    orthogonalise(rows)
    assert rows[0, 0].norm().item() == pytest.approx(1)
    assert not rows[0, 1:].any()


def test_gradients_of_any_size_can_be_orthogonalised() -> None:
    for size in (1e-18, 1.0, 1e17):
        rows = torch.eye(3)[None] * size
        orthogonalise(rows)
        torch.testing.assert_close(rows, torch.eye(3)[None])


def test_an_undefined_row_stays_undefined() -> None:
    rows = torch.full((1, 2, 4), float("nan"))
    orthogonalise(rows)
    assert rows.isnan().all()
