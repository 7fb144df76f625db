"""All that is measured, slice by slice, and what is predicted of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from transformers import PretrainedConfig, Qwen3Config

from longctx.attention.kernels.choose import candidates
from longctx.forecast.documents import one_document
from longctx.forecast.shape import RunShape
from longctx.machine.here import Machine
from longctx.machine.measure import Work
from longctx.model.tiny import tiny_config
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve_on
from longctx.settings.schema import Method

from ..attention.ways import CASES
from ..max_length.combinations import FLAGS, LONGCTX, ONE_DEVICE, TRL, Combination, resolved_for
from ..max_length.rank import Task
from ..max_length.results import OK, Line
from ..max_length.search import next_length
from ..max_length.sweep import write_rows
from ..published import CONFIGS
from .probes import Attention, HeadLoss, checks, facts, kernel_speed, loss_speed, ring_efficiency, speeds, train

SLICES = ("device", "checks", "speeds", "steps", "kernels", "loss", "memory_options", "longest", "ring")
"""The most telling first."""
BUDGET = 12 * 2**30
"""Bytes of the device in the search for the longest sequence: sequences that fill a whole one take minutes a step."""
PRECISION = 0.1
SMALL, WIDE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B, 4 layers"
LONGEST = 1 << 18
"""Most tokens of that search: a step of Qwen3-0.6B then takes two minutes."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is."""

    models: Mapping[str, PretrainedConfig]
    """The first is the one of memory options and of the longest sequence."""
    heads: tuple[int, int, int]
    kernel_lengths: Sequence[int]
    packed_lengths: Sequence[int]
    """Of kernels on packed documents and on a window."""
    loss_tiles: Mapping[int, int]
    """Vocabulary -> tokens of a tile."""
    hidden: int
    ring_lengths: Sequence[int]
    num_ranks: Sequence[int]
    steps: Sequence[tuple[str, int, Sequence[str]]]
    """Model, tokens and ways of the steps that are timed."""
    memory_option_length: int
    chunk: int
    budget: int
    longest: int
    warmup: int
    work: Work | None


def _wide(num_layers: int) -> PretrainedConfig:
    """Return the configuration of Qwen3-8B with fewer layers, so that one device can train them in fp32."""
    whole = CONFIGS["Qwen/Qwen3-8B"].to_dict()
    return Qwen3Config(**{**whole, "num_hidden_layers": num_layers, "layer_types": None})


EQUAL_WORK = ("TRL", "balanced, no Liger", "TRL, Liger", "balanced")
"""What computes the same, in pairs: as stock layers do it, and with Liger's kernels on both sides."""
PREFERENCES = ("TRL, DPO", "balanced, DPO", "auto, DPO")
"""On pairs of which the prompt has half of the tokens, and each answer a quarter."""
PACKED = ("auto, packed", "auto, packed, flash-attn 4")
"""On documents of which a row has several."""
QUANTIZED = ("TRL, QLoRA", "balanced, QLoRA", "auto, QLoRA")

FULL = Sizes(
    models={SMALL: CONFIGS[SMALL], WIDE: _wide(4)},
    heads=(32, 8, 128),
    kernel_lengths=(2048, 4096, 8192, 32_768, 131_072),
    packed_lengths=(32_768,),
    loss_tiles={151_936: 1792, 262_144: 1024},
    hidden=4096,
    ring_lengths=(32_768, 131_072),
    num_ranks=(2, 4, 8),
    steps=(
        (SMALL, 16_384, (*EQUAL_WORK, "auto")),
        (SMALL, 4096, (*EQUAL_WORK, "auto")),
        (WIDE, 16_384, (*EQUAL_WORK, "auto")),
        (SMALL, 65_536, (*EQUAL_WORK, "auto")),
        (SMALL, 32_768, ("TRL", "balanced", "auto")),
        (SMALL, 131_072, ("TRL", "balanced", "auto")),
        (SMALL, 16_384, ("fastest", "compiled", "TRL, chunked loss", *PREFERENCES)),
        (SMALL, 4096, ("fastest", "compiled", "balanced, DeepSpeed")),
        (SMALL, 32_768, PACKED),
        (WIDE, 16_384, ("compiled", *QUANTIZED)),
    ),
    memory_option_length=32_768,
    chunk=8192,
    budget=BUDGET,
    longest=LONGEST,
    warmup=2,
    work=None,
)
QUICK = Sizes(
    models={"tiny": tiny_config()},
    heads=(4, 2, 128),
    kernel_lengths=(128, 512),
    packed_lengths=(512,),
    loss_tiles={500: 256},
    hidden=64,
    ring_lengths=(256,),
    num_ranks=(2, 4),
    steps=(("tiny", 64, EQUAL_WORK), ("tiny", 256, ("TRL", "balanced", *PREFERENCES, "auto, packed"))),
    memory_option_length=256,
    chunk=64,
    budget=BUDGET,
    longest=512,
    warmup=2,
    work=Work(
        dtype=torch.bfloat16,
        tokens=128,
        hidden_size=64,
        intermediate_size=192,
        row=128,
        num_heads=4,
        num_key_value_heads=2,
        head_size=128,
        num_elements=1 << 16,
    ),
)
"""To see that all of it works, on any GPU, in a few minutes. Its figures say nothing."""


