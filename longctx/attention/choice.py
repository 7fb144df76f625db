"""The choice of a backend: the one asked for, or the one that the cost model prefers among those that can run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Arrangement, RingWork, Setup
from longctx.attention.modelled import attention_time, planned_work
from longctx.model.rope import context_length
from longctx.recurrent.cost import recurrent_time
from longctx.sequence.mesh import ParallelDims

ASSUMED_MEAN_LENGTH = 2000
ASSUMED_SIGMA = 1.5
"""Log-normal document lengths in tokens; the mix of benchmarks/data has mean 1,780 and median 566."""

MOST_ASSUMED_TOKENS = 1 << 22
"""A longer sequence is modelled by one of this length, since planning takes memory for every token."""

MAX_MODELLED_RING = 512
"""Largest ring that is modelled; planning a longer one takes seconds for every sequence."""

A_TIE = 1.05
"""Modelled times within this ratio of the fastest count as equal. Among these an exchange that stays in a node comes
first, then the smallest ring, then the backend registered first, which takes less memory."""

WORTH_OVERLAPPING = 0.98
"""Part of attention's modelled seconds that is left if the exchange overlaps with attention, for it to be worth it."""

WORTH_A_CHANGE = 1.1
"""How many times faster another backend must be to replace one that was chosen before the data was known."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents to model attention for.

    Each of `rows` holds the document lengths of one sequence in tokens, int64 [n]. `source` says where they come from.
    """

    rows: Sequence[NDArray[np.int64]]
    source: str


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """The arrangement of attention over the ranks of a sequence group, and the reason for it."""

    arrangement: Arrangement
    reason: str
    """`auto` and what it means, `asked for`, or what sp 1 means."""
    modelled: tuple[tuple[Arrangement, float], ...] = ()
    """Modelled seconds of attention per layer and micro-batch, of all arrangements that can run, the fastest first."""
    refused: tuple[tuple[Arrangement, str], ...] = ()
    """The arrangements that cannot run, each with the reason."""
    documents: str = ""
    """Where the modelled documents come from."""
    overlaps_exchange: bool = False
    """Whether these documents are attended to faster if the exchange overlaps with attention (`exchange_overlaps`)."""
    recurrent: str = ""
    """How recurrent layers can be spread, with the modelled seconds; empty without any."""

    @property
    def name(self) -> str:
        """A value of --sp_backend, or `local`."""
        return self.arrangement.name

    @property
    def engine(self) -> str:
        """The engine that the backend runs on by default."""
        return BACKENDS[self.name].engine

    def describe(self) -> str:
        """Describe the choice and its numbers in one line.

        `ulysses 4 (auto): modelled ms per layer: ulysses 4: 0.8, ulysses 2 × ring 2: 1.3, ring 4: 1.5, gather 4: 2`
        """
        numbers = ", ".join(f"{arrangement}: {seconds * 1e3:.3g}" for arrangement, seconds in self.modelled)
        parts = [f"modelled ms per layer: {numbers}"] if numbers else []
        parts += _reasons(self.refused)
        parts += ["exchange overlaps with attention"] if self.overlaps_exchange else []
        parts += [self.recurrent] if self.recurrent else []
        parts += [f"for {self.documents}"] if numbers else []
        return f"{self.arrangement} ({self.reason})" + (": " + "; ".join(parts) if parts else "")


