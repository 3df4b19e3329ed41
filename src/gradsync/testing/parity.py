"""Oracles: is training with one wrapper the same as with another, and as in one process?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.testing.pool import WorkerPool
from gradsync.testing.scenario import Scenario, Trace, Wrap, train, train_single


@dataclass(frozen=True)
class ParityTraces:
    """What `check_parity` ran: traces by rank, and the one of a single process.

    >>> ParityTraces(ours=[Trace()], torch=[Trace()], single=None).single is None
    True
    """

    ours: list[Trace]
    torch: list[Trace]
    single: Trace | None


def check_parity(
    pool: WorkerPool,
    scenario: Scenario,
    ranks: int = 2,
    ddp_kwargs: Mapping[str, Any] | None = None,
    torch_kwargs: Mapping[str, Any] | None = None,
    *,
    bitwise: bool = True,
    single: bool = True,
    compare_buffers: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    ours: Wrap | None = None,
    backend: str = "gloo",
    timeout: float = 60.0,
) -> ParityTraces:
    """Train with our DDP, with torch's and in one process; fail where they differ.

    Checks that all ranks end with bitwise equal weights, that ours equals torch's on every
    rank (bitwise, or within ``rtol`` and ``atol``), and that ours equals a single process within
    ``rtol`` and ``atol``. ``torch_kwargs`` are ``ddp_kwargs`` unless given; ``ours`` puts
    another wrapper in the place of our DDP. Buffers that depend on the order of batches, as
    BatchNorm's do, differ in one process: ``compare_buffers=False`` leaves them out there.

    >>> scenario = Scenario(
    ...     build=lambda: nn.Linear(2, 1),
    ...     batch=lambda step, rank, world: (torch.ones(3, 2) * rank, torch.ones(3, 1)),
    ... )
    >>> with WorkerPool(max_ranks=2) as pool:
    ...     traces = check_parity(pool, scenario, ranks=2)
    >>> len(traces.ours)
    2
    """
    our_kwargs = dict(ddp_kwargs or {})
    reference_kwargs = our_kwargs if torch_kwargs is None else dict(torch_kwargs)
    by_rank = pool.run(
        _train_all,
        ranks=ranks,
        args=(scenario, ours, our_kwargs, reference_kwargs, single),
        backend=backend,
        timeout=timeout,
    )
    traces = ParityTraces(
        ours=[mine for mine, _, _ in by_rank],
        torch=[reference for _, reference, _ in by_rank],
        single=by_rank[0][2],
    )
    for rank, (mine, reference) in enumerate(zip(traces.ours, traces.torch, strict=True)):
        _assert_same_weights(traces.ours[0], mine, rank)
        assert_traces_equal(
            mine,
            reference,
            bitwise=bitwise,
            names=(f"ours on rank {rank}", "torch's DDP"),
            rtol=rtol,
            atol=atol,
        )
    if traces.single is not None:
        assert_traces_equal(
            replace(traces.ours[0], losses=_mean_losses(traces.ours)),
            traces.single,
            bitwise=False,
            compare_buffers=compare_buffers,
            names=("ours", "a single process"),
            rtol=rtol,
            atol=atol,
        )
    return traces


def assert_traces_equal(
    a: Trace,
    b: Trace,
    *,
    bitwise: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    compare_buffers: bool = True,
    names: tuple[str, str] = ("a", "b"),
) -> None:
    """Fail at the first step and tensor that differ, and say by how much.

    >>> one = Trace(losses=[torch.tensor(1.0)], grads=[{"w": torch.zeros(2)}])
    >>> two = Trace(losses=[torch.tensor(1.0)], grads=[{"w": torch.tensor([0.0, 0.5])}])
    >>> assert_traces_equal(one, two)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    AssertionError: step 0, gradient of 'w': 1 of 2 elements differ (bitwise), most by 0.5 ...
    """
    tolerance = None if bitwise else (rtol, atol)
    for where, left, right in _pairs(a, b, compare_buffers, names):
        problem = _difference(left, right, tolerance, names)
        if problem:
            raise AssertionError(f"{where}: {problem}")


def _train_all(
    rank: int,
    world: int,
    scenario: Scenario,
    ours: Wrap | None,
    our_kwargs: dict[str, Any],
    torch_kwargs: dict[str, Any],
    single: bool,
) -> tuple[Trace, Trace, Trace | None]:
    def wrap_in_ours(module: nn.Module) -> nn.Module:
        from gradsync import DistributedDataParallel

        return DistributedDataParallel(module, **our_kwargs)

    def wrap_in_torch(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, **torch_kwargs)

    mine = train(scenario, ours or wrap_in_ours, rank, world)
    reference = train(scenario, wrap_in_torch, rank, world)
    return mine, reference, train_single(scenario, world) if single and rank == 0 else None


def _assert_same_weights(first: Trace, other: Trace, rank: int) -> None:
    names = ("rank 0", f"rank {rank}")
    for name, weight in first.parameters.items():
        problem = _difference(weight, other.parameters[name], None, names)
        if problem:
            raise AssertionError(f"ours, at the end, the ranks' parameter {name!r}: {problem}")


def _mean_losses(traces: list[Trace]) -> list[Tensor]:
    return [torch.stack(losses).mean(0) for losses in zip(*(t.losses for t in traces), strict=True)]


def _pairs(
    a: Trace, b: Trace, buffers: bool, names: tuple[str, str]
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Everything to compare, in the order in which training made it."""
    if len(a.losses) != len(b.losses):
        counts = f"{names[0]} has {len(a.losses)} steps, {names[1]} {len(b.losses)}"
        raise AssertionError(f"the traces are of different length: {counts}")
    for step, (left, right) in enumerate(zip(a.losses, b.losses, strict=True)):
        yield f"step {step}, loss", left, right
        yield from _matched(f"step {step}, gradient of", a.grads[step], b.grads[step], names)
    yield from _matched("at the end, parameter", a.parameters, b.parameters, names)
    if buffers:
        yield from _matched("at the end, buffer", a.buffers, b.buffers, names)


