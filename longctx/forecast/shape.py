"""The shape of a run: everything but the machine and the length that its memory and its seconds depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from longctx.attention.backend import Backend
from longctx.attention.backends import BACKENDS
from longctx.attention.cost import Arrangement, Setup
from longctx.forecast.memory_options import MemoryOptions
from longctx.forecast.model_sizes import ModelSizes, adapter_rows
from longctx.layers.liger import fuses_layers
from longctx.machine.here import Machine
from longctx.sequence.mesh import ParallelDims

Engine = Literal["none", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]

FP32 = 4
"""Bytes of an element in single precision."""
NF4_BYTES = 0.5
"""For each 4-bit weight, without its scale (bitsandbytes)."""
NF4_BLOCK = 64
"""Number of 4-bit weights that share a scale, which is fp32."""
NESTED_SCALE_BYTES = 1
"""For each scale that is quantised itself (`use_bnb_nested_quant`)."""

AS_IT_IS = MemoryOptions()
ONE_DEVICE = Arrangement(name="local", ring=1, ulysses=1)


class Stack(NamedTuple):
    """What other training stacks do otherwise; benchmarks alone change it."""

    fused_loss: bool = True
    """Whether logits exist only for a few tokens at a time."""
    passes_gradients_on: bool = False
    """Whether a gather passes the gradients on from rank to rank, as torch's context parallelism does."""
    projects_by_stage: bool = False
    """Whether each stage also projects its heads itself (UPipe, arXiv 2602.21196)."""
    pins_host_memory: bool = True
    """Whether offloaded tensors lie in pinned memory, which devices copy to and from by themselves."""
    repeats_keys: bool = False
    """Whether keys and values that query heads share are repeated, as stock transformers does for sdpa."""
    bucket_size: int | None = None
    """Elements that DeepSpeed reduces at a time; None means those of a layer."""
    live_parameters: int = 1_000_000_000
    """Parameters that ZeRO-3 keeps gathered; by default DeepSpeed's own number."""


