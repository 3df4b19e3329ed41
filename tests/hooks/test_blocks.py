"""Blocks of int8, without processes: the native ones have to do what torch's do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

from gradsync.backend import _native
from gradsync.hooks.blocks import Blocks, Layout, Stretch
from gradsync.hooks.native_blocks import NativeBlocks
from gradsync.hooks.torch_blocks import TorchBlocks

Maker = Callable[[Layout, Tensor], Blocks]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY = torch.finfo(torch.float32).tiny
# Zeros, numbers below the smallest scale, ordinary ones, huge ones: powers of two.
MAGNITUDES = st.sampled_from([-149, -130, -120, -20, 0, 10, 120])
LARGE = float(np.float32(1e30))
FINITE = st.floats(-LARGE, LARGE, width=32)
UNDEFINED = [float("nan"), float("inf"), -float("inf")]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(0, 70), min_size=1, max_size=6))
    places, end = [], 0
    for size in sizes:
        places.append((end, size))
        end += size + draw(st.integers(0, 2))
    return Layout.of(places, draw(st.sampled_from([8, 16, 64])), draw(st.integers(1, 4)))


@st.composite
def steps(draw: st.DrawFn, poison: list[float]) -> tuple[Layout, list[Tensor]]:
    """A layout and what comes in three steps."""
    layout = draw(layouts())
    count = max(stretch.start + stretch.size for stretch in layout.stretches) + 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    buffers = []
    for _ in range(3):
        buffer = torch.randn(count, generator=generator).ldexp(torch.tensor(draw(MAGNITUDES)))
        buffer[torch.rand(count, generator=generator) < 0.1] = 0.0
        if poison and draw(st.booleans()):
            buffer[draw(st.integers(0, count - 1))] = draw(st.sampled_from(poison))
        buffers.append(buffer)
    return layout, buffers


def native(layout: Layout, like: Tensor) -> NativeBlocks:
    assert NativeBlocks.can_take(like)
    return NativeBlocks(layout, torch.zeros(layout.length), like)


def with_torch(layout: Layout, like: Tensor) -> TorchBlocks:
    return TorchBlocks(layout, torch.zeros(layout.length))


def gradients_of(layout: Layout, buffer: Tensor) -> Tensor:
    return torch.cat([buffer[start : start + size] for start, _, size in layout.stretches])


def message_of(blocks: Blocks, buffer: Tensor) -> Tensor:
    message = torch.zeros(blocks.message_size, dtype=torch.uint8)
    blocks.fill(buffer, message)
    return message


def close(a: Tensor, b: Tensor, buffers: list[Tensor]) -> None:
    """Up to the last bits of the largest: torch's kernels may fuse a product and a sum."""
    largest = max(float(buffer.float().nan_to_num(0, 0, 0).abs().max()) for buffer in buffers)
    limits = torch.finfo(a.dtype)
    atol = limits.eps * (4 * largest + limits.tiny) + TINY
    torch.testing.assert_close(a, b, rtol=0, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@given(case=steps([]) | steps(UNDEFINED))
def test_what_is_sent_received_and_left_is_the_same_as_with_torch(
    dtype: torch.dtype, case: tuple[Layout, list[Tensor]]
) -> None:
    layout, buffers = case
    buffers = [buffer.to(dtype) for buffer in buffers]
    ours, theirs = native(layout, buffers[0]), with_torch(layout, buffers[0])
    earlier = torch.zeros(ours.message_size, dtype=torch.uint8)
    for buffer in buffers:
        message, right = message_of(ours, buffer), message_of(theirs, buffer)
        if buffer.isfinite().all():
            assert torch.equal(message, right)
        close(ours.residual, theirs.residual, buffers)
        found, expected = buffer.clone(), buffer.clone()
        ours.mean([earlier, message], found)
        theirs.mean([earlier, right], expected)
        close(found, expected, buffers)
        theirs.residual.copy_(ours.residual)
        earlier = message


@pytest.mark.parametrize("make", [native, with_torch])
@given(case=steps([]))
def test_what_is_sent_and_what_is_left_are_all_that_came(
    make: Maker, case: tuple[Layout, list[Tensor]]
) -> None:
    layout, buffers = case
    blocks = make(layout, buffers[0])
    came, sent = torch.zeros(2, len(gradients_of(layout, buffers[0])))
    for buffer in buffers:
        came += gradients_of(layout, buffer)
        received = buffer.clone()
        blocks.mean([message_of(blocks, buffer)], received)
        sent += gradients_of(layout, received)
    left = torch.cat([blocks.residual[at : at + size] for _, at, size in layout.stretches])
    close(sent + left, came, buffers)


@pytest.mark.parametrize("make", [native, with_torch])
@given(case=steps(UNDEFINED))
def test_a_block_that_is_undefined_arrives_so_and_leaves_nothing(
    make: Maker, case: tuple[Layout, list[Tensor]]
) -> None:
    layout, (buffer, *_) = case
    blocks = make(layout, buffer)
    received = torch.zeros_like(buffer)
    blocks.mean([message_of(blocks, buffer)], received)
    assert blocks.residual.isfinite().all()
    for start, at, size in layout.stretches:
        for begin in range(0, size, layout.block):
            part = slice(start + begin, start + min(begin + layout.block, size))
            defined = bool(buffer[part].isfinite().all())
            assert received[part].isfinite().all() == defined
            assert defined or received[part].isfinite().any() == 0
            assert defined or not blocks.residual[at + begin : at + begin + layout.block].any()


@pytest.mark.parametrize("make", [native, with_torch])
@given(case=steps([]))
def test_elements_between_the_parameters_and_the_rest_of_blocks_stay_as_they_are(
    make: Maker, case: tuple[Layout, list[Tensor]]
) -> None:
    layout, (buffer, *_) = case
    blocks = make(layout, buffer)
    outside = torch.ones_like(buffer, dtype=torch.bool)
    unused = torch.ones_like(blocks.residual, dtype=torch.bool)
    for start, at, size in layout.stretches:
        outside[start : start + size] = False
        unused[at : at + size] = False
    received = buffer.clone()
    blocks.mean([message_of(blocks, buffer)], received)
    assert torch.equal(received[outside], buffer[outside])
    assert not blocks.residual[unused].any()


@given(case=steps([]) | steps(UNDEFINED))
def test_a_mean_that_is_quantised_again_is_the_same_as_with_torch(
    case: tuple[Layout, list[Tensor]],
) -> None:
    layout, buffers = case
    messages = [message_of(native(layout, buffer), buffer) for buffer in buffers]
    ours, theirs = native(layout, buffers[0]), with_torch(layout, buffers[0])
    found, expected = (torch.zeros(ours.message_size, dtype=torch.uint8) for _ in range(2))
    for share in range(layout.shares):
        parts = [message.chunk(layout.shares)[share] for message in messages]
        ours.requantise(parts, share, found.chunk(layout.shares)[share])
        theirs.requantise(parts, share, expected.chunk(layout.shares)[share])
    mean, right = (torch.zeros_like(buffers[0]) for _ in range(2))
    ours.mean([found], mean)
    theirs.mean([expected], right)
    # A mean that lies between two integers may go to either: the residual makes up for it.
    for start, at, size in layout.stretches:
        totals = [
            values[start : start + size] + blocks.residual[at : at + size] / len(buffers)
            for values, blocks in ((mean, ours), (right, theirs))
        ]
        close(*totals, buffers)
    assert torch.equal(mean.isfinite(), right.isfinite())
    close(mean, right, [100 * buffer for buffer in buffers])


@given(case=steps([]))
def test_what_becomes_of_a_parameter_does_not_depend_on_its_neighbours(
    case: tuple[Layout, list[Tensor]],
) -> None:
    layout, (buffer, *_) = case
    blocks, together = native(layout, buffer), buffer.clone()
    blocks.mean([message_of(blocks, buffer)], together)
    for start, at, size in layout.stretches:
        alone = buffer[start : start + size].clone()
        single = Layout.of([(0, size)], layout.block, 1)
        its_blocks = native(single, alone)
        its_blocks.mean([message_of(its_blocks, alone)], alone)
        assert torch.equal(alone, together[start : start + size])
        assert torch.equal(its_blocks.residual[:size], blocks.residual[at : at + size])


@st.composite
def whole_blocks(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> tuple[Tensor, int]:
    block = draw(st.sampled_from([8, 16, 64]))
    count = draw(st.integers(1, 5)) * block
    content = draw(arrays.arrays(np.float32, count, elements=elements))
    return torch.from_numpy(content.copy()), block


def there_and_back(make: Maker, values: Tensor, block: int) -> Tensor:
    """What one message says, by block."""
    blocks = make(Layout.of([(0, values.numel())], block, 1), values)
    back = values.clone()
    blocks.mean([message_of(blocks, values)], back)
    return back.view(-1, block)


@pytest.mark.parametrize("make", [native, with_torch])
@given(case=whole_blocks(FINITE))
def test_the_error_is_at_most_half_a_step_of_the_block_and_the_largest_element_comes_back(
    make: Maker, case: tuple[Tensor, int]
) -> None:
    values, block = case
    back = there_and_back(make, values, block)
    largest = values.view(-1, block).abs().amax(1, keepdim=True)
    error = (back - values.view(-1, block)).abs()
    assert bool((error <= 0.5001 * (largest / 127).clamp(min=TINY)).all())
    torch.testing.assert_close(back.abs().amax(1, keepdim=True), largest, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("make", [native, with_torch])
@given(case=whole_blocks(FINITE))
def test_what_has_come_back_once_comes_back_the_same(make: Maker, case: tuple[Tensor, int]) -> None:
    once = there_and_back(make, *case)
    twice = there_and_back(make, once.flatten(), case[1])
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("make", [native, with_torch])
@given(case=whole_blocks(FINITE | st.sampled_from(UNDEFINED)))
def test_a_block_with_an_undefined_or_infinite_element_comes_back_as_such(
    make: Maker, case: tuple[Tensor, int]
) -> None:
    values, block = case
    finite = values.view(-1, block).isfinite().all(1)
    assert torch.equal(there_and_back(make, values, block).isfinite().all(1), finite)


def test_parameters_that_fill_their_blocks_become_one_stretch() -> None:
    layout = Layout.of([(0, 16), (16, 0), (16, 20), (36, 8), (44, 8)], block=8, shares=1)
    assert layout.joined() == [Stretch(0, 0, 36), Stretch(36, 40, 16)]


@pytest.mark.parametrize("make", [native, with_torch])
def test_a_buffer_in_the_middle_of_memory_is_used_where_it_is(make: Maker) -> None:
    memory = torch.arange(100.0)
    buffer = memory[33:53]
    blocks = make(Layout.of([(0, 20)], block=8, shares=1), buffer)
    message = message_of(blocks, buffer)
    buffer.zero_()
    blocks.mean([message], buffer)
    torch.testing.assert_close(memory, torch.arange(100.0), rtol=0, atol=0.3)
    assert torch.equal(memory[:33], torch.arange(33.0))
    assert torch.equal(memory[53:], torch.arange(53.0, 100.0))


class TestRefusals:
    @pytest.mark.parametrize(
        "buffer",
        [torch.zeros(8, dtype=torch.float64), torch.zeros(16)[::2], torch.zeros(8, device="meta")],
    )
    def test_gradients_without_native_kernels_are_left_to_torch(self, buffer: Tensor) -> None:
        assert not NativeBlocks.can_take(buffer)

    def test_memory_of_another_size_does_not_get_to_the_native_side(self) -> None:
        buffer = torch.zeros(20)
        blocks = native(Layout.of([(0, 20)], block=8, shares=2), buffer)
        message = torch.zeros(blocks.message_size, dtype=torch.uint8)
        part = message[: blocks.message_size // 2]
        for call in (
            lambda: blocks.fill(buffer[1:], message),
            lambda: blocks.fill(buffer, part),
            lambda: blocks.mean([message, part], buffer),
            lambda: blocks.mean([message], torch.zeros(40)[::2]),
            lambda: blocks.requantise([message], 0, part),
            lambda: blocks.requantise([part], 0, message),
        ):
            with pytest.raises(AssertionError):
                call()

    def test_a_layout_that_does_not_fit_the_buffer_is_refused(self) -> None:
        with pytest.raises(_native.InvalidError, match="cannot lie at 0"):
            native(Layout.of([(0, 21)], block=8, shares=1), torch.zeros(20))

    def test_a_share_that_there_is_not_is_refused(self) -> None:
        blocks = native(Layout.of([(0, 20)], block=8, shares=2), torch.zeros(20))
        part = torch.zeros(blocks.message_size // 2, dtype=torch.uint8)
        with pytest.raises(_native.InvalidError, match="share 2 of 2"):
            blocks.requantise([part], 2, part.clone())
