"""What every rank of a sequence group gets of a batch, for the ways to spread it: tokens, plans, entries, pieces.

A value is of one set of rows. It has a digest for each fact over all ways to spread the rows, and one for each way over
all facts, so that a change shows which facts it changes, and where. A few short sets are recorded in full.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import longctx
from longctx.collate import SequenceCollator
from longctx.parallel import SequenceParallel
from longctx.recurrent.pieces import Pieces
from longctx.ring import plan_ring
from longctx.sequence.batch import AttentionKind, ShardedBatch
from longctx.sequence.layout import TRUNK, Layout, padding_documents
from longctx.training.data_order import ShardCollator
from tests.golden.digests import digest

Batch = dict[str, Any]


class Way(NamedTuple):
    """How a batch is spread: the arguments of `parallelize`, and the number of processes."""

    backend: str
    sp: int
    ring_size: int | None = None
    processes: int | None = None


WAYS = {
    "alone": Way("auto", 1),
    **{f"ring {sp}": Way("ring", sp) for sp in (2, 3, 4, 8)},
    **{f"gather {sp}": Way("gather", sp) for sp in (2, 4, 8)},
    **{f"ulysses {sp}": Way("ulysses", sp) for sp in (2, 4, 8)},
    **{f"hybrid {ring}x{sp // ring}": Way("hybrid", sp, ring) for ring, sp in ((2, 4), (3, 6), (2, 8), (4, 8))},
    "hybrid 2x2 of 8": Way("hybrid", 4, 2, 8),
}
KINDS = {
    "full": (AttentionKind(),),
    "window": (AttentionKind(window=7), AttentionKind(window=64, softcap=5.0)),
    "chunks": (AttentionKind(chunk_size=16), AttentionKind(chunk_size=100, window=30)),
}
EVERY = 48
"""Batches that come from elsewhere have a multiple of this many tokens, which all ways can cut."""
ALWAYS = ("alone", "ulysses 2", "ulysses 4", "ulysses 8")
DRAWN = 4
"""Of the other ways, so many are drawn for each set of rows: the search for a plan takes a tenth of a second."""

# --------------------------------------------------------------------------------------------------
# Adapters: what is read of longctx's inner objects
# --------------------------------------------------------------------------------------------------


def entries_of(schedule: Any) -> list[Any]:
    """Return the calls of kernels that a schedule makes, with what it sends and receives for each, as plain values."""
    if hasattr(schedule, "mine"):  # of windows or chunks over a ring
        mine = schedule.mine
        sent = [*map(np.ndarray.tolist, (mine.send_rows, mine.kv_rows)), mine.send_sizes, mine.receive_sizes]
        return [sent, _entries(schedule.entries)]
    if hasattr(schedule, "parts"):
        return [_entries(part) for part in schedule.parts]
    hops = [[step.hop, step.source, step.recv_tokens, *map(_entries, parts)] for step, parts in schedule.steps]
    return [[_entries(part) for part in schedule.own], *hops]


def _entries(entries: Any) -> list[Any]:
    varlen = entries.varlen(torch.device("cpu"))
    bounds = [varlen.cu_seqlens_q.tolist(), varlen.cu_seqlens_k.tolist(), varlen.max_seqlen_q, varlen.max_seqlen_k]
    limits = [varlen.causal, varlen.window_size_left, varlen.window_size_right, varlen.softcap]
    rows = [entries.q_ranges.tolist(), entries.kv_ranges.tolist()]
    return [*rows, *bounds, *limits]


def pieces_of(layout: Any, rank: int) -> list[Any]:
    """Return what recurrent layers know of a rank's pieces of documents."""
    pieces = Pieces.of(layout, rank)
    carried = [*pieces.tails(3), *pieces.halos(3)]
    arrays = [pieces.lengths, pieces.gives, pieces.receives, *carried]
    return [*(array.tolist() for array in arrays), pieces.slots, pieces.most_given, pieces.chains]


def plan_of(layout: Any) -> list[Any]:
    """Return the bounds of documents; of a ring, also the rank of every token, and how much of each shard travels."""
    bounds, plan = layout.cu_seqlens.tolist(), layout.plan
    if plan is None:
        return [bounds]
    arrays = plan.permutation, plan.rank_of_token, plan.prefix_tokens, plan.area_per_rank
    return [bounds, *(array.tolist() for array in arrays)]


