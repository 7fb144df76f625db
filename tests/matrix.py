"""The support matrix: which set-ups are held against one process with which features, and how.

To flip a feature once it is built: name what shows it, a run of RUNS or a test elsewhere, in `shown_by`, and write
benchmarks/results/support_matrix.md anew with the command at its end. Whether a cell is refused is never declared:
resolving its flags decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from longctx.attention.backends import BACKENDS
from longctx.sequence.layout import Layout
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from longctx.settings.schema import Method
from tests.model.more_families import SMALL

NUMBERS, COMPILED, SOFT_DEVICE = "numbers", "compiled", "soft device"


@dataclass(frozen=True)
class Proof:
    """How far something that only GPUs run is shown without one."""

    kind: str
    """NUMBERS of the kernels in Triton's interpreter, COMPILED for GPUs that are not there, or on the SOFT_DEVICE."""
    what: str
    test: str
    """A file of tests."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} (`{self.test}`)"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A row of issue and table: degrees, backend and engine."""

    processes: int = 2
    dp: int = 1
    """Sequences that are trained on at a time: processes / sp."""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """What a launcher's profile adds to the environment."""
    only_on_gpu: bool = False
    last_on_gpu: str = "not run yet"
    without_gpu: tuple[Proof, ...] = ()

    @property
    def on_deepspeed(self) -> bool:
        return "deepspeed" in self.flags or "ACCELERATE_USE_DEEPSPEED" in self.env


def _zero(stage: int) -> dict[str, str]:
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }


def _shared(backend: str, engine: str) -> Setup:
    """A backend on an engine, over the fewest ranks that it spreads a sequence over."""
    sp = BACKENDS[backend].fewest_ranks or 1
    return Setup(processes=sp, flags=("--sp", str(sp), "--sp_backend", backend, "--engine", engine))