def _matched(
    what: str,
    a: Mapping[str, Tensor | None],
    b: Mapping[str, Tensor | None],
    names: tuple[str, str],
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    if a.keys() != b.keys():
        only = f"only in {names[0]}: {sorted(a.keys() - b.keys())}, "
        only += f"only in {names[1]}: {sorted(b.keys() - a.keys())}"
        raise AssertionError(f"{what}: the names differ; {only}")
    for name in a:
        yield f"{what} {name!r}", a[name], b[name]


def _difference(
    a: Tensor | None,
    b: Tensor | None,
    tolerance: tuple[float, float] | None,
    names: tuple[str, str],
) -> str:
    """What is wrong between two tensors, in words; empty if nothing is."""
    if a is None or b is None:
        if a is b:
            return ""
        holder, lacking = (names[0], names[1]) if b is None else (names[1], names[0])
        return f"{lacking} has None, {holder} has a tensor"
    if a.shape != b.shape or a.dtype != b.dtype:
        shapes = (f"{n} has {tuple(t.shape)} {t.dtype}" for n, t in zip(names, (a, b), strict=True))
        return ", ".join(shapes)
    a, b = a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b
    differs = _unequal_bits(a, b) if tolerance is None else _not_close(a, b, *tolerance)
    count = int(differs.sum())
    if count == 0:
        return ""
    kind = "(bitwise)" if tolerance is None else "beyond rtol={:g}, atol={:g}".format(*tolerance)
    index, amount = _largest(a, b, differs)
    values = f"{names[0]} has {a[index].item()!r}, {names[1]} has {b[index].item()!r}"
    return f"{count} of {a.numel()} elements differ {kind}, most by {amount:g} at {index}: {values}"


def _unequal_bits(a: Tensor, b: Tensor) -> Tensor:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1, 1).view(torch.uint8)

    return (bits(a) != bits(b)).any(1).reshape(a.shape)


def _not_close(a: Tensor, b: Tensor, rtol: float, atol: float) -> Tensor:
    return ~torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _largest(a: Tensor, b: Tensor, differs: Tensor) -> tuple[tuple[int, ...], float]:
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=math.inf)
    flat = int(torch.where(differs, gap, -1.0).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), a.shape))
    return index, float(gap[index])
