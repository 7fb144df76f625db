"""What one rank of a probe does: the real trainer, for a few optimizer steps.

Imported by the process that ranks are forked from, so that no probe pays for imports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal

import pyarrow.parquet
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, ModelConfig, SFTConfig, SFTTrainer, get_peft_config

import longctx.run
from longctx.forecast.shape import RunShape
from longctx.model.adapter import quantization_of
from longctx.model.load import count_parameters, load_config, load_model, load_tokenizer
from longctx.packing import PackedDataset
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.settings.run import Run
from longctx.training.engines import start_on_gpu
from longctx.training.metrics import StepMetrics
from longctx.training.peak_memory import PeakMemory
from longctx.upstream.accelerate_internals import promote

from ..elsewhere.steps import start_stock
from ..memory.trace import GRADIENTS, OPTIMIZER_STATES, PARAMETERS, MemoryTracer


@dataclass(frozen=True, kw_only=True)
class Task:
    """A few optimizer steps on rows that lie in a file."""

    stack: Literal["longctx", "trl"]
    model: str
    data: str
    """Parquet file of `input_ids`; of preferences, of texts `prompt`, `chosen` and `rejected`."""
    length: int
    """Tokens of a row, max_length."""
    num_steps: int
    is_traced: bool
    """Whether allocations are counted: where there is no GPU, whose allocator would."""
    memory_fraction: float | None
    """Of the GPU's memory that torch may take; None for all of it."""
    flags: tuple[str, ...] = ()
    """Of longctx.train, besides."""
    trains_preferences: bool = False
    """Whether it is DPO instead of fine-tuning."""
    degrees: Mapping[str, int] | None = None
    """TRL's: cp_size or sp_size, and dp_shard_size; none on one device."""
    trl_options: Mapping[str, Any] = field(default_factory=dict)
    """Of SFTConfig or DPOConfig, besides."""
    use_cpu: bool


def run_task(task: Task) -> dict[str, Any]:
    """Train, and return what this rank has to report; loss and gradient norm are the first step's."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if task.memory_fraction is not None:
        device = int(os.environ.get("LOCAL_RANK", 0))
        torch.cuda.set_per_process_memory_fraction(task.memory_fraction, device)
    watch = _Watch(is_traced=task.is_traced)
    report = _train_longctx(task, watch) if task.stack == "longctx" else _train_trl(task, watch)
    allocated, reserved, host, *_ = PeakMemory.here(torch.device("cpu" if task.use_cpu else "cuda"))
    if watch.tracer is not None:
        trace = watch.tracer.trace()
        allocated, report["offloaded"] = trace.peak_bytes, trace.host_peak_bytes
    return report | {
        "seconds": watch.seconds,
        "allocated": allocated,
        "reserved": None if task.use_cpu else reserved,
        "host": host,
        "cpu_seconds": time.process_time(),
    }


def describe_gpu(_: None) -> dict[str, Any]:
    """Name and memory of the first."""
    properties = torch.cuda.get_device_properties(0)
    return {"device_kind": properties.name, "device_bytes": properties.total_memory}


class _Watch(TrainerCallback):
    """Takes the time of every step, and counts what all of them allocate."""

    def __init__(self, *, is_traced: bool):
        self.is_traced = is_traced
        self.on_host: frozenset[str] = frozenset()
        """States that the engine keeps on the host, which only it can tell from the devices of a CPU."""
        self.tracer: MemoryTracer | None = None
        self.seconds: list[float] = []
        self._before = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.is_traced and self.tracer is None:
            self.tracer = MemoryTracer(kwargs["model"], _torch_optimizer(kwargs["optimizer"]), on_host=self.on_host)
            self.tracer.__enter__()
        self._before = self._before or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()  # from one end to the next, so that data is part of a step
        self.seconds.append(now - self._before)
        self._before = now
        if self.tracer is not None and state.global_step == state.max_steps:
            self.tracer.__exit__(None, None, None)


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Inside accelerate's and DeepSpeed's."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _resolved(task: Task) -> Run:
    flags = [*task.flags, "--model_name_or_path", task.model, "--dataset_name", task.data]
    flags += ["--max_length", str(task.length), "--max_steps", str(task.num_steps)]
    flags += ["--logging_first_step", "True", "--logging_steps", str(task.num_steps)]
    flags += ["--output_dir", os.path.join(os.path.dirname(task.data), "out")]
    return resolve(parse_flags(flags, DPO if task.trains_preferences else SFT), read_profile(), os.environ)


def _train_longctx(task: Task, watch: _Watch) -> dict[str, Any]:
    run = _resolved(task)
    watch.on_host = _states_on_host(run.shape)
    prepared = longctx.run.prepare(run)
    trainer = longctx.run.build_trainer(prepared, longctx.run.load(prepared))
    trainer.add_callback(watch)
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    metrics, dims = trainer.step_metrics, trainer.sequence.dims
    assert isinstance(trainer.train_dataset, PackedDataset), "the sweep trains on no stream"
    lengths = [length for row in range(dims.dp) for length in trainer.train_dataset[row]["seq_lengths"].tolist()]
    return {
        "loss": first["loss"],
        "grad_norm": first.get("grad_norm"),
        "padding": first["padding_fraction"],
        **_work(metrics, lengths),
    }


def _states_on_host(shape: RunShape) -> frozenset[str]:
    """FSDP2 offloads all or nothing; ZeRO adds gradients up where the optimizer is."""
    parameters, optimizer = shape.options.offload_param_device, shape.options.offload_optimizer_device
    places = {PARAMETERS: parameters, OPTIMIZER_STATES: optimizer}
    places[GRADIENTS] = parameters if shape.is_fsdp else optimizer
    return frozenset(category for category, place in places.items() if place != "none")


def _work(metrics: StepMetrics, lengths: Sequence[int]) -> dict[str, Any]:
    """Of a step on documents of these lengths."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    flops = metrics.flops_per_token * sum(lengths) + metrics.flops_per_pair * pairs
    return {"tokens": sum(lengths), "flops": flops, "peak_flops": metrics.peak_flops}