def documents_of(batch: Batch) -> list[Any]:
    """Return where documents and answers begin, which are padding, and the tokens that are not, of an uncut batch."""
    layout = Layout.of_batch(batch)
    starts = layout.bounds[:-1][np.flatnonzero(np.diff(layout.answers, prepend=-1))]
    padding = padding_documents(batch, layout)
    rows = None if layout.lengths is None else layout.real_tokens().reshape(layout.shape)
    return [starts.tolist(), padding.tolist(), None if rows is None else rows.tolist()]


def of_trainer(sequence: SequenceParallel, collator: SequenceCollator) -> Callable[[Sequence[Any]], Batch]:
    """Return what the trainer's data loader makes of rows before it cuts them."""
    return ShardCollator(collator, sequence.dims, sequence.rank, time_of=sequence.time_of_plan).whole


# --------------------------------------------------------------------------------------------------
# Rows and batches
# --------------------------------------------------------------------------------------------------


def _tokens(random: Random, number: int) -> list[int]:
    return [random.randrange(2, 250) for _ in range(number)]


def _masked(random: Random, ids: Sequence[int]) -> list[int]:
    """Labels of a document of which some runs are not learnt."""
    labels, learnt = [], True
    for token in ids:
        learnt ^= random.random() < 0.15
        labels.append(token if learnt else -100)
    return labels


def _lengths(random: Random, longest: int) -> list[int]:
    """Of a row's documents: some of one token, some equal, some much longer than others."""
    choices = [1, 2, 3, random.randrange(2, 12), random.randrange(5, 40), random.randrange(8, longest)]
    return [random.choice(choices) for _ in range(random.randrange(2, 9))]


def _packed(random: Random, longest: int = 120) -> list[Batch]:
    """Rows of several documents, with labels, masks or neither."""
    rows = []
    for _ in range(random.randrange(1, 4)):
        lengths = _lengths(random, longest)
        ids = _tokens(random, sum(lengths))
        row = {"input_ids": ids, "seq_lengths": lengths}
        beside = random.randrange(3)
        if beside == 0:
            row["labels"] = _masked(random, ids)
        elif beside == 1:
            row["completion_mask"] = [int(label >= 0) for label in _masked(random, ids)]
        rows.append(row)
    return rows


def _single(random: Random) -> list[Batch]:
    """Documents of several lengths, which a batch pads."""
    lengths = [random.choice([1, 2, random.randrange(3, 100)]) for _ in range(random.randrange(1, 5))]
    documents = [_tokens(random, length) for length in lengths]
    return [{"input_ids": ids, "labels": _masked(random, ids)} for ids in documents]


def _branching(random: Random) -> list[Batch]:
    """Rows in which some documents share their beginning: two to four answers to a prompt."""
    rows = []
    for _ in range(random.randrange(1, 3)):
        lengths, starts = [], []
        for _ in range(random.randrange(1, 5)):
            trunk, begin = random.randrange(1, 40), sum(lengths)
            answers = [random.randrange(1, 30) for _ in range(random.randrange(0, 5))]
            starts += [begin + trunk + sum(answers[:place]) for place in range(len(answers))]
            lengths.append(trunk + sum(answers))
        ids = _tokens(random, sum(lengths))
        tokens = torch.tensor([ids])
        layout = Layout.of_documents(tokens, tokens, np.cumsum([0, *lengths[:-1]]), branch_starts=starts)
        trunks = np.repeat(layout.kind == TRUNK, np.diff(layout.bounds))  # in which nothing is learnt
        labels = np.where(trunks, -100, _masked(random, ids)).tolist()
        rows.append({"input_ids": ids, "labels": labels, "seq_lengths": lengths, "branch_starts": starts})
    return rows


