"""The drawings of README.md and docs/: `python docs/drawings.py` writes docs/images/*.svg.

Drawings of plans show tokens as cells and documents as colours, and compute every number from the plan. The chart of
errors elsewhere reads its numbers from the page in benchmarks/results. Each drawing has a light background of its own,
so that it is readable on light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longctx.ring import plan_ring

Tokens = Sequence[int] | npt.NDArray[np.integer]
"""Indices of tokens in the packed sequence."""

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
    """(place, first token, number of tokens) of each stretch of consecutive tokens of one document."""
    numbered = enumerate(int(token) for token in tokens)
    for _, stretch in groupby(numbered, lambda pair: (pair[1] - pair[0], DOCUMENT[pair[1]])):
        places = list(stretch)
        yield places[0][0], places[0][1], len(places)


def row(x: float, y: float, tokens: Tokens, *, cell: float = CELL, height: float = 24) -> Iterator[str]:
    """Tokens side by side; each stretch is labelled with its document and positions."""
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
    """How a packed sequence is cut: contiguous for Ulysses, by the plan for a ring."""
    left, everything = 20.0, np.arange(TOKENS)
    parts = [text(left, 30, f"One sequence of {TOKENS} tokens: four packed documents on {RANKS} ranks", size=15)]
    parts += row(left, 44, everything)
    parts += [text(left, 104, "Ulysses: contiguous slices"), text(left + 380, 104, "Ring and gather: by the plan")]
    for rank in range(RANKS):
        y = 118 + rank * 40
        contiguous, planned = everything[share(rank)], PLAN.permutation[share(rank)]
        for x, tokens in ((left, contiguous), (left + 380, planned)):
            parts += [text(x, y + 17, f"rank {rank}", size=12), *row(x + 48, y, tokens, cell=14)]
            parts += [text(x + 48 + 16 * 14 + 8, y + 17, f"{work(tokens)} pairs", size=12, fill="#57606a")]
    mean = work(everything) / RANKS
    worst = max(work(everything[share(rank)]) for rank in range(RANKS))
    said = (
        (f"busiest rank: {worst / mean:.2f} × the mean work as cut,", "1.00 × after the exchange of heads"),
        (
            f"busiest rank: {PLAN.imbalance:.2f} × the mean work",
            f"{PLAN.kv_tokens_sent} keys are sent; a full gather sends {TOKENS * (RANKS - 1)}",
        ),
    )
    for x, lines in zip((left, left + 380), said, strict=True):
        parts += [text(x, 292 + 18 * i, line, size=12) for i, line in enumerate(lines)]
    return svg(760, 326, "How a packed sequence is cut over four ranks", parts)


def held() -> str:
    """What a rank holds around attention under Ulysses, and what arrives hop by hop in a ring."""
    heads, cell, left, top = 8, 6.0, 20.0, 88.0
    parts = [text(left, 30, "What rank 1 holds while a layer attends (8 heads, 4 ranks)", size=15)]
    parts += [
        text(left, 56, "Ulysses: its own tokens with all heads before"),
        text(left, 74, "the exchange, all tokens with 2 heads after it"),
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
    said = "Ring: its own tokens with all heads; keys and values that its queries need arrive hop by hop"
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
    """One document over four ranks: which rank computes which query-key pairs, contiguous and zigzag."""
    tokens, size, left, top = 32, 8.0, 20.0, 84.0
    plan = plan_ring([0, tokens], RANKS)
    owners = {"contiguous": np.repeat(np.arange(RANKS), tokens // RANKS), "planned (zigzag)": plan.rank_of_token}
    parts = [text(left, 30, "One document: each query (row) attends to the keys (columns) up to itself", size=15)]
    for i, (name, owner) in enumerate(owners.items()):
        x = left + i * 370
        pairs = np.bincount(owner, weights=np.arange(1, tokens + 1), minlength=RANKS).astype(int)
        parts.append(text(x, 58, f"{name}: busiest rank {pairs.max() / pairs.mean():.2f} × the mean work"))
        for query in range(tokens):
            parts.append(box(x, top + query * size, (query + 1) * size, size, COLOURS[owner[query]], stroke="none"))
        for rank in range(RANKS):
            y = top + 4 + rank * 22
            parts += [
                box(x + 196, y, 12, 12, COLOURS[rank]),
                text(x + 214, y + 11, f"rank {rank}: {pairs[rank]} pairs", size=12),
            ]
    return svg(760, top + tokens * size + 20, "Causal balance over four ranks", parts)


ELSEWHERE = Path(__file__).parent.parent / "benchmarks" / "results" / "elsewhere_cpu_2026-11-28.md"
SITUATIONS = {
    "Trainer, Ulysses sp_size 2, ZeRO-1, one document": "Ulysses on ZeRO-1 or ZeRO-2",
    "Trainer, Ulysses sp_size 2, ZeRO-3, 2 accumulation steps with 511 and 64 label tokens": (
        "Ulysses, accumulation, unequal labels"
    ),
    "Trainer, Ulysses sp_size 2, sdpa, sliding window of 64, one document of 512": "Ulysses, sliding window (sdpa)",
    "Trainer, packed row, cp_size 2 (FSDP2)": "Ring attention, packed documents",
    "Trainer, packed row, Ulysses sp_size 2 (ZeRO-3), sdpa": "Ulysses, packed documents (sdpa)",
    "SFTTrainer with packing, cp_size 2 (FSDP2)": "Ring attention, SFTTrainer's packing",
    "SFTTrainer with packing, Ulysses sp_size 2 (ZeRO-3)": "Ulysses, SFTTrainer's packing",
}
"""Rows of the page, and what the chart calls them."""
RELEASES = {
    f"{trainer}, Qwen3.5, {releases}": f"{releases.replace(' and', ',')}: {trainer.split()[0]}"
    for release, trl in (("5.8.1", "1.4.0"), ("5.19.0", "1.16.0"), ("5.24.0", "1.16.0"))
    for trainer, releases in (
        ("SFTTrainer with packing", f"transformers {release} and TRL {trl}"),
        ("Trainer with DataCollatorWithFlattening", f"transformers {release}"),
    )
}
"""The same for packed documents in gated delta layers."""
STOCK, OURS = "#b5560f", "#3c7d35"


def loss_and_norm(cell: str) -> tuple[float, float] | None:
    """(loss, gradient norm) of a cell; None where it holds an error."""
    found = re.fullmatch(r"loss ([\d.]+), norm ([\d.]+)", cell)
    return (float(found[1]), float(found[2])) if found else None


def elsewhere() -> str:
    """The errors of the stock stack in the first step, with those of longctx beside them."""
    lines = ELSEWHERE.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    table = {situation: rest for situation, *rest in cells}
    left, bars, top, scale, ours = 20.0, 310.0, 84.0, 1.8, 690.0
    parts = [
        text(left, 30, "Error in the gradient norm of the first step, on two processes", size=15),
        text(bars, 62, "stock stack", fill=STOCK),
        text(ours, 62, "longctx", fill=OURS),
    ]
    y = top
    for situation, name in (SITUATIONS | RELEASES).items():
        if situation == next(iter(RELEASES)):
            said = "Packed documents in the gated delta layers of Qwen3.5, on one device: error of the gradient"
            parts.append(text(left, y + 34, said, size=15))
            y += 56
        exact, stock, longctx = (loss_and_norm(cell) for cell in table[situation])
        assert exact is not None
        assert longctx == exact
        parts += [text(left, y + 15, name), text(ours, y + 15, "exact", fill=OURS)]
        if stock is None:
            error = table[situation][1].partition(":")[0]
            parts.append(text(bars, y + 15, f"no step: {error}", fill=STOCK))
        else:
            loss, norm = (got / want - 1 for got, want in zip(stock, exact, strict=True))
            said = f"{norm:+.0%}, loss {loss:+.1%}" if abs(loss) > 1e-4 else f"{norm:+.0%}, loss exact"
            if situation in RELEASES:
                norm = float(table[f"{situation}; relative error of the gradient"][1])
                said = f"{norm:.0%}, without an error message"
            length = abs(norm) * 100 * scale
            parts.append(box(bars, y, length, 20, STOCK))
            parts.append(text(bars + length + 8, y + 15, said.replace("-", "−"), size=12))
        y += 34
    said = "2-core CPU, gloo, no kernels for GPUs, 2026-11-28. “exact” means equal to one process in four decimals."
    parts.append(text(left, y + 18, said, size=12, fill="#57606a"))
    return svg(760, y + 36, "Errors of the stock stack in loss and gradient norm", parts)


DRAWINGS = {"cut.svg": cut, "held.svg": held, "balance.svg": balance, "elsewhere.svg": elsewhere}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / name).write_text(draw(), encoding="utf-8")
