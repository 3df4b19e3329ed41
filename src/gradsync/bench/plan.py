"""What to run. Pure: settings in, heats out, and the cases that cannot run with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gradsync import ArgumentError
from gradsync.bench.comm import CommHeat
from gradsync.bench.contenders import DEFAULT, Contender
from gradsync.bench.result import NO_DDP, Case
from gradsync.bench.worker import Heat
from gradsync.bench.workloads import BUILT_IN, Benchmark, check, model_name

BUCKET_CAP_MB: Final = 25.0  # torch's default, and ours


@dataclass(frozen=True, kw_only=True)
class Place:
    """How many ranks there can be, and why not more."""

    slots: int
    why: str  # "this machine has 2 cores"
    is_cuda: bool = False
    host_slots: int | None = None  # of one host; None: there is one host only
    allows_more: bool = False  # more ranks than slots, if they are asked for

    def why_not(self, world: int) -> str | None:
        """Why so many ranks do not fit, or None when they do."""
        if world <= self.slots or self.allows_more:
            return None
        return f"{world} ranks do not fit: {self.why}"

    def worlds(self) -> tuple[int, ...]:
        """1, 2, 4 … on one host, then whole hosts.

        >>> Place(slots=6, why="").worlds()
        (1, 2, 4, 6)
        >>> Place(slots=24, host_slots=8, why="").worlds()
        (1, 2, 4, 8, 16, 24)
        """
        host = self.host_slots or self.slots
        powers = [2**n for n in range(host.bit_length()) if 2**n < host]
        hosts = range(host, self.slots + 1, host)
        return (*powers, *hosts)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``gradsync bench`` was asked for."""

    workloads: tuple[str, ...]
    worlds: tuple[int, ...] | None = None  # None: as the place allows
    implementations: tuple[str, ...] = DEFAULT
    backends: tuple[str, ...] | None = None  # None: each implementation's own
    batch_size: int | None = None
    bucket_cap_mb: float = BUCKET_CAP_MB
    comm_hook: str | None = None
    dtype: str = "float32"
    steps: int = 50
    rounds: int = 10
    warm_up: int = 5
    seed: int = 0
    threads: int = 1


def plan(settings: Settings, place: Place) -> tuple[list[Heat], list[Case]]:
    """The heats to run, small worlds first, and the cases that cannot run.

    >>> settings = Settings(workloads=("mlp",), worlds=(1, 64), implementations=("none",))
    >>> heats, failed = plan(settings, Place(slots=2, why="this machine has 2 cores"))
    >>> [(heat.workload, heat.world) for heat in heats], failed[0].error
    ([('mlp', 1)], '64 ranks do not fit: this machine has 2 cores')
    """
    who = contenders(settings.implementations, settings.backends, is_cuda=place.is_cuda)
    heats, failed = [], []
    for workload in settings.workloads:
        error = _why_no_workload(workload)
        for world in settings.worlds or place.worlds():
            heat = Heat(
                workload=workload,
                world=world,
                contenders=who,
                batch_size=settings.batch_size,
                bucket_cap_mb=settings.bucket_cap_mb,
                comm_hook=settings.comm_hook,
                dtype=settings.dtype,
                steps_by_round=split_steps(settings.steps, settings.rounds),
                warm_up=settings.warm_up,
                seed=settings.seed,
                threads=settings.threads,
            )
            why_not = error or place.why_not(world)
            if why_not is None:
                heats.append(heat)
            else:
                failed += cases_of(heat, error=why_not)
    return heats, failed


def contenders(
    implementations: Sequence[str], backends: Sequence[str] | None = None, *, is_cuda: bool = False
) -> tuple[Contender, ...]:
    """All implementations on all backends; on its own one where none is named.

    >>> [each.label for each in contenders(["torch", "gradsync", "none"])]
    ['torch/gloo', 'gradsync/gradsync', 'none']
    >>> [each.label for each in contenders(["torch", "none"], ["gloo", "gradsync"])]
    ['torch/gloo', 'torch/gradsync', 'none']
    """
    found: list[Contender] = []
    for name in implementations:
        own = "gradsync" if name.startswith("gradsync") else "gloo"
        chosen: Sequence[str | None] = backends or ["nccl" if is_cuda else own]
        if name == NO_DDP:
            chosen = [None]
        found += [Contender(implementation=name, backend=backend) for backend in chosen]
    return tuple(found)


def split_steps(steps: int, rounds: int) -> tuple[int, ...]:
    """The steps of each round, as even as can be.

    >>> split_steps(10, 4)
    (3, 3, 2, 2)
    """
    if rounds < 1 or steps < rounds:
        raise ArgumentError(f"{steps} steps cannot be split into {rounds} rounds")
    return tuple(steps // rounds + (number < steps % rounds) for number in range(rounds))


def cases_of(heat: Heat, *, error: str | None = None) -> list[Case]:
    """One case for each contender, with nothing measured yet."""
    return [
        Case(
            model=model_name(heat.workload),
            batch_size=heat.batch_size or _own_batch_size(heat.workload),
            implementation=contender.implementation,
            backend=contender.backend,
            dtype=heat.dtype,
            comm_hook=heat.comm_hook if contender.backend else None,
            bucket_cap_mb=heat.bucket_cap_mb if contender.backend else None,
            seed=heat.seed,
            threads=heat.threads,
            ranks=tuple(range(heat.world)),
            complete=False,
            error=error,
        )
        for contender in heat.contenders
    ]


def plan_comm(
    *,
    collectives: Sequence[str],
    sizes: Sequence[int],
    backends: Sequence[str],
    worlds: Sequence[int] | None,
    place: Place,
    rounds: int,
    warm_up: int,
    turn_seconds: float,
) -> tuple[list[CommHeat], list[tuple[CommHeat, str]]]:
    """The heats of ``bench-comm``, and those that cannot run with the reason."""
    heats, failed = [], []
    for world in worlds or [world for world in place.worlds() if world > 1] or [2]:
        for collective in collectives:
            for size in sizes:
                heat = CommHeat(
                    collective=collective,
                    bytes=size,
                    world=world,
                    backends=tuple(backends),
                    rounds=rounds,
                    warm_up=warm_up,
                    turn_seconds=turn_seconds,
                )
                why_not = place.why_not(world)
                if why_not is None:
                    heats.append(heat)
                else:
                    failed.append((heat, why_not))
    return heats, failed


def _why_no_workload(spec: str) -> str | None:
    try:
        check(spec)
    except ArgumentError as error:
        return str(error)
    return None


def _own_batch_size(spec: str) -> int:
    """0 for a file that was not run yet."""
    return 0 if ":" in spec else BUILT_IN.get(spec, Benchmark).batch_size
