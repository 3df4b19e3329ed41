"""Random programs of collectives and messages on the gradsync backend, every result checked.

    python tests/backend/soak.py --seconds 60 [--seed 7] [--ranks 2]

Each session has 2 to 4 ranks with several threads, each of which has a group of its own, some of
only two ranks. All ranks of a group draw the same program from the seed: operations, types, sizes,
roots, what is symmetric. What may differ, each rank draws for itself: whether to wait, ask or take
the future, and when. The inputs of all ranks travel over gloo too, and the expected result is
computed from those.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
import traceback
from collections import Counter

import torch
import torch.distributed as dist
from soak_player import TIMEOUT, Player

from gradsync.testing import WorkerPool


def session(rank: int, world: int, seed: int, seconds: float) -> dict[str, int]:
    """What a rank runs. Threads 0 and 1 are on groups of all ranks, thread 2 on one of two."""
    torch.set_num_threads(1)
    pair = sorted(random.Random(f"{seed}").sample(range(world), 2))
    players = []
    for number, ranks in enumerate([list(range(world)), list(range(world)), pair]):
        group = dist.new_group(ranks, backend="gradsync", timeout=TIMEOUT)
        gloo = dist.new_group(ranks, backend="gloo", timeout=TIMEOUT)
        if rank in ranks:
            own = ranks.index(rank)
            players.append(Player(own, len(ranks), group, gloo, f"{seed}/{number}", ranks))
    until = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    problems: list[str] = []

    def play(number: int, player: Player) -> None:
        try:
            player.play(until)
        except BaseException as error:
            where = f"seed {seed}, rank {rank} of {world}, thread {number}, step {player.step}"
            problems.append(f"{where}: {error}\n{traceback.format_exc()}")

    threads = [threading.Thread(target=play, args=pair) for pair in enumerate(players)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not problems:
            thread.join(0.1)
    if problems:
        raise AssertionError("\n".join(problems))
    for player in players:
        counts += player.counts
    return dict(counts)


def soak(pool: WorkerPool, seed: int, ranks: int, seconds: float) -> Counter[str]:
    """One session; how many operations of each kind rank 0 has checked."""
    results = pool.run(
        session, ranks=ranks, args=(seed, seconds), timeout=seconds + 90, backend="gloo"
    )
    return Counter(results[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first session; then + 1 each"
    )
    parser.add_argument("--ranks", type=int, default=None, help="2 to 4; otherwise in turn")
    parser.add_argument("--session", type=float, default=20, help="seconds of one session")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"soak: seed {seed}", flush=True)
    began, total = time.monotonic(), Counter()
    with WorkerPool(max_ranks=4) as pool:
        while (left := began + options.seconds - time.monotonic()) > 0:
            ranks = options.ranks or 2 + seed % 3
            total += soak(pool, seed, ranks, min(options.session, left))
            passed = time.monotonic() - began
            print(
                f"{passed:.0f} s: seed {seed}, {ranks} ranks; {sum(total.values())} operations "
                "checked on rank 0",
                flush=True,
            )
            seed += 1
    print("soak: all right. " + ", ".join(f"{name} {n}" for name, n in total.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
