"""Longest sequences by memory option, and beside published ones."""

from __future__ import annotations

from collections.abc import Iterator

from longctx.launch.terminal import token_label

from ..packing import print_head, print_row
from ..published import read
from .rows import (
    CHECK_TOKENS,
    CHUNKED,
    DEVICE,
    GATHER,
    HEADS,
    MODELS,
    OFFLOAD,
    OPTIMIZER_ON_HOST,
    RESERVE,
    TILED,
    Fit,
    Results,
    Row,
    Task,
    combined,
    rows_of,
)


def length_text(tokens: float) -> str:
    return "does not fit" if tokens < 1 else token_label(tokens)


LENGTH_COLUMNS = (
    "memory_options",
    "",
    "longest",
    "bound by",
    "device alone",
    "device, bytes a token",
    "host, bytes a token",
)


def length_cells(name: str, kind: str, fitted: Fit, sp: int) -> list[str]:
    device, host = fitted.longest()
    tokens = min(device, host)
    slope = [0.0, 0.0]
    for side, parts in enumerate((fitted.device, fitted.host)):
        slope[side] = max(parts.values(), key=lambda line: line[0] + line[1] * max(tokens, 1))[1]
    return [
        name,
        kind,
        length_text(tokens * sp),
        "" if tokens < 1 else "host" if host < device else "device",
        length_text(device * sp),
        f"{slope[0]:,.0f}",
        f"{slope[1]:,.0f}",
    ]


def length_tasks(model: str, sp: int) -> Iterator[Task]:
    rows = [row for _, row in rows_of(model, sp)]
    yield from (Task(model, sp, row) for row in rows)
    yield Task(model, sp, rows[0], is_check=True)


def print_lengths(model: str, sp: int, results: Results) -> None:
    """The ablation of one model on one number of devices."""
    print(f"\n## {model}, sp {sp}")
    print_head(*LENGTH_COLUMNS)
    for kind, row in rows_of(model, sp):
        fitted = results.fit(model, sp, row)
        print_row([row.name, kind, fitted] if isinstance(fitted, str) else length_cells(row.name, kind, fitted, sp))
    _, first = next(rows_of(model, sp))
    fitted, traced = results.fit(model, sp, first), results.check(model, sp, first)
    if not isinstance(fitted, str) and not isinstance(traced, str):
        device, host = fitted.at(CHECK_TOKENS)
        print(
            f"\n*Check*, all {MODELS[model].num_hidden_layers} layers at {CHECK_TOKENS * sp:,} tokens, first row: "
            f"traced over fitted {traced[0] / device:.4f} on the device ({traced[0] / 2**30:.2f} GiB)"
            + (f", {traced[1] / host:.4f} on the host." if host else ".")
        )


SAME_AND_OURS = "the same, and ours"
COUNTERPARTS: list[tuple[str, str, str, list[Row]]] = [
    ("ALST", "baseline+fused-loss+ulysses8", "Llama-3.1-8B", [OPTIMIZER_ON_HOST]),
    ("ALST", "baseline+fused-loss+ulysses8+tiled-mlp", "Llama-3.1-8B", [OPTIMIZER_ON_HOST, TILED]),
    ("ALST", "baseline+fused-loss+ulysses8+checkpoint-offload", "Llama-3.1-8B", [OPTIMIZER_ON_HOST, OFFLOAD]),
    ("ALST", "all", "Llama-3.1-8B", [OPTIMIZER_ON_HOST, OFFLOAD, TILED]),
    (
        "UPipe paper",
        "head-chunked ulysses+checkpoint-offload+tiled-mlp, FA3",
        "Llama-3.1-8B",
        [OPTIMIZER_ON_HOST, OFFLOAD, TILED, HEADS],
    ),
    ("UPipe paper", SAME_AND_OURS, "Llama-3.1-8B", [CHUNKED]),
    ("TRL 1.13 CP", "fsdp2+cp8+chunked-loss+checkpoint-offload", "Qwen3-8B", [GATHER, OFFLOAD]),
    ("TRL 1.13 CP", SAME_AND_OURS, "Qwen3-8B", [CHUNKED]),
]
"""(stack, its features, model, our memory options for the same)."""


def published_tasks() -> Iterator[Task]:
    yield from (Task(model, 8, combined(memory_options)) for _, _, model, memory_options in COUNTERPARTS)


def print_published(results: Results) -> None:
    """Rows of the table of published lengths on 8 devices, and ours with the same features and budget."""
    print("\n## Published on 8 devices, and ours with the same features\n")
    print(
        "A published run that states its peak (TRL's) is compared at that peak, maxima at 80 GiB less the reserve. "
        "*the same, and ours*: the row above, against our longest."
    )
    print_head("stack", "features", "model", "published", "ours, predicted", "ratio", "bound by", "device alone")
    by_features = {(row.stack, row.features): row for row in read() if row.gpus == 8}
    for stack, features, model, memory_options in COUNTERPARTS:
        if features != SAME_AND_OURS:
            theirs = by_features[stack, features]
        fitted = results.fit(model, 8, combined(memory_options))
        if isinstance(fitted, str):
            print_row([stack, features, model, theirs.length, fitted])
            continue
        budget = theirs.peak_gib * 2**30 - RESERVE if theirs.peak_gib else DEVICE
        device, host = fitted.longest(device=budget)
        ours, bound = min(device, host) * 8, "host" if host < device else "device"
        ratio = f"{ours / theirs.length:.2f}"
        figures = (f"{theirs.length:,}", length_text(ours), ratio, bound, length_text(device * 8))
        print_row([stack, features, model, *figures])
