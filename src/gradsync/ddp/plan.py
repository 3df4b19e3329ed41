"""Which parameter goes into which bucket: pure functions, no tensors, no network.

A plan is a list of buckets, each a list of parameter indices, in the order in which the
buckets are reduced. All ranks must hold the same plan; it depends only on sizes, dtypes and
the order given, which are verified equal at construction (see ``verify``).
"""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Real

from gradsync.errors import ArgumentError

MIB = 1024 * 1024
DEFAULT_CAP_MIB = 25
FIRST_BUCKET_BYTES = MIB

Plan = list[list[int]]


@dataclass(frozen=True)
class Item:
    """What the plan needs to know of one parameter.

    ``kind`` is whatever must be equal within one bucket (dtype and device); ``alone`` keeps
    a parameter out of company (sparse gradients).
    """

    nbytes: int
    kind: Hashable
    alone: bool = False


@dataclass(frozen=True)
class BucketCaps:
    """How large buckets may grow, in bytes: at the first backward and after it.

    Before the first backward the order of the gradients is not known, so there is nothing to
    overlap with and one bucket is best. Only where buckets are never rebuilt (unused
    parameters are looked for) does the first plan have to be the final one.
    """

    initial: tuple[int, ...]
    rebuilt: tuple[int, ...]
    cap_bytes: int
    caps_given: tuple[int, ...] = ()


def bucket_caps(
    cap_mb: float | None, cap_mb_list: Sequence[float] | None, *, will_rebuild: bool
) -> BucketCaps:
    """The caps that the constructor's arguments ask for; raises ``ArgumentError``."""
    if cap_mb_list is not None and not isinstance(cap_mb_list, Sequence):
        raise ArgumentError(f"bucket_cap_mb_list must be a list of sizes, got {cap_mb_list!r}.")
    if cap_mb_list:
        given = tuple(_to_bytes("bucket_cap_mb_list", cap) for cap in cap_mb_list)
        return BucketCaps(initial=given, rebuilt=given, cap_bytes=max(given), caps_given=given)
    if cap_mb is None:
        cap = DEFAULT_CAP_MIB * MIB
        rebuilt: tuple[int, ...] = (FIRST_BUCKET_BYTES, cap)
    else:
        cap = _to_bytes("bucket_cap_mb", cap_mb)
        rebuilt = (cap,)
    return BucketCaps(
        initial=(sys.maxsize,) if will_rebuild else rebuilt, rebuilt=rebuilt, cap_bytes=cap
    )


def initial_plan(items: Sequence[Item], caps: Sequence[int]) -> Plan:
    """The plan before any backward: last layers first, as gradients most likely arrive."""
    plan = make_plan(items, range(len(items)), caps)
    plan.sort(key=min, reverse=True)
    return plan


def make_plan(items: Sequence[Item], order: Sequence[int], caps: Sequence[int]) -> Plan:
    """Fill buckets in ``order``; a bucket is closed once it has reached its cap.

    The k-th bucket of a kind has the k-th cap, and the last cap holds for all further ones.
    """
    plan: Plan = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    closed: dict[Hashable, int] = {}
    for index in order:
        item = items[index]
        if item.alone:
            plan.append([index])
            continue
        members, size = open_buckets.pop(item.kind, ([], 0))
        members.append(index)
        size += item.nbytes
        count = closed.get(item.kind, 0)
        if size >= caps[min(count, len(caps) - 1)]:
            plan.append(members)
            closed[item.kind] = count + 1
        else:
            open_buckets[item.kind] = (members, size)
    plan.extend(members for members, _ in open_buckets.values())
    return plan


def _to_bytes(argument: str, mib: object) -> int:
    if isinstance(mib, bool) or not isinstance(mib, Real) or not float(mib) >= 0:
        raise ArgumentError(
            f"{argument} must be a size in MiB, got {mib!r}. Leave it out for the default of "
            f"{DEFAULT_CAP_MIB}; 0 gives each parameter a bucket of its own."
        )
    return int(min(float(mib) * MIB, sys.maxsize))