def choose_backend(
    name: str,
    setup: Setup,
    documents: Documents | None = None,
    *,
    ring_size: int | None = None,
    pad_to_multiple_of: int | None = None,
    before: BackendChoice | None = None,
) -> BackendChoice:
    """Choose a backend and its degrees, and return them with the numbers behind the choice.

    Args:
        name: a backend, which has to be able to run, or `auto` for the least modelled seconds of attention.
        setup: heads, degrees and speeds.
        documents: sequences to model, of at least one token each. `auto` needs them; without them nothing is modelled.
        ring_size: ring ranks of `hybrid`; the rest are Ulysses ranks. None means the fewest that the heads allow.
        pad_to_multiple_of: what sequences are padded to, if that is fixed; `auto` skips backends that it does not suit.
        before: an earlier choice of `auto`, which is kept unless another is faster by `WORTH_A_CHANGE`.

    Raises:
        ValueError: for an unknown name, heads that Ulysses cannot divide, or a ring that does not divide sp, or if
            `auto` finds no backend that can run.
    """
    sp = setup.sp
    if name not in ("auto", *BACKENDS.spread):
        raise ValueError(f"--sp_backend {name} is unknown. Use one of {', '.join(('auto', *BACKENDS.spread))}.")
    if ring_size is not None and not (name in BACKENDS and BACKENDS[name].has_ring_size):
        splitting = ", ".join(other for other, backend in BACKENDS.items() if backend.has_ring_size)
        raise ValueError(
            f"--ring_size {ring_size} splits --sp_backend {splitting}; it is {name}. Leave it out, or use {splitting}."
        )
    if sp == 1:
        alone = BACKENDS["local"].arrange(setup, None)
        return BackendChoice(arrangement=alone, reason="sp 1: every sequence stays on one device")
    assert name != "auto" or documents is not None, "auto compares what backends cost for given documents"
    asked = None if name == "auto" else BACKENDS[name].arrange(setup, ring_size)
    obstacles = {
        arrangement: _obstacle(arrangement, setup, pad_to_multiple_of)
        for arrangement in arrangements(sp)
        if arrangement != asked
    }
    refused = [(arrangement, why) for arrangement, why in obstacles.items() if why is not None]
    able = [arrangement for arrangement in arrangements(sp) if obstacles.get(arrangement) is None]
    modelled = _modelled(setup, able, documents) if documents is not None else []
    if asked is not None:
        chosen, reason = asked, "asked for"
    elif modelled:
        chosen, reason = _least(setup, modelled, before)
    else:
        why = "; ".join(_reasons(refused))
        raise ValueError(f"--sp_backend auto finds no backend for sp {sp} ({why}). Lower --sp, or name a backend.")
    longest = max(int(row.sum()) for row in documents.rows) if documents is not None else 0
    recurrent = recurrent_time(setup, chosen, longest) if longest else None
    return BackendChoice(
        arrangement=chosen,
        reason=reason,
        modelled=tuple(modelled),
        refused=tuple(refused),
        documents=documents.source if documents is not None else "",
        overlaps_exchange=documents is not None and exchange_overlaps(setup, chosen, documents),
        recurrent=recurrent.describe() if recurrent else "",
    )


def exchange_overlaps(setup: Setup, arrangement: Arrangement, documents: Documents) -> bool:
    """Return whether the exchange of tokens for heads had better overlap with attention, by the modelled seconds.

    In stages of a few heads, the backward pass exchanges the inputs and the output again, so it pays on slow links.
    """
    if arrangement.ulysses == 1 or arrangement.ring > MAX_MODELLED_RING:
        return False
    work = _work(setup, arrangement, documents)
    whole, stages = (
        sum(attention_time(replace(setup, overlap_exchange=overlaps), arrangement, of_row).seconds for of_row in work)
        for overlaps in (False, True)
    )
    return stages < WORTH_OVERLAPPING * whole


def arrangements(sp: int) -> list[Arrangement]:
    """Return every arrangement of sp > 1 ranks, those with fewer ring ranks first."""
    ways = [arrangement for backend in BACKENDS.values() for arrangement in backend.arrangements(sp)]
    return sorted(ways, key=lambda arrangement: arrangement.ring)


def chunking_backend(setup: Setup) -> str | None:
    """Return the backend that `auto` means for a sequence-chunked step; None if the heads permit none.

    It has no ring, which would hold a part of the heads of all its tokens at once.
    """
    for name, backend in BACKENDS.spread.items():
        if backend.can_chunk and any(
            arrangement.ring == 1 and setup.num_heads % arrangement.ulysses == 0
            for arrangement in backend.arrangements(setup.sp)
        ):
            return name
    return None


