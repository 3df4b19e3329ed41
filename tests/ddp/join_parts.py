"""What the tests of uneven inputs share: a model, and its training."""

from __future__ import annotations

from typing import Any

import torch
from replicas import batch, quiet
from torch import Tensor, nn

LIMIT = 60.0


class Tower(nn.Module):
    """With BatchNorm, whose statistics are buffers, or without."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def train(
    ddp: Any, rank: int, steps: int, *use: int, optimizer: Any = None, rows: int = 3, **options: Any
) -> None:
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    with quiet(), ddp.join(**options):
        for step in range(steps):
            optimizer.zero_grad()
            ddp(batch(rank, step, rows), *use).square().mean().backward()
            optimizer.step()
