"""Quantising to int8, without processes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gradsync.hooks.torch_blocks import dequantise, quantise

BLOCKS = st.sampled_from([8, 16, 64])
LARGE = float(np.float32(1e30))
FINITE = st.floats(-LARGE, LARGE, width=32)
ANY = FINITE | st.sampled_from([float("nan"), float("inf"), -float("inf")])


@st.composite
def values(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> tuple[torch.Tensor, int]:
    block = draw(BLOCKS)
    count = draw(st.integers(1, 5)) * block
    content = draw(arrays.arrays(np.float32, count, elements=elements))
    return torch.from_numpy(content.copy()), block


@given(values(FINITE))
@settings(deadline=None)
def test_the_error_is_at_most_half_a_step_of_the_block(case: tuple[torch.Tensor, int]) -> None:
    tensor, block = case
    integers, scales = quantise(tensor, block)
    error = (dequantise(integers, scales) - tensor).view(-1, block).abs()
    largest = tensor.view(-1, block).abs().amax(1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    assert bool((error <= 0.5001 * (largest / 127).clamp(min=tiny)).all())
    assert integers.dtype == torch.int8
    assert integers.abs().max() <= 127


@given(values(FINITE))
@settings(deadline=None)
def test_the_largest_element_of_a_block_comes_back(case: tuple[torch.Tensor, int]) -> None:
    tensor, block = case
    back = dequantise(*quantise(tensor, block)).view(-1, block).abs().amax(1)
    largest = tensor.view(-1, block).abs().amax(1)
    torch.testing.assert_close(back, largest, rtol=1e-6, atol=1e-38)


@given(values(FINITE))
@settings(deadline=None)
def test_what_has_come_back_once_comes_back_the_same(case: tuple[torch.Tensor, int]) -> None:
    tensor, block = case
    once = dequantise(*quantise(tensor, block))
    twice = dequantise(*quantise(once, block))
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=1e-37)


@given(values(ANY))
@settings(deadline=None)
def test_a_block_with_an_undefined_or_infinite_element_comes_back_as_such(
    case: tuple[torch.Tensor, int],
) -> None:
    tensor, block = case
    back = dequantise(*quantise(tensor, block)).view(-1, block)
    finite = tensor.view(-1, block).isfinite().all(1)
    assert torch.equal(back.isfinite().all(1), finite)


def test_an_original_is_left_alone() -> None:
    tensor = torch.arange(64.0)
    quantise(tensor, 8)
    assert torch.equal(tensor, torch.arange(64.0))
