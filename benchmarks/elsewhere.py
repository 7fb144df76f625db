"""What the stock stack does with packed documents, next to longctx, on this machine's CPU.

    python -m benchmarks.elsewhere                    # all cases, a few minutes on two cores
    python -m benchmarks.elsewhere --only mask packs  # some of them

"Stock stack" is transformers' Trainer or TRL's SFTTrainer with accelerate's ParallelismConfig: Ulysses on DeepSpeed
(sp_size) or context_parallel on FSDP2 (cp_size). Both columns train one optimizer step from the same weights on the
same rows, in real gloo processes that nothing else has used. "Exact" is one process with stock transformers, one
document after the other, token-weighted.

accelerate refuses both engines on a machine without an accelerator. What it takes to run them, and nothing else of
the stock stack, is changed: accelerate's state is set as longctx sets it (longctx.training.engines.start_on_cpu);
torch's context_parallel gets the CPU's attention kernel beside the CUDA ones (`_give_ring_the_cpu_kernel`); and on
four processes the backward of an all-gather does what it does on NCCL (`_repair_gather_backward`). The rows called
"control" show that the stock stack, driven so, is exact where it has no reason not to be.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import ranks
from .packing import device, histogram, line

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "trl")
HEADER = ["situation", "exact value", "stock stack", "longctx"]
ROW_LENGTH = 512
PACKED_LENGTHS = (90, 7, 41, 1, 130, 64, 2, 33, 17, 127)  # one row, filled
FEW_TOKENS = 64  # learnt in the row that has fewer than the others
WINDOW = 64  # of the model with sliding-window attention
WEIGHT_STD = 0.1  # logits as large as a trained model's: with the usual 0.02 every loss is ln(vocabulary)
MASK_LENGTH = 8192
LONG_MASK_LENGTH = 131_072
PACK_LENGTHS = (32_768, 131_072)
PACK_DOCUMENTS = 20_000
TIMEOUT = 200  # seconds for one group of processes

_CPU_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Document = tuple[list[int], list[int]]
"""input_ids, and labels before shifting."""


# --- data, model and the exact values ---------------------------------------------------------------------------


def make_documents(lengths: Sequence[int], *, learnt: int | None = None, seed: int = 0) -> list[Document]:
    """Random documents; only the last `learnt` tokens of each are learnt, all where None, the first token never."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = rng.integers(3, 250, length).tolist()
        hidden = 1 if learnt is None else length - learnt
        documents.append((ids, [-100] * hidden + ids[hidden:]))
    return documents


def make_row(documents: Sequence[Document]) -> dict[str, list[int]]:
    """The documents in one packed row, as a collator for the stock stack would give it."""
    return {
        "input_ids": [token for ids, _ in documents for token in ids],
        "labels": [label for _, labels in documents for label in labels],
        "position_ids": [position for ids, _ in documents for position in range(len(ids))],
    }


def write_model(folder: str, **changes: Any) -> str:
    """Save a random 2-layer model and its tokenizer; returns the folder."""
    from transformers import Qwen3ForCausalLM

    from longctx.model.tiny import tiny_config, tiny_tokenizer

    config = tiny_config()
    config.update({"initializer_range": WEIGHT_STD, **changes})
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load_model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def exact_step(folder: str, documents: Sequence[Document]) -> dict[str, float]:
    """Token-weighted loss and gradient norm of a step on these documents, one after the other, in one process."""
    model = load_model(folder)
    count = sum(label != -100 for _, labels in documents for label in labels[1:])
    total = 0.0
    for ids, labels in documents:
        if len(ids) == 1:
            continue
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum") / count
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return {"loss": total, "grad_norm": float(norm)}


# --- groups of processes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What rank 0 of a group returned, or the error that ended the group."""

    value: Any = None
    error: str | None = None
    """`Type: first sentence`."""
    log: str = ""
    """Output and traceback of the rank that failed."""


