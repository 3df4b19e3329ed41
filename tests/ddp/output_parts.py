"""What the tests of outputs share: a module with two of them, and the modes to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from oracles import FEATURES
from torch import Tensor, nn

LIMIT = 50.0
MODES: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


class TwoHeads(nn.Module):
    """A body and two heads; ``wrap`` makes the output of what the heads give."""

    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap
        self.body = nn.Linear(FEATURES, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self.wrap(self.left(hidden), self.right(hidden))
