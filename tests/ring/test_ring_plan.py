"""The ring planner: exactness by brute force on short sequences, balance and thrift on realistic ones."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.ring.plan import RankShard, RingPlan
from longctx.ring.planner import PlanTime, plan_ring


def _plan(lengths, world_size: int, **options) -> RingPlan:
    return plan_ring(np.append(0, np.cumsum(lengths)), world_size, **options)


def _fitted(lengths: list[int], multiple: int) -> list[int]:
    """The lengths with a last document that makes the total divisible by `multiple`."""
    missing = -sum(lengths) % multiple
    return [*lengths, missing] if missing else lengths


@st.composite
def packs(draw) -> tuple[list[int], int]:
    """(lengths, world_size): few tokens, and lengths that differ by orders of magnitude."""
    world_size = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 13]))
    length = st.one_of(st.just(1), st.integers(1, 2 * world_size), st.integers(1, 40), st.integers(1, 200))
    repeated = st.builds(lambda n, times: [n] * times, length, st.integers(1, 8))
    groups = draw(st.lists(repeated, min_size=1, max_size=6))
    return _fitted([n for group in groups for n in group], world_size), world_size


def _legal_pairs(lengths: list[int]) -> np.ndarray:
    """bool [T, T]: query and key in one document, the key not after the query."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    return np.tril(document[:, None] == document[None])


def _own(plan: RingPlan, rank: int) -> np.ndarray:
    """The original tokens of a rank's shard."""
    num_tokens = plan.num_tokens // plan.world_size
    return plan.permutation[rank * num_tokens : (rank + 1) * num_tokens]


def _count_pairs(plan: RingPlan) -> np.ndarray:
    """int [T, T]: how often the ranks' causal calls and entries compute each (query, key) pair."""
    count = np.zeros((plan.num_tokens, plan.num_tokens), np.int64)
    for rank in range(plan.world_size):
        shard, own = plan.shard(rank), _own(plan, rank)
        for begin, end in zip(shard.cu_seqlens[:-1], shard.cu_seqlens[1:], strict=True):
            count[np.ix_(own[begin:end], own[begin:end])] += np.tri(end - begin, dtype=np.int64)
        for step in shard.steps:
            source = _own(plan, step.source)
            for q_start, q_end, kv_start, kv_end in step.entries:
                count[np.ix_(own[q_start:q_end], source[kv_start:kv_end])] += 1
    return count


