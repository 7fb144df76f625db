"""A small set of cases in which every two values of different axes occur together.

All pairs of all values of the space would take thousands of cases. The axes here have one value for each class of
settings that takes a path of its own through the code; where a class has several members (the model types of one
kind, the spellings), cases take turns with them. All values of an axis go with all values of the others, so that a
refusal in this set is worth a look, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from longctx.attention.backends import BACKENDS

from .space import Case, make_consistent
from .values import PREFERENCES

Value = Mapping[str, Any]

OTHER_ENGINE = {"fsdp2": "deepspeed", "deepspeed": "fsdp2"}
"""Each engine's other one. Of a backend, every second case runs on the engine that is not its default."""

KINDS = itertools.cycle(("prompt", "messages"))
"""Kinds of records that hold pairs: text and conversations."""

AXES: dict[str, dict[str, Sequence[Value]]] = {
    "layout": {
        "one process": [{}],
        **{
            name: [{"sp": 2, "backend": name}, {"sp": 2, "backend": name, "engine": OTHER_ENGINE[backend.engine]}]
            for name, backend in BACKENDS.spread.items()
            if backend.fewest_ranks == 2
        },
        "ZeRO-1, ZeRO-2": [{"sp": 2, "backend": "ulysses", "engine": "zero2"}, {"dp": 2, "engine": "zero1"}],
        "data parallel": [{"dp": 2}, {"dp": 2, "engine": "deepspeed"}],
    },
    "model": {
        "dense, untied": [
            {"model": "llama", "heads": "4:4"},
            {"model": "olmo2", "heads": "6:2", "vocab_size": 301},
            {"model": "qwen2", "head_dim": 12},
            {"model": "gpt_neox", "heads": "4:4", "head_dim": 16},
            {"model": "granite"},
            {"model": "starcoder2", "heads": "4:1"},
            {"model": "llama", "embeddings": "contradictory"},
            {"model": "phi3", "layers": 1},
        ],
        "dense, tied": [
            {"model": "qwen3", "embeddings": "tied", "heads": "4:1"},
            {"model": "gemma", "embeddings": "tied"},
            {"model": "cohere", "embeddings": "tied", "vocab_size": 263},
            {"model": "smollm3", "embeddings": "tied", "layers": 3},
        ],
        "windows": [
            {"model": "gemma3_text", "window": 8},
            {"model": "mistral", "window": 24},
            {"model": "qwen3", "window": 2},
            {"model": "olmo3", "window": 1},
        ],
        "experts": [
            {"model": "qwen3_moe", "aux_loss": 1.0},
            {"model": "mixtral", "aux_loss": 0.01},
            {"model": "glm4_moe"},
            {"model": "olmoe"},
        ],
        "sinks": [{"model": "gpt_oss", "window": 8}, {"model": "gpt_oss", "window": 24, "heads": "6:2"}],
    },
    "records": {
        "labels": [{"masked": "nearly all"}, {"masked": "some documents", "tokens": "pad and eos"}],
        "text": [{"records": "text"}, {"records": "text", "file": "folder"}],
        "chats": [{"records": "messages", "file": "json"}, {"records": "assistant", "file": "saved"}],
        "prompts": [{"records": "prompt", "file": "parquet"}, {"records": "prompt, all learnt"}],
        "pairs of answers": [
            *({"method": method, "records": kind} for method, kind in zip(PREFERENCES, KINDS, strict=False)),
            {"method": "dpo sigmoid", "records": "prompt", "share_prompts": False},
        ],
        "mixture": [{"reading": "weighted", "documents": 3}, {"reading": "mixture", "documents": 3, "file": "arrow"}],
    },
    "lengths": {
        "mixed": [{}],
        "one token": [{"lengths": "ones"}, {"lengths": "uneven"}],
        "exact": [{"lengths": "exact"}, {"lengths": "window"}],
        "overlong": [
            {"lengths": "longer by one", "overlong": "split"},
            {"lengths": "long", "overlong": "truncate"},
        ],
    },
    "steps": {
        "whole, packed": [{}],
        "random, packed": [{"order": "random", "steps": 3}],
        "in order, accumulated": [{"order": "sequential", "packing": "none", "accumulation": 2, "steps": 3}],
        "padding-free, two epochs": [{"order": "random", "packing": "padding_free", "batch": 2, "epochs": 2}],
    },
    "memory_option": {
        "none": [{}],
        "no checkpointing": [{"checkpointing": "False"}, {"memory": "fastest"}],
        "selective, chunked loss": [{"checkpointing": "selective", "loss_type": "chunked_nll"}],
        "tiled MLP, offloading": [
            {"tiled_mlp": "3", "checkpointing": "not selective"},
            {"tiled_mlp": "True", "activation_offloading": True, "heads_k_stride": 1},
        ],
        "longest": [{"memory": "longest"}],
    },
    "feature": {
        "none": [{}],
        "adapter": [{"adapter": "rslora all-linear"}, {"adapter": "norm"}],
        "evaluation, smoothing": [
            {"evaluation": "at the start", "smoothing": 0.1},
            {"evaluation": "steps", "smoothing": 0.3},
        ],
        "AdamW": [
            {"optimizer": "adamw_torch", "schedule": "cosine", "warmup": 1, "weight_decay": 0.1, "clipping": 0.0},
            {"optimizer": "adamw_torch_fused", "schedule": 'polynomial {"lr_end": 1e-4}', "clipping": 0.01},
        ],
        "YaRN": [{"rope_scaling": "yarn:4"}, {"rope_scaling": "linear:2"}, {"rope_scaling": "llama3:8"}],
    },
    "spelling": {
        "flags": [{}, {"spelling": "equals"}, {"spelling": "dashes"}, {"spelling": "older names"}],
        "YAML": [{"spelling": "yaml"}, {"spelling": "yaml and flags"}],
    },
}
"""Axes, their classes of values, and the members of a class."""