_ULYSSES = ("--sp", "2", "--sp_backend", "ulysses")
_HSDP = ("--dp_replicate", "2", "--engine", "fsdp2")
SETUPS = {
    "sp 1": Setup(processes=1),
    "ulysses, ZeRO-3": Setup(flags=_ULYSSES, env=_zero(3)),
    **{f"{name}, FSDP2": _shared(name, "fsdp2") for name in BACKENDS.spread},
    **{f"{name}, ZeRO-3": _shared(name, "deepspeed") for name in BACKENDS.spread if name != "ulysses"},
    "ulysses, ZeRO-0": Setup(flags=_ULYSSES, env=_zero(0)),
    "ulysses, ZeRO-1": Setup(flags=_ULYSSES, env=_zero(1)),
    "ulysses, ZeRO-2": Setup(flags=_ULYSSES, env=_zero(2)),
    "dp 2, FSDP1": Setup(
        dp=2,
        env={"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
        only_on_gpu=True,
        without_gpu=(Proof(SOFT_DEVICE, "its profile trains like that of FSDP2", "tests/gpu/test_soft_training.py"),),
    ),
    "dp 2, FSDP2": Setup(dp=2, flags=("--engine", "fsdp2")),
    "dp_replicate 2 x dp_shard 2": Setup(processes=4, dp=4, flags=_HSDP),
    "dp_replicate 2 x ring 2": Setup(processes=4, dp=2, flags=(*_HSDP, "--sp", "2", "--sp_backend", "ring")),
}


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of every set-up that tests/test_support_matrix.py trains and compares with one process."""

    model: str = "GQA"
    """A folder of `models`."""
    method: Method = SFT
    records: str = "documents"
    """What the data file holds, as test_support_matrix.RECORDS makes it."""
    flags: tuple[str, ...] = ("--packing", "True")
    sequences: int = 4
    """Rows of an optimizer step, whatever the degrees."""
    accumulation: int = 1
    copies: int = 1
    """Times as many processes as the set-up has; more sequences at a time."""

    def shape_of(self, setup: Setup) -> tuple[int, int]:
        """(processes, sequences at a time); a set-up that trains on several sequences is not enlarged."""
        copies = 1 if setup.dp > 1 else self.copies
        return setup.processes * copies, setup.dp * copies

    def flags_on(self, setup: Setup) -> tuple[str, ...]:
        batch = self.sequences // (self.shape_of(setup)[1] * self.accumulation)
        sizes = ("--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(self.accumulation))
        return (*setup.flags, *self.flags, *sizes)


_EPOCHS = ("--max_steps", "-1", "--num_train_epochs", "2", "--train_sampling_strategy", "sequential")
_PADDED = {
    "records": "unequal documents",
    "flags": ("--packing", "False", *_EPOCHS),
    "sequences": 16,
    "accumulation": 2,
}
_EVALUATES = ("--eval_strategy", "steps", "--eval_steps", "5", "--eval_on_start", "True")
_EVALUATES_EACH_STEP = ("--packing", "True", "--eval_strategy", "steps", "--eval_steps", "1")
YARN = '{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32}'
RUNS = {
    "packed": TrainingRun(),
    "padded": TrainingRun(model="MHA", **_PADDED),
    "data parallel": TrainingRun(**_PADDED, copies=2),
    "padding-free": TrainingRun(
        model="MQA",
        flags=("--packing", "False", "--padding_free", "True", "--gradient_checkpointing", "False"),
        sequences=16,
    ),
    "assistant only": TrainingRun(records="chats", flags=("--packing", "True", "--assistant_only_loss", "True")),
    "completion only": TrainingRun(
        records="completions", flags=("--packing", "True", "--completion_only_loss", "True")
    ),
    "windows": TrainingRun(model="windows"),
    "experts": TrainingRun(model="experts"),
    "sinks": TrainingRun(model="sinks"),
    "chunked loss": TrainingRun(flags=("--packing", "True", "--loss_type", "chunked_nll")),
    "label smoothing": TrainingRun(flags=("--packing", "True", "--label_smoothing_factor", "0.1")),
    "mixture": TrainingRun(records="mixture"),
    "early stopping": TrainingRun(
        records="documents with a test split",
        flags=(*_EVALUATES_EACH_STEP, "--greater_is_better", "True", "--early_stopping_patience", "2"),
    ),
    "YaRN": TrainingRun(flags=("--packing", "True", "--rope_scaling", YARN)),
    "streaming": TrainingRun(flags=("--packing", "True", "--dataset_streaming", "True")),
    "DPO": TrainingRun(
        method=DPO, records="pairs of answers", flags=("--packing", "True", "--loss_type", "sigmoid", "sft")
    ),
    "LoRA": TrainingRun(flags=("--packing", "True", "--use_peft", "True")),
    "gated delta": TrainingRun(model="gated delta"),
    "Mamba-2": TrainingRun(model="Falcon-H1"),
    "short convolutions": TrainingRun(model="LFM2"),
    "bf16": TrainingRun(flags=("--packing", "True", "--bf16", "True")),
    "evaluation": TrainingRun(records="documents with a test split", flags=("--packing", "True", *_EVALUATES)),
    "memory longest": TrainingRun(flags=("--packing", "True", "--memory", "longest")),
    "activation offloading": TrainingRun(flags=("--packing", "True", "--activation_offloading", "True")),
    "sequence chunks": TrainingRun(flags=("--packing", "True", "--sequence_chunk_size", "50")),
    "tiled MLP": TrainingRun(flags=("--packing", "True", "--tiled_mlp", "True", "--tiled_mlp_num_shards", "3")),
    "heads_k_stride": TrainingRun(flags=("--packing", "True", "--heads_k_stride", "1")),
    "optimizer on the host": TrainingRun(flags=("--packing", "True", "--offload_optimizer_device", "cpu")),
    "parameters on the host": TrainingRun(flags=("--packing", "True", "--offload_param_device", "cpu")),
}


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A line of the table."""

    shown_by: str | None = None
    """A run of RUNS, or the id of a test elsewhere, as pytest prints it; None where nothing shows it."""
    only: tuple[str, ...] = tuple(SETUPS)
    """The set-ups that a test elsewhere covers."""
    model: str = "GQA"
    flags: tuple[str, ...] = ()
    """What asks for it, besides the flags of the run."""
    only_on_gpu: bool = False
    last_on_gpu: str = "not run yet"
    """Date and device of the last run that showed it there."""
    without_gpu: tuple[Proof, ...] = ()
    refused_by: Callable[[], str | None] | None = None
    """Where no flag asks for it: what returns the reason."""


def _left_padded_batch() -> str | None:
    """What every set-up does to a batch before it cuts it; the trainer's own batches are padded on the right."""
    ids = torch.zeros(1, 4, dtype=torch.long)
    try:
        Layout.of_batch({"input_ids": ids, "labels": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])})
    except ValueError as error:
        return str(error)
    return None


