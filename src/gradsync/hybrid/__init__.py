"""Hybrid training: embedding tables on parameter servers, the dense network under DDP on trainers.

    from gradsync import hybrid

    hybrid.run(hybrid.Roles(trainer=train, trainers=2, servers=2))

starts the processes and calls ``train(cluster)`` in each trainer, where
``hybrid.RemoteEmbeddingBag`` takes the place of ``torch.nn.EmbeddingBag``. See docs/hybrid.md.
"""

from gradsync.errors import ServerLostError
from gradsync.hybrid.checkpoint import Progress, load, save
from gradsync.hybrid.children import Servers, start_servers
from gradsync.hybrid.cluster import Cluster, current
from gradsync.hybrid.launch import RoleFailure, Roles, local, rank_of, run
from gradsync.hybrid.optimizers import SGD, Adagrad, Adam, RowwiseAdagrad, ServerOptimizer
from gradsync.hybrid.server import ParameterServer
from gradsync.hybrid.slow import SlowServerWarning
from gradsync.hybrid.table import Lookup, RemoteEmbeddingBag

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Cluster",
    "Lookup",
    "ParameterServer",
    "Progress",
    "RemoteEmbeddingBag",
    "RoleFailure",
    "Roles",
    "RowwiseAdagrad",
    "ServerLostError",
    "ServerOptimizer",
    "Servers",
    "SlowServerWarning",
    "current",
    "load",
    "local",
    "rank_of",
    "run",
    "save",
    "start_servers",
]