def run_group(processes: int, function: Callable[..., Any], **arguments: Any) -> Outcome:
    """Call `function(**arguments)` on every rank of a new group of processes that nothing else has used."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        argument = function, arguments
        ending = ranks.run_group(processes, _call, argument, environment={}, folder=Path(folder), timeout=TIMEOUT)
    if ending.status == "ok":
        return Outcome(value=ending.reports[0]["value"])
    return Outcome(error=ending.error, log=ending.log)


def _call(argument: tuple[Callable[..., Any], dict[str, Any]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    function, arguments = argument
    value = function(**arguments)
    if dist.is_initialized():
        dist.barrier()
    return {"value": value}


# --- the two columns, on each rank -------------------------------------------------------------------------------


def stock_step(
    *,
    model: str,
    rows: list[dict[str, list[int]]],
    degrees: dict[str, int],
    zero_stage: int | None = None,
    accumulation: int = 1,
) -> dict[str, float]:
    """One step of transformers' Trainer; its data loader hands out `rows` in order."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments, default_data_collator

    start_stock("fsdp2" if zero_stage is None else "deepspeed", zero_stage)
    args = TrainingArguments(**_arguments(degrees, accumulation), remove_unused_columns=False)
    trainer = Trainer(
        load_model(model), args, train_dataset=Dataset.from_list(rows), data_collator=default_data_collator
    )
    trainer.train()
    return first_log(trainer.state.log_history)