def _train_trl(task: Task, watch: _Watch) -> dict[str, Any]:
    """TRL's own sequence parallelism: one document a row, since it refuses to pack with cp_size and pads sp_size.

    On one device its plain trainer, on the same rows.
    """
    from accelerate import ParallelismConfig

    degrees = task.degrees or {}
    engine = "deepspeed" if "sp_size" in degrees else "fsdp2"
    if not degrees:
        pass
    elif task.use_cpu:
        start_stock(engine, 3 if engine == "deepspeed" else None)
    else:
        promote(engine)
        start_on_gpu(timedelta(minutes=30), None)
        os.environ["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] = "sdpa"
    args = (DPOConfig if task.trains_preferences else SFTConfig)(
        output_dir=os.path.dirname(task.data),
        per_device_train_batch_size=1,
        max_steps=task.num_steps,
        max_length=task.length,
        logging_first_step=True,
        logging_steps=task.num_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=task.use_cpu,
        bf16=not task.use_cpu,
        accelerator_config={"use_configured_state": True} if task.use_cpu and degrees else None,
        parallelism_config=ParallelismConfig(**degrees) if degrees else None,
        **task.trl_options,
    )
    quantization = adapter = None
    if not degrees:  # as our most similar run has them
        settings = _resolved(task).settings
        quantization = quantization_of(settings)
        adapter = get_peft_config(ModelConfig(**{field.name: settings[field.name] for field in fields(ModelConfig)}))
    model = load_model(task.model, load_config(task.model), quantization=quantization)
    flops_per_token = 6 * count_parameters(model)
    trainer = (DPOTrainer if task.trains_preferences else SFTTrainer)(
        model,
        args=args,
        train_dataset=Dataset(pyarrow.parquet.read_table(task.data)),
        processing_class=load_tokenizer(task.model),
        callbacks=[watch],
        peft_config=adapter,
    )
    if task.use_cpu and engine == "deepspeed":  # its default of 5e8 elements is 100 times a budget for `tiny`
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = "auto"
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    groups = int(os.environ["WORLD_SIZE"]) // max(degrees.get("cp_size", 1), degrees.get("sp_size", 1))
    metrics = StepMetrics(
        sp=1, sp_rank=0, config=model.config, flops_per_token=flops_per_token, device=trainer.args.device
    )
    return {
        "loss": first["loss"],
        "grad_norm": first.get("grad_norm"),
        "padding": 0.0,
        **_work(metrics, [task.length] * groups),
    }