def assumed_documents(num_tokens: int, *, packed: bool) -> Documents:
    """Return assumed documents of a sequence of `num_tokens` tokens, for use before the data is known."""
    num_tokens = min(num_tokens, MOST_ASSUMED_TOKENS)
    count = max(round(num_tokens / ASSUMED_MEAN_LENGTH), 1) if packed else 1
    if count == 1:
        return Documents(rows=[np.array([num_tokens])], source=f"one assumed document of {num_tokens:,} tokens")
    normal = NormalDist(sigma=ASSUMED_SIGMA)
    lengths = np.exp([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    bounds = (np.cumsum(lengths) * (num_tokens / lengths.sum())).round().astype(np.int64)
    return Documents(
        rows=[np.diff(bounds, prepend=0)],
        source=f"{count:,} assumed documents of log-normal length in {num_tokens:,} tokens",
    )


def documents_given(config: PretrainedConfig, lengths: Sequence[int] | None) -> Documents:
    """Return one row of documents of these lengths; without them, one document as long as the model's context."""
    if lengths is None:
        return assumed_documents(context_length(config), packed=False)
    row = np.asarray(lengths)
    if row.ndim != 1 or row.dtype.kind not in "iu" or not len(row) or row.min() < 1:
        raise ValueError(
            f"document_lengths {lengths!r} are not lengths of documents. Give a list of whole numbers of at least 1."
        )
    return Documents(rows=[row.astype(np.int64)], source=f"{len(row)} documents given")


def _least(
    setup: Setup, modelled: Sequence[tuple[Arrangement, float]], before: BackendChoice | None
) -> tuple[Arrangement, str]:
    """Choose an arrangement from modelled seconds in ascending order, and return it with the reason."""
    fastest, least = modelled[0]
    ratio = {arrangement: seconds / least for arrangement, seconds in modelled}
    if before is not None and ratio.get(before.arrangement, math.inf) <= WORTH_A_CHANGE:
        chosen, why = before.arrangement, "chosen before the data was read"
    else:
        ties = [arrangement for arrangement, _ in modelled if ratio[arrangement] <= A_TIE]
        order = list(BACKENDS)
        chosen = min(
            ties,
            key=lambda arrangement: (
                not setup.in_a_node(arrangement.ulysses),
                arrangement.ring,
                order.index(arrangement.name),
            ),
        )
        same_node = "less memory" if chosen.ring == fastest.ring else "smaller ring"
        why = "stays in a node" if chosen.ring > fastest.ring else same_node
    if chosen == fastest:
        return chosen, "auto"
    return chosen, f"auto: within {ratio[chosen] - 1:.1%} of {fastest}, {why}"


def _modelled(setup: Setup, candidates: Sequence[Arrangement], documents: Documents) -> list[tuple[Arrangement, float]]:
    """Return the mean modelled seconds over all sequences for each candidate, the fastest first."""
    seconds = []
    for arrangement in candidates:
        if arrangement.ring <= MAX_MODELLED_RING:
            of_rows = [attention_time(setup, arrangement, row).seconds for row in _work(setup, arrangement, documents)]
            seconds.append((arrangement, float(np.mean(of_rows))))
    return sorted(seconds, key=lambda pair: pair[1])


def _work(setup: Setup, arrangement: Arrangement, documents: Documents) -> list[RingWork]:
    """Return the work of a ring for each sequence, planned as in training."""
    return [planned_work(tuple(_filled(row, 2 * setup.sp).tolist()), setup, arrangement) for row in documents.rows]


def _filled(row: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Return the document lengths of a sequence with its padding, which is one more document."""
    return np.append(row, tail) if (tail := -int(row.sum()) % multiple) else row


def _obstacle(arrangement: Arrangement, setup: Setup, pad_to_multiple_of: int | None) -> str | None:
    """Return why the arrangement cannot run, or None if it can."""
    if setup.num_heads % arrangement.ulysses:
        return f"{setup.num_heads} heads"
    if arrangement.ring > MAX_MODELLED_RING:
        return f"rings above {MAX_MODELLED_RING} ranks are not modelled"
    multiple = ParallelDims.arrange(
        arrangement.ring * arrangement.ulysses, ring=arrangement.ring, ulysses=arrangement.ulysses
    ).multiple
    if pad_to_multiple_of is not None and pad_to_multiple_of % multiple:
        return f"needs rows padded to a multiple of {multiple}, not {pad_to_multiple_of}"
    return None


def _reasons(refused: Sequence[tuple[Arrangement, str]]) -> list[str]:
    """Return texts such as `ulysses 8, ulysses 4 × ring 2 cannot: 3 heads`."""
    return [
        f"{', '.join(str(arrangement) for arrangement, its in refused if its == why)} cannot: {why}"
        for why in dict.fromkeys(why for _, why in refused)
    ]