LONGCTX = Stack()


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """A run without its machine and its length.

    Counts of layers in `options` can be int arrays of one shape, for many runs at once.
    """

    model: ModelSizes
    arrangement: Arrangement = ONE_DEVICE
    world_size: int = 1
    dp_replicate: int = 1
    engine: Engine = "none"
    options: MemoryOptions = AS_IT_IS
    rows: int = 1
    """Rows of a micro-batch on a rank."""
    micro_batches: int = 1
    """Of an optimizer step."""
    bf16: bool = True
    """Whether --bf16 makes activations bf16."""
    weight_bytes: int = 4
    """Bytes of a parameter as it was loaded, in which FSDP2 and a single process train it."""
    fused_layers: bool = False
    """Whether norms and the MLP's activation are single kernels that save only their inputs (Liger, torch.compile)."""
    compiled: bool = False
    """Whether --torch_compile compiles decoder layers, which are then neither chunked nor tiled."""
    quantized_weight_bytes: float | None = None
    """Bytes of a 4-bit weight of a linear layer, its scale included. None without quantisation."""
    unverified_with: str = ""
    """The flag with which tiles, chunks and parameters on the host are not verified; empty if there is none."""
    flash3: bool = False
    """Whether attention's kernel is FlashAttention-3, which makes other fp32 sums."""
    stack: Stack = LONGCTX

    def __post_init__(self) -> None:
        if self.model.num_heads % self.ulysses:
            raise ValueError(
                f"{self.arrangement} exchanges tokens for heads among {self.ulysses} ranks, and the model has "
                f"{self.model.num_heads} heads. Use Ulysses ranks that divide them."
            )

    @classmethod
    def of_values(
        cls,
        model: ModelSizes,
        settings: Mapping[str, Any],
        *,
        dims: ParallelDims,
        arrangement: Arrangement,
        engine: str,
        zero_stage: int | None,
    ) -> RunShape:
        """Return the shape of a run from the final values of its flags, without memory options."""
        if settings.get("use_peft"):
            model = replace(model, num_trained_parameters=settings["lora_r"] * adapter_rows(model))
        compiled, liger = bool(settings.get("torch_compile")), settings.get("liger_kernel_config")
        return cls(
            model=model,
            arrangement=arrangement,
            world_size=dims.world_size,
            dp_replicate=dims.dp_replicate,
            engine=cast(Engine, f"zero{zero_stage}" if zero_stage else engine),
            rows=settings["per_device_train_batch_size"],
            micro_batches=settings["gradient_accumulation_steps"],
            bf16=bool(settings.get("bf16")),
            weight_bytes=4 if settings.get("dtype") == "float32" else 2,
            fused_layers=compiled or (bool(settings.get("use_liger_kernel")) and fuses_layers(liger)),
            compiled=compiled,
            quantized_weight_bytes=_quantized_weight_bytes(settings),
            unverified_with=_unverified_with(settings),
        )

    def with_layers(self, whole: Any, selective: Any, offloaded: Any) -> RunShape:
        """Return the shape with these numbers of layers, which can be arrays: see `MemoryOptions`."""
        changed = replace(self.options, whole_layers=whole, selective=selective, offloaded_layers=offloaded)
        return replace(self, options=replace(changed, activation_checkpointing=True, activation_offloading=True))

    def attention(self, machine: Machine) -> Setup:
        """Return what `longctx.attention.cost` needs to know of the run."""
        model = self.model
        return Setup(
            sp=self.sp,
            num_heads=model.num_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_size=model.head_size,
            element_size=self.element_size,
            machine=machine,
            heads_k_stride=self.options.heads_k_stride,
            overlap_exchange=bool(self.options.overlap_exchange),
            recurrent=model.recurrent,
        )

    @property
    def backend(self) -> Backend:
        """The attention backend."""
        return BACKENDS[self.arrangement.name]

    @property
    def ring(self) -> int:
        """Ranks that pass keys and values around."""
        return self.arrangement.ring

    @property
    def ulysses(self) -> int:
        """Ranks that exchange tokens for heads."""
        return self.arrangement.ulysses

    @property
    def sp(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def dp(self) -> int:
        """Groups of ranks that share a sequence."""
        return self.world_size // self.sp

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the states, where an engine shards them."""
        return self.world_size // self.dp_replicate

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's stage; None on another engine."""
        return int(self.engine.removeprefix("zero")) if self.engine.startswith("zero") else None

    @property
    def engine_name(self) -> str:
        """A value of --engine: deepspeed, fsdp2, fsdp1 or none."""
        return "deepspeed" if self.zero_stage is not None else self.engine

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP shards the states, in either version."""
        return self.engine.startswith("fsdp")

    @property
    def can_chunk(self) -> bool:
        """Whether the run supports the sequence-chunked step."""
        is_able = self.backend.can_chunk and self.model.chunk_obstacle is None and not self.compiled
        return is_able and self.engine != "fsdp1"

    @property
    def element_size(self) -> int:
        """Bytes of an activation's element, b."""
        return 2 if self.bf16 or self.weight_bytes == 2 else 4

    @property
    def stream_size(self) -> int:
        """Bytes of an element of the residual stream. Without an engine, autocast leaves it in the embeddings' fp32."""
        return 4 if self.engine == "none" and self.weight_bytes == 4 else self.element_size

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient's element while it is reduced; ZeRO also adds gradients up in this precision.

        By default FSDP2 reduces in fp32, and DeepSpeed in the training precision.
        """
        asked = self.options.communication_data_type
        by_default = asked == "auto" and self.zero_stage is not None and self.bf16
        return 2 if asked == "bf16" or by_default else 4

    @property
    def trained_share(self) -> float:
        """The part of the parameters that is trained."""
        return self.model.num_trained_parameters / self.model.num_parameters

    @property
    def num_checkpointed(self) -> Any:
        """Layers that are checkpointed."""
        if not self.options.activation_checkpointing:
            return 0
        return -(-(self.model.num_layers - self.options.whole_layers) // self.options.every_n_layers)

    @property
    def num_selective(self) -> Any:
        """Checkpointed layers that keep attention's output."""
        selective = self.options.selective
        if selective is None:
            selective = self.backend.keeps_output
        return selective * self.num_checkpointed if isinstance(selective, bool) else selective

    @property
    def num_offloaded(self) -> Any:
        """Checkpointed layers whose checkpoints wait in host memory."""
        if self.options.sequence_chunk_size is not None:
            return self.num_checkpointed
        if not (self.options.activation_offloading and self.options.activation_checkpointing):
            return 0
        return self.num_checkpointed if self.options.offloaded_layers is None else self.options.offloaded_layers

    @property
    def num_selective_offloaded(self) -> Any:
        """Layers whose output of attention waits in host memory."""
        offloaded = self.num_offloaded
        if self.options.sequence_chunk_size is not None and self.options.offloaded_layers is not None:
            offloaded = self.options.offloaded_layers  # all layers' inputs wait there
        return np.maximum(0, self.num_selective + offloaded - self.num_checkpointed)

    def local_tokens(self, length: int) -> float:
        """Return the tokens of a rank, for rows of this many tokens."""
        return length * self.rows / self.sp

    def padded(self, length: int) -> int:
        """Return the tokens of a row once it is padded, as the backend needs it."""
        multiple = ParallelDims.arrange(self.sp, ring=self.ring, ulysses=self.ulysses).multiple
        return -(-length // multiple) * multiple


def _unverified_with(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_4bit"):
        return "--load_in_4bit True"
    return "--lora_target_parameters" if settings.get("use_peft") and settings.get("lora_target_parameters") else ""


def _quantized_weight_bytes(settings: Mapping[str, Any]) -> float | None:
    """Return the bytes of a 4-bit weight, its scale included; None where weights are not quantised."""
    if not settings.get("load_in_4bit"):
        return None
    scale = NESTED_SCALE_BYTES if settings.get("use_bnb_nested_quant") else FP32
    return NF4_BYTES + scale / NF4_BLOCK
