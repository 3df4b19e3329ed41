#!/usr/bin/env python3
"""Race hybrid training: DDP trainers with parameter servers, ours against the plain way.

    benchmarks/hybrid.py --trainers 2 --servers 4 --json result.json
    benchmarks/hybrid.py --style reference        # only the plain way

The reference is what torch's own benchmark does by hand: RPC to one server after the other,
distributed autograd, DistributedOptimizer. Both take turns, and the other stands still meanwhile.
"""

import argparse
import json
from pathlib import Path

from gradsync.hybrid import benchmark


def main():
    options = parse_arguments()
    settings = benchmark.Settings(
        trainers=options.trainers,
        servers=options.servers,
        embeddings=options.embeddings,
        embedding_dim=options.embedding_dim,
        warmup=options.warmup,
        epochs=options.epochs,
        rounds=options.rounds,
        styles=tuple(options.style or (benchmark.OURS, benchmark.REFERENCE)),
        backend=options.backend,
    )
    result = benchmark.measure(settings)
    print(benchmark.table_of(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def parse_arguments():
    default = benchmark.Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", type=int, default=default.trainers)
    parser.add_argument("--servers", type=int, default=default.servers)
    parser.add_argument("--embeddings", type=int, default=default.embeddings, help="rows a server")
    parser.add_argument("--embedding-dim", type=int, default=default.embedding_dim)
    parser.add_argument("--warmup", type=int, default=default.warmup, help="epochs")
    parser.add_argument("--epochs", type=int, default=default.epochs, help="in a round")
    parser.add_argument("--rounds", type=int, default=default.rounds)
    parser.add_argument(
        "--style",
        action="append",
        choices=[benchmark.OURS, benchmark.REFERENCE],
        help="only this one (may be given twice); default both, in turns",
    )
    parser.add_argument("--backend", default=default.backend, help="of our trainers' DDP")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
