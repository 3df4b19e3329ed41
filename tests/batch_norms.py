"""What the tests of SyncBatchNorm share: data, and a plain layer to compare ours with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync import SyncBatchNorm

LIMIT = 40.0
FEATURES = 4
# By dtype: what another order of the sums may differ by.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def close(actual: Tensor | None, expected: Tensor | None, hint: object = "") -> None:
    assert actual is not None, hint
    assert expected is not None, hint
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=5 * tolerance, msg=lambda text: f"{hint}: {text}"
    )


def summed(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total


def equal_on_all_ranks(layer: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    for name, buffer in layer.named_buffers():
        others = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]
        dist.all_gather(others, buffer, group=group)
        assert all(torch.equal(buffer, other) for other in others), name


def data(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Features of different means and deviations."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    by_feature = torch.arange(1.0, shape[1] + 1).view(-1, *[1] * (len(shape) - 2))
    return (values * by_feature - 3 * by_feature).to(dtype)


def pair(dim: int, **settings: Any) -> tuple[nn.Module, SyncBatchNorm]:
    """A plain layer, and ours with the same parameters."""
    plain = PLAIN[dim](FEATURES, **settings)
    with torch.no_grad():
        for seed, parameter in enumerate(plain.parameters()):
            parameter.copy_(data((1, FEATURES), seed=seed).squeeze(0))
    ours = SyncBatchNorm(FEATURES, **settings)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def compare_steps(
    rank: int,
    rows: Sequence[int],
    rest: Sequence[int] = (),
    *,
    dtype: torch.dtype = torch.float32,
    layout: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    group: dist.ProcessGroup | None = None,
    steps: int = 3,
    **settings: Any,
) -> SyncBatchNorm:
    """Some training steps of both; ``rows`` is the batch size by rank of the group."""
    plain, ours = pair(2 + len(rest), dtype=dtype, **settings)
    ours.process_group = group
    for step in range(steps):
        whole = data((sum(rows), FEATURES, *rest), dtype, seed=step)
        grad = data(whole.shape, dtype, seed=100 + step)
        expected_input = whole.clone().requires_grad_()
        expected = plain(expected_input)
        expected.backward(grad)

        input = layout(whole.split(list(rows))[rank].clone()).requires_grad_()
        output = ours(input)
        assert output.dtype == input.dtype
        output.backward(layout(grad.split(list(rows))[rank].clone()))

        close(output, expected.split(list(rows))[rank], f"output {step}")
        close(input.grad, expected_input.grad.split(list(rows))[rank], f"input.grad {step}")
        for name, parameter in ours.named_parameters():
            theirs = plain.get_parameter(name).grad
            close(summed(parameter.grad, group) / 100, theirs / 100, f"{name}.grad {step}")
            parameter.grad = plain.get_parameter(name).grad = None
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, plain.get_buffer(name), msg=f"{name} {step}")
    equal_on_all_ranks(ours, group)
    return ours
