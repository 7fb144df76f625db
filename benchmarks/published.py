"""Published lengths, peaks and step times, and the configurations of the models they are of."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig

PUBLISHED = Path(__file__).parent / "data" / "published_lengths.csv"
HELD_BACK = PUBLISHED.with_name("held_back_lengths.csv")
"""Rows that nothing in longctx was fitted on."""

HOST_BYTES = 1.9e12
"""Of a node of ALST's paper; those of the others are taken to have as much."""

MODELS: Mapping[str, Mapping[str, Any]] = json.loads(PUBLISHED.with_name("models.json").read_text(encoding="utf-8"))
"""Hub name -> `config`, the sizes of its config.json, and `source`, where these are public."""

CONFIGS: dict[str, PretrainedConfig] = {
    name: AutoConfig.for_model(**MODELS[name]["config"])
    for name in (
        *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"),
        *("Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B"),
    )
}
"""The configurations of the models of published runs."""


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