@dataclass(frozen=True)
class Probe:
    """One line of the results."""

    slice: str
    name: str
    function: Callable[[Any], dict[str, Any]]
    argument: Any
    timeout: float = 120.0
    model: str | None = None
    """That has to be on the disk first."""
    is_alone: bool = False
    """Whether it needs a process of its own; others share one with those of the same model, or of the same slice."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Of the line, besides what is measured."""

    @property
    def key(self) -> tuple[str, str]:
        return self.slice, self.name

    @property
    def shares(self) -> str:
        """What those in one process have in common."""
        return self.model or self.slice


class Catalogue:
    """What there is to measure with these sizes in this folder.

    Args:
        folder: for models and rows, which are gone at the end.
    """

    def __init__(self, sizes: Sizes, folder: Path):
        self.sizes, self.folder = sizes, folder
        for name, config in sizes.models.items():
            config.save_pretrained(self.model_folder(name))

    def left(self, lines: Sequence[Line], slices: Sequence[str]) -> Iterator[Probe]:
        """What has no line yet, in order. A search goes on with each line, so ask again after each probe.

        Args:
            slices: names of SLICES, or `NAME: TEXT` for what of a slice has this text in its name.
        """
        known = {(line["kind"], line["name"]): line for line in lines if "name" in line}
        for asked in slices:
            name, _, text = asked.partition(": ")
            found = self._searches(known) if name == "longest" else getattr(self, f"_{name}")()
            yield from (probe for probe in found if probe.key not in known and text in probe.name)

    # What does not depend on what was found

    def _device(self) -> Iterator[Probe]:
        yield Probe("device", "facts", facts, None, 300.0)

    def _speeds(self) -> Iterator[Probe]:
        yield Probe("speeds", "measured", speeds, self.sizes.work, 240.0)

    def _checks(self) -> Iterator[Probe]:
        if self.sizes is FULL:
            yield Probe("checks", "pytest -m gpu", checks, None, 240.0)

    def _kernels(self) -> Iterator[Probe]:
        of = {"one document": self.sizes.kernel_lengths}
        of |= dict.fromkeys(("packed", "window"), self.sizes.packed_lengths)
        for documents, lengths in of.items():
            for length in lengths:
                for kernel in candidates():
                    about = Attention(length, documents, self.sizes.heads)
                    line = {"kernel": kernel.name, "length": length, "documents": documents}
                    name = f"{kernel.name}, {documents}, {length}"
                    yield Probe("kernels", name, kernel_speed, (kernel.name, about), about=line)

    def _loss(self) -> Iterator[Probe]:
        for vocabulary, tokens in self.sizes.loss_tiles.items():
            for way, options in LOSSES.items():
                line = {"way": way, "vocabulary": vocabulary, "tokens": tokens}
                about = HeadLoss(vocabulary, tokens, **options)
                yield Probe("loss", f"{way}, {vocabulary}", loss_speed, about, about=line)
            for tile in (tokens, tokens - 26):
                about = HeadLoss(vocabulary, 4 * tokens, self.sizes.hidden, tile)
                line = {"way": f"head, tiles of {tile:,}", "vocabulary": vocabulary, "tokens": about.tokens}
                yield Probe("loss", f"{line['way']}, {vocabulary}", loss_speed, about, about=line)

    def _ring(self) -> Iterator[Probe]:
        for length in self.sizes.ring_lengths:
            for num_ranks in self.sizes.num_ranks:
                for documents in ("one document", "packed"):
                    about = Attention(length, documents, self.sizes.heads, num_ranks)
                    line = {"length": length, "documents": documents, "ranks": num_ranks}
                    yield Probe("ring", f"{num_ranks} ranks, {documents}, {length}", ring_efficiency, about, about=line)

    def _steps(self) -> Iterator[Probe]:
        for model, length, ways in self.sizes.steps:
            for way in ways:
                if importlib.util.find_spec(NEEDS.get(way, "torch")):
                    yield self._training("steps", model, way, length)

    def _memory_options(self) -> Iterator[Probe]:
        model, length = next(iter(self.sizes.models)), self.sizes.memory_option_length
        for memory_option in memory_options(self.sizes.chunk):
            yield self._training("memory_options", model, memory_option, length)

    # The longest sequence

    def _searches(self, known: Mapping[tuple[str, str], Line]) -> Iterator[Probe]:
        model, sizes = next(iter(self.sizes.models)), self.sizes
        device_bytes = known["device", "facts"]["device_bytes"]
        for way in SEARCHED:
            lines = [line for (kind, _), line in known.items() if kind == "longest" and line["way"] == way]
            outcomes = {line["length"]: line["status"] == OK for line in lines}
            length = next_length(
                outcomes,
                guess=self._guess(model, way, lines),
                multiple=64,
                precision=PRECISION,
                longest=sizes.longest,
            )
            if length is not None:
                probe = self._training("longest", model, way, length)
                limited = replace(probe.argument, memory_fraction=min(1.0, sizes.budget / device_bytes))
                yield replace(probe, argument=limited, about={**probe.about, "budget": sizes.budget})

    def _guess(self, model: str, way: str, lines: Sequence[Line]) -> float:
        """By the closed form, corrected by the step that came nearest to the budget."""
        combination, beside = self.combination(model, way, self.sizes.memory_option_length), 0.0
        measured = [line for line in lines if line.get("allocated")]
        if measured:
            nearest = min(measured, key=lambda line: abs(line["allocated"] - self.sizes.budget))
            beside = nearest["allocated"] - combination.predicted_peak(nearest["length"])
        return combination.longest_within(self.sizes.budget - beside)

    # Training

    def _training(self, of: str, model: str, way: str, length: int) -> Probe:
        combination, sizes = self.combination(model, way, length), self.sizes
        is_search = of == "longest"
        rows = "pairs" if way in PREFERENCES else "packed" if way in PACKED else "document"
        data = self.folder / f"{rows}-{length}.parquet"
        task = Task(
            stack=combination.stack,
            model=str(self.model_folder(model)),
            data=str(data),
            length=length,
            num_steps=2 if is_search else sizes.warmup + (5 if length <= MANY_STEPS else 2),
            is_traced=False,
            memory_fraction=None,
            flags=combination.flags,
            trains_preferences=way in PREFERENCES,
            trl_options=TRLS.get(way, {}),
            use_cpu=False,
        )
        line = {"model": model, "way": way, "length": length}
        if of == "memory_options" and way in TRACED:
            task = replace(task, flags=(*task.flags, "--profile", "True", "--profile_steps", "1"))
        name = f"{model}, {way}, {length}"
        is_alone = is_search or bool(TRLS.get(way, {}).get("use_liger_kernel"))
        return Probe(of, name, train, task, 400.0, model, is_alone, line)

    def write_rows(self, probes: Iterable[Probe]) -> None:
        """Write the rows that these train on."""
        for task in {probe.argument.data: probe.argument for probe in probes}.values():
            path = Path(task.data)
            if task.trains_preferences:
                write_pairs(path, task.length, task.num_steps)
                continue
            is_packed = path.stem.startswith("packed")
            documents = CASES["packed"](task.length, 1)[0].tolist() if is_packed else one_document(task.length)
            write_rows(path, [*documents] * task.num_steps)

    def _flags(self, model: str, way: str) -> tuple[list[str], Method]:
        like_trl = (*OURS["balanced"], "--use_liger_kernel", str(bool(TRLS.get(way, {}).get("use_liger_kernel"))))
        flags = {**OURS, **memory_options(self.sizes.chunk), "TRL, QLoRA": OURS["balanced, QLoRA"]}.get(way, like_trl)
        data = str(self.folder / "any.parquet")
        base = [*FLAGS.split(), "--warmup_steps", "0", "--model_name_or_path", str(self.model_folder(model))]
        return [*base, "--dataset_name", data, *flags], DPO if way in PREFERENCES else SFT

    def combination(self, model: str, way: str, length: int) -> Combination:
        """How it is trained, and what is predicted of it; of TRL's, what our most similar run would take."""
        flags, method = self._flags(model, way)
        found = resolved_for(ONE_DEVICE, 1, flags, {}, length, method)
        return replace(found, stack=TRL if way in TRLS else LONGCTX)

    def model_folder(self, model: str) -> Path:
        return self.folder / "models" / model.replace("/", "_")

    def predicted(self, probe: Probe) -> dict[str, Any]:
        """Of a probe's line: bytes that tensors take at the peak of one of our own steps, unless it is refused."""
        if not isinstance(probe.argument, Task) or probe.argument.stack == TRL:
            return {}
        about = probe.about
        combination = self.combination(about["model"], about["way"], about["length"])
        return {"predicted_bytes": combination.predicted_peak(probe.argument.length)} if combination.run else {}

    def shape(self, line: Mapping[str, Any], machine: Machine) -> RunShape:
        """What the prediction of a line's step is made from, on the machine that it was measured on."""
        flags, method = self._flags(line["model"], line["way"])
        return resolve_on(parse_flags([*flags, "--max_length", str(line["length"])], method), machine, 1).shape