def _foreign(random: Random, number: int) -> Batch:
    """A batch as people's own collators make it: several rows, padded to a multiple of EVERY tokens."""
    rows = random.randrange(1, 4)
    lengths = [_lengths(random, 90) if number % 2 else [random.randrange(2, 130)] for _ in range(rows)]
    width = -(-max(map(sum, lengths)) // EVERY) * EVERY
    ids, labels, positions, mask = (torch.zeros(rows, width, dtype=torch.int64) for _ in range(4))
    labels -= 100
    for row, of_row in enumerate(lengths):
        size = sum(of_row)
        ids[row, :size] = torch.tensor(_tokens(random, size))
        labels[row, :size] = torch.tensor(_masked(random, ids[row, :size].tolist()))
        mask[row, :size] = 1
        parts = [*of_row, *([width - size] if width > size else [])]
        positions[row] = torch.cat([torch.arange(length) for length in parts])
    given = {"position_ids": positions, "attention_mask": mask, "lengths": [sum(of_row) for of_row in lengths]}
    beside = (["position_ids"], ["attention_mask"], ["position_ids", "attention_mask"], ["position_ids", "lengths"], [])
    return {"input_ids": ids, "labels": labels} | {name: given[name] for name in beside[number % 5]}


def row_sets(number: int = 200) -> Iterator[tuple[str, list[Batch] | Batch, bool]]:
    """Yield (name, rows or a batch that was collated elsewhere, whether padding is at the end alone)."""
    makers: dict[str, Callable[[Random], Any]] = {
        "packed": _packed,
        "padded": _single,
        "branches": _branching,
        "padding-free": _single,
        "foreign": lambda random: _foreign(random, random.randrange(10)),
        "long": lambda random: _packed(random, 1500),
        "packed, padding-free": _packed,
        "foreign too": lambda random: _foreign(random, random.randrange(10)),
    }
    names = [*makers]
    for place in range(number):
        name, random = names[place % len(names)], Random(place)
        yield f"{place:03}, {name}", makers[name](random), name.endswith("padding-free")
    yield "empty, as on ranks without rows", [], False


# --------------------------------------------------------------------------------------------------
# Cuts
# --------------------------------------------------------------------------------------------------


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    sets = [*enumerate(row_sets())]
    chosen = [*sets[::17], sets[-1]] if quick else sets
    others = [way for way in WAYS if way not in ALWAYS]
    drawn = {number: Random(number).sample(others, DRAWN) for number, _ in chosen}
    by_set: dict[int, dict[str, dict[str, Any]]] = {number: {} for number, _ in chosen}
    for name, way in WAYS.items():
        together = [one for one in chosen if name in ALWAYS or name in drawn[one[0]]]
        for (number, _), facts in zip(together, _facts_of(way, together), strict=True):
            by_set[number][name] = facts
    for number, (name, *_) in chosen:
        yield name, _summary(by_set[number])
    yield from _in_full(quick)
    yield from _collated(quick)
    yield from _plans(quick)


def _summary(by_way: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the batch as one process sees it, a digest of each fact, and one of each way to spread the batch."""
    digests = {
        way: {fact: digest(value) for fact, value in facts.items() if fact != "batch"} for way, facts in by_way.items()
    }
    return {
        **by_way["alone"]["batch"],
        "facts": {fact: digest(*(of_way[fact] for of_way in digests.values())) for fact in digests["alone"]},
        "ways": {way: digest(*of_way.values()) for way, of_way in digests.items()},
    }


def _facts_of(way: Way, together: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the facts of every batch, each with a list of those of the ranks that share it.

    Ranks are those of torch's group without messages, since no rank needs another to cut. The first one plans.
    """
    processes = way.processes or way.sp
    found: list[dict[str, Any]] = [{} for _ in together]
    batches: list[Batch] = []
    for rank in range(processes - way.sp, processes):
        with _as_rank(rank, processes):
            _, sequence = longctx.parallelize(_model(), way.sp, sp_backend=way.backend, ring_size=way.ring_size)
            batches = batches or [_batch(sequence, number, *rows) for number, (_, *rows) in together]
            for facts, batch in zip(found, batches, strict=True):
                shard = sequence.shard(batch)
                batch["layout"] = shard.layout
                if way.sp == 1:
                    facts["batch"] = _of_batch(sequence, batch)
                for name, value in _of_rank(sequence, shard).items():
                    facts.setdefault(name, []).append(value)
    return found


@contextmanager
def _as_rank(rank: int, processes: int) -> Iterator[None]:
    """Be a rank of torch's group without messages, or a process without a group."""
    if processes == 1:
        yield
        return
    hook = sys.excepthook  # which torch replaces, to begin every line of an error with the rank
    dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _model() -> Qwen3MoeForCausalLM:
    """A mixture of experts, whose routers make `shard` tell padding apart, with heads for all ways."""
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 2, "num_experts_per_tok": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, attention_dropout=0.0, **sizes, **heads))


def _batch(sequence: SequenceParallel, number: int, rows: Any, padding_free: bool) -> Batch:
    """Collate rows as a loop of one's own does, and every other set as the trainer does."""
    if not isinstance(rows, list):
        return dict(rows)
    collator = SequenceCollator(1, sequence.dims.multiple, padding_free)
    if number % 2:
        return of_trainer(sequence, collator)(rows) if rows else collator.empty() | {"lengths": []}
    return collator(rows) if rows else collator.empty()


def _of_batch(sequence: SequenceParallel, batch: Batch) -> dict[str, Any]:
    shape, documents = list(batch["input_ids"].shape), digest(documents_of(batch))
    return {"shape": shape, "label tokens": sequence.count_label_tokens([batch]), "documents": documents}


