"""``RemoteEmbeddingBag``: an embedding table on the servers that is used like one at hand.

A lookup asks each server for the distinct rows that it has, all servers at once; pooling then is
torch's own ``embedding_bag`` on those rows, so the results are those of a local table. The backward
gives each distinct row one gradient, which goes back to the server that has the row.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.errors import ArgumentError
from gradsync.hybrid.cluster import Cluster, current
from gradsync.hybrid.optimizers import SGD, ServerOptimizer
from gradsync.hybrid.partition import Sharding
from gradsync.hybrid.shard import TableSpec, check_spec
from gradsync.hybrid.transport import Message

_AT_ONCE = 256 * 1024  # gradients of more bytes do not wait for step()


class RemoteEmbeddingBag(nn.Module):
    """``torch.nn.EmbeddingBag`` whose table is on parameter servers.

    It is made by all trainers alike and has no parameters at hand: a backward sends the gradients
    of the rows to the servers, and ``step`` has them applied, once for all trainers together. A
    table of this name that is there already, with the same description, is used as it is.

    Args:
        num_embeddings: rows.
        embedding_dim: columns.
        name: of the table; different for each.
        mode: "sum", "mean" or "max".
        optimizer: ``hybrid.SGD``, ``Adagrad``, ``RowwiseAdagrad`` or ``Adam``.
        sharding: rows over the servers by "hash" or by "range", or by "column".
        servers: names of those that take part; default all.
        include_last_offset: as for ``torch.nn.EmbeddingBag``.
        update: "sync": a step has the gradients of all trainers, and a lookup sees all steps
            before it; "async": the gradients of each trainer are applied as they come.
        reduce: "mean" divides the gradients by the number of trainers, as DDP does, "sum" not.
        step_in_backward: let the backward of each lookup be a step: the servers apply it while DDP
            still reduces. For models that look up once a step; ``step`` is not called then.
        staleness: a lookup may miss this many of the last steps, and waits less.
        seed, std: of the normal initial values, which are the same for any number of servers.
        dtype: of the rows.
        cluster: default the current one.

    Example:
        >>> import torch
        >>> from gradsync import hybrid
        >>> with hybrid.local(servers=2):
        ...     table = hybrid.RemoteEmbeddingBag(
        ...         100, 4, name="words", mode="sum", optimizer=hybrid.SGD(lr=0.5)
        ...     )
        ...     before = table(torch.tensor([[3, 7]]))
        ...     before.sum().backward()
        ...     table.step()
        ...     before.detach() - table(torch.tensor([[3, 7]])).detach()
        tensor([[1.0000, 1.0000, 1.0000, 1.0000]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        name: str,
        mode: str = "mean",
        optimizer: ServerOptimizer | None = None,
        sharding: Sharding = "hash",
        servers: Iterable[str] | None = None,
        include_last_offset: bool = False,
        update: str = "sync",
        reduce: str = "mean",
        step_in_backward: bool = False,
        staleness: int = 0,
        seed: int = 0,
        std: float = 1.0,
        dtype: torch.dtype = torch.float32,
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean", "max"):
            raise ArgumentError(f'mode must be "sum", "mean" or "max", got {mode!r}.')
        if reduce not in ("sum", "mean"):
            raise ArgumentError(f'reduce must be "sum" or "mean", got {reduce!r}.')
        self.cluster = current() if cluster is None else cluster
        self.mode = mode
        self.include_last_offset = include_last_offset
        self.step_in_backward = step_in_backward
        self.staleness = staleness
        self.spec = TableSpec(
            name=name,
            rows=num_embeddings,
            columns=embedding_dim,
            optimizer=(optimizer or SGD(lr=0.01)).describe(),
            servers=self.cluster.pick(servers),
            sharding=sharding,
            dtype=str(dtype).removeprefix("torch."),
            update=update,
            mean=reduce == "mean",
            seed=seed,
            std=std,
        )
        check_spec(self.spec)
        self._partition = self.spec.partition
        self._parts = self._partition.parts
        # Lets the rows be part of a graph. No parameter: DDP has nothing to reduce here.
        self._anchor = torch.zeros((), requires_grad=True)
        self._held: list[tuple[Lookup, Tensor]] = []  # gradients that step() sends
        self.attach()

    def attach(self) -> None:
        """Make the table where it is not there, and go on from the step that it is at.

        To be called when the servers have changed it by other ways, as ``load`` does.
        """
        created = self.cluster.ask_all(
            {
                server: Message("create", {"spec": self.spec.as_dict(), "index": index})
                for index, server in enumerate(self.spec.servers)
            }
        )
        self._versions = {server: int(each.values["version"]) for server, each in created.items()}

    # ---------------------------------------------------------------- forward

    def prefetch(self, input: Tensor, *, ahead: int = 0) -> "Lookup":
        """Ask for the rows of ``input`` now; give what is returned to ``forward`` in its place.

        All servers work on it while this trainer does something else, such as the dense part of the
        batch before. ``ahead=1`` asks for the rows as they will be after the next ``step()``.

        >>> import torch
        >>> from gradsync import hybrid
        >>> with hybrid.local(servers=2):
        ...     table = hybrid.RemoteEmbeddingBag(100, 4, name="words")
        ...     ahead = table.prefetch(torch.tensor([[3, 7]]))
        ...     table(ahead).shape
        torch.Size([1, 4])
        """
        self._check_indices(input)
        return Lookup(self, input, ahead)

    def forward(
        self,
        input: "Tensor | Lookup",
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As that of ``torch.nn.EmbeddingBag``.

        >>> import torch
        >>> from gradsync import hybrid
        >>> with hybrid.local(servers=2):
        ...     table = hybrid.RemoteEmbeddingBag(100, 4, name="words")
        ...     table(torch.tensor([3, 7, 7]), offsets=torch.tensor([0, 1])).shape
        torch.Size([2, 4])
        """
        # What is wrong is told before anything is sent.
        if isinstance(input, Lookup):
            self._check_lookup(input)
        else:
            self._check_indices(input)
        indices = input.input if isinstance(input, Lookup) else input
        self._check_bags(indices, offsets, per_sample_weights)
        lookup = input if isinstance(input, Lookup) else Lookup(self, input, ahead=0)
        rows = _Rows.apply(self._anchor, lookup)  # type: ignore[no-untyped-call]
        return F.embedding_bag(
            lookup.places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )

    def _check_indices(self, input: Tensor) -> None:
        name = self.spec.name
        dtype = getattr(input, "dtype", None)
        if dtype not in (torch.int64, torch.int32):
            kind = dtype or type(input).__name__
            raise ArgumentError(
                f"table {name}: input must be a tensor of int64 or int32, got {kind}."
            )
        if input.dim() not in (1, 2):
            raise ArgumentError(
                f"table {name}: input must have 1 dimension (with offsets) or 2, got "
                f"{input.dim()}: shape {tuple(input.shape)}."
            )
        if input.numel():
            low, high = (int(each) for each in torch.aminmax(input))
            if low < 0 or high >= self.spec.rows:
                wrong = low if low < 0 else high
                raise ArgumentError(
                    f"table {name} has rows 0 to {self.spec.rows - 1}, and input has index {wrong}."
                )

    def _check_lookup(self, lookup: "Lookup") -> None:
        if lookup.table is not self:
            raise ArgumentError(
                f"table {self.spec.name} was given a lookup of table {lookup.table.spec.name}: "
                "each table has to look up its own rows."
            )

    def _check_bags(self, input: Tensor, offsets: Tensor | None, weights: Tensor | None) -> None:
        name = self.spec.name
        if (input.dim() == 1) == (offsets is None):
            needs = "needs offsets" if offsets is None else "cannot have offsets"
            raise ArgumentError(f"table {name}: input of {input.dim()} dimension(s) {needs}.")
        if offsets is not None:
            self._check_offsets(input, offsets)
        if weights is not None and self.mode != "sum":
            raise ArgumentError(
                f'table {name}: per_sample_weights need mode="sum", and this one has {self.mode!r}.'
            )
        if weights is not None and weights.shape != input.shape:
            raise ArgumentError(
                f"table {name}: per_sample_weights have shape {tuple(weights.shape)} and input "
                f"{tuple(input.shape)}; they must be the same."
            )

    def _check_offsets(self, input: Tensor, offsets: Tensor) -> None:
        name = self.spec.name
        if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"table {name}: offsets must have 1 dimension and be int64 or int32, got shape "
                f"{tuple(offsets.shape)} of {offsets.dtype}."
            )
        if not len(offsets):
            return
        low, high = (int(each) for each in torch.aminmax(offsets))
        if int(offsets[0]) or low < 0 or high > len(input):
            raise ArgumentError(
                f"table {name}: offsets must begin with 0 and be at most {len(input)}, the length "
                f"of input; they begin with {int(offsets[0])} and go from {low} to {high}."
            )

    # ---------------------------------------------------------------- backward and step

    def _take(self, lookup: "Lookup", gradient: Tensor) -> None:
        """The gradients of the rows of a lookup."""
        self._held.append((lookup, gradient))
        if self.step_in_backward:
            self.step()
        elif sum(each.numel() * each.element_size() for _, each in self._held) > _AT_ONCE:
            self._push(commit=False)

    def step(self) -> None:
        """Have the gradients applied that the backwards since the last step have sent.

        With ``update="sync"`` all trainers have to call it, and the servers apply the step when
        the last one has. Nobody waits here: the next lookup does, if it must.

        >>> import torch
        >>> from gradsync import hybrid
        >>> with hybrid.local():
        ...     sgd = hybrid.SGD(lr=1)
        ...     table = hybrid.RemoteEmbeddingBag(8, 2, name="t", std=0.0, optimizer=sgd)
        ...     table(torch.tensor([[5]])).sum().backward()
        ...     table.step()
        ...     table(torch.tensor([[5]])).tolist()
        [[-1.0, -1.0]]
        """
        self._push(commit=True)
        if self.spec.update == "sync":
            for server in self._versions:
                self._versions[server] += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients since the last step; for a batch that is to be skipped.

        >>> import torch
        >>> from gradsync import hybrid
        >>> with hybrid.local():
        ...     table = hybrid.RemoteEmbeddingBag(8, 2, name="t", std=0.0)
        ...     table(torch.tensor([[5]])).sum().backward()
        ...     table.zero_grad()
        ...     table.step()
        ...     table(torch.tensor([[5]])).tolist()
        [[0.0, 0.0]]
        """
        self._held.clear()
        if self._sent:
            self._sent = False
            message = Message("drop", {"table": self.spec.name})
            self.cluster.post(dict.fromkeys(self.spec.servers, message))

    _sent = False  # gradients of the step under way

    def _push(self, *, commit: bool) -> None:
        held, self._held = self._held, []
        self._sent = not commit
        values = {"table": self.spec.name, "commit": commit}
        self.cluster.post(
            {
                server: Message(
                    "push",
                    values,
                    [
                        *(lookup.local[at] for lookup, _ in held),
                        *(self._part_of(gradient, lookup, at) for lookup, gradient in held),
                    ],
                )
                for at, server in enumerate(self.spec.servers)
            }
        )

    def _part_of(self, gradient: Tensor, lookup: "Lookup", server: int) -> Tensor:
        if self._partition.by_row:
            start = lookup.ends[server - 1] if server else 0
            return gradient[start : lookup.ends[server]]
        return gradient[:, self._parts[server].columns]

    def extra_repr(self) -> str:
        """For ``repr``.

        >>> from gradsync import hybrid
        >>> with hybrid.local():
        ...     hybrid.RemoteEmbeddingBag(8, 2, name="t")
        RemoteEmbeddingBag(t: 8 × 2, mode=mean, by hash on server0, SGD)
        """
        spec = self.spec
        servers = ", ".join(spec.servers)
        return (
            f"{spec.name}: {spec.rows} × {spec.columns}, mode={self.mode}, by {spec.sharding} on "
            f"{servers}, {spec.optimizer['kind']}"
        )


class Lookup:
    """Rows that were asked for: made by ``RemoteEmbeddingBag.prefetch``.

    >>> from gradsync import hybrid
    >>> with hybrid.local():
    ...     table = hybrid.RemoteEmbeddingBag(8, 2, name="t")
    ...     table.prefetch(torch.tensor([[3, 3]])).rows().shape
    torch.Size([1, 2])
    """

    def __init__(self, table: RemoteEmbeddingBag, input: Tensor, ahead: int) -> None:
        self.table, self.input = table, input
        partition = table._partition
        slots, places = torch.unique(partition.slots(input.long()), return_inverse=True)
        self.places = places  # of each index among the distinct rows, in the shape of the input
        count = partition.servers
        if partition.by_row:
            self.ends = partition.split(slots)
            starts = [0, *self.ends[:-1]]
            self.local: Sequence[Tensor] = [
                partition.local(slots[a:b], at)
                for at, (a, b) in enumerate(zip(starts, self.ends, strict=True))
            ]
        else:
            self.ends = [len(slots)] * count
            self.local = [slots] * count
        self._rows: Tensor | None = None
        self._requests = table.cluster.send(
            {
                server: Message(
                    "lookup",
                    {
                        "table": table.spec.name,
                        "version": table._versions[server] + ahead - table.staleness,
                    },
                    [self.local[at]],
                )
                for at, server in enumerate(table.spec.servers)
            },
            # What cannot be answered before the next step goes with its gradients.
            hold=ahead > table.staleness and table.spec.update == "sync",
        )

    def rows(self) -> Tensor:
        """Wait for the distinct rows."""
        if self._rows is None:
            table = self.table
            answers = table.cluster.answers(self._requests)
            parts = [answers[server].tensors[0] for server in table.spec.servers]
            along = 0 if table._partition.by_row else 1
            self._rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=along)
        return self._rows


class _Rows(torch.autograd.Function):
    """The rows of a lookup, as part of a graph."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, lookup: Lookup) -> Tensor:
        ctx.lookup = lookup
        return lookup.rows().view_as(lookup.rows())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.lookup.table._take(ctx.lookup, gradients[0])
        return None, None