LOSSES: Mapping[str, Mapping[str, Any]] = {
    "kernel": {},
    "kernel, no top-1": {"is_top1": False},
    "kernel, soft cap": {"softcap": 30.0},
    "kernel, blocks of 8,192 by 16 warps": {"block": 8192, "num_warps": 16},
    "kernel, blocks of 2,048 by 4 warps": {"block": 2048, "num_warps": 4},
    "torch's operators": {"by_kernel": False},
    "torch's operators, soft cap": {"by_kernel": False, "softcap": 30.0},
}
"""A tile of the loss; below it, the head with tiles that are multiples of 256 tokens and that are not."""

_QLORA = ("--use_peft", "True", "--load_in_4bit", "True")
OURS: Mapping[str, tuple[str, ...]] = {
    "balanced": ("--memory", "balanced"),
    "balanced, no Liger": ("--memory", "balanced", "--use_liger_kernel", "False"),
    "auto": ("--memory", "auto"),
    "fastest": ("--memory", "fastest"),
    "longest": ("--memory", "longest"),
    "compiled": ("--memory", "balanced", "--torch_compile", "True"),
    "balanced, DeepSpeed": ("--memory", "balanced", "--engine", "deepspeed"),
    "balanced, DPO": ("--memory", "balanced"),
    "auto, DPO": ("--memory", "auto"),
    "auto, packed": ("--memory", "auto"),
    "auto, packed, flash-attn 4": ("--memory", "auto", "--attn_implementation", "flash_attention_4"),
    "balanced, QLoRA": ("--memory", "balanced", *_QLORA),
    "auto, QLoRA": ("--memory", "auto", *_QLORA),
}
TRLS: Mapping[str, Mapping[str, Any]] = {
    "TRL": {"loss_type": "nll"},
    "TRL, Liger": {"loss_type": "nll", "use_liger_kernel": True},
    "TRL, chunked loss": {"loss_type": "chunked_nll"},
    "TRL, DPO": {"precompute_ref_log_probs": True},
    "TRL, QLoRA": {"loss_type": "nll"},
}
"""SFTTrainer as it comes, with Liger's kernels, and with its own memory option against the logits' memory; DPOTrainer,
which like ours has the reference's values before the first step; and SFTTrainer with an adapter on 4-bit weights."""
NEEDS = {**dict.fromkeys(QUANTIZED, "bitsandbytes"), "auto, packed, flash-attn 4": "flash_attn"}
"""Modules without which a way is left out."""
SEARCHED = ("TRL", "balanced", "longest", "TRL, chunked loss")
MANY_STEPS = 16_384
"""Length of the longest sequences of which five steps are timed; longer ones are timed for two steps."""
TRACED = ("activations on the host", "chunks")
"""Memory options whose copies have to hide behind kernels."""