def _of_rank(sequence: SequenceParallel, shard: ShardedBatch) -> dict[str, Any]:
    context = shard.context
    learnt, documents = context.learnt_positions(shard.shift_labels), sequence.documents_of_tokens(shard.layout)
    tensors = [shard.inputs["input_ids"], shard.inputs["position_ids"], shard.shift_labels, learnt]
    facts = {
        "tokens": [tensor.flatten().tolist() for tensor in (*tensors, context.real_tokens, documents)],
        "plan": plan_of(shard.layout),
        **{name: [_schedule(context, kind) for kind in kinds] for name, kinds in KINDS.items()},
    }
    if shard.layout.segments is None:  # which recurrent layers refuse
        facts["pieces"] = pieces_of(shard.layout, sequence.dims.sp_rank(sequence.rank))
    return facts


def _schedule(context: Any, kind: AttentionKind) -> Any:
    try:
        return entries_of(context.schedule(kind))
    except ValueError:
        return "refused"


def _in_full(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield short sets in full, to be read where a digest above has changed."""
    document = {"input_ids": [*range(2, 11)], "labels": [-100, -100, *range(4, 11)]}
    sets: dict[str, Any] = {
        "a row of documents of 7, 1 and 5 tokens": [{"input_ids": [*range(2, 15)], "seq_lengths": [7, 1, 5]}],
        "documents of 9 and 4 tokens, padded": [document, {"input_ids": [20, 21, 22, 23]}],
        "a prompt of 4 tokens with two answers": [
            {"input_ids": [*range(2, 14)], "labels": [*[-100] * 3, *range(5, 14)], "seq_lengths": [12]}
            | {"branch_starts": [3, 8]}
        ],
    }
    for name, rows in sets.items():
        together = [(0, (name, rows, False))]
        for way in ("alone", "ring 2", *(() if quick else ("ulysses 2", "hybrid 2x2"))):
            for fact, value in _facts_of(WAYS[way], together)[0].items():
                yield f"{name}, {way}: {fact}", value


def _plans(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield the plans of a ring for drawn documents, by balance alone and with other limits, over up to 64 ranks."""
    options = [{}, {"max_imbalance": 1.0}, {"max_imbalance": 1.2, "group_fraction": 0.0}, {"group_fraction": 1.0}]
    for number in range(8 if quick else 60):
        random, world_size = Random(number), (2, 3, 4, 5, 8, 16, 32, 64)[number % 8]
        lengths = [length for _ in range(random.randrange(1, 6)) for length in _lengths(random, 40 * world_size)]
        bounds = np.cumsum([0, *lengths, -sum(lengths) % world_size or world_size])
        plan = plan_ring(bounds, world_size, **options[number % 4])
        arrays = plan.permutation, plan.rank_of_token, plan.prefix_tokens, plan.area_per_rank
        hops = [step for shard in plan.shards for step in shard.steps]
        steps = [[step.source, step.recv_tokens, step.entries.tolist()] for step in hops]
        shards = [[shard.cu_seqlens.tolist(), shard.prefix_tokens.tolist()] for shard in plan.shards]
        name = f"plan {number:02}, {len(bounds) - 1} documents, {bounds[-1]} tokens, {world_size} ranks"
        sent = {"tokens sent": plan.kv_tokens_sent, "imbalance": round(plan.imbalance, 6)}
        yield name, sent | {"tokens": digest(*arrays), "work": digest(steps, shards, plan.work_per_hop)}


def _collated(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield what SequenceCollator returns, with each of its options, for rows as lists, arrays or tensors."""
    forms: tuple[Callable[[Any], Any], ...] = (list, np.array, torch.tensor, lambda values: np.array(values, np.int32))
    options = [{}, {"pad_to_multiple_of": 48}, {"padding_free": True}, {"pad_to_multiple_of": 7, "padding_free": True}]
    for place, (name, rows, _) in enumerate(row_sets(8 if quick else 56)):
        if not isinstance(rows, list):
            continue
        form = forms[place % len(forms)]
        given = [{key: form(values) for key, values in row.items()} for row in rows]
        for number, option in enumerate(options):
            collator = SequenceCollator(number * 50, **option)
            batch = collator(given) if given else collator.empty()
            yield f"collated {name}, {option}", {key: _shown(value) for key, value in batch.items()}


def _shown(value: Any) -> Any:
    return f"{value.dtype} {list(value.shape)} {digest(value)}" if isinstance(value, torch.Tensor) else value
