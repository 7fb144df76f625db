"""One optimizer step of one process, of the stock stack, and of longctx, each in new processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from .. import ranks

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


class Row(NamedTuple):
    """One line of the table."""

    situation: str
    exact: str
    stock: str
    longctx: str


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
    return outcome.error.replace("RefusedError", "refused")


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
    flags = [*flags, "--model_name_or_path", model, "--dataset_name", str(data), "--output_dir", f"{folder}/out"]
    flags += ["--packing", "True", "--max_length", str(ROW_LENGTH), "--per_device_train_batch_size", "1"]
    flags += ["--max_steps", "1", "--logging_steps", "1", "--save_strategy", "no", "--report_to", "none"]
    with contextlib.redirect_stderr(io.StringIO()) as messages:
        code = main([*flags, "--disable_tqdm", "True"])
    if code:
        raise RefusedError(messages.getvalue().removeprefix("longctx: error: "))
    state = Path(folder, "out", "trainer_state.json")  # rank 0 writes it
    return first_log(json.loads(state.read_text())["log_history"]) if state.exists() else {}


class RefusedError(Exception):
    """longctx.train ended with an error message before training."""


def first_log(history: list[dict[str, float]]) -> dict[str, float]:
    """Loss and gradient norm of the first logged step."""
    entry = next(entry for entry in history if "loss" in entry)
    return {name: entry[name] for name in ("loss", "grad_norm")}
