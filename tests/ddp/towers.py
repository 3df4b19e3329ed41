"""A model of equal layers: what makes how many buckets of it, and what its steps send."""

from __future__ import annotations

from typing import Any

import torch
from oracles import FEATURES, batch, plain_step
from torch import Tensor, nn

from gradsync.testing import count_collectives

LIMIT = 50.0
LAYERS = 15
WIDTH = 64  # a weight is 16 KiB: less than a quarter of the caps, else it would go alone


class Tower(nn.Module):
    """Equal layers, so that the number of buckets for a cap is known."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# What is asked for, and how many buckets that makes of a Tower once they are rebuilt.
CAPS: list[tuple[dict[str, Any], int]] = [
    ({"bucket_cap_mb": 0}, 2 * LAYERS),
    ({"bucket_cap_mb": 0.07}, LAYERS // 5),
    ({"bucket_cap_mb": 1000}, 1),
    ({}, 1),
    ({"bucket_cap_mb_list": [0]}, 2 * LAYERS),
    ({"bucket_cap_mb_list": [0.01, 0.07]}, 4),
    ({"bucket_cap_mb_list": [0.07, 1000]}, 2),
    ({"bucket_cap_mb_list": [1000, 0]}, 1),
]


def collectives_by_step(model: nn.Module, rank: int, steps: int) -> list[list[str]]:
    """The names of the collectives of each step, in order."""
    logs = []
    with count_collectives() as counted:
        for index in range(steps):
            counted.clear()
            plain_step(model, batch(index, rank), index)
            logs.append([entry.op for entry in counted.log])
    return logs