FEATURES = {
    "packed": Feature(shown_by="packed"),
    "padding-free": Feature(shown_by="padding-free"),
    "right padding": Feature(shown_by="padded"),
    "left padding, in a batch that you build": Feature(refused_by=_left_padded_batch),
    "batch size > 1": Feature(shown_by="padded"),
    "gradient accumulation, unequal label counts": Feature(shown_by="padded"),
    "data parallel, unequal label counts": Feature(shown_by="data parallel"),
    "assistant-only loss": Feature(shown_by="assistant only"),
    "completion-only loss": Feature(shown_by="completion only"),
    "label smoothing": Feature(shown_by="label smoothing"),
    "sdpa (CPU kernel)": Feature(shown_by="packed"),
    "flash-attn 2": Feature(
        only_on_gpu=True,
        flags=("--attn_implementation", "flash_attention_2"),
        without_gpu=(
            Proof(
                NUMBERS,
                "our adapter with the library's Triton backend equals plain attention in fp32 and bf16, forward and "
                "backward, without windows, which that backend ignores; its CUDA kernels are not tested",
                "tests/attention/test_flash_triton.py",
            ),
        ),
    ),
    "flash-attn 3": Feature(only_on_gpu=True, flags=("--attn_implementation", "flash_attention_3")),
    "flash-attn 4": Feature(
        only_on_gpu=True,
        flags=("--attn_implementation", "flash_attention_4"),
        last_on_gpu="2026-11-27, one H200: numbers and gradients equal plain attention in bf16, also with windows",
        without_gpu=(
            Proof(
                COMPILED,
                "our adapter's forward and backward passes, with windows, for sm_90 and sm_100; it is not used on "
                "sm_80, for which the library has no backward pass",
                "tests/attention/test_flash_compiled.py",
            ),
        ),
    ),
    "MHA": Feature(shown_by="padded"),
    "GQA": Feature(shown_by="packed"),
    "MQA, fewer KV heads than sp": Feature(shown_by="padding-free"),
    "sliding window": Feature(shown_by="windows"),
    "mixed layer types": Feature(shown_by="windows"),
    "attention sinks": Feature(shown_by="sinks"),
    "mixture of experts": Feature(shown_by="experts"),
    "auxiliary loss of the routers": Feature(shown_by="experts"),
    "tied embeddings": Feature(shown_by="packed"),
    "untied embeddings": Feature(shown_by="padded"),
    "VLM that was not compared": Feature(model="VLM"),
    "gated-delta linear attention": Feature(shown_by="gated delta"),
    "gated-delta kernel of flash-linear-attention": Feature(
        only_on_gpu=True,
        model="gated delta",
        flags=("--bf16", "True"),
        without_gpu=(
            Proof(
                NUMBERS,
                "release 0.6.0 equals the recurrence in fp64, forward and backward, and models equal those of "
                "transformers at sp 1 and 2",
                "tests/model/test_gated_delta_kernel.py",
            ),
        ),
    ),
    "Mamba-2 beside attention: Falcon-H1": Feature(shown_by="Mamba-2"),
    "short convolutions: LFM2": Feature(shown_by="short convolutions"),
    "other hybrids: Jamba": Feature(model="Jamba"),
    "SSM: Mamba": Feature(model="Mamba"),
    "gradient checkpointing": Feature(shown_by="packed"),
    "no gradient checkpointing": Feature(shown_by="padding-free"),
    "activations on the host": Feature(shown_by="activation offloading"),
    "layers over chunks of the sequence": Feature(shown_by="sequence chunks"),
    "tiled MLP": Feature(shown_by="tiled MLP"),
    "a few heads at a time": Feature(shown_by="heads_k_stride"),
    "optimizer states on the host": Feature(shown_by="optimizer on the host"),
    "parameters on the host": Feature(shown_by="parameters on the host"),
    "--memory longest": Feature(shown_by="memory longest"),
    "fused or chunked cross-entropy": Feature(shown_by="chunked loss"),
    "Liger kernels": Feature(
        only_on_gpu=True,
        flags=("--use_liger_kernel", "True"),
        last_on_gpu="2026-11-26, one H200 at sp 1: runs of five steps equal one process on the CPU",
        without_gpu=(
            Proof(
                NUMBERS, "the layers equal those of transformers at sp 1 and 2, and train", "tests/layers/test_liger.py"
            ),
            Proof(COMPILED, "every kernel for sm_80, sm_90 and sm_100", "tests/layers/test_liger_compiled.py"),
        ),
    ),
    "DPO": Feature(shown_by="DPO"),
    "LoRA": Feature(shown_by="LoRA"),
    "QLoRA": Feature(
        only_on_gpu=True,
        flags=("--use_peft", "True", "--load_in_4bit", "True"),
        last_on_gpu="2026-11-27, one H200 at sp 1: trains; not compared with another run",
    ),
    "bf16 mixed precision": Feature(shown_by="bf16"),
    "YaRN": Feature(shown_by="YaRN"),
    "evaluation": Feature(shown_by="evaluation"),
    "early stopping": Feature(shown_by="early stopping"),
    "predict": Feature(shown_by="evaluation"),
    "gradient clipping": Feature(shown_by="packed"),
    "learning-rate schedule, steps and epochs": Feature(shown_by="padded"),
    "streaming data": Feature(shown_by="streaming"),
    "mixture of data sets": Feature(shown_by="mixture"),
}
assert all(
    feature.shown_by in RUNS for feature in FEATURES.values() if feature.shown_by and "::" not in feature.shown_by
)


# ------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------

_SMALL = SMALL | {
    "vocab_size": 272,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 257,
    "eos_token_id": 256,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}
_WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_chunk_size": 32}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
TRAINED_MODELS = {
    "GQA": ("qwen3", _SMALL),
    "MHA": ("qwen3", _SMALL | {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "MQA": ("qwen3", _SMALL | {"num_key_value_heads": 1}),
    "windows": ("qwen3", _SMALL | _WINDOWS | {"use_sliding_window": True}),
    "experts": ("qwen3_moe", _SMALL | _EXPERTS),
    "sinks": ("gpt_oss", _SMALL | _WINDOWS | _SINKS | _ROPE),
    "gated delta": ("qwen3_5_text", _SMALL | _GATED_DELTA),
    "Falcon-H1": ("falcon_h1", _SMALL | _MAMBA2),
    "LFM2": ("lfm2", _SMALL | {"layer_types": ["conv", "full_attention"]}),
}
MODELS = TRAINED_MODELS | {"VLM": ("paligemma", {}), "Jamba": ("jamba", {}), "Mamba": ("mamba", {})}
"""transformers' model type and settings by name; those of TRAINED_MODELS are given weights."""
