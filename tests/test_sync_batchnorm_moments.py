"""The moments that SyncBatchNorm computes: of one batch, and combined from parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batch_norms import data
from gradsync.sync_batchnorm import (
    _moments_by_hand,
    _moments_by_kernel,
    combine_moments,
    local_moments,
)

parts_of_values = st.lists(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=0, max_size=8), min_size=1, max_size=6
)


class TestMoments:
    @settings(deadline=None)
    @given(parts=parts_of_values, offset=st.sampled_from([0.0, 1.0, 1e6]))
    def test_the_moments_of_parts_combine_to_those_of_the_whole(
        self, parts: list[list[float]], offset: float
    ) -> None:
        tensors = [torch.tensor(part, dtype=torch.float64) + offset for part in parts]
        counts = torch.tensor([float(len(part)) for part in parts], dtype=torch.float64)
        means = torch.stack([t.mean() if len(t) else t.sum() for t in tensors]).unsqueeze(1)
        m2s = torch.stack([((t - t.mean()).square()).sum() for t in tensors]).unsqueeze(1)
        mean, m2 = combine_moments(counts, means, m2s)
        whole = torch.cat(tensors)
        expected = whole.mean() if len(whole) else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(mean[0], expected, rtol=1e-13, atol=1e-10)
        deviations = (whole - expected).square().sum()
        torch.testing.assert_close(m2[0], deviations, rtol=1e-9, atol=1e-8)
        assert m2 >= 0

    @settings(deadline=None)
    @given(parts=parts_of_values, seed=st.randoms(use_true_random=False))
    def test_the_order_of_the_parts_does_not_matter(self, parts: list[list[float]], seed: Any):
        def moments(order: list[list[float]]) -> tuple[Tensor, Tensor]:
            rows = [torch.tensor(part, dtype=torch.float64) for part in order]
            return combine_moments(
                torch.tensor([float(len(row)) for row in rows], dtype=torch.float64),
                torch.stack([row.sum() / max(len(row), 1) for row in rows]).unsqueeze(1),
                torch.stack([(row - row.mean()).square().sum() for row in rows]).unsqueeze(1),
            )

        shuffled = parts.copy()
        seed.shuffle(shuffled)
        for one, other in zip(moments(parts), moments(shuffled), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-8)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(50, 3), (5, 3, 7), (9, 3, 200, 200)])
    def test_both_ways_to_local_moments_agree_with_float64(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        values = data(shape, dtype) + 100
        exact = values.double()
        dims = [0, *range(2, len(shape))]
        variance, mean = torch.var_mean(exact, dims, correction=0)
        count = torch.tensor([[values.numel() // 3]], dtype=torch.float64)
        for rounding, (got_mean, got_m2) in (
            (5e-6, local_moments(values)),
            (5e-6, [each[0] for each in _moments_by_hand([values], count)]),
            (1e-4, [each[0] for each in _moments_by_kernel([values], count)]),
        ):
            assert got_mean.dtype == got_m2.dtype == torch.float64
            torch.testing.assert_close(got_mean, mean, rtol=1e-6, atol=0)
            torch.testing.assert_close(got_m2 / count[0], variance, rtol=rounding, atol=0)

    def test_a_constant_has_no_deviation(self) -> None:
        for value in (0.1, 1e4 + 0.1, -3e-20):
            _, m2 = local_moments(torch.full((7, 2, 3), value))
            assert (m2 >= 0).all()
            assert (m2 <= 1e-12 * value**2).all()
