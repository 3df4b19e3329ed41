"""Which parameter goes into which bucket."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.ddp.plan import MIB, Item, bucket_caps, initial_plan, make_plan
from gradsync.errors import ArgumentError

pytestmark = pytest.mark.timeout(60)

DTYPES = [torch.float32, torch.float64, torch.bfloat16]

items = st.lists(
    st.builds(
        Item, st.integers(0, 50), st.sampled_from("abc"), st.sampled_from([False] * 4 + [True])
    ),
    max_size=20,
)
caps = st.lists(st.integers(0, 100), min_size=1, max_size=4)


@st.composite
def items_and_order(draw: st.DrawFn) -> tuple[list[Item], list[int]]:
    drawn = draw(items)
    return drawn, draw(st.permutations(range(len(drawn))))


@given(items_and_order(), caps)
def test_every_parameter_is_in_exactly_one_bucket_and_none_is_empty(
    drawn: tuple[list[Item], list[int]], caps: list[int]
) -> None:
    for plan in (make_plan(*drawn, caps), initial_plan(drawn[0], caps)):
        assert sorted(chain.from_iterable(plan)) == list(range(len(drawn[0])))
        assert all(plan)


@given(items_and_order(), caps)
def test_kinds_are_not_mixed_and_those_that_want_to_be_alone_are(
    drawn: tuple[list[Item], list[int]], caps: list[int]
) -> None:
    parameters, order = drawn
    for plan in (make_plan(parameters, order, caps), initial_plan(parameters, caps)):
        for bucket in plan:
            assert len({parameters[index].kind for index in bucket}) == 1
            if any(parameters[index].alone for index in bucket):
                assert len(bucket) == 1


@given(items_and_order(), caps)
def test_a_bucket_is_closed_by_the_parameter_that_reaches_its_cap_and_not_before(
    drawn: tuple[list[Item], list[int]], caps: list[int]
) -> None:
    parameters, order = drawn
    plan = make_plan(parameters, order, caps)
    for kind in {item.kind for item in parameters}:
        buckets = [b for b in plan if parameters[b[0]].kind == kind and not parameters[b[0]].alone]
        for position, bucket in enumerate(buckets):
            cap = caps[min(position, len(caps) - 1)]
            sizes = [parameters[index].nbytes for index in bucket]
            assert sum(sizes[:-1]) < cap or len(sizes) == 1
            is_last = position == len(buckets) - 1
            assert sum(sizes) >= cap or is_last, "only the last bucket of a kind may be short"


@given(items_and_order(), caps)
def test_the_order_given_is_kept(drawn: tuple[list[Item], list[int]], caps: list[int]) -> None:
    """Within a bucket, and from bucket to bucket by when each is full."""
    parameters, order = drawn
    position = {index: at for at, index in enumerate(order)}
    plan = make_plan(parameters, order, caps)
    for bucket in plan:
        assert bucket == sorted(bucket, key=position.__getitem__)
    for kind in {item.kind for item in parameters}:
        of_kind = [b for b in plan if parameters[b[0]].kind == kind and not parameters[b[0]].alone]
        assert list(chain.from_iterable(of_kind)) == [
            i for i in order if parameters[i].kind == kind and not parameters[i].alone
        ]


@given(items, caps)
def test_the_first_plan_has_the_last_parameters_first(drawn: list[Item], caps: list[int]) -> None:
    first = [min(bucket) for bucket in initial_plan(drawn, caps)]
    assert first == sorted(first, reverse=True)


tensors = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(DTYPES)), min_size=1, max_size=15
).map(lambda shapes: [torch.empty(size, dtype=dtype) for size, dtype in shapes])


def to_items(drawn: list[torch.Tensor]) -> list[Item]:
    return [Item(tensor.numel() * tensor.element_size(), tensor.dtype) for tensor in drawn]


@given(tensors, st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_the_first_plan_is_torchs(drawn: list[torch.Tensor], caps: list[int]) -> None:
    theirs, _ = dist._compute_bucket_assignment_by_size(drawn, caps)
    assert initial_plan(to_items(drawn), caps) == list(reversed(theirs))


@given(tensors, st.lists(st.integers(1, 200), min_size=1, max_size=4), st.randoms())
def test_the_rebuilt_plan_has_torchs_buckets(
    drawn: list[torch.Tensor], caps: list[int], random: object
) -> None:
    """Those that reach their caps also come in torch's order; torch puts the short rest of each
    dtype behind them in the order of a hash table."""
    order = list(range(len(drawn)))
    random.shuffle(order)  # type: ignore[attr-defined]
    in_order = [drawn[index] for index in order]
    theirs, _ = dist._compute_bucket_assignment_by_size(in_order, caps, [False] * len(order), order)
    ours = make_plan(to_items(drawn), order, caps)
    assert sorted(ours) == sorted(theirs)
    rest = len({tensor.dtype for tensor in drawn})
    full = max(0, len(ours) - rest)
    assert ours[:full] == theirs[:full]


def test_a_cap_of_zero_gives_each_parameter_its_own_bucket_and_a_huge_one_the_same() -> None:
    parameters = [Item(4 * n, "f") for n in (1, 5, 2, 0)]
    alone = bucket_caps(0, None, will_rebuild=True)
    together = bucket_caps(math.inf, None, will_rebuild=True)
    assert make_plan(parameters, range(4), alone.rebuilt) == [[0], [1], [2], [3]]
    assert make_plan(parameters, range(4), together.rebuilt) == [[0, 1, 2, 3]]


def test_before_the_first_backward_one_bucket_is_enough_if_it_is_rebuilt_after() -> None:
    parameters = [Item(30 * MIB, "f") for _ in range(4)]
    rebuilding = bucket_caps(None, None, will_rebuild=True)
    final = bucket_caps(None, None, will_rebuild=False)
    assert initial_plan(parameters, rebuilding.initial) == [[0, 1, 2, 3]]
    assert initial_plan(parameters, final.initial) == [[3], [2], [1], [0]]


@settings(max_examples=50)
@given(st.floats(0, 2000), st.booleans())
def test_caps_are_the_sizes_asked_for(mib: float, will_rebuild: bool) -> None:
    one = bucket_caps(mib, None, will_rebuild=will_rebuild)
    assert one.rebuilt == (int(mib * MIB),)
    assert one.cap_bytes == int(mib * MIB)
    several = bucket_caps(None, [1, mib], will_rebuild=will_rebuild)
    assert several.rebuilt == several.caps_given == (MIB, int(mib * MIB))


def test_the_default_is_a_small_first_bucket_and_25_mib_after_it() -> None:
    assert bucket_caps(None, None, will_rebuild=True).rebuilt == (MIB, 25 * MIB)


@pytest.mark.parametrize("bad", [-1, -0.001, math.nan, "25", None, True, [1], 1j], ids=repr)
def test_a_bad_cap_is_refused_by_the_name_of_its_argument(bad: object) -> None:
    if bad is not None:
        with pytest.raises(ArgumentError, match=r"bucket_cap_mb must be a size in MiB"):
            bucket_caps(bad, None, will_rebuild=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"bucket_cap_mb_list must be a size in MiB"):
        bucket_caps(None, [1, bad], will_rebuild=True)  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [5, 2.5, "25"], ids=repr)
def test_a_list_of_caps_that_is_no_list_is_refused_by_name(bad: object) -> None:
    with pytest.raises(ArgumentError, match="bucket_cap_mb_list"):
        bucket_caps(None, bad, will_rebuild=True)  # type: ignore[arg-type]
