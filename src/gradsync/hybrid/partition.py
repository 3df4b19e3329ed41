"""Which server has which part of a table: pure arithmetic.

Rows are numbered anew, server by server: the ``slot`` of a row says both which server has it and
where. Sorted slots are so grouped by server, and nothing has to be sorted by server again.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from gradsync.errors import ArgumentError

Sharding = Literal["hash", "range", "column"]
SHARDINGS = ("hash", "range", "column")


@dataclass(frozen=True)
class Part:
    """One server's part of a table.

    >>> Part(rows=5, columns=slice(0, 4)).rows
    5
    """

    rows: int
    columns: slice


class Partition:
    """A table of ``rows`` × ``columns`` on ``servers`` servers.

    By "hash" neighbouring rows go to different servers, so that popular rows do not meet on one;
    by "range" each has a block of rows; by "column" each has a block of columns of all rows.

    >>> partition = Partition("range", rows=10, columns=4, servers=3)
    >>> [part.rows for part in partition.parts]
    [4, 4, 2]
    >>> partition.split(partition.slots(torch.tensor([1, 5, 9])))
    [1, 2, 3]
    """

    def __init__(self, sharding: Sharding, *, rows: int, columns: int, servers: int) -> None:
        if sharding not in SHARDINGS:
            raise ArgumentError(f'sharding must be "hash", "range" or "column", got {sharding!r}.')
        if sharding == "column" and columns < servers:
            raise ArgumentError(
                f"{columns} columns cannot be sharded over {servers} servers by column: use fewer "
                'servers, or sharding="hash".'
            )
        self.sharding, self.rows, self.columns, self.servers = sharding, rows, columns, servers
        self._height = -(-rows // servers)  # rows of one server at most
        self._factor = _coprime(rows)
        self._inverse = pow(self._factor, -1, rows) if rows > 1 else 0

    @property
    def by_row(self) -> bool:
        """Has each row one server?"""
        return self.sharding != "column"

    @property
    def parts(self) -> list[Part]:
        """What each server has."""
        if self.by_row:
            everything = slice(0, self.columns)
            return [Part(self._rows_of(at), everything) for at in range(self.servers)]
        cuts = [self.columns * at // self.servers for at in range(self.servers + 1)]
        return [Part(self.rows, slice(a, b)) for a, b in pairwise(cuts)]

    def _rows_of(self, server: int) -> int:
        return max(0, min(self._height, self.rows - server * self._height))

    def slots(self, rows: Tensor) -> Tensor:
        """Where rows are: ``slot // height`` is the server, ``slot % height`` the row there."""
        return rows * self._factor % self.rows if self.sharding == "hash" else rows

    def rows_at(self, server: int) -> Tensor:
        """The rows of the table that a server has, in its order."""
        if not self.by_row:
            return torch.arange(self.rows)
        slots = torch.arange(self._rows_of(server)) + server * self._height
        return slots * self._inverse % self.rows if self.sharding == "hash" else slots

    def split(self, slots: Tensor) -> list[int]:
        """For sorted slots, where those of each server end."""
        ends = torch.arange(1, self.servers + 1) * self._height
        return [int(end) for end in torch.searchsorted(slots, ends)]

    def local(self, slots: Tensor, server: int) -> Tensor:
        """The rows of ``server`` that slots of it stand for."""
        return slots - server * self._height if self.by_row and server else slots


def _coprime(rows: int) -> int:
    """A factor that, modulo ``rows``, hits each row once and spreads neighbours and multiples."""
    factor = max(1, round(rows * 0.6180339887))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor
