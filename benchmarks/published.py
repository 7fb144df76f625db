"""Published lengths, peaks and step times, and the configurations of the models they are of."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

PUBLISHED = Path(__file__).parent / "data" / "published_lengths.csv"
HELD_BACK = PUBLISHED.with_name("held_back_lengths.csv")
"""Rows that nothing in longctx was fitted on."""

HOST_BYTES = 1.9e12
"""Of a node of ALST's paper; those of the others are taken to have as much."""

_LLAMA: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN3: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "meta-llama/Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **_LLAMA
    ),
    "meta-llama/Llama-3.1-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **_LLAMA
    ),
    "Qwen/Qwen3-0.6B": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        **_QWEN3 | {"tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-4B": Qwen3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        **_QWEN3 | {"tie_word_embeddings": True},
    ),
    "Qwen/Qwen3-8B": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, **_QWEN3
    ),
    "Qwen/Qwen3-32B": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, **_QWEN3
    ),
    "Qwen/Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_hidden_layers=48,
        num_attention_heads=32,
        **_QWEN3 | {"num_key_value_heads": 4},
    ),
}
"""Hub name -> the sizes of its config.json."""


class Published(NamedTuple):
    """A row of either file."""

    stack: str
    gpus: int
    gpu: str
    """With its memory in GB as it is sold: H100-80."""
    model: str
    features: str
    """What was on, joined by `+`."""
    length: int
    is_run: bool
    """Else `length` is the longest that fits."""
    peak_gib: float | None
    """What tensors took of a GPU at `length`."""
    device_gib: float | None
    """What nvidia-smi showed of it."""
    seconds: float | None
    """Of a step at `length`."""

    @property
    def device(self) -> str:
        """Its name in the table of speeds."""
        return self.gpu.split("-")[0]


def read(path: Path = PUBLISHED) -> list[Published]:
    """Every row of one of the two files."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return [_row(line) for line in csv.DictReader(lines)]


def _row(line: dict[str, str]) -> Published:
    length, gpus = int(line["max_length"]), int(line["gpus"])
    seconds = float(line["seconds_per_step"]) if line["seconds_per_step"] else None
    if speed := line["tokens_per_second_per_gpu"]:
        seconds = length / gpus / float(speed)
    return Published(
        stack=line["stack"],
        gpus=gpus,
        gpu=line["gpu"],
        model=line["model"],
        features=line["features"],
        length=length,
        is_run=(line.get("kind") or ("run" if line["peak_gib"] else "longest")) == "run",
        peak_gib=float(line["peak_gib"]) if line["peak_gib"] else None,
        device_gib=float(line["device_gib"]) if line.get("device_gib") else None,
        seconds=seconds,
    )