def trl_packed_step(
    *, model: str, documents: list[Document], degrees: dict[str, int], zero_stage: int | None = None
) -> dict[str, float]:
    """One step of TRL's SFTTrainer with its own packing."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from longctx.model.tiny import tiny_tokenizer

    start_stock("fsdp2" if zero_stage is None else "deepspeed", zero_stage)
    options = {"packing": True, "max_length": ROW_LENGTH, "gradient_checkpointing": False}
    args = SFTConfig(**_arguments(degrees, 1), **options)
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in documents]
    trainer = SFTTrainer(
        load_model(model), args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer()
    )
    trainer.train()
    return first_log(trainer.state.log_history)


def start_stock(engine: str, zero_stage: int | None) -> None:
    """The state a launcher and an accelerator would have made."""
    from longctx.training.engines import start_on_cpu
    from longctx.upstream.accelerate_internals import promote
    from longctx.upstream.deepspeed_internals import stay_on_cpu

    promote(engine)
    os.environ["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] = "sdpa"
    if zero_stage is not None:
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(zero_stage)
    else:
        _give_ring_the_cpu_kernel()
    if int(os.environ["WORLD_SIZE"]) > 2:
        _repair_gather_backward()
    stay_on_cpu()
    start_on_cpu(engine)


def _arguments(degrees: dict[str, int], accumulation: int) -> dict[str, Any]:
    from accelerate import ParallelismConfig

    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "train_sampling_strategy": "sequential",
        "accelerator_config": {"use_configured_state": True},
        "parallelism_config": ParallelismConfig(**degrees),
    }


def _repair_gather_backward() -> None:
    """torch's gloo path of this backward takes group ranks for global ranks: do what its NCCL path does."""
    from torch.distributed.nn import functional

    def backward(context: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        total = torch.stack(gradients)
        dist.all_reduce(total, group=context.group)
        return None, total[dist.get_rank(context.group)]

    functional._AllGather.backward = staticmethod(backward)  # type: ignore[method-assign]


def _give_ring_the_cpu_kernel() -> None:
    """Enter the CPU's attention kernel in torch's context_parallel, beside the CUDA kernels it lists."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    handlers: dict[Any, Any] = ring.custom_ops
    handlers[_CPU_FORWARD.default] = _ring_forward
    handlers[_CPU_BACKWARD.default] = _ring_backward


def _ring_forward(op: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """As torch's `_scaled_dot_product_ring_flash_attention`; args are q, k, v, dropout_p, is_causal."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    q, k, v = (tensor.to_local() for tensor in args[:3])
    options = dict(zip(("dropout_p", "is_causal"), args[3:], strict=False)) | {"scale": kwargs.get("scale")}
    group = args[0].device_mesh.get_group()
    return _wrap(ring._templated_ring_attention(group, 2, _CPU_FORWARD, q, k, v, **options), args[0])


def _ring_backward(op: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """As torch's `_scaled_dot_product_ring_flash_attention_backward`."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    tensors = {name: tensor.to_local() for name, tensor in zip(names, args[:6], strict=True)}
    options = {"dropout_p": args[6], "is_causal": args[7], "scale": kwargs.get("scale")}
    group = args[0].device_mesh.get_group()
    gradients = ring._templated_ring_attention_backward(
        group, 2, _CPU_BACKWARD.default, grad_out_name="grad_out", **tensors, **options
    )
    return _wrap(gradients, args[0])


def _wrap(tensors: Sequence[torch.Tensor], like: Any) -> tuple[Any, ...]:
    """Local [B, H, S/P, ...] results as DTensors cut like `like`."""
    from torch.distributed.tensor import DTensor

    return tuple(DTensor.from_local(tensor, like.device_mesh, like.placements) for tensor in tensors)


def longctx_step(
    *, model: str, documents: list[Document], flags: list[str], zero_stage: int | None = None
) -> dict[str, float]:
    """One step of longctx.train, as a launcher would start it."""
    from longctx.train import main
    from longctx.upstream.accelerate_internals import promote

    if zero_stage is not None:
        promote("deepspeed")
        os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(zero_stage)
    folder = tempfile.mkdtemp()
    data = Path(folder, "data.jsonl")
    data.write_text("".join(json.dumps({"input_ids": ids, "labels": labels}) + "\n" for ids, labels in documents))
    flags = [*flags, "--model_name_or_path", model, "--dataset_name", str(data), "--output_dir", folder]
    flags += ["--packing", "True", "--max_length", str(ROW_LENGTH), "--per_device_train_batch_size", "1"]
    flags += ["--max_steps", "1", "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"]
    with contextlib.redirect_stderr(io.StringIO()) as messages:
        code = main([*flags, "--disable_tqdm", "True"])
    if code:
        raise RefusedError(messages.getvalue().removeprefix("longctx: error: "))
    state = Path(folder, "trainer_state.json")  # rank 0 writes it
    return first_log(json.loads(state.read_text())["log_history"]) if state.exists() else {}


class RefusedError(Exception):
    """longctx.train ended with an error message before training."""


def first_log(history: list[dict[str, float]]) -> dict[str, float]:
    """Loss and gradient norm of the first logged step."""
    entry = next(entry for entry in history if "loss" in entry)
    return {name: entry[name] for name in ("loss", "grad_norm")}


# --- rows of the table -------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table."""

    situation: str
    exact: str
    stock: str
    longctx: str


@dataclass(frozen=True, kw_only=True)
class Training:
    """One optimizer step in the three columns."""

    situation: str
    rows: Sequence[Sequence[Document]]
    """As the stock data loader hands them out; rank r of the first group reads row r."""
    trained: Sequence[int] = (0,)
    """Rows that take part in the step."""
    degrees: dict[str, int]
    zero_stage: int | None = None
    """None: FSDP2."""
    processes: int = 2
    accumulation: int = 1
    trl: bool = False

    @property
    def documents(self) -> list[Document]:
        return [document for index in self.trained for document in self.rows[index]]

    def run_stock(self, model: str) -> Outcome:
        common: dict[str, Any] = {"model": model, "degrees": self.degrees, "zero_stage": self.zero_stage}
        if self.trl:
            documents = [document for row in self.rows for document in row]
            return run_group(self.processes, trl_packed_step, documents=documents, **common)
        rows = [make_row(row) for row in self.rows]
        return run_group(self.processes, stock_step, rows=rows, accumulation=self.accumulation, **common)

    def run_longctx(self, model: str) -> Outcome:
        backend = "ring" if "cp_size" in self.degrees else "ulysses"
        flags = ["--sp", "2", "--sp_backend", backend, "--gradient_accumulation_steps", str(self.accumulation)]
        arguments = {"model": model, "documents": self.documents, "flags": flags, "zero_stage": self.zero_stage}
        return run_group(self.processes, longctx_step, **arguments)


def training_rows(trainings: Sequence[Training], model: str) -> Iterator[Row]:
    """Each step's loss and gradient norm in the three columns."""
    exact: dict[str, Outcome] = {}
    for training in trainings:
        key = repr(training.documents)
        if key not in exact:
            exact[key] = require(run_group(1, exact_step, folder=model, documents=training.documents))
        outcomes = exact[key], training.run_stock(model), require(training.run_longctx(model))
        yield Row(training.situation, *(show(outcome, "loss {loss:.4f}, norm {grad_norm:.4f}") for outcome in outcomes))


def require(outcome: Outcome) -> Outcome:
    """The outcome, unless it is an error other than longctx's refusal: then what was measured is not what was meant.

    Raises:
        RuntimeError: with the failed process's log.
    """
    if outcome.error is not None and not outcome.error.startswith(RefusedError.__name__):
        raise RuntimeError(f"{outcome.error}\n{outcome.log}")
    return outcome


def show(outcome: Outcome, template: str) -> str:
    """A table cell: the template filled from the value, or the error; the error's log goes to stderr."""
    if outcome.error is None:
        return template.format(**outcome.value)
    print(outcome.log, file=sys.stderr, flush=True)
    return outcome.error.replace("RefusedError", "refused").replace("|", "\\|")


def packed_trainings() -> list[Training]:
    """One packed row, its documents learnt whole; controls hold one document."""
    packed = make_documents(PACKED_LENGTHS)
    alone = make_documents([ROW_LENGTH])
    ulysses: dict[str, Any] = {"degrees": {"sp_size": 2}, "zero_stage": 3}
    ring: dict[str, Any] = {"degrees": {"cp_size": 2}}
    return [
        Training(situation="SFTTrainer with packing, cp_size 2 (FSDP2)", rows=[packed], trl=True, **ring),
        Training(situation="Trainer, packed row, cp_size 2 (FSDP2)", rows=[packed, packed], **ring),
        Training(situation="control: the same, one document in the row", rows=[alone, alone], **ring),
        Training(situation="SFTTrainer with packing, Ulysses sp_size 2 (ZeRO-3)", rows=[packed], trl=True, **ulysses),
        Training(situation="Trainer, packed row, Ulysses sp_size 2 (ZeRO-3), sdpa", rows=[packed, packed], **ulysses),
        Training(situation="control: the same, one document in the row", rows=[alone, alone], **ulysses),
    ]


def weighting_trainings() -> list[Training]:
    """One document a row; the rows of a step have equal or unequal numbers of label tokens."""
    full, other, third = (make_documents([ROW_LENGTH], seed=seed) for seed in range(3))
    few = make_documents([ROW_LENGTH], learnt=FEW_TOKENS, seed=3)
    counts = f"{ROW_LENGTH - 1} and {FEW_TOKENS} label tokens"
    two: dict[str, Any] = {"degrees": {"sp_size": 2}, "zero_stage": 3, "accumulation": 2, "trained": (0, 1)}
    four: dict[str, Any] = {"degrees": {"sp_size": 2, "dp_shard_size": 2}, "zero_stage": 3, "processes": 4}
    four["trained"] = (0, 2)  # each sequence group of the stock stack starts with its first rank's row
    stages = [
        Training(
            situation=f"Trainer, Ulysses sp_size 2, ZeRO-{stage}, one document",
            rows=[full, full],
            degrees={"sp_size": 2},
            zero_stage=stage,
        )
        for stage in (1, 2)
    ]
    return [
        Training(
            situation=f"Trainer, Ulysses sp_size 2, ZeRO-3, 2 accumulation steps with {counts}", rows=[full, few], **two
        ),
        Training(situation="control: the same, equal numbers", rows=[full, other], **two),
        Training(
            situation=f"Trainer, Ulysses sp_size 2 × dp 2, ZeRO-3, with {counts}",
            rows=[full, other, few, third],
            **four,
        ),
        Training(situation="control: the same, equal numbers", rows=[full, few, other, third], **four),
        *stages,
    ]


def window_trainings() -> list[Training]:
    """One document, longer than the window."""
    alone = make_documents([ROW_LENGTH])
    situation = f"Trainer, Ulysses sp_size 2, sdpa, sliding window of {WINDOW}, one document of {ROW_LENGTH}"
    return [Training(situation=situation, rows=[alone, alone], degrees={"sp_size": 2}, zero_stage=3)]


def packed_case(model: str) -> Iterator[Row]:
    yield from training_rows(packed_trainings(), model)


def weighting_case(model: str) -> Iterator[Row]:
    yield from training_rows(weighting_trainings(), model)


def window_case(model: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        layers = {"layer_types": ["sliding_attention"] * 2, "max_window_layers": 0}
        write_model(folder, use_sliding_window=True, sliding_window=WINDOW, **layers)
        yield from training_rows(window_trainings(), folder)


def logits_case(model: str) -> Iterator[Row]:
    outcome = require(run_group(1, logit_errors, folder=model))
    situations = {
        "mask": "packed row in a stock model, one device: position_ids and a 2-D mask of ones",
        "cache": "the same: position_ids, use_cache left at its default",
        "plain": "the same: input_ids alone, no cache",
        "positions": "control: the same: position_ids, use_cache=False, no mask",
    }
    for name, situation in situations.items():
        stock, ours = show(outcome, f"{{{name}:.1e}}"), show(outcome, "{longctx:.1e}")
        yield Row(f"{situation}; largest logit error", show(outcome, "0 (logits up to {largest:.1f})"), stock, ours)


def logit_errors(*, folder: str) -> dict[str, float]:
    """Largest difference to the logits of each document alone; longctx's collator feeds the same stock model."""
    from datasets import Dataset

    from longctx.collate import SequenceCollator
    from longctx.packing import pack_dataset

    model, documents = load_model(folder), make_documents(PACKED_LENGTHS)
    row = {name: torch.tensor([values]) for name, values in make_row(documents).items()}
    ids, positions = row["input_ids"], row["position_ids"]
    lists = {"input_ids": [ids for ids, _ in documents], "labels": [labels for _, labels in documents]}
    batch = SequenceCollator(0, padding_free=True)(list(pack_dataset(Dataset.from_dict(lists), ROW_LENGTH)))
    del batch["labels"]
    ways: dict[str, dict[str, Any]] = {
        "mask": {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)},
        "cache": {"input_ids": ids, "position_ids": positions},
        "plain": {"input_ids": ids, "use_cache": False},
        "positions": {"input_ids": ids, "position_ids": positions, "use_cache": False},
        "longctx": batch,
    }
    errors = {name: _largest_error(model, inputs) for name, inputs in ways.items()}
    with torch.no_grad():
        return errors | {"largest": float(model(**batch).logits.abs().max())}


@torch.no_grad()
def _largest_error(model: Any, inputs: dict[str, Any]) -> float:
    """Over the documents that restarting positions show; where none are given, those of PACKED_LENGTHS."""
    ids = inputs["input_ids"][0]
    default = torch.cat([torch.arange(length) for length in PACKED_LENGTHS])
    starts = (inputs.get("position_ids", default[None])[0] == 0).nonzero().flatten().tolist()
    logits = model(**inputs).logits[0]
    spans = zip(starts, [*starts[1:], len(ids)], strict=True)
    errors = (logits[a:b] - model(input_ids=ids[None, a:b], use_cache=False).logits[0] for a, b in spans)
    return max(float(error.abs().max()) for error in errors)


def mask_case(model: str) -> Iterator[Row]:
    outcome = require(run_group(1, mask_bytes, folder=model))
    stock, ours = show(outcome, "{stock:,}"), show(outcome, "{longctx:,}")
    yield Row(f"bytes of the mask of a packed row of {MASK_LENGTH:,} tokens", "—", stock, ours)
    predicted = f"{LONG_MASK_LENGTH**2:,} (predicted: S²)"
    yield Row(f"the same, {LONG_MASK_LENGTH:,} tokens", "—", predicted, f"{ours} (predicted)")


class _MaskSeenError(Exception):
    """Ends a forward pass at its first attention layer."""


def mask_bytes(*, folder: str) -> dict[str, int]:
    """Bytes of the mask that reaches the first attention layer, without and with longctx."""
    import longctx

    lengths = [MASK_LENGTH // 4] * 4
    batch = {name: torch.tensor([values]) for name, values in make_row(make_documents(lengths)).items()}
    model = load_model(folder)
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    stock = _seen_mask_bytes(model, inputs)
    model, sequence = longctx.parallelize(model, 1)
    return {"stock": stock, "longctx": _seen_mask_bytes(model, sequence.shard(batch).inputs)}


def _seen_mask_bytes(model: Any, inputs: dict[str, Any]) -> int:
    seen = []

    def look(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["attention_mask"])
        raise _MaskSeenError

    hook = model.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
    with contextlib.suppress(_MaskSeenError):
        model(**inputs)
    hook.remove()
    return 0 if seen[0] is None else seen[0].nbytes


def packs_case(model: str) -> Iterator[Row]:
    for capacity in PACK_LENGTHS:
        outcome = require(run_group(1, count_packs, capacity=capacity))
        situation = f"packs of {capacity:,} tokens, BFD, {PACK_DOCUMENTS:,} documents of data/document_lengths.csv"
        yield Row(situation, *(show(outcome, cell) for cell in ("at least {bound:,}", "{trl:,}", "{longctx:,}")))


def count_packs(*, capacity: int) -> dict[str, int]:
    """Packs by trl.pack_dataset and longctx.packing; both cut a longer document to the capacity."""
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset as trl_pack_dataset

    from longctx.packing import lower_bound, pack_dataset

    lengths = histogram(np.random.default_rng(0), PACK_DOCUMENTS, capacity)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))
    documents = Dataset(pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)}))
    return {
        "bound": lower_bound(np.minimum(lengths, capacity), capacity),
        "trl": len(trl_pack_dataset(documents, capacity, "bfd")),
        "longctx": len(pack_dataset(documents, capacity, "bfd", overlong="truncate")),
    }


CASES: dict[str, Callable[[str], Iterator[Row]]] = {
    "logits": logits_case,
    "packed": packed_case,
    "weighting": weighting_case,
    "window": window_case,
    "mask": mask_case,
    "packs": packs_case,
}


def commit() -> str:
    """` (commit …)` of the checkout this runs in; nothing outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    options = parser.parse_args(arguments)

    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    ranks.start_server()
    import longctx

    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES) + f", longctx {longctx.__version__}"
    print("`" + " ".join(["python -m benchmarks.elsewhere", *sys.argv[1:]]) + f"`, {date.today()}")
    print(f"{device()}, gloo; Python {platform.python_version()}, {versions}{commit()}\n")
    print("loss and norm: mean loss and gradient norm of the first optimizer step, fp32.\n")
    print(line(HEADER), line(["---"] * len(HEADER)), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        for name in options.only:
            for row in CASES[name](folder):
                print(line(list(row)), flush=True)


if __name__ == "__main__":
    main()
