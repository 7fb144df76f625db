"""The drawings of concepts.md, made of real plans: `python docs/drawings.py` writes docs/images/*.svg.

Tokens are cells, documents are colours, and every number in a drawing is computed here from the plan. Drawings have a
light card of their own, so that they can be read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longctx.ring import plan_ring

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Numbers of tokens in the packed row."""

IMAGES = Path(__file__).parent / "images"
LENGTHS = (32, 16, 8, 8)
RANKS = 4
TOKENS = sum(LENGTHS)
CU_SEQLENS = np.cumsum((0, *LENGTHS))
PLAN = plan_ring(CU_SEQLENS, RANKS)
DOCUMENT = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
POSITION = np.arange(TOKENS) - CU_SEQLENS[DOCUMENT]
COLOURS = ("#3b6ea5", "#b5560f", "#3c7d35", "#8f4f86")
"""Of documents."""
NAMES = "ABCD"
INK, FAINT, CARD = "#24292f", "#8b949e", "#fbfbfd"
CELL = 11.0


def text(x: float, y: float, said: str, *, size: int = 13, anchor: str = "start", fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{said}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, *, stroke: str = CARD, opacity: float = 1) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}" '
        f'fill-opacity="{opacity:g}"/>'
    )


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A drawing on its card; screen readers get the title."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
            'font-family="system-ui, sans-serif">',
            f"<title>{title}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{CARD}" stroke="#d0d7de"/>',
            *parts,
            "</svg>\n",
        ]
    )


def runs(tokens: Tokens) -> Iterator[tuple[int, int, int]]:
    """(place in the row, first token, tokens) of stretches that follow each other within one document."""
    numbered = enumerate(int(token) for token in tokens)
    for _, stretch in groupby(numbered, lambda pair: (pair[1] - pair[0], DOCUMENT[pair[1]])):
        places = list(stretch)
        yield places[0][0], places[0][1], len(places)


def row(x: float, y: float, tokens: Tokens, *, cell: float = CELL, height: float = 24) -> Iterator[str]:
    """Tokens beside each other, each stretch with its document and positions."""
    for place, first, count in runs(tokens):
        colour, start = COLOURS[DOCUMENT[first]], POSITION[first]
        yield box(x + place * cell, y, count * cell, height, colour)
        said = f"{NAMES[DOCUMENT[first]]} {start}–{start + count - 1}" if count > 3 else ""
        if said:
            middle = x + (place + count / 2) * cell
            yield text(middle, y + height / 2 + 4, said, size=11, anchor="middle", fill="#fff")