FURTHER: tuple[Value, ...] = (
    *(
        {"sp": backend.fewest_ranks, "backend": name, "heads": "4:4"}
        for name, backend in BACKENDS.spread.items()
        if backend.fewest_ranks != 2
    ),
    {"sp": 2, "backend": "ring", "dp": 2, "dp_replicate": 2, "steps": 3, "order": "random"},
    {"sp": 3, "backend": "auto", "heads": "5:1", "tokens": "pad and eos"},
    {"sp": 2, "backend": "ring", "steps": 3, "order": "random", "resume": "ulysses"},
    {"sp": 2, "backend": "ulysses", "adapter": "lora", "steps": 3, "resume": "one process"},
    {"sp": 2, "backend": "ring", "adapter": "dora", "rope_scaling": "yarn:4", "evaluation": "epoch"},
    {"sp": 2, "reading": "stream", "steps": 3, "order": "sequential", "packing": "none", "batch": 2},
    {"sp": 2, "backend": "ring", "spelling": "python -m longctx.train"},
)
"""Cases besides: degrees above 2, resuming, DoRA, streams, and a real command line. They have no pairs to cover."""

Choice = tuple[str, ...]
"""A class of each axis, in the order of AXES."""


def covering_set(seed: int = 0) -> list[Case]:
    """Cases in which all pairs occur, and FURTHER."""
    turns: dict[tuple[str, str], int] = {}
    cases = []
    for number, choice in enumerate(choices(seed)):
        case = Case(seed=seed + number)
        for axis, name in zip(AXES, choice, strict=True):
            turn = turns.get((axis, name), 0)
            turns[axis, name] = turn + 1
            members = AXES[axis][name]
            case = replace(case, **members[turn % len(members)])
        cases.append(make_consistent(case))
    return cases + [make_consistent(Case(seed=seed + number, **value)) for number, value in enumerate(FURTHER)]


def describe(trained: Collection[Case], seed: int = 0) -> str:
    """How many of the pairs occur in the cases that have trained, for the report."""
    done = zip(choices(seed), covering_set(seed), strict=False)
    found = {pair for choice, case in done if case in trained for pair in pairs(choice)}
    axes = ", ".join(f"{axis} ({len(values)})" for axis, values in AXES.items())
    return f"Of the {len(all_pairs())} pairs of classes of {axes}, {len(found)} occur in cases that trained exactly."


def choices(seed: int = 0, *, tries: int = 60) -> list[Choice]:
    """Greedily: of `tries` random choices that start from a pair not covered yet, the one that covers most."""
    draw = random.Random(seed)
    left = set(all_pairs())
    chosen: list[Choice] = []
    while left:
        best = max((_extend(draw, left) for _ in range(tries)), key=lambda choice: len(left & set(pairs(choice))))
        left -= set(pairs(best))
        chosen.append(best)
    return chosen


def _extend(draw: random.Random, left: set[tuple]) -> Choice:
    """A choice that has one of the pairs that are left, and axis by axis what covers most."""
    fixed = dict(draw.choice(sorted(left)))
    for axis in draw.sample(list(AXES), len(AXES)):
        if axis not in fixed:
            names = draw.sample(list(AXES[axis]), len(AXES[axis]))
            covered = [sum(_pair(axis, name, *other) in left for other in fixed.items()) for name in names]
            fixed[axis] = names[covered.index(max(covered))]
    return tuple(fixed[axis] for axis in AXES)


def all_pairs() -> list[tuple]:
    """Every two classes of different axes."""
    return [
        _pair(first, one, second, other)
        for first, second in itertools.combinations(AXES, 2)
        for one in AXES[first]
        for other in AXES[second]
    ]


def pairs(choice: Choice) -> list[tuple]:
    """Those that occur in a choice."""
    named = list(zip(AXES, choice, strict=True))
    return [_pair(*one, *other) for one, other in itertools.combinations(named, 2)]


def _pair(first: str, one: str, second: str, other: str) -> tuple:
    return tuple(sorted([(first, one), (second, other)]))
