"""DDP beside modules of other ranks: one backward of distributed autograd goes through them all."""

from __future__ import annotations

import pytest
import rpc_pool
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from replicas import OurDDP, assert_equal_on_all_ranks, assert_same, batch, gradients
from rpc_pool import RpcPool
from torch import Tensor, nn
from torch.distributed import rpc

pool = rpc_pool.pool  # in the place of the one that all tests share


class TestRemoteModules:
    """Ranks 0 and 1 train, rank 2 holds what is remote; backward runs through all of it."""

    @pytest.mark.parametrize("place", ["below", "above", "between", "inside"])
    def test_local_and_remote_layers_have_the_same_gradients(
        self, pool: RpcPool, place: str
    ) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote
            from torch.distributed.nn import RemoteModule

            trainers = dist.new_group([0, 1])
            with remote.workers(rank, world):
                if rank < 2:
                    far = RemoteModule("w2", remote.layer, (4, 4, 11))
                    near = remote.layer(4, 4, 11)
                    compare(place, far, near, rank, trainers, remote)
                dist.barrier()

        def compare(place, far, near, rank, trainers, remote) -> None:
            def build(middle):
                first, last = remote.layer(4, 4, 12), remote.layer(4, 4, 13)
                wrap = lambda module: OurDDP(module, process_group=trainers)  # noqa: E731
                if place == "below":
                    last = wrap(last)
                    return [last], lambda x: last(middle(x))
                if place == "above":
                    first = wrap(first)
                    return [first], lambda x: middle(first(x))
                if place == "between":
                    first, last = wrap(first), wrap(last)
                    return [first, last], lambda x: last(middle(first(x)))
                whole = wrap(Around(first, middle, last))
                return [whole], whole

            for step in range(2):
                x = batch(rank, step)
                modules, forward = build(near)
                near.zero_grad()
                forward(x).square().sum().backward()
                expected = [gradients(module) for module in modules]
                modules, forward = build(far)
                with dist_autograd.context() as context:
                    dist_autograd.backward(context, [forward(x).square().sum()])
                    for module, wanted in zip(modules, expected, strict=True):
                        assert_same(remote.gradients(module, context), wanted, hint=(place, step))
                    theirs = rpc.rpc_sync(
                        "w2", remote.gradients_of, args=(far.get_module_rref(), context)
                    )
                    for mine, other in zip(near.parameters(), theirs, strict=True):
                        torch.testing.assert_close(mine.grad, other)
                dist.barrier(trainers)

        pool.run(run)

    def test_gradients_of_opposite_examples_cancel_where_ddp_is_and_only_there(
        self, pool: RpcPool
    ) -> None:
        """DDP nowhere, around all, or around the last layer alone; even and uneven inputs."""

        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            trainers = dist.new_group([0, 1])
            with remote.workers(rank, world):
                if rank < 2:
                    table = rpc.remote("w2", remote.Table, args=(2, 3))
                    net = rpc.remote("w2", remote.layer, args=(5, 3, 17))
                    for mode in ("none", "outside", "inside"):
                        train(mode, table, net, rank, trainers, remote)
                dist.barrier()

        def train(mode, table, net, rank, trainers, remote) -> None:
            model = Hybrid(table, net, remote.call)
            if mode == "outside":
                model = OurDDP(model, process_group=trainers)
            elif mode == "inside":
                model.last = OurDDP(model.last, process_group=trainers)
            sign = 1.0 if rank else -1.0
            dense, sparse = torch.tensor([[1.0, -1.0], [2.0, 1.0]]), torch.tensor([0, 1])
            for _ in range(2):
                got = remote.step(model, lambda: (model(dense, sparse) * sign).sum())
                for name, gradient in got.items():
                    averaged = mode == "outside" or (mode == "inside" and "last" in name)
                    assert averaged == (not gradient.any()), (mode, name, gradient)
            if mode != "outside":
                return
            with model.join():
                for extra in range(1 + rank):
                    got = remote.step(model, lambda: (model(dense, sparse) * sign).sum())
                    for name, gradient in got.items():  # rank 1 is alone in its last step
                        assert gradient.any() == bool(extra), (extra, name, gradient)

        pool.run(run)

    def test_replicas_that_are_called_by_others_are_reduced(self, pool: RpcPool) -> None:
        """Rank 0 holds no replica: it calls those of ranks 1 and 2 in one context."""

        def run(rank: int, world: int) -> None:
            import remote_parts as remote

            with remote.workers(rank, world):
                if rank == 0:
                    replicas = [rpc.remote(f"w{r}", remote.replica, args=([1, 2],)) for r in (1, 2)]
                    for step in range(3):
                        with dist_autograd.context() as context:
                            outputs = [
                                rpc.rpc_async(
                                    each.owner(), remote.call, args=(each, batch(r, step))
                                )
                                for r, each in enumerate(replicas)
                            ]
                            loss = sum(output.wait().square().sum() for output in outputs)
                            dist_autograd.backward(context, [loss])
                            found = [
                                rpc.rpc_sync(
                                    each.owner(), remote.gradients_of, args=(each, context)
                                )
                                for each in replicas
                            ]
                        alone = remote.layer(4, 2, seed=5)
                        for r in range(2):
                            (alone(batch(r, step)).square().sum() / 2).backward()
                        for one, other, p in zip(*found, alone.parameters(), strict=True):
                            assert torch.equal(one, other)
                            torch.testing.assert_close(one, p.grad)
                dist.barrier()

        pool.run(run)

    def test_the_distributed_optimizer_steps_with_what_is_reduced(self, pool: RpcPool) -> None:
        def run(rank: int, world: int) -> None:
            import remote_parts as remote
            from torch.distributed.nn import RemoteModule
            from torch.distributed.optim import DistributedOptimizer

            trainers = dist.new_group([0, 1])
            with remote.workers(rank, world):
                if rank < 2:
                    far = RemoteModule("w2", remote.Table, (6, 4))
                    ddp = OurDDP(remote.layer(4, 2, 5), process_group=trainers)
                    near, plain = remote.Table(6, 4), remote.layer(4, 2, 5)
                    optimizer = DistributedOptimizer(
                        torch.optim.SGD,
                        [rpc.RRef(p) for p in ddp.parameters()] + far.remote_parameters(),
                        lr=0.1,
                    )
                    with dist_autograd.context() as context:
                        ids = torch.tensor([rank, 2, 4])
                        loss = ddp(far(ids)).square().sum()
                        dist.barrier(trainers)  # both have read the table before it is stepped
                        dist_autograd.backward(context, [loss])
                        optimizer.step(context)
                    for r in range(2):
                        (plain(near(torch.tensor([r, 2, 4]))).square().sum() / 2).backward()
                    torch.optim.SGD(plain.parameters(), lr=0.1).step()
                    for got, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
                        torch.testing.assert_close(got, wanted)
                    assert_equal_on_all_ranks(ddp.parameters(), trainers)
                dist.barrier()

        pool.run(run)


class Around(nn.Module):
    """A DDP around it sees two local layers; what lies between may be anywhere."""

    def __init__(self, first: nn.Module, middle: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.middle = [middle]  # not a submodule: reduced by nobody

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle[0](self.first(x)))


class Hybrid(nn.Module):
    """Torch's own test model: an embedding and a net elsewhere, two layers here."""

    def __init__(self, table: rpc.RRef, net: rpc.RRef, call: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.net, self.call = table, net, call
        self.first, self.last = nn.Linear(2, 2), nn.Linear(3, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        rows = rpc.rpc_sync(self.table.owner(), self.call, args=(self.table, sparse))
        both = torch.cat((self.first(dense), rows), 1)
        return self.last(rpc.rpc_sync(self.net.owner(), self.call, args=(self.net, both)))