def share(rank: int) -> slice:
    return slice(rank * TOKENS // RANKS, (rank + 1) * TOKENS // RANKS)


def work(tokens: Tokens) -> int:
    """(query, key) pairs of these queries: a token attends to its document up to itself."""
    return int((POSITION[list(tokens)] + 1).sum())


def cut() -> str:
    """How a packed row is cut: contiguous for Ulysses, by the plan for a ring."""
    left, everything = 20.0, np.arange(TOKENS)
    parts = [text(left, 30, f"One row of {TOKENS} tokens with four packed documents, on {RANKS} ranks", size=15)]
    parts += row(left, 44, everything)
    parts += [text(left, 104, "Ulysses: contiguous slices"), text(left + 380, 104, "ring, gather: as planned")]
    for rank in range(RANKS):
        y = 118 + rank * 40
        contiguous, planned = everything[share(rank)], PLAN.permutation[share(rank)]
        for x, tokens in ((left, contiguous), (left + 380, planned)):
            parts += [text(x, y + 17, f"rank {rank}", size=12), *row(x + 48, y, tokens, cell=14)]
            parts += [text(x + 48 + 16 * 14 + 8, y + 17, f"{work(tokens)} pairs", size=12, fill="#57606a")]
    mean = work(everything) / RANKS
    worst = max(work(everything[share(rank)]) for rank in range(RANKS))
    said = (
        (f"largest over mean {worst / mean:.2f}, if heads were not exchanged;", "with them, every rank has equal work"),
        (
            f"largest over mean {PLAN.imbalance:.2f}",
            f"{PLAN.kv_tokens_sent} keys travel, {TOKENS * (RANKS - 1)} in a full gather",
        ),
    )
    for x, lines in zip((left, left + 380), said, strict=True):
        parts += [text(x, 292 + 18 * i, line, size=12) for i, line in enumerate(lines)]
    return svg(760, 326, "How a packed row is cut over four ranks", parts)


def held() -> str:
    """What a rank holds around attention under Ulysses, and what reaches it hop by hop in a ring."""
    heads, cell, left, top = 8, 6.0, 20.0, 88.0
    parts = [text(left, 30, "What rank 1 holds while a layer attends (8 heads, 4 ranks)", size=15)]
    parts += [
        text(left, 56, "Ulysses: before, its tokens with all heads;"),
        text(left, 74, "in between, all tokens, 2 heads"),
    ]
    for x, tokens, mine in ((left, range(TOKENS)[share(1)], range(heads)), (left + 150, range(TOKENS), range(2, 4))):
        for place, first, count in runs(tokens):
            for head in range(heads):
                shown = head in mine
                fill = COLOURS[DOCUMENT[first]] if shown else "#eaeef2"
                parts.append(box(x + place * cell, top + head * 14, count * cell, 14, fill))
        parts.append(text(x, top + heads * 14 + 18, f"{len(tokens)} tokens × {len(mine)} heads", size=12))
    parts += [text(left + 110, top + 62, "⇄", size=24)]
    y = top + heads * 14 + 60
    said = "ring: its own tokens with all heads, and keys and values that its queries need, hop by hop"
    parts.append(text(left, y - 12, said))
    held_tokens = [("its own", PLAN.permutation[share(1)], "")]
    for step in PLAN.shard(1).steps:
        arriving = PLAN.permutation[share(step.source)][: step.recv_tokens]
        held_tokens.append((f"from rank {step.source}", arriving, f"{step.num_pairs} pairs"))
    for i, (name, tokens_of_rank, pairs) in enumerate(held_tokens):
        parts += [text(left, y + i * 36 + 17, name, size=12), *row(left + 100, y + i * 36, tokens_of_rank, cell=14)]
        parts += [text(left + 100 + 16 * 14 + 8, y + i * 36 + 17, pairs, size=12, fill="#57606a")]
    return svg(760, y + RANKS * 36 + 4, "What a rank holds under Ulysses and in a ring", parts)


def balance() -> str:
    """One document over four ranks: whose queries meet which keys, contiguous and zigzag."""
    tokens, size, left, top = 32, 8.0, 20.0, 84.0
    plan = plan_ring([0, tokens], RANKS)
    owners = {"contiguous": np.repeat(np.arange(RANKS), tokens // RANKS), "planned (zigzag)": plan.rank_of_token}
    parts = [text(left, 30, "One document, causal: each query (row) meets the keys (columns) up to itself", size=15)]
    for i, (name, owner) in enumerate(owners.items()):
        x = left + i * 370
        pairs = np.bincount(owner, weights=np.arange(1, tokens + 1), minlength=RANKS).astype(int)
        parts.append(text(x, 58, f"{name}: largest over mean {pairs.max() / pairs.mean():.2f}"))
        for query in range(tokens):
            parts.append(box(x, top + query * size, (query + 1) * size, size, COLOURS[owner[query]], stroke="none"))
        for rank in range(RANKS):
            y = top + 4 + rank * 22
            parts += [
                box(x + 196, y, 12, 12, COLOURS[rank]),
                text(x + 214, y + 11, f"rank {rank}: {pairs[rank]} pairs", size=12),
            ]
    return svg(760, top + tokens * size + 20, "Causal balance over four ranks", parts)


DRAWINGS = {"cut.svg": cut, "held.svg": held, "balance.svg": balance}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
