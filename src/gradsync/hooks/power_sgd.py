"""PowerSGD: gradients travel as products of two thin matrices (Vogels et al., arXiv 1905.13727).

A gradient, as a matrix M of n rows and m columns, is approximated by P Qᵀ with ``rank`` columns
each. A step of the power iteration makes P = M Q, sums it over the ranks and orthogonalises its
columns; then Q = Mᵀ P, summed as well, is the best factor for that P. Q is where the next step
starts (warm start), and M − P Qᵀ is added to the next gradient (error feedback).

[Note: thin matrices]
P and Q are kept transposed, as rows: a product of a large matrix with a few *columns* takes the
library ten times as long as one with a few rows (3072x3072 by 4: Mᵀ P 70 ms, Pᵀ M 6 ms).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradsync.errors import ArgumentError
from gradsync.hooks import wire
from gradsync.hooks.alike import Alike, group_alike
from gradsync.hooks.base import Hook, Round, Rounds, compute_dtype
from gradsync.hooks.memory import Owner, ParameterMemory, PerBucket, Roster, places_of

# What is left of a row once the rows before it are taken out of it, relative to what it was:
# below this it is rounding, and points anywhere.
_NOISE = 1e-5


class PowerSGD(Hook):
    """Send a low-rank approximation of each gradient, with error feedback.

    Before ``start_iteration`` steps gradients are averaged as they are: the first ones change
    quickly. A gradient is compressed if that makes it smaller by more than
    ``min_compression_rate``; vectors never are. ``warm_start=False`` begins each step with
    random factors, the same on all ranks, drawn from ``seed``.

    >>> import gradsync, torch
    >>> ddp = gradsync.DistributedDataParallel(torch.nn.Linear(64, 64))
    >>> hook = gradsync.hooks.PowerSGD(rank=2, start_iteration=0)
    >>> ddp.register_comm_hook(None, hook)
    >>> ddp(torch.ones(1, 64)).sum().backward()
    >>> hook.iteration
    1
    """

    name = "power_sgd"

    def __init__(
        self,
        rank: int = 1,
        *,
        start_iteration: int = 1000,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        if rank < 1:
            raise ArgumentError(f"rank must be at least 1, not {rank}")
        if start_iteration < 0:
            raise ArgumentError(f"start_iteration must not be negative, but is {start_iteration}")
        if min_compression_rate <= 0:
            raise ArgumentError(
                f"min_compression_rate must be positive, not {min_compression_rate}"
            )
        self.rank = rank
        self.start_iteration = start_iteration
        self.min_compression_rate = min_compression_rate
        self.warm_start = warm_start
        self.seed = seed
        self.iteration = 0
        self._roster = Roster()
        self._plans: PerBucket[_Plan] = PerBucket(self._roster)
        self._residuals = ParameterMemory(self._roster)
        self._factors = ParameterMemory(self._roster, self._draw)

    def __repr__(self) -> str:
        return f"PowerSGD(rank={self.rank}, start_iteration={self.start_iteration})"

    def reduce(self, bucket: GradBucket, buffer: Tensor, group: dist.ProcessGroup) -> Rounds:
        """See `Hook.reduce`."""
        if self.iteration < self.start_iteration:
            self._roster.meet(bucket.parameters())
            total = wire.Sum(group, buffer)
            yield Round(total.work, last=True)
            total.finish()
            buffer.div_(group.size())
            return
        plan = self._plans.get(bucket, lambda: self._plan(bucket, buffer))
        if not self.warm_start:
            self._factors.begin_anew(plan.compressed(), salt=self.iteration)
        message = plan.first_message(buffer)
        total = wire.Sum(group, message)
        yield Round(total.work, last=not plan.matrices)
        total.finish()
        plan.read_vectors(message, buffer, group.size())
        if not plan.matrices:
            return
        plan.make_factors(message)
        total = wire.Sum(group, plan.factors)
        yield Round(total.work, last=True)
        total.finish()
        plan.factors.div_(group.size())
        plan.decompress(message, buffer)
        if not torch.isfinite(plan.factors.sum()):
            self._forget(plan)

    def end_step(self, buckets: int) -> None:
        """See `Hook.end_step`."""
        super().end_step(buckets)
        self._plans.keep_first(buckets)
        self.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """See `Hook.state_dict`.

        >>> import gradsync
        >>> gradsync.hooks.PowerSGD().state_dict()["iteration"]
        0
        """
        return super().state_dict() | {
            "rank": self.rank,
            "iteration": self.iteration,
            "parameters": self._roster.state(),
            "residuals": self._residuals.state(),
            "factors": self._factors.state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Hook.load_state_dict`.

        >>> import gradsync
        >>> saved = gradsync.hooks.PowerSGD(rank=2).state_dict()
        >>> gradsync.hooks.PowerSGD(rank=2).load_state_dict(saved)
        """
        super().load_state_dict(state)
        if state["rank"] != self.rank:
            raise ArgumentError(
                f"this is the state of a PowerSGD of rank {state['rank']}, not {self.rank}"
            )
        self.iteration = state["iteration"]
        self._roster.load(state["parameters"])
        self._residuals.load(state["residuals"])
        self._factors.load(state["factors"])

    def _plan(self, bucket: GradBucket, buffer: Tensor) -> "_Plan":
        matrices, vectors = [], []
        for owner, gradient in zip(places_of(bucket), bucket.gradients(), strict=True):
            rows, columns = _matrix_shape(gradient)
            rank = min(self.rank, rows, columns)
            if (rows + columns) * rank * self.min_compression_rate < rows * columns:
                matrices.append((owner, (rows, columns)))
            elif owner.size:
                vectors.append(owner)
        groups = group_alike(matrices)
        dtype, device = compute_dtype(buffer.dtype), buffer.device
        ordered = [(member, group.shape) for group in groups for member in group.members]
        ranks = [min(self.rank, *shape) for _, shape in ordered]
        return _Plan(
            matrices=groups,
            vectors=_neighbours_joined(vectors),
            rank=self.rank,
            residuals=self._lay_out(
                self._residuals, ordered, [owner.size for owner, _ in ordered], dtype, device
            ),
            factors=self._lay_out(
                self._factors,
                ordered,
                [r * shape[1] for r, (_, shape) in zip(ranks, ordered, strict=True)],
                dtype,
                device,
            ),
        )

    def _lay_out(
        self,
        memory: ParameterMemory,
        ordered: Sequence[tuple[Owner, tuple[int, ...]]],
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        owners, end = [], 0
        for (owner, _), size in zip(ordered, sizes, strict=True):
            owners.append(Owner(owner.parameter, end, size))
            end += size
        return memory.lay_out(owners, end, dtype, device)

    def _draw(self, place: Tensor, number: int) -> None:
        """Random numbers that are the same on all ranks."""
        generator = torch.Generator().manual_seed(self.seed + number)
        place.copy_(torch.randn(place.shape, generator=generator))

    def _forget(self, plan: "_Plan") -> None:
        """An infinite or undefined gradient was sent as such, and must not stay for ever."""
        self._residuals.begin_anew(plan.compressed())
        self._factors.begin_anew(plan.compressed())


@dataclass(frozen=True)
class _Plan:
    """One bucket: its matrices, which are compressed, and its vectors, which are not.

    The first message holds the vectors and then all Pᵀ, the second all Qᵀ.
    """

    matrices: list[Alike]
    vectors: list[Owner]
    rank: int
    residuals: Tensor  # 1D, the matrices group by group
    factors: Tensor  # 1D, all Qᵀ group by group

    def compressed(self) -> list[Tensor]:
        """The parameters whose gradients are compressed."""
        return [member.parameter for group in self.matrices for member in group.members]

    def first_message(self, buffer: Tensor) -> Tensor:
        """The vectors, and P = M Q of the gradients with what earlier steps have left."""
        vectors = sum(owner.size for owner in self.vectors)
        length = vectors + sum(len(g.members) * self._rank(g) * g.shape[0] for g in self.matrices)
        message = self.residuals.new_empty(length)
        places, gradients = self._vector_sides(message, buffer)
        if places:
            torch._foreach_copy_(places, gradients)
        for group, residual, p, q in self._parts(message):
            residual.add_(group.view(buffer))
            torch.bmm(_normalised(q), residual.mT, out=p)
        return message

    def read_vectors(self, message: Tensor, buffer: Tensor, world: int) -> None:
        """The mean of the vectors into their places."""
        places, gradients = self._vector_sides(message, buffer)
        if places:
            message[: sum(owner.size for owner in self.vectors)].div_(world)
            torch._foreach_copy_(gradients, places)

    def make_factors(self, message: Tensor) -> None:
        """Orthogonal P, and Q = Mᵀ P of this rank."""
        for _, residual, p, q in self._parts(message):
            orthogonalise(p)
            torch.bmm(p, residual, out=q)

    def decompress(self, message: Tensor, buffer: Tensor) -> None:
        """P Qᵀ into the buffer, and what it lacks of M into the residuals."""
        for group, residual, p, q in self._parts(message):
            gradient = group.view(buffer)
            if gradient.dtype == p.dtype and len(gradient) == 1:
                torch.mm(p[0].T, q[0], out=gradient[0])
            else:
                gradient.copy_(torch.bmm(p.mT, q))
            residual.sub_(gradient)

    def _parts(self, message: Tensor) -> list[tuple[Alike, Tensor, Tensor, Tensor]]:
        """For each group: its residuals (k, n, m), Pᵀ (k, rank, n) and Qᵀ (k, rank, m)."""
        parts = []
        at_p, at_q, at_m = sum(owner.size for owner in self.vectors), 0, 0
        for group in self.matrices:
            count, (rows, columns), rank = len(group.members), group.shape, self._rank(group)
            p = message[at_p : at_p + count * rank * rows].view(count, rank, rows)
            q = self.factors[at_q : at_q + count * rank * columns].view(count, rank, columns)
            m = self.residuals[at_m : at_m + count * rows * columns].view(count, rows, columns)
            at_p, at_q, at_m = at_p + p.numel(), at_q + q.numel(), at_m + m.numel()
            parts.append((group, m, p, q))
        return parts

    def _vector_sides(self, message: Tensor, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        places, gradients, end = [], [], 0
        for _, start, size in self.vectors:
            places.append(message[end : end + size])
            gradients.append(buffer[start : start + size])
            end += size
        return places, gradients

    def _rank(self, group: Alike) -> int:
        return min(self.rank, *group.shape)


def orthogonalise(rows: Tensor) -> None:
    """Make the rows of each matrix orthonormal, in place; a row that depends on others is 0.

    >>> rows = torch.tensor([[[3.0, 0.0], [1.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]]])
    >>> orthogonalise(rows)
    >>> rows[0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    >>> rows[1, 1].tolist()
    [0.0, 0.0]
    """
    smallest = torch.finfo(rows.dtype).tiny
    before = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    for index in range(rows.shape[1]):
        row = rows[:, index : index + 1]
        norm = torch.linalg.vector_norm(row, dim=2, keepdim=True) if index else before[:, :1]
        noise = norm <= before[:, index : index + 1] * _NOISE
        row.div_(norm.clamp(min=smallest)).masked_fill_(noise, 0)
        if index + 1 < rows.shape[1]:
            others = rows[:, index + 1 :]
            others.baddbmm_(torch.bmm(others, row.mT), row, alpha=-1)


def _normalised(rows: Tensor) -> Tensor:
    """Rows of length 1: products of small gradients would underflow otherwise.

    A row of zeros would give zeros for ever, and becomes one that meets every column.
    """
    norms = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    unit: Tensor = rows / norms.clamp(min=torch.finfo(rows.dtype).tiny)
    if bool((norms == 0).any()):
        generator = torch.Generator().manual_seed(rows.shape[2])
        fallback = torch.randn(rows.shape[1:], generator=generator).to(rows)
        unit = torch.where(norms == 0, fallback / rows.shape[2] ** 0.5, unit)
    return unit


def _matrix_shape(gradient: Tensor) -> tuple[int, int]:
    """Rows and columns of a gradient as it lies in memory; the outermost dimension gives the rows.

    That is the first one, except where weights are stored transposed.
    """
    if gradient.dim() < 2 or gradient.numel() == 0:
        return gradient.numel(), 1
    outermost = max(range(gradient.dim()), key=lambda d: (gradient.stride(d), -d))
    rows = gradient.shape[outermost]
    return rows, gradient.numel() // rows


def _neighbours_joined(owners: Sequence[Owner]) -> list[Owner]:
    joined: list[Owner] = []
    for owner in owners:
        if joined and joined[-1].start + joined[-1].size == owner.start:
            last = joined.pop()
            owner = Owner(last.parameter, last.start, last.size + owner.size)
        joined.append(owner)
    return joined
