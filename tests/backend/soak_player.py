"""One thread of a rank in a soak: a random program on one group, every result checked."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradsync

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
ARITHMETIC = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
LONGEST_QUEUE = 6
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # as it is new
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
ROUND = 25  # steps after which the ranks agree whether to go on
TIMEOUT = timedelta(seconds=60)


@dataclass
class Pending:
    """An operation under way."""

    what: str
    works: list[Any]
    check: Callable[[], None]
    kept: object = None


@dataclass
class Player:
    """Runs one random program on one group."""

    rank: int  # in the group
    world: int
    group: Any
    gloo: Any
    seed: str
    ranks: list[int]  # of the whole job, by rank of the group
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.common = random.Random(self.seed)
        self.own = random.Random(f"{self.seed}/{self.rank}")
        self.generator = torch.Generator().manual_seed(self.own.getrandbits(60))
        self.pending: list[Pending] = []
        self.memories: list[tuple[Tensor, Pending | None]] = []
        self.step = 0

    def play(self, until: float) -> Counter[str]:
        operations = [self.all_reduce] * 6 + [
            self.reduce,
            self.broadcast,
            self.all_gather,
            self.all_gather_single,
            self.gather,
            self.scatter,
            self.reduce_scatter,
            self.all_to_all,
            self.barrier,
            self.messages,
            self.messages,
            self.mismatch,
        ]
        while self.goes_on(until):
            for _ in range(ROUND):
                self.step += 1
                self.common.choice(operations)()
                self.settle(self.own.randrange(LONGEST_QUEUE))
        self.settle(0)
        return self.counts

    def goes_on(self, until: float) -> bool:
        flag = torch.tensor([int(time.monotonic() < until)])
        dist.broadcast(flag, self.ranks[0], group=self.gloo)
        return bool(flag)

    # ---------------------------------------------------------------- what is common

    def size(self) -> int:
        limit = self.common.choice([1, 4, 300, 9000, 9000, 70_000, 300_000, 900_000])
        return self.common.randrange(limit)

    def data(self, count: int, dtype: torch.dtype, op: Any = None) -> Tensor:
        """Numbers whose sums and products are exact in any order."""
        low, high = (-1, 3) if op == dist.ReduceOp.PRODUCT else (-5, 6)
        if dtype in INTEGERS and op != dist.ReduceOp.PRODUCT:
            low, high = (0, 256) if dtype is torch.uint8 else (-120, 120)
        if not dtype.is_signed:
            low = max(low, 0)
        return torch.randint(low, high, (count,), generator=self.generator).to(dtype)

    def of_all(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, over gloo."""
        flat = tensor.contiguous().view(-1)
        if flat.numel() == 0:
            return [flat.clone() for _ in range(self.world)]
        raw = flat.view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self.world)]
        dist.all_gather(parts, raw.clone(), group=self.gloo)
        return [part.view(tensor.dtype) for part in parts]

    def reduced(self, parts: list[Tensor], op: Any) -> Tensor:
        dtype = parts[0].dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        result = parts[0].to(wide)
        for part in parts[1:]:
            result = (ARITHMETIC | BITWISE)[op](result, part.to(wide))
        if op == dist.ReduceOp.AVG:
            if dtype.is_floating_point:
                result = result * (1.0 / self.world)
            else:
                result = result.div(self.world, rounding_mode="trunc")
        return result.to(dtype)

    def draw(self) -> tuple[torch.dtype, Any]:
        dtype = self.common.choice(FLOATS * 2 + INTEGERS)
        ops = list(ARITHMETIC) + ([] if dtype.is_floating_point else list(BITWISE))
        return dtype, self.common.choice(ops)

    def begin(
        self, what: str, works: Any, check: Callable[[], None], kept: object = None
    ) -> Pending:
        """``works`` are under way, or None of a call that has waited."""
        self.counts[what.split("(")[0]] += 1
        works = works if isinstance(works, list) else [works]
        one = Pending(f"step {self.step}, {what}", [w for w in works if w is not None], check, kept)
        self.pending.append(one)
        if not one.works:
            self.settle_one(one)
        return one

    def settle(self, longest: int) -> None:
        while len(self.pending) > longest:
            self.settle_one(self.own.choice(self.pending))

    def settle_one(self, one: Pending) -> None:
        if one not in self.pending:
            return
        self.pending.remove(one)
        for work in one.works:
            way = self.own.randrange(5)
            if way == 0:
                deadline = time.monotonic() + TIMEOUT.total_seconds()
                while not work.is_completed():
                    assert time.monotonic() < deadline, f"{one.what} is never completed"
            elif way == 1:
                work.get_future().wait()
            work.wait()
        try:
            one.check()
        except AssertionError as error:
            raise AssertionError(f"{one.what}: {error}") from None

    def equal(self, got: Tensor, right: Tensor) -> None:
        if torch.equal(got.reshape(-1), right.reshape(-1)):
            return
        wrong = (got.reshape(-1) != right.reshape(-1)).nonzero().view(-1)
        first = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {right.numel()} elements are wrong, the first is {first}: "
            f"{got.reshape(-1)[first]}, not {right.reshape(-1)[first]}"
        )

    # ---------------------------------------------------------------- operations

    def all_reduce(self) -> None:
        dtype, op = self.draw()
        count, later = self.size(), self.common.random() < 0.6
        kind = self.common.randrange(4)
        value = self.data(count, dtype, op)
        right = self.reduced(self.of_all(value), op)
        spoils = self.common.random() < 0.2 and self.rank == 0  # not symmetric on all ranks
        if kind <= 1 and not spoils:
            tensor, slot = self.symmetric(count, dtype)
            tensor.copy_(value)
        elif kind == 2 and self.own.random() < 0.5:
            tensor, slot = torch.empty((count, 2), dtype=dtype)[:, 0], None
            tensor.copy_(value)
        else:
            tensor, slot = value.clone(), None
        work = dist.all_reduce(tensor, op, group=self.group, async_op=later)
        name = f"all_reduce({op}, {count} x {dtype}, kind {kind})"
        one = self.begin(name, work, lambda: self.equal(tensor, right))
        if slot is not None:
            self.memories[slot] = (self.memories[slot][0], one)

    def symmetric(self, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A part of one of our pieces of symmetric memory, and which. Ranks use different ones."""
        if len(self.memories) < 3 or self.own.random() < 0.02:
            memory = self.group.symmetric_empty(8 * 1_000_000, torch.uint8)
            self.memories = [*self.memories[-2:], (memory, None)]
        slot = self.own.randrange(len(self.memories))
        memory, user = self.memories[slot]
        if user is not None:
            self.settle_one(user)
        begin = self.own.randrange(8) * 64
        part = memory[begin : begin + count * dtype.itemsize]
        return part.view(dtype) if count else torch.empty(0, dtype=dtype), slot

    def reduce(self) -> None:
        dtype, op = self.draw()
        count, root = self.size(), self.common.randrange(self.world)
        tensor = self.data(count, dtype, op)
        right = self.reduced(self.of_all(tensor), op) if self.rank == root else tensor.clone()
        if self.rank != root:
            self.of_all(tensor)
        work = dist.reduce(
            tensor, self.ranks[root], op, group=self.group, async_op=self.common.random() < 0.5
        )
        self.begin(f"reduce({op}, {count} x {dtype})", work, lambda: self.equal(tensor, right))

    def broadcast(self) -> None:
        dtype = self.common.choice((*INTEGERS, *FLOATS, torch.bool, torch.complex64))
        count, root = self.size(), self.common.randrange(self.world)
        tensor = self.data(count, torch.int32).to(dtype)
        right = self.of_all(tensor)[root]
        work = dist.broadcast(
            tensor, self.ranks[root], group=self.group, async_op=self.common.random() < 0.5
        )
        self.begin(f"broadcast({count} x {dtype})", work, lambda: self.equal(tensor, right))

    def all_gather(self) -> None:
        dtype, _ = self.draw()
        count = self.size() // self.world
        tensor = self.data(count, dtype)
        right = self.of_all(tensor)
        outputs = [torch.empty_like(tensor) for _ in range(self.world)]
        work = dist.all_gather(
            outputs, tensor, group=self.group, async_op=self.common.random() < 0.5
        )
        self.begin(
            f"all_gather({count} x {dtype})",
            work,
            lambda: [self.equal(*pair) for pair in zip(outputs, right, strict=True)],
            tensor,
        )

    def all_gather_single(self) -> None:
        dtype, _ = self.draw()
        count = self.size() // self.world
        tensor = self.data(count, dtype)
        right = torch.cat(self.of_all(tensor))
        output = torch.empty(count * self.world, dtype=dtype)
        work = ALL_GATHER_SINGLE(
            output, tensor, group=self.group, async_op=self.common.random() < 0.5
        )
        self.begin(
            f"all_gather_single({count} x {dtype})",
            work,
            lambda: self.equal(output, right),
            tensor,
        )

    def gather(self) -> None:
        dtype, _ = self.draw()
        count, root = self.size() // self.world, self.common.randrange(self.world)
        tensor = self.data(count, dtype)
        right = self.of_all(tensor)
        outputs = None
        if self.rank == root:
            outputs = [torch.empty_like(tensor) for _ in range(self.world)]
        work = dist.gather(
            tensor,
            outputs,
            self.ranks[root],
            group=self.group,
            async_op=self.common.random() < 0.5,
        )
        self.begin(
            f"gather({count} x {dtype})",
            work,
            lambda: [self.equal(*pair) for pair in zip(outputs or [], right, strict=False)],
            tensor,
        )

    def scatter(self) -> None:
        dtype, _ = self.draw()
        count, root = self.size() // self.world, self.common.randrange(self.world)
        whole = self.data(count * self.world, dtype)
        right = self.of_all(whole)[root].split(count)[self.rank] if count else whole
        if not count:
            self.of_all(whole)
        output = torch.empty(count, dtype=dtype)
        pieces = list(whole.view(self.world, count)) if self.rank == root else None
        work = dist.scatter(
            output,
            pieces,
            self.ranks[root],
            group=self.group,
            async_op=self.common.random() < 0.5,
        )
        self.begin(f"scatter({count} x {dtype})", work, lambda: self.equal(output, right), pieces)

    def reduce_scatter(self) -> None:
        dtype, op = self.draw()
        count = self.size() // self.world
        whole = self.data(count * self.world, dtype, op)
        parts = [part.view(self.world, count)[self.rank] for part in self.of_all(whole)]
        right = self.reduced(parts, op)
        output = torch.empty(count, dtype=dtype)
        later = self.common.random() < 0.5
        if self.common.random() < 0.5:
            work = REDUCE_SCATTER_SINGLE(output, whole, op, group=self.group, async_op=later)
        else:
            pieces = list(whole.view(self.world, count))
            work = dist.reduce_scatter(output, pieces, op, group=self.group, async_op=later)
        name = f"reduce_scatter({op}, {count} x {dtype})"
        self.begin(name, work, lambda: self.equal(output, right), whole)

    def all_to_all(self) -> None:
        dtype, _ = self.draw()
        longest = self.size() // self.world
        lengths = [
            [self.common.randrange(longest + 1) for _ in range(self.world)]
            for _ in range(self.world)
        ]
        padded = self.data(longest * self.world, dtype)
        rows = [part.view(self.world, longest) for part in self.of_all(padded)]
        right = [rows[peer][self.rank, : lengths[peer][self.rank]] for peer in range(self.world)]
        inputs = [
            padded.view(self.world, longest)[peer, : lengths[self.rank][peer]].clone()
            for peer in range(self.world)
        ]
        outputs = [torch.empty_like(part) for part in right]
        later = self.common.random() < 0.5
        if self.common.random() < 0.5:
            work = dist.all_to_all(outputs, inputs, group=self.group, async_op=later)
            whole, source = None, None
        else:
            whole = torch.empty(sum(len(part) for part in right), dtype=dtype)
            outputs = list(whole.split([len(part) for part in right]))
            source = torch.cat(inputs)
            work = dist.all_to_all_single(
                whole,
                source,
                [len(part) for part in right],
                [len(part) for part in inputs],
                group=self.group,
                async_op=later,
            )
        self.begin(
            f"all_to_all({longest} x {dtype})",
            work,
            lambda: [self.equal(*pair) for pair in zip(outputs, right, strict=True)],
            (inputs, source, whole),
        )

    def barrier(self) -> None:
        work = dist.barrier(group=self.group, async_op=self.common.random() < 0.5)
        self.begin("barrier()", work, lambda: None)

    def messages(self) -> None:
        """A few messages between all pairs, with tags, begun in any order."""
        dtype = self.common.choice((torch.uint8, torch.float32, torch.bfloat16))
        plan = [
            (source, target, tag, self.size() // 2)
            for source in range(self.world)
            for target in range(self.world)
            for tag in range(self.common.randrange(3))
            if source != target
        ]
        sent = [self.data(count, dtype) for source, _, _, count in plan if source == self.rank]
        longest = max([count for *_, count in plan], default=0)
        padded = torch.zeros(len(plan) * longest, dtype=dtype).view(len(plan), longest)
        mine = iter(sent)
        for row, (source, _, _, count) in enumerate(plan):
            if source == self.rank:
                padded[row, :count] = next(mine)
        everything = [part.view(len(plan), longest) for part in self.of_all(padded)]
        works, got, right = [], [], []
        starts: list[Callable[[], None]] = []
        mine = iter(sent)
        for row, (source, target, tag, count) in enumerate(plan):
            if source == self.rank:
                data = next(mine)

                def send(data: Tensor = data, target: int = target, tag: int = tag) -> None:
                    works.append(dist.isend(data, self.ranks[target], group=self.group, tag=tag))

                starts.append(send)
            elif target == self.rank:
                place = torch.empty(count, dtype=dtype)
                got.append(place)
                right.append(everything[source][row, :count])

                def receive(place: Tensor = place, source: int = source, tag: int = tag) -> None:
                    works.append(dist.irecv(place, self.ranks[source], group=self.group, tag=tag))

                starts.append(receive)
        self.own.shuffle(starts)
        for start in starts:
            start()
        if not works:
            return
        one = self.begin(
            f"messages({len(plan)})",
            works,
            lambda: [self.equal(*pair) for pair in zip(got, right, strict=True)],
            sent,
        )
        self.settle_one(one)  # the next ones have the same tags

    def mismatch(self) -> None:
        """Ranks that disagree all hear of it. Everything before is done: it has no part in that."""
        if self.common.random() < 0.5:
            return
        self.settle(0)
        odd = self.rank == self.common.randrange(self.world)
        large = self.common.random() < 0.5
        tensor = torch.ones((100_000 if odd else 90_000) if large else (3 if odd else 4))
        try:
            dist.all_reduce(tensor, group=self.group)
        except gradsync.CollectiveMismatchError:
            self.counts["mismatch"] += 1
        else:
            raise AssertionError(f"step {self.step}: a mismatch was not noticed")