def memory_options(chunk: int) -> Mapping[str, tuple[str, ...]]:
    """Name -> flags: each memory option alone, beside `none`."""
    none: tuple[str, ...] = ("--memory", "balanced", "--gradient_checkpointing", "True", "--tiled_mlp", "False")
    none += ("--use_liger_kernel", "False")
    changed = {
        "none": (),
        "no checkpoints": ("--gradient_checkpointing", "False"),
        "tiled MLP": ("--tiled_mlp", "True"),
        "activations on the host": ("--activation_offloading", "True"),
        "chunks": ("--sequence_chunk_size", str(chunk)),
        "Liger's kernels": ("--use_liger_kernel", "True"),
    }
    return {name: (*none, *flags) for name, flags in changed.items()}


def write_pairs(path: Path, length: int, number: int) -> None:
    """Texts of one token a letter: a prompt of half of `length` tokens, and two answers of a quarter each.

    Each answer gets a token that ends it, and where a pair shares its prompt, the prompt's last token is there twice.
    """
    letters = np.random.default_rng(0).integers(ord("a"), ord("z") + 1, (number, length), dtype=np.uint8)
    half, quarter = length // 2, length // 4
    ends = {"prompt": (1, half), "chosen": (half, half + quarter - 1), "rejected": (half + quarter, length - 1)}
    texts = {name: [row[start:end].tobytes().decode() for row in letters] for name, (start, end) in ends.items()}
    pyarrow.parquet.write_table(pa.table(texts), path)
