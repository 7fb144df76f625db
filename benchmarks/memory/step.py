"""The training step of longctx for a model of any size, traced on fake tensors: no weights, no devices, no messages.

`longctx.parallelize` prepares the model, the loss is longctx's, FSDP2 wraps the model as in accelerate, and the
optimizer is the Trainer's AdamW. A fake process group stands for the ranks other than the traced one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only
from transformers import AutoModelForCausalLM, PretrainedConfig

from longctx.attention.kernels import choose
from longctx.attention.kernels.varlen import AtenFlashKernel
from longctx.layers import loss
from longctx.parallel import SequenceParallel, parallelize
from longctx.sequence.batch import ShardedBatch
from longctx.sequence.host_tensors import SavedOnHost
from longctx.upstream.transformers_internals import enable_checkpointing

from .trace import MemoryTrace, MemoryTracer


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of a run that the memory of its step depends on."""

    length: int
    """Tokens of the row that the ranks of a sequence group share."""
    document_lengths: Sequence[int] | None = None
    """Lengths of the row's documents, `length` in all; None means one document."""
    sp: int = 1
    engine: str = "fsdp2"
    """`fsdp2`, or `none`: one device without an engine, with fp32 weights under autocast."""
    sp_backend: str = "auto"
    fused_loss: bool = True
    """Whether the loss is fused, as it always is in longctx; False makes all logits, for comparison."""
    activation_checkpointing: Mapping[str, Any] | None = field(default_factory=dict)
    """transformers' `activation_checkpointing_kwargs`, such as `every_n_layers`. None switches it off."""
    saved_on_host: bool = False
    """Whether all that the forward pass saves is copied to the host."""
    memory_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `longctx.parallelize`: `heads_k_stride`, `tiled_mlp_num_shards`, `sequence_chunk_size`, …"""

    def __post_init__(self) -> None:
        if self.engine not in ("fsdp2", "none") or (self.engine == "none" and self.sp > 1):
            raise ValueError(
                f"engine {self.engine!r} with {self.sp} devices: use 'fsdp2', or 'none' for one device. "
                "DeepSpeed does not run on fake tensors; trace a real step of it with MemoryTracer."
            )
        if sum(self.documents) != self.length:
            raise ValueError(f"document_lengths sum to {sum(self.documents)}, and length is {self.length}.")

    @property
    def documents(self) -> Sequence[int]:
        return [self.length] if self.document_lengths is None else self.document_lengths


LossOf = Callable[[SequenceParallel, Mapping[str, Any]], Callable[[nn.Module, ShardedBatch], Tensor]]
"""(sequence, batch) -> (model, this rank's part of the batch) -> the loss, [], to call backward on."""


def trace_training_step(
    config: PretrainedConfig, settings: StepSettings, *, rank: int = 0, loss_of: LossOf | None = None
) -> MemoryTrace:
    """Predict the memory of one optimizer step in the steady state, on the device of `rank`.

    Attention's kernel is FlashAttention-2, with what it allocates on a GPU.

    Args:
        config: the configuration of a causal language model that `longctx.parallelize` takes.
        loss_of: the loss of another training method; if None, that of fine-tuning.

    Raises:
        ValueError: for settings that the real run would refuse, or inside a process group.
    """
    with fake_process_group(settings.sp, rank), flash_kernel(), few_tiles():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model, sequence = parallelize(
            model,
            settings.sp,
            sp_backend=settings.sp_backend if settings.sp > 1 else "auto",
            **settings.memory_options,
        )
        if settings.activation_checkpointing is not None:
            enable_checkpointing(model, **settings.activation_checkpointing)
        model.train()
        batch = row_of(settings.documents)
        shard = sequence.shard(batch)
        shard.context.before_first_pass = None  # which asks the other ranks
        other_loss = None if loss_of is None else loss_of(sequence, batch)
        wrapped = fsdp2() if settings.engine == "fsdp2" else None

        def losses(model: nn.Module, inputs: dict[str, Any], shift_labels: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                if other_loss is not None:
                    return other_loss(model, replace(shard, inputs=inputs, shift_labels=shift_labels))
                if settings.fused_loss:
                    token_losses = model(**inputs, shift_labels=shift_labels, token_outputs=True).losses
                    return sequence.reduce(token_losses, settings.length)
                return sequence.loss(model(**inputs).logits, shift_labels, settings.length)

        with mode:
            model = model if wrapped is None else wrapped(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
            _make_states(optimizer)
            inputs, shift_labels = tree_map_only(Tensor, mode.from_tensor, (shard.inputs, shard.shift_labels))
            with MemoryTracer(model, optimizer) as tracer:
                with SavedOnHost() if settings.saved_on_host else contextlib.nullcontext():
                    losses(model, inputs, shift_labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    return tracer.trace()


def row_of(documents: Sequence[int]) -> dict[str, Tensor]:
    """Return one packed row of documents of these lengths, as `SequenceCollator` makes it. All tokens are the same."""
    position_ids = torch.cat([torch.arange(length) for length in documents])[None]
    input_ids = torch.zeros_like(position_ids)
    return {
        "input_ids": input_ids,
        "labels": input_ids.masked_fill(position_ids == 0, -100),
        "position_ids": position_ids,
    }


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one rank of many, whose messages go nowhere."""
    if dist.is_initialized():
        raise ValueError("A process group is there already. Trace before it starts, or in a process of its own.")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _TracedKernel(AtenFlashKernel):
    """It stands for a FlashAttention-2 with soft caps, too, which allocates the same."""

    caps_scores = True


@contextlib.contextmanager
def flash_kernel() -> Iterator[None]:
    """Compute blocks of attention by FlashAttention's varlen calls, on fake tensors of any device."""
    original = choose.choose_kernel
    choose.choose_kernel = lambda *args: _TracedKernel()  # type: ignore[assignment]
    try:
        yield
    finally:
        choose.choose_kernel = original  # type: ignore[assignment]


@contextlib.contextmanager
def few_tiles() -> Iterator[None]:
    """Let the head compute only two tiles of logits; each further one would reuse the memory of the one before."""
    original = loss._tiles
    loss._tiles = lambda *args: original(*args)[:2]
    try:
        yield
    finally:
        loss._tiles = original


def fsdp2() -> Callable[[nn.Module], nn.Module]:
    """Return accelerate's own wrapping of a model. Call it outside the fake mode, where the mesh has to be made."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp_shard",)),
        mixed_precision="bf16",
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return lambda model: fsdp2_prepare_model(accelerator, model)


def _make_states(optimizer: torch.optim.AdamW) -> None:
    """Make what the first step leaves for all later ones.

    This includes DTensor's cache of shapes, which on fake tensors DTensor fills by tensors as large as the parameters.
    """
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
