"""What the cost model answers: bytes, seconds and lengths of arrangements, backends, memory options, rings and traces.

Numbers have 12 digits and are compared within TOLERANCES. All else is exact: names, refusals, the memory that is full,
and permutations, since ring plans round times to three digits so that all processors agree.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import AutoConfig, Gemma3TextConfig, PretrainedConfig, Qwen3_5TextConfig

from benchmarks.closed_form import TILES, TRACED, VOCABULARY
from benchmarks.published import CONFIGS
from benchmarks.published import MODELS as PUBLIC
from tests.golden import cost_model
from tests.golden.cost_model import Machine

TOLERANCES = {
    "bytes": 1e-9,
    "seconds": 1e-9,
    "share": 1e-9,
    "speed": 1e-9,
    "length": 0.0,
    "choice": 1e-9,
    "traced": 0.01,
    "text": 0.0,
}
"""The largest relative difference by kind.

- length: the longest sequence that fits.
- choice: seconds or speed of options that may be chosen instead of those that are recorded. Many options are equally
  fast, and the search takes the first of them: where the last digits of seconds change, as by another order of
  additions, so do about twenty choices, and what they take by up to 2%.
- traced: bytes of a step on fake tensors, which other versions of torch may allocate a little differently.
- text: numbers in texts for people.
"""

KINDS = {"device": "bytes", "host": "bytes", "used": "share", "waiting": "seconds", "modelled": "seconds"}
KINDS |= {"tokens": "length", "plain": "length"} | {kind: kind for kind in TOLERANCES}
"""The kind of a value by the nearest key around it; others are exact."""

PARTS = ("device", "host", "seconds")
"""Keys of parts of a whole: their differences are relative to the whole, and it is compared, too."""

GEMMA = PUBLIC["google/gemma-3-12b-it"]["config"]["text_config"]
MODELS: dict[str, PretrainedConfig] = {
    **{name.split("/")[1]: config for name, config in CONFIGS.items()},
    "gemma-3-12b": Gemma3TextConfig(**GEMMA | {"rope_parameters": None}),
    "Qwen2.5-0.5B": AutoConfig.for_model(**PUBLIC["Qwen/Qwen2.5-0.5B"]["config"]),
    "small Qwen3.5": Qwen3_5TextConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, head_dim=256),
}

SMALL, MIDDLE, LARGE = "Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-70B"
PLANNED = (SMALL, MIDDLE, LARGE, "Qwen3-30B-A3B", "gemma-3-12b")
H100S, A100S = Machine(8, "H100", 1770), Machine(4, "A100", 885)
CARDS, NODES = Machine(2, "RTX 4090", 128), Machine(32, "H100", 1770)
LENGTHS = (8192, 131072, 1048576)
LORA = ["--use_peft", "True", "--lora_r", "16"]
OTHER_PLANS: dict[str, tuple[str, Machine, str, list[str]]] = {
    "flash-attn 3": (MIDDLE, H100S._replace(kernel="flash-attn 3"), "one document", []),
    "packed": (MIDDLE, H100S, "documents", []),
    "pairs": (MIDDLE, H100S, "a pair", []),
    "LoRA": (MIDDLE, A100S, "one document", LORA),
    "4 bits": (MIDDLE, CARDS, "one document", [*LORA, "--load_in_4bit", "True", "--dtype", "bfloat16"]),
    "no Liger": (MIDDLE, H100S, "one document", ["--use_liger_kernel", "False"]),
    "compiled": (MIDDLE, H100S, "one document", ["--torch_compile", "True"]),
    "recurrent": ("small Qwen3.5", A100S, "documents", []),
    "one GPU": (SMALL, Machine(1, "H100", 221), "one document", []),
}
"""Plans that differ from the others in what is named."""
QUICK_PLANS = ((MIDDLE, H100S), ("gemma-3-12b", CARDS))


def golden(quick: bool) -> Iterator[tuple[str, Any]]:
    """Yield values by name, with rounded numbers."""
    parts = [_plans, _backends, _rings, _runs, _advice]
    parts += [] if quick else [_other_plans, _printed_plans, _traces]
    for name, value in [pair for part in parts for pair in part(quick)] + list(cost_model.published()):
        yield name, _rounded(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


# Plans


def _plans(quick: bool) -> Iterator[tuple[str, Any]]:
    every = [(model, machine) for model in PLANNED for machine in (H100S, NODES, A100S, CARDS)]
    for model, machine in QUICK_PLANS if quick else every:
        yield from _plan(f"{model} on {machine.gpus} {machine.gpu}", model, machine, "one document", [])


def _other_plans(quick: bool) -> Iterator[tuple[str, Any]]:
    for name, (model, *case) in OTHER_PLANS.items():
        yield from _plan(f"{model}, {name}", model, *case)


def _plan(name: str, model: str, machine: Machine, fill: str, flags: Sequence[str]) -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        MODELS[model].save_pretrained(model)
        for what, values in cost_model.plan(model, machine, LENGTHS, fill, flags).items():
            yield f"plan: {name}, {what}", values


def _printed_plans(quick: bool) -> Iterator[tuple[str, Any]]:
    from longctx.plan import main

    every = {SMALL: ["--gpus", "2", "--gpu", "RTX 4090", "--host_memory_gib", "128"]}
    every |= {MIDDLE: ["--gpus", "8", "--host_memory_gib", "1770", "--max_length", "1048576"]}
    every |= {LARGE: ["--gpus", "32", "--host_memory_gib", "1770", "--kernel", "flash-attn 3"]}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for model, flags in every.items():
            MODELS[model].save_pretrained(model)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                code = main(["--model_name_or_path", model, *flags])
            yield f"printed plan: {model}", {"exit": code, "text": printed.getvalue().splitlines()}


# Backends and rings


def _drawn(count: int, largest: int, seed: int) -> list[int]:
    """Return lengths of documents of at most 2^largest tokens, as many of every order of magnitude."""
    draw = random.Random(seed)
    return [1 + draw.getrandbits(draw.randrange(5, largest + 1)) for _ in range(count)]


ROWS: dict[str, list[list[int]]] = {
    "one document": [[131072]],
    "1M": [[1048576]],
    "4M": [[4194304]],
    "short": [[512] * 256],
    "mixed": [_drawn(100, 14, seed=0), _drawn(30, 16, seed=1)],
}
ONE, SHORT, MIXED = "one document", "short", "mixed"
BACKENDS: list[tuple[str, int, str, dict[str, Any]]] = [
    (MIDDLE, 8, ONE, {}),
    (MIDDLE, 8, SHORT, {}),
    (SMALL, 32, ONE, {}),
    (MIDDLE, 8, ONE, {"device": "RTX 4090"}),
    ("Qwen2.5-0.5B", 4, ONE, {}),
    ("small Qwen3.5", 8, ONE, {}),
    (MIDDLE, 8, SHORT, {"before": ONE}),
    (LARGE, 8, MIXED, {"name": "hybrid", "ring_size": 4}),
    (MIDDLE, 8, MIXED, {"per_node": 4}),
    *((model, sp, ONE, {}) for model in (SMALL, "Qwen3-30B-A3B", "gemma-3-12b") for sp in (2, 16)),
    *((MIDDLE, 8, rows, {"device": device}) for device in ("A100", "CPU") for rows in (ONE, MIXED)),
    (MIDDLE, 8, MIXED, {"device": "RTX 4090"}),
    (LARGE, 16, ONE, {"per_node": 4}),
    (LARGE, 64, "1M", {}),
    (MIDDLE, 16, MIXED, {}),
    (MIDDLE, 32, "4M", {"device": "H200"}),
    ("Qwen2.5-0.5B", 6, MIXED, {"per_node": 6}),
    (MIDDLE, 8, MIXED, {"before": ONE, "per_node": 2}),
    (MIDDLE, 8, MIXED, {"pad_to_multiple_of": 8}),
    (MIDDLE, 8, ONE, {"heads_k_stride": 1}),
    (MIDDLE, 8, ONE, {"device": "Some Other GPU", "per_node": 1}),
    (MIDDLE, 1, ONE, {}),
]
QUICK_BACKENDS = 8


def _backends(quick: bool) -> Iterator[tuple[str, Any]]:
    for model, sp, rows, options in BACKENDS[: QUICK_BACKENDS if quick else None]:
        name = ", ".join([model, f"sp {sp}", rows, *(f"{key} {value}" for key, value in options.items())])
        rows_of = {key: ROWS[value] for key, value in options.items() if key == "before"}
        yield f"backend: {name}", cost_model.backend(MODELS[model], sp, ROWS[rows], **options | rows_of)


RANKS = (8, 32, 128, 16, 64, 96)
QUICK_RANKS = 2


def _rings(quick: bool) -> Iterator[tuple[str, Any]]:
    for ranks in RANKS[: QUICK_RANKS if quick else None]:
        for count, largest in ((1, 20), (5, 16)) if quick else ((1, 20), (5, 16), (100, 16), (3000, 14)):
            documents = [2**largest] if count == 1 else _drawn(count, largest, seed=count)
            documents.append(2 * ranks - sum(documents) % (2 * ranks))
            name = f"ring plan: {ranks} ranks, documents {count}"
            yield name, cost_model.ring_plan(MODELS[MIDDLE], ranks, documents)


# Runs


SPREAD = ["--sp", "auto", "--memory", "auto", "--num_processes", "8", "--max_length"]
WORLD_16 = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
UNKNOWN, NO_GPU = Machine(8, "Some Other GPU", 512), Machine(0, "CPU", 64)
RUNS: list[tuple[str, Machine, list[str], dict[str, str]]] = [
    (SMALL, CARDS, ["--sp", "auto", "--memory", "auto", "--num_processes", "2", "--max_length", "65536"], {}),
    *((MIDDLE, H100S, [*SPREAD, length], {}) for length in ("4096", "131072", "1048576")),
    (MIDDLE, H100S, [*SPREAD, "67108864"], {}),
    (LARGE, H100S, ["--sp", "auto", "--memory", "auto", "--max_length", "262144"], WORLD_16),
    ("Qwen3-30B-A3B", H100S, [*SPREAD, "131072", "--engine", "fsdp2", "--dtype", "bfloat16"], {}),
    ("gemma-3-12b", A100S, ["--sp", "auto", "--memory", "auto", "--num_processes", "4", "--max_length", "32768"], {}),
    (MIDDLE, H100S, ["--sp", "8", "--memory", "auto", "--max_length", "524288", "--packing", "False"], {}),
    (MIDDLE, H100S, ["--sp", "all", "--max_length", "32768", "--global_batch_size", "32"], {}),
    (MIDDLE, UNKNOWN, [*SPREAD, "131072"], {}),
    (SMALL, NO_GPU, ["--sp", "auto", "--memory", "auto", "--max_length", "1024", "--num_processes", "2"], {}),
]
OUT_OF_MEMORY: list[tuple[str, Machine, list[str], dict[str, str]]] = [
    (MIDDLE, H100S, ["--max_length", "262144", "--sp", "4", "--num_processes", "8"], {}),
    (SMALL, NO_GPU, ["--max_length", "65536", "--gradient_checkpointing", "False"], {}),
    (MIDDLE, CARDS, ["--max_length", "131072", "--sp", "2", "--num_processes", "2", "--use_peft", "True"], {}),
    (LARGE, H100S, ["--max_length", "1048576", "--sp", "16", "--memory", "longest"], WORLD_16),
]


def _runs(quick: bool) -> Iterator[tuple[str, Any]]:
    yield from _resolved("run", RUNS[:1] if quick else RUNS, cost_model.run)


def _advice(quick: bool) -> Iterator[tuple[str, Any]]:
    for name, text in _resolved("out of memory", OUT_OF_MEMORY[:1] if quick else OUT_OF_MEMORY, cost_model.advice):
        yield name, {"text": text}


def _resolved(kind: str, cases: Sequence[Any], work: Any) -> Iterator[tuple[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for model, machine, flags, env in cases:
            MODELS[model].save_pretrained(model)
            given = ["--model_name_or_path", model, "--dataset_name", "stdlib", "--output_dir", "out", *flags]
            with cost_model.found(machine, env):
                yield f"{kind}: {model} on {machine.gpus} {machine.gpu}, {' '.join(flags)}", work(given, env)


# Traces


def _traces(quick: bool) -> Iterator[tuple[str, Any]]:
    llama = CONFIGS["meta-llama/Llama-3.1-8B"]
    four, two, narrow, one = (copy.deepcopy(llama) for _ in range(4))
    four.update({"num_hidden_layers": 4, "vocab_size": 4096})
    two.update({"num_hidden_layers": 2, "vocab_size": 4096})
    narrow.update({"num_hidden_layers": 2, "vocab_size": 4096, "intermediate_size": 1024})
    one.update({"num_hidden_layers": 1})
    for name, changes in TRACED.items():
        yield f"trace: {name}", cost_model.traced(four, 65536, changes)
    yield f"trace: one layer, {VOCABULARY}", cost_model.traced(one, 4096, {"sp": 8, **TILES})
    yield "trace: ulysses, a pair", cost_model.traced(two, 32768, {"sp": 8}, pairs=True)
    for name, changes in {
        "ulysses": {"sp": 8},
        "ring": {"sp": 8, "ring": 8},
        "gather": {"sp": 8, "ring": 8, "backend": "gather"},
        "checkpoints on the host": {"sp": 8, "activation_offloading": True},
        "exchange beside attention": {"sp": 8, "overlap_exchange": True},
        "no checkpoints": {"sp": 8, "activation_checkpointing": False},
    }.items():
        yield f"trace: narrow MLP, {name}", cost_model.traced(narrow, 32768, changes)


# Comparison

MOST_SHOWN = 6
_NUMBER = re.compile(r"\d[\d,]*\.?\d*")
Found = Iterator[tuple[float, str]]
"""Relative differences, infinite where there is none, each with its text."""


def differs(name: str, recorded: Any, now: Any) -> str:
    """Return what differs by more than TOLERANCES: the path, both values, and for numbers the relative difference."""
    found = sorted(_differences(recorded, now), reverse=True, key=lambda one: one[0])
    rest = f"; … {len(found)} differences in all" if len(found) > MOST_SHOWN else ""
    return "; ".join(text for _, text in found[:MOST_SHOWN]) + rest


def _differences(recorded: Any, now: Any, path: str = "", kind: str = "", whole: float | None = None) -> Found:
    """Yield what differs.

    Args:
        whole: what the values are parts of, to which their differences are relative; None for those that are no parts.
    """
    if isinstance(recorded, dict) and isinstance(now, dict):
        if recorded.get("flags") != now.get("flags") and {"speed", "seconds"} & recorded.keys() & now.keys():
            yield from _choices(recorded, now, path)
            return
        if path.split(" > ")[-1] in PARTS:
            whole = sum(recorded.values())
            recorded, now = (
                dict.fromkeys(recorded | now, 0) | of | {"in all": sum(of.values())} for of in (recorded, now)
            )
        for key in sorted(recorded.keys() | now.keys()):
            of_key = kind if whole else KINDS.get(key, kind)
            yield from _differences(
                recorded.get(key), now.get(key), f"{path} > {key}".removeprefix(" > "), of_key, whole
            )
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        yield from _differences(_lines(recorded), _lines(now), path, kind)
    elif isinstance(recorded, list) and isinstance(now, list):
        alone = ([value for value in one if value not in other] for one, other in ((recorded, now), (now, recorded)))
        yield float("inf"), f"{path}: " + " -> ".join(map(str, alone))
    elif isinstance(recorded, float | int) and isinstance(now, float | int):
        apart = _apart(recorded, now, whole)
        if apart > TOLERANCES.get(kind, 0.0):
            of = " of the whole" if whole else ""
            yield apart, f"{path}: {recorded:.12g} -> {now:.12g} (relative difference {apart:.2g}{of})"
    elif recorded != now and not (kind == "text" and _same_words(recorded, now)):
        yield float("inf"), f"{path}: {recorded!r} -> {now!r}"


def _lines(values: list[Any]) -> dict[str, Any]:
    return {f"line {number}": value for number, value in enumerate(values, 1)}


def _apart(recorded: float, now: float, whole: float | None = None) -> float:
    return abs(now - recorded) / (whole or max(abs(recorded), abs(now)) or 1)


def _choices(recorded: dict[str, Any], now: dict[str, Any], path: str) -> Found:
    """Yield that something else was chosen, unless it is as good: as fast, and of the same level of used memory."""
    by = "speed" if "speed" in recorded else "seconds"
    pair, full = (recorded[by], now[by]), [one.get("used", 0.0) for one in (recorded, now)]
    apart = _apart(*pair) if all(isinstance(value, float | int) for value in pair) else float("inf")
    levels = {(part > 0.9) + (part > 1) for part in full}
    if apart > TOLERANCES["choice"] or len(levels) > 1:
        yield (
            apart,
            (
                f"{path}: {recorded['flags']} -> {now['flags']} ({by} {pair[0]} -> {pair[1]}, relative difference "
                f"{apart:.2g}, used {full[0]} -> {full[1]})"
            ),
        )


def _same_words(recorded: Any, now: Any) -> bool:
    """Whether texts differ in numbers alone, and in these within the tolerance."""
    if not (isinstance(recorded, str) and isinstance(now, str)) or _NUMBER.sub("#", recorded) != _NUMBER.sub("#", now):
        return False
    numbers = ([float(number.replace(",", "")) for number in _NUMBER.findall(text)] for text in (recorded, now))
    return all(_apart(*pair) <= TOLERANCES["text"] for pair in zip(*numbers, strict=True))