def _assert_partition(plan: RingPlan) -> None:
    num_tokens, world_size = plan.num_tokens, plan.world_size
    assert np.array_equal(np.sort(plan.permutation), np.arange(num_tokens))
    assert np.array_equal(np.bincount(plan.rank_of_token), np.full(world_size, num_tokens // world_size))
    for rank in range(world_size):
        assert (plan.rank_of_token[_own(plan, rank)] == rank).all()


def _assert_entries(plan: RingPlan, shard: RankShard) -> None:
    """Not empty, inside what was received, no query and no key twice in a step."""
    for hop, step in enumerate(shard.steps, start=1):
        assert (step.hop, step.source) == (hop, (shard.rank - hop) % plan.world_size)
        assert (step.entries[:, 0] < step.entries[:, 1]).all()
        assert (step.entries[:, 2] < step.entries[:, 3]).all()
        assert (step.entries[:, 1] <= shard.num_tokens).all()
        assert (step.entries[:, 3] <= step.recv_tokens).all()
        for begin, end in (step.entries[:, :2].T, step.entries[:, 2:].T):
            order = np.argsort(begin)
            assert (begin[order][1:] >= end[order][:-1]).all()


def _assert_transport(plan: RingPlan) -> None:
    """Each rank receives what it is to have of its source's shard, and messages grow shorter from hop to hop."""
    for shard in plan.shards:
        for step in shard.steps:
            assert step.recv_tokens == plan.shards[step.source].prefix_tokens[step.hop]
    assert (np.diff(plan.prefix_tokens, axis=1) <= 0).all()
    assert sum(step.recv_tokens for shard in plan.shards for step in shard.steps) == plan.kv_tokens_sent


def _runs_per_rank(plan: RingPlan) -> list[int]:
    """Maximal contiguous ranges of original tokens in each shard."""
    return [1 + int((np.diff(_own(plan, rank)) != 1).sum()) for rank in range(plan.world_size)]


def _assert_exact(plan: RingPlan, lengths: list[int]) -> None:
    _assert_partition(plan)
    _assert_transport(plan)
    for shard in plan.shards:
        assert shard.cu_seqlens[0] == 0
        assert shard.cu_seqlens[-1] == shard.num_tokens
        assert (np.diff(shard.cu_seqlens) > 0).all()
        _assert_entries(plan, shard)
    legal, count = _legal_pairs(lengths), _count_pairs(plan)
    assert np.array_equal(count, legal)
    work = np.array([legal[_own(plan, rank)].sum() for rank in range(plan.world_size)])
    assert np.array_equal(plan.area_per_rank, work)
    assert plan.imbalance == pytest.approx(work.max() / work.mean())


@settings(max_examples=150, deadline=None)
@given(packs(), st.sampled_from([1.0, 1.02, 1.2]), st.sampled_from([0.0, 0.125, 1.0]))
def test_every_legal_pair_exactly_once(pack, max_imbalance, group_fraction):
    lengths, world_size = pack
    plan = _plan(lengths, world_size, max_imbalance=max_imbalance, group_fraction=group_fraction)
    _assert_exact(plan, lengths)


@settings(max_examples=50, deadline=None)
@given(packs())
def test_areas_runs_and_reports(pack):
    lengths, world_size = pack
    plan = _plan(lengths, world_size)
    local = sum(int((n * (n + 1) // 2).sum()) for n in (np.diff(s.cu_seqlens) for s in plan.shards))
    remote = sum(step.num_pairs for shard in plan.shards for step in shard.steps)
    assert local + remote == sum(n * (n + 1) // 2 for n in lengths)
    pairs, entries, queries = plan.work_per_hop
    for shard in plan.shards:
        own = np.diff(shard.cu_seqlens)
        remote = [(s.num_pairs, len(s.entries), int((s.entries[:, 1] - s.entries[:, 0]).sum())) for s in shard.steps]
        expected = [(int((own * (own + 1) // 2).sum()), len(own), shard.num_tokens), *remote]
        assert [*zip(pairs[shard.rank], entries[shard.rank], queries[shard.rank], strict=True)] == expected
    assert plan.kv_tokens_sent <= sum(lengths) * (world_size - 1)


def test_times_that_differ_by_rounding_give_one_plan():
    """Processors add floats in different orders, and all ranks have to choose the same of two equally fast plans."""
    lengths = np.random.default_rng(2).lognormal(6.3, 1.4, 400).astype(np.int64) + 1
    lengths = np.append(lengths, -lengths.sum() % 16 or 16)
    for seed in range(3):
        errors = np.random.default_rng(seed)

        def time_of(plan, errors=errors):
            return PlanTime(seconds=0.123 * (1 + errors.uniform(-1e-14, 1e-14)), waiting=0.1)

        plans = [_plan(lengths, 8, time_of=time_of) for _ in range(4)]
        assert all(np.array_equal(plans[0].permutation, other.permutation) for other in plans[1:])


@pytest.mark.parametrize(
    ("lengths", "world_size"),
    [
        ([7], 1),
        ([3 * 5], 3),  # T divisible by P, not by 2P
        ([1] * 8, 8),  # T == P, and no pair but (t, t)
        ([3, 5], 8),  # documents shorter than 2P, and than P
        ([100, 99, 1], 8),  # few huge and one tiny
        ([1, 1, 1, 509], 64),  # adversarial ones
        ([2, 1] * 43 + [1] * 63, 64),
    ],
)
def test_degenerate_packs_are_exact(lengths, world_size):
    _assert_exact(_plan(lengths, world_size), lengths)


def _histogram_packs(num_packs: int, seed: int) -> list[list[int]]:
    """Packs of 64k tokens with a heavy tail of lengths; the last document closes the pack."""
    rng = np.random.default_rng(seed)
    packs = []
    for _ in range(num_packs):
        lengths = np.minimum(rng.lognormal(6.5, 1.6, 4000).astype(int) + 1, 65536)
        rng.shuffle(lengths)
        end = np.cumsum(lengths)
        inside = int(np.searchsorted(end, 65536))
        packs.append([*lengths[:inside].tolist(), 65536 - int(end[inside - 1] if inside else 0)])
    return [[n for n in pack if n] for pack in packs]


@pytest.mark.parametrize("world_size", [2, 8, 16])
def test_realistic_packs_are_balanced_and_frugal(world_size):
    plans = [_plan(lengths, world_size) for lengths in _histogram_packs(40, seed=5)]
    assert np.mean([plan.imbalance for plan in plans]) <= 1.02
    assert max(plan.imbalance for plan in plans) <= 1.05
    assert np.mean([plan.kv_tokens_sent / (65536 * (world_size - 1)) for plan in plans]) <= 0.5
    assert max(max(_runs_per_rank(plan)) for plan in plans) <= 20


@pytest.mark.long
def test_planning_for_a_thousand_ranks_takes_seconds():
    """2 s on the machine it was written on, where a search through all documents for every rank took four times it."""
    lengths = np.minimum(np.random.default_rng(1).lognormal(6.5, 1.6, 9000).astype(int) + 1, 1 << 18)
    start = time.process_time()
    plan = _plan(_fitted(lengths.tolist(), 1024), 1024)
    assert plan.work_per_hop[0].sum() == plan.area_per_rank.sum()
    assert time.process_time() - start <= 12


@pytest.mark.parametrize(
    ("cu_seqlens", "world_size", "message"),
    [
        ([0, 10], 4, r"10 tokens .*world_size=4.*multiple of 2 \* world_size = 8 \(here 16\)"),
        ([0, 4, 4, 8], 2, "strictly increasing.*document 1 goes from 4 to 4.*length zero"),
        ([0, 6, 4], 2, "strictly increasing.*document 1"),
        ([1, 8], 2, "start with 0, got 1"),
        ([0], 2, "at least two document boundaries"),
        ([[0, 4], [0, 4]], 2, "one-dimensional"),
        ([0.0, 4.0], 2, "integer"),
        ([0, 4], 0, "world_size must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(cu_seqlens, world_size, message):
    with pytest.raises(ValueError, match=message):
        plan_ring(cu_seqlens, world_size)


def test_bad_options_and_ranks_are_refused():
    with pytest.raises(ValueError, match="max_imbalance must be at least 1"):
        plan_ring([0, 8], 2, max_imbalance=0.9)
    with pytest.raises(ValueError, match="group_fraction at least 0"):
        plan_ring([0, 8], 2, group_fraction=-1)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1"):
        plan_ring([0, 8], 2).shard(2)
