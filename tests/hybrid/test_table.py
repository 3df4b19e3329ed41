"""RemoteEmbeddingBag against torch's EmbeddingBag and torch.optim in one process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradsync import ArgumentError, DeadlineError, StateError, hybrid
from gradsync.hybrid.shard import TableSpec
from gradsync.hybrid.transport import Message, Peer

ROWS, COLUMNS = 40, 6
SHARDINGS = ("hash", "range", "column")


def weight_of(table: hybrid.RemoteEmbeddingBag) -> Tensor:
    """The whole table."""
    bag = table.mode
    table.mode = "sum"
    with torch.no_grad():
        rows = table(torch.arange(table.spec.rows)[:, None])
    table.mode = bag
    return rows


def local_copy(table: hybrid.RemoteEmbeddingBag, *, sparse: bool = False) -> nn.EmbeddingBag:
    weight = weight_of(table).clone()
    return nn.EmbeddingBag.from_pretrained(
        weight, freeze=False, mode=table.mode, sparse=sparse
    ).requires_grad_()


def bags(step: int = 0, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Indices with many duplicates, and offsets, one bag empty."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 12, (20,), generator=generator), torch.tensor([0, 3, 3, 11])


class TestLikeATableAtHand:
    @pytest.mark.parametrize("mode", ["sum", "mean", "max"])
    @pytest.mark.parametrize("sharding", SHARDINGS)
    @pytest.mark.parametrize("servers", [1, 3])
    def test_outputs_and_steps_are_those_of_torch(
        self, mode: str, sharding: str, servers: int
    ) -> None:
        with hybrid.local(servers=servers):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", mode=mode, sharding=sharding, optimizer=hybrid.SGD(lr=0.5)
            )
            torchs = local_copy(table)
            optimizer = torch.optim.SGD(torchs.parameters(), lr=0.5)
            for step in range(3):
                outputs = [module(*bags(step)) for module in (table, torchs)]
                assert torch.equal(*outputs)
                for output in outputs:
                    output.square().sum().backward()
                table.step()
                optimizer.step()
                optimizer.zero_grad()
                torch.testing.assert_close(weight_of(table), torchs.weight)

    @pytest.mark.parametrize("sharding", SHARDINGS)
    def test_per_sample_weights_get_gradients_too(self, sharding: str) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", mode="sum", sharding=sharding
            )
            torchs = local_copy(table)
            weights = [torch.rand(20, generator=torch.Generator().manual_seed(1)) for _ in "ab"]
            for each, module in zip(weights, (table, torchs), strict=True):
                each.requires_grad_()
                module(*bags(), per_sample_weights=each).square().sum().backward()
            torch.testing.assert_close(weights[0].grad, weights[1].grad)

    def test_two_dimensions_int32_and_the_last_offset(self) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="t", include_last_offset=True)
            torchs = local_copy(table)
            torchs.include_last_offset = True
            ids = torch.tensor([[1, 2], [39, 1]], dtype=torch.int32)
            assert torch.equal(table(ids), torchs(ids))
            flat, offsets = torch.tensor([1, 2, 39]), torch.tensor([0, 2, 3])
            assert torch.equal(table(flat, offsets), torchs(flat, offsets))
            assert torch.equal(table(ids[:0]), torchs(ids[:0]))

    def test_initial_values_do_not_depend_on_servers_and_sharding(self) -> None:
        found = []
        for servers, sharding in ((1, "hash"), (3, "hash"), (2, "range"), (2, "column")):
            with hybrid.local(servers=servers):
                table = hybrid.RemoteEmbeddingBag(
                    5000, 4, name="t", sharding=sharding, seed=3, std=0.1
                )
                found.append(weight_of(table))
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert 0.09 < float(found[0].std()) < 0.11

    def test_it_has_nothing_that_ddp_would_reduce(self) -> None:
        with hybrid.local():
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="t")
            assert not list(table.parameters())
            assert not table.state_dict()


OPTIMIZERS: dict[str, tuple[hybrid.ServerOptimizer, Callable[..., torch.optim.Optimizer], bool]] = {
    "sgd": (hybrid.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), False),
    "sgd, sparse": (hybrid.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1), True),
    "adagrad": (
        hybrid.Adagrad(lr=0.1, lr_decay=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
        False,
    ),
    "adagrad, sparse": (
        hybrid.Adagrad(lr=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
        True,
    ),
    "adam, sparse": (hybrid.Adam(lr=0.1), lambda p: torch.optim.SparseAdam(list(p), lr=0.1), True),
}


class TestOptimizers:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("sharding", SHARDINGS)
    def test_duplicates_are_added_up_before_the_step_as_torch_does(
        self, kind: str, sharding: str
    ) -> None:
        ours, torchs_optimizer, sparse = OPTIMIZERS[kind]
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", mode="sum", sharding=sharding, optimizer=ours
            )
            torchs = local_copy(table, sparse=sparse)
            optimizer = torchs_optimizer(torchs.parameters())
            for step in range(4):
                for module in (table, torchs):
                    (module(*bags(step)) * torch.arange(4.0)[:, None]).square().sum().backward()
                table.step()
                optimizer.step()
                optimizer.zero_grad()
                torch.testing.assert_close(weight_of(table), torchs.weight.detach())

    def test_rowwise_adagrad_has_one_sum_a_row(self) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", mode="sum", optimizer=hybrid.RowwiseAdagrad(lr=0.1)
            )
            torchs = local_copy(table)
            sums = torch.zeros(ROWS)
            for step in range(3):
                for module in (table, torchs):
                    module(*bags(step)).square().sum().backward()
                table.step()
                gradient = torchs.weight.grad
                sums += gradient.square().mean(1)
                with torch.no_grad():
                    torchs.weight -= 0.1 * gradient / (sums.sqrt() + 1e-10)[:, None]
                torchs.zero_grad()
                torch.testing.assert_close(weight_of(table), torchs.weight.detach())
            with pytest.raises(ArgumentError, match="whole rows"):
                hybrid.RemoteEmbeddingBag(
                    4, 4, name="c", sharding="column", optimizer=hybrid.RowwiseAdagrad(lr=0.1)
                )

    @pytest.mark.parametrize("reduce", ["mean", "sum"])
    def test_a_step_has_the_gradients_of_all_trainers_at_once(self, reduce: str) -> None:
        """Two trainers at one server, played by hand: Adagrad is not linear."""
        server = hybrid.ParameterServer("server0", token="t")
        peers = [Peer(f"trainer{rank}", "g") for rank in range(2)]
        spec = TableSpec(
            name="t",
            rows=5,
            columns=2,
            optimizer=hybrid.Adagrad(lr=0.1).describe(),
            servers=("server0",),
            mean=reduce == "mean",
            sharding="range",
        )
        for peer in peers:
            server.handle(peer, Message("begin", {"trainers": [p.name for p in peers]}))
            server.handle(peer, Message("create", {"spec": spec.as_dict(), "index": 0}))
        shard = server.tables["t"]
        weight = nn.Parameter(shard.weight.clone())
        optimizer = torch.optim.Adagrad([weight], lr=0.1)
        for step in range(3):
            gradient = torch.zeros(5, 2)
            for rank in (1, 0):  # in any order
                rows = torch.tensor([rank, 3, 3])
                values = torch.full((3, 2), 1.0 + rank + step)
                gradient.index_add_(0, rows, values)
                assert shard.version == step
                waiting = server.handle(
                    peers[rank], Message("lookup", {"table": "t", "version": step + 1}, [rows])
                )
                assert not waiting.done()
                server.handle(
                    peers[rank], Message("push", {"table": "t", "commit": True}, [rows, values])
                )
            assert waiting.done()
            weight.grad = gradient / (2 if reduce == "mean" else 1)
            optimizer.step()
            torch.testing.assert_close(shard.weight, weight.detach())


class TestSteps:
    def test_backwards_gather_until_the_step_however_large_they_are(self) -> None:
        with hybrid.local(servers=2):
            for rows in (ROWS, 30_000):  # the larger gradients do not wait for the step
                table = hybrid.RemoteEmbeddingBag(rows, COLUMNS, name=f"t{rows}", mode="sum")
                torchs = local_copy(table)
                optimizer = torch.optim.SGD(torchs.parameters(), lr=0.01)
                ids = torch.arange(rows).view(-1, 2)
                for _ in range(2):
                    for module in (table, torchs):
                        for part in (ids, ids.flip(0)[: len(ids) // 2]):
                            module(part).square().sum().backward()
                    table.step()
                    optimizer.step()
                    optimizer.zero_grad()
                torch.testing.assert_close(weight_of(table), torchs.weight.detach())

    def test_a_table_may_be_used_twice_in_one_graph(self) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="t", optimizer=hybrid.SGD(lr=1.0))
            torchs = local_copy(table)
            for module in (table, torchs):
                (module(*bags(0)) * module(*bags(1))).sum().backward()
            table.step()
            torch.testing.assert_close(weight_of(table), torchs.weight - torchs.weight.grad)

    def test_a_backward_can_be_a_step(self) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", optimizer=hybrid.SGD(lr=1.0), step_in_backward=True
            )
            torchs = local_copy(table)
            for step in range(2):
                for module in (table, torchs):
                    module(*bags(step)).square().sum().backward()
                with torch.no_grad():
                    torchs.weight -= torchs.weight.grad
                torchs.zero_grad()
            torch.testing.assert_close(weight_of(table), torchs.weight.detach())

    @pytest.mark.parametrize("rows", [ROWS, 30_000])
    def test_zero_grad_forgets_what_was_sent_and_what_was_not(self, rows: int) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(rows, COLUMNS, name="t")
            before = weight_of(table)
            table(torch.arange(rows).view(-1, 2)).sum().backward()
            table.zero_grad()
            table.step()
            assert torch.equal(weight_of(table), before)

    def test_lookups_in_evaluation_leave_no_gradients(self) -> None:
        with hybrid.local():
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="t")
            with torch.no_grad():
                assert not table(*bags()).requires_grad

    def test_asynchronous_steps_are_seen_by_their_own_trainer(self) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", update="async", optimizer=hybrid.SGD(lr=1.0)
            )
            torchs = local_copy(table)
            for module in (table, torchs):
                module(*bags()).sum().backward()
            table.step()
            torch.testing.assert_close(weight_of(table), torchs.weight - torchs.weight.grad)


class TestPrefetch:
    def test_all_servers_are_asked_before_any_answer_is_waited_for(self) -> None:
        with hybrid.local(servers=3) as cluster:
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="t")
            events = []
            send, answers = cluster._transport.request, cluster._transport.replies
            cluster._transport.request = lambda s, m, **k: events.append(s) or send(s, m, **k)
            cluster._transport.replies = lambda r, t: events.append("waits") or answers(r, t)
            lookup = table.prefetch(bags()[0])
            assert events == ["server0", "server1", "server2"]
            table(lookup, bags()[1])
            assert events[3:] == ["waits"]

    def test_ahead_are_the_rows_after_the_next_step(self) -> None:
        with hybrid.local(servers=2):
            table = hybrid.RemoteEmbeddingBag(
                ROWS, COLUMNS, name="t", mode="sum", optimizer=hybrid.SGD(lr=1.0)
            )
            ids = torch.tensor([[5, 6]])
            now, then = table.prefetch(ids), table.prefetch(ids, ahead=1)
            before = table(now)
            before.sum().backward()
            table.step()
            torch.testing.assert_close(table(then), before - 2.0)

    def test_stale_rows_are_allowed_where_asked_for(self) -> None:
        with hybrid.local() as cluster:
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="t", staleness=1)
            table(table.prefetch(torch.tensor([[1]]), ahead=1))  # one step behind is enough
            cluster.timeout = 0.2
            late = table.prefetch(torch.tensor([[1]]), ahead=2)
            start = time.monotonic()
            with pytest.raises(DeadlineError, match="server0 did not answer"):
                table(late)
            assert time.monotonic() - start < 10


class TestMistakes:
    """They are told to the caller, by name, before anything is sent."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda t: t(torch.tensor([[1, ROWS]])),
                f"rows 0 to {ROWS - 1}, and input has .* {ROWS}",
            ),
            (lambda t: t(torch.tensor([[-1, 2]])), "index -1"),
            (lambda t: t(torch.ones(2, 2)), "int64 or int32, got torch.float32"),
            (lambda t: t([1, 2]), "int64 or int32, got list"),
            (lambda t: t(torch.zeros(2, 2, 2, dtype=torch.int64)), r"shape \(2, 2, 2\)"),
            (lambda t: t(torch.tensor([1, 2])), "needs offsets"),
            (lambda t: t(torch.tensor([[1, 2]]), torch.tensor([0])), "cannot have offsets"),
            (lambda t: t(torch.tensor([[1]]), None, torch.ones(1, 1)), 'need mode="sum"'),
            (lambda t: t(torch.tensor([1, 2]), torch.tensor([[0]])), r"shape \(1, 1\)"),
            (lambda t: t(torch.tensor([1, 2]), torch.tensor([0.0])), "float32"),
            (lambda t: t(torch.tensor([1, 2]), torch.tensor([1])), "begin with 1"),
            (lambda t: t(torch.tensor([1, 2]), torch.tensor([0, 3])), "at most 2, .* from 0 to 3"),
        ],
    )
    def test_of_a_lookup(self, call: Callable[[object], object], message: str) -> None:
        with hybrid.local() as cluster:
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="words")
            cluster.send = None  # nothing is sent
            with pytest.raises(ArgumentError, match=f"table words.*{message}"):
                call(table)
            del cluster.send

    def test_of_whose_lookup_it_is(self) -> None:
        with hybrid.local():
            users, items = (
                hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name=name) for name in ("users", "items")
            )
            with pytest.raises(ArgumentError, match=r"table items was given .* of table users"):
                items(users.prefetch(torch.tensor([[1]])))

    def test_weights_of_another_shape(self) -> None:
        with hybrid.local():
            table = hybrid.RemoteEmbeddingBag(ROWS, COLUMNS, name="words", mode="sum")
            with pytest.raises(ArgumentError, match=r"\(3,\) and input \(1, 2\)"):
                table(torch.tensor([[1, 2]]), None, torch.ones(3))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"servers": ["server7"]}, "no server 'server7'; there are server0, server1"),
            ({"servers": []}, "at least one"),
            ({"mode": "product"}, "'product'"),
            ({"sharding": "diagonal"}, "'diagonal'"),
            ({"update": "sometimes"}, "'sometimes'"),
            ({"reduce": "median"}, "'median'"),
            ({"std": -1.0}, "std"),
            ({"num_embeddings": 0}, "rows must be at least 1"),
        ],
    )
    def test_of_a_construction(self, options: dict[str, object], message: str) -> None:
        arguments = {"num_embeddings": 8, "embedding_dim": 4, "name": "words"} | options
        with hybrid.local(servers=2), pytest.raises(ArgumentError, match=message):
            hybrid.RemoteEmbeddingBag(**arguments)

    def test_another_table_of_the_same_name_and_no_cluster(self) -> None:
        with hybrid.local():
            hybrid.RemoteEmbeddingBag(8, 4, name="words")
            hybrid.RemoteEmbeddingBag(8, 4, name="words")
            with pytest.raises(ArgumentError, match=r"server0: table words .* rows 9, not 8"):
                hybrid.RemoteEmbeddingBag(9, 4, name="words")
        with pytest.raises(StateError, match=r"hybrid\.run"):
            hybrid.RemoteEmbeddingBag(8, 4, name="words")
