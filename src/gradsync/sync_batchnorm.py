"""Batch normalisation over the batches of all ranks, on any device that has collectives.

The path of one training step: the rank's own moments, one exchange of them, the combination of
all ranks' moments, the normalisation by those; in backward the rank's own two sums, one exchange
of them, the gradient of the input.

[Note: rows] An exchange is an all-gather of one row a rank, always in float64. So ranks whose
inputs have different dtypes (autocast on one of them) understand each other, counts are exact,
and what every rank computes from the rows is the same to the bit. A row is a few kilobytes at
most: there the all-gather of gloo is faster than its all-reduce, and the moments need it anyway.

[Note: nobody waits in vain] The head of a row says whether this rank's input can be used, and
whether the rank will come to the backward. A rank with a bad input takes part all the same, and
then every rank raises; if one will not come, the others raise in backward. What is left is a rank
that never gets to the layer: its peers wait for the time-out of the group.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from gradsync.errors import (
    ArgumentError,
    CollectiveError,
    ModelMismatchError,
    PeerStepError,
    StateError,
)

_HEAD = 2  # numbers at the start of a row: the count or _BAD_INPUT, and a stake
_BAD_INPUT = -1.0
# Elements: moments are taken block by block, so that deviations stay in the cache and sums short.
_BLOCK = 2**18
# What a rank has at stake in the backward: nothing (it will not come), only its parameters'
# gradients (it will come, and needs no exchange), its input's gradient.
_NO_BACKWARD, _PARAMETERS_ONLY, _INPUT = 0.0, 1.0, 2.0


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.SyncBatchNorm`` that works on the CPU too: statistics over all ranks' batches.

    Arguments, parameters, buffers and ``state_dict`` are torch's. While training, each forward
    issues one collective and each backward one, and all ranks of ``process_group`` (None: all
    ranks there are) have to take part in both. Batches may have different sizes, and a rank's
    batch may be empty; its loss still has to go through backward, as ``output.sum()`` does. The
    first forward on a group issues one more, which compares the layers of the ranks. In
    evaluation, with one rank, or without a process group it is a plain batch normalisation.

    The gradients of ``weight`` and ``bias`` are this rank's own: ``DistributedDataParallel``
    averages them as it does all others. Gradients of gradients are not supported.

    Inside ``torch.distributed.algorithms.join.Join`` (and ``DistributedDataParallel.join``) a
    rank that has run out of inputs does not take part in the collectives of this layer, and the
    others would wait for it: use ``throw_on_early_termination=True``.

    >>> layer = SyncBatchNorm(3)
    >>> output = layer(torch.randn(8, 3, 4, 4))
    >>> output.shape
    torch.Size([8, 3, 4, 4])
    >>> bool(output.mean().abs() < 1e-6)
    True
    """

    # A weak reference to the group whose ranks have compared their layers.
    _compared_in: weakref.ref[dist.ProcessGroup] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # older releases of torch do not take the argument
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, of shape (batch, features, ...); see the class.

        >>> SyncBatchNorm(3).eval()(torch.zeros(2, 3)).tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        """
        if not self.training:
            return super().forward(input)
        if torch.compiler.is_compiling():  # the exchange cannot be part of a compiled graph
            forward: Callable[[Tensor], Tensor] = torch.compiler.disable(self._forward_in_training)
            return forward(input)
        return self._forward_in_training(input)

    def _forward_in_training(self, input: Tensor) -> Tensor:
        group = self._group_to_sync()
        if group is None:
            return super().forward(input)
        self._compare_layers(group, input.device)
        problem = self._problem_with(input)
        rows = _exchange(group, self._row(input, problem), "the exchange of moments in forward")
        if problem is not None:
            raise ArgumentError(problem)
        heads: list[list[float]] = rows[:, :_HEAD].tolist()
        _check_heads(group, heads, input)
        counts, (means, m2s) = rows[:, 0], rows[:, _HEAD:].chunk(2, dim=1)
        mean, m2 = combine_moments(counts, means, m2s)
        peers = _Peers(group, heads)
        self._track(mean, m2, peers.total)
        variance = m2 / max(peers.total, 1)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, self.eps, peers
        )
        return output

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """Put this class in the place of every batch normalisation in ``module``.

        Takes ``BatchNorm1d``, ``2d``, ``3d`` and torch's ``SyncBatchNorm``. Returns ``module``, or
        the new layer if ``module`` is one itself. A new layer has the parameters, buffers, hooks
        and settings of the old one, as the same objects; a layer in two places stays one layer.
        Without a ``process_group`` a ``SyncBatchNorm`` keeps its own.

        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        >>> weight = model[1].weight
        >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
        >>> type(model[1]).__name__, model[1].weight is weight
        ('SyncBatchNorm', True)
        """
        return _convert(cls, module, process_group, {})

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or what another process loads, compares anew: weak references do not travel.
        return {name: value for name, value in vars(self).items() if name != "_compared_in"}

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(f"expected at least 2D input (got {input.dim()}D input)")

    def _group_to_sync(self) -> dist.ProcessGroup | None:
        """The group to exchange moments in, or None if this forward is a local one."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group or dist.group.WORLD
        # On a rank outside of a group, `new_group` returns something that has no size.
        if not isinstance(group, dist.ProcessGroup) or group.size() < 2:
            return None
        return group

    def _compare_layers(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raise on every rank if the ranks' layers differ, once for each group.

        Rows of different lengths would end the process inside gloo, so this has to come first.
        """
        if self._compared_in is not None and self._compared_in() is group:
            return
        names = ("num_features", "eps", "momentum", "track_running_stats")
        settings = [getattr(self, name) for name in names]
        mine = [math.nan if value is None else float(value) for value in settings]
        row = torch.tensor(mine, dtype=torch.float64, device=device)
        rows = _exchange(group, row, "the comparison of layers in the first forward").tolist()
        for rank, theirs in enumerate(rows):
            for name, first, other in zip(names, rows[0], theirs, strict=True):
                if first != other and not (math.isnan(first) and math.isnan(other)):
                    raise ModelMismatchError(
                        f"rank {group.rank()}: the SyncBatchNorm layers of the ranks differ: "
                        f"{name} is {first:g} on rank 0 and {other:g} on rank {rank} of the "
                        "group. Build the same model on every rank."
                    )
        self._compared_in = weakref.ref(group)

    def _row(self, input: Tensor, problem: str | None) -> Tensor:
        """What this rank tells the others: [Note: rows], [Note: nobody waits in vain]."""
        count = _BAD_INPUT if problem is not None else input.numel() // self.num_features
        stake = _stake(input, (self.weight, self.bias))
        head = torch.tensor([count, stake], dtype=torch.float64, device=input.device)
        if count < 1:
            return torch.cat((head, head.new_zeros(2 * self.num_features)))
        return torch.cat((head, *local_moments(input)))

    def _problem_with(self, input: Tensor) -> str | None:
        if input.dim() < 2:
            return f"expected at least 2D input (got {input.dim()}D input)"
        if input.size(1) != self.num_features or self.num_features == 0:
            return (
                f"expected an input with {self.num_features} features (at least one) in its "
                f"second dimension, got input size {input.size()}"
            )
        kept = next((t for t in (self.weight, self.running_mean) if t is not None), None)
        if not input.is_floating_point():
            return f"expected an input of floating point numbers, got {input.dtype}"
        if kept is not None and kept.dtype not in (input.dtype, _working_dtype(input)):
            return f"expected an input of {kept.dtype}, as the layer has it, got {input.dtype}"
        return None

    def _track(self, mean: Tensor, m2: Tensor, total: int) -> None:
        if not self.track_running_stats:
            return
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if total == 0 or self.running_mean is None or self.running_var is None:
            return
        for running, value in ((self.running_mean, mean), (self.running_var, m2 / (total - 1))):
            running.lerp_(value.to(running.dtype), factor or 0.0)


def combine_moments(counts: Tensor, means: Tensor, m2s: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the sum of squared deviations of a whole, from those of its parts.

    ``counts`` has one number a part, ``means`` and ``m2s`` one row a part. A part without
    values has the count 0, a mean of 0 and a sum of 0. Never subtracts squares of means, so a
    mean that is large beside the deviation does no harm (Chan, Golub and LeVeque, 1979).

    >>> counts = torch.tensor([2.0, 1.0])  # the parts are (1, 3) and (8,)
    >>> means, m2s = torch.tensor([[2.0], [8.0]]), torch.tensor([[2.0], [0.0]])
    >>> mean, m2 = combine_moments(counts, means, m2s)
    >>> mean.item(), m2.item()
    (4.0, 26.0)
    """
    # No matrix product: its last bit may depend on the machine, and ranks have to agree on it.
    weights = counts.unsqueeze(1)
    mean = (weights * means).sum(0) / counts.sum().clamp_(min=1)
    return mean, (means - mean).square_().mul_(weights).add_(m2s).sum(0)


@torch.no_grad()  # their share of the gradient is in the backward of _Normalise
def local_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the sum of squared deviations of each feature, in float64.

    >>> mean, m2 = local_moments(torch.tensor([[1.0], [3.0], [8.0]]))
    >>> round(mean.item(), 5), round(m2.item(), 5)
    (4.0, 26.0)
    """
    # torch's own kernel for the CPU sums in float64, one number at a time, where features do not
    # lie side by side: sums by hand take half of its time there or less. Else it is the faster one.
    by_kernel = input.is_cpu and (input.stride(1) == 1 or input.dtype.itemsize == 2)
    blocks = input.split(max(1, _BLOCK * input.size(0) // input.numel()))
    sizes = [float(block.numel() // block.size(1)) for block in blocks]
    counts = torch.tensor(sizes, dtype=torch.float64, device=input.device)
    moments = _moments_by_kernel if by_kernel else _moments_by_hand
    means, m2s = moments(blocks, counts.unsqueeze(1))
    return combine_moments(counts, means, m2s) if len(blocks) > 1 else (means[0], m2s[0])


def _moments_by_kernel(blocks: Sequence[Tensor], counts: Tensor) -> tuple[Tensor, Tensor]:
    # Without running statistics, those of 16-bit inputs would come out in 16 bits.
    unused = torch.zeros(blocks[0].size(1), dtype=_working_dtype(blocks[0]))
    found = [torch.batch_norm_update_stats(block, unused, unused, 0.0) for block in blocks]
    means, variances = (torch.stack(each).double() for each in zip(*found, strict=True))
    return means, variances * counts


def _moments_by_hand(blocks: Sequence[Tensor], counts: Tensor) -> tuple[Tensor, Tensor]:
    dims, shape = _layout(blocks[0])
    found = []
    for block in blocks:
        near = block.mean(dims, dtype=_working_dtype(block))
        deviations = block - near.view(shape)
        found.append((near, deviations.sum(dims), deviations.square_().sum(dims)))
    nears, excesses, squares = (torch.stack(each).double() for each in zip(*found, strict=True))
    # The deviations are from a rounded mean, and know by how much it was rounded.
    excesses /= counts
    return nears + excesses, (squares - excesses.square() * counts).clamp_(min=0)


class _Peers:
    """Who takes part in one forward, for its backward."""

    def __init__(self, group: dist.ProcessGroup, heads: list[list[float]]) -> None:
        counts, stakes = zip(*heads, strict=True)
        self.group = group
        self.total = int(sum(counts))  # values per feature, over all ranks
        self.exchange_in_backward = _INPUT in stakes
        self.absent = [rank for rank, stake in enumerate(stakes) if stake == _NO_BACKWARD]

    def exchange(self, row: Tensor) -> Tensor:
        if self.absent:
            raise StateError(
                f"rank {self.group.rank()}: the backward of a SyncBatchNorm needs every rank of "
                f"its group, but on rank {self.absent[0]} its forward ran without gradients "
                "(torch.no_grad, or neither input nor parameters require any). Run it in the "
                "same way on every rank."
            )
        return _exchange(self.group, row, "the exchange of gradients' sums in backward")


class _Normalise(torch.autograd.Function):
    """Normalises by moments over all ranks, of which the input is a part.

    With x̂ = (x - mean) / deviation, the gradient of the input is
    weight / deviation · (dy - mean of dy - x̂ · mean of dy x̂), both means over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        peers: _Peers,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.eps = eps
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.peers = peers
        dtype = _working_dtype(input)
        weight, bias = (None if each is None else each.to(dtype) for each in (weight, bias))
        mean, variance = mean.to(dtype), variance.to(dtype)
        return nn.functional.batch_norm(input, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors
        sum_grad, sum_product = _sums(grad, input, mean, variance, ctx.eps)
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_input = None
        if ctx.peers.exchange_in_backward:
            sums = ctx.peers.exchange(torch.cat((sum_grad, sum_product))).sum(0)
            if wants_input:
                mean_grad, mean_product = (sums / max(ctx.peers.total, 1)).chunk(2)
                inverse = (variance + ctx.eps).rsqrt_()
                scale = inverse if weight is None else inverse * weight
                slope = scale * inverse * mean_product
                shift = slope * mean - scale * mean_grad
                grad_input = _affine(grad, scale, input, -slope, shift)
        return (
            grad_input,
            sum_product.to(weight.dtype) if wants_weight else None,
            sum_grad.to(ctx.bias_dtype) if wants_bias else None,
            *(None,) * 4,
        )


def _sums(
    grad: Tensor, input: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Over this rank: the sums of ``grad`` and of its product with the normalised input."""
    if input.numel() == 0:  # the other ranks wait for this one's sums all the same
        zeros = torch.zeros_like(mean)
        return zeros, zeros
    # What the backward of an evaluation computes for bias and weight, in one look at the memory.
    dtype = _working_dtype(input)
    mean, variance = mean.to(dtype), variance.to(dtype)
    only_parameters = [False, True, True]
    _, sum_product, sum_grad = torch.ops.aten.native_batch_norm_backward(
        grad, input, None, mean, variance, None, None, False, eps, only_parameters
    )
    return sum_grad.double(), sum_product.double()


def _affine(a: Tensor, a_times: Tensor, b: Tensor, b_times: Tensor, plus: Tensor) -> Tensor:
    """``a * a_times + b * b_times + plus``, the last of each by feature."""
    dtype = _working_dtype(b)
    _, shape = _layout(b)
    by_feature = torch.stack((a_times, b_times, plus)).to(dtype).view(3, *shape)
    a_times, b_times, plus = by_feature.unbind()
    return torch.addcmul(plus, b, b_times).addcmul_(a, a_times).to(b.dtype)


def _check_heads(group: dist.ProcessGroup, heads: list[list[float]], input: Tensor) -> None:
    """Raise on every rank if one of them cannot go on."""
    for rank, (count, _) in enumerate(heads):
        if count == _BAD_INPUT:
            raise PeerStepError(
                f"rank {group.rank()}: the input of a SyncBatchNorm is not valid on rank {rank} "
                "of the group; that rank's own error says why."
            )
    if sum(count for count, _ in heads) == 1:
        raise ArgumentError(
            "Expected more than 1 value per channel when training, got input size "
            f"{input.size()} (and one value over all {len(heads)} ranks)"
        )


def _exchange(group: dist.ProcessGroup, row: Tensor, what: str) -> Tensor:
    """The rows of all ranks of ``group``."""
    rows = row.new_empty(group.size(), row.numel())
    try:
        group.allgather([list(rows.unbind(0))], [row], AllgatherOptions()).wait()
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {group.rank()} of {group.size()}: SyncBatchNorm: {what} failed: {error}\n"
            "Another rank failed, was killed, or is not at the same point of the program; its "
            "own output says why."
        ) from error
    return rows


def _convert(
    cls: type[SyncBatchNorm],
    module: nn.Module,
    group: dist.ProcessGroup | None,
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if module in done:
        return done[module]
    converted = (
        _taking_the_place_of(cls, module, group) if isinstance(module, _BatchNorm) else module
    )
    done[module] = converted
    # Not named_children(), which leaves out the second place of a module that has two.
    for name, child in module._modules.items():
        if child is not None:
            converted._modules[name] = _convert(cls, child, group, done)
    return converted


def _taking_the_place_of(
    cls: type[SyncBatchNorm], layer: _BatchNorm, group: dist.ProcessGroup | None
) -> SyncBatchNorm:
    if any(is_lazy(each) for each in (*layer.parameters(), *layer.buffers())):
        raise ArgumentError(
            f"a {type(layer).__name__} does not know its number of features yet: run the model "
            "once, then convert it"
        )
    new = cls.__new__(cls)
    # The same dictionaries: a hook's handle, for one, refers to the one that it is in.
    vars(new).update(vars(layer))
    new.process_group = group or getattr(layer, "process_group", None)
    return new


def _stake(input: Tensor, parameters: tuple[Tensor | None, ...]) -> float:
    if torch.is_grad_enabled():
        if input.requires_grad:
            return _INPUT
        if any(each is not None and each.requires_grad for each in parameters):
            return _PARAMETERS_ONLY
    return _NO_BACKWARD


def _layout(input: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions to sum over, and the shape in which features broadcast."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    return dims, [1, -1] + [1] * (input.dim() - 2)


def _working_dtype(input: Tensor) -> torch.dtype:
    return torch.float32 if input.dtype.itemsize < 4 else input.dtype
