"""The set-up of a verification: defaults for its flags, the model's first layers, and rows that show errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from longctx.data import name_data
from longctx.forecast.model_sizes import ModelSizes
from longctx.model.load import first_layers
from longctx.model.tiny import TINY, tiny_config
from longctx.packing import PackedDataset
from longctx.ranks.agreement import on_all_ranks
from longctx.run import PreparedRun, load
from longctx.settings.run import Run
from longctx.training.dataset import TrainingData
from longctx.upstream.transformers_internals import unpartitioned

LARGE = 200_000_000
"""Parameters from which a model's first layers stand for all."""

CONSIDERED_ROWS = 500


def check_engine(run: Run) -> Run:
    """Return the run if its engine can be verified.

    Raises:
        ValueError: for an engine whose gradients cannot be compared one by one.
    """
    if run.settings["load_in_4bit"]:
        raise ValueError("--load_in_4bit True: only weights that are not quantised are compared here. Leave it out.")
    if run.engine == "fsdp1":
        raise ValueError(
            "fsdp_version 1 keeps the gradients of many parameters in one, which are not compared here. "
            "Set fsdp_version: 2 (--config_file configs/fsdp2.yaml)."
        )
    return run


def few_layers(run: Run, num_layers: int | None) -> Run:
    """Return the run on the model's first layers only.

    Args:
        num_layers: how many; where None, all of a model with less than LARGE parameters, and of others two, or as
            many as hold every kind of layer.

    Raises:
        ValueError: for a number of layers that the model does not have.
    """
    text = run.model_config.get_text_config()
    if num_layers is None:
        num_layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None) or []
        if ModelSizes.of_config(run.model_config).num_parameters >= LARGE:
            num_layers = min(max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]), num_layers)
    if not 1 <= num_layers <= text.num_hidden_layers:
        raise ValueError(
            f"--num_layers {num_layers}: {run.settings['model_name_or_path']} has {text.num_hidden_layers} layers. "
            f"Use 1 to {text.num_hidden_layers}."
        )
    config = copy.deepcopy(run.model_config)
    text = config.get_text_config()
    for name, value in first_layers(text, num_layers).items():
        setattr(text, name, value)
    return replace(run, facts=replace(run.facts, model_config=config))


def with_tokenizer(run: Run) -> Run:
    """Return the run with tiny's tokenizer and vocabulary, where a folder holds a config.json and little else."""
    folder = Path(run.settings["model_name_or_path"])
    if not _is_without_weights(folder) or any(folder.glob("tokenizer*")):
        return run
    config, tiny = copy.deepcopy(run.model_config), tiny_config()
    text = config.get_text_config()
    for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, getattr(tiny, name))
    return replace(run.decide(model_name_or_path=TINY), facts=replace(run.facts, model_config=config))


def load_layers(run: Run, prepared: PreparedRun) -> PreTrainedModel:
    """Return the weights, whole on rank 0 at least; random ones, the same on every rank, where the folder has none.

    Args:
        run: as asked for, before `with_tokenizer`.
        prepared: the same with its tokenizer.
    """
    with unpartitioned():  # rank 0 runs the same weights by itself
        if _is_without_weights(Path(run.settings["model_name_or_path"])):
            return on_all_ranks(lambda: _random_weights(prepared.run.model_config))
        return load(prepared, whole=True)


def _is_without_weights(folder: Path) -> bool:
    is_model = (folder / "config.json").is_file()
    return is_model and not any(path for kind in ("*.safetensors", "*.bin") for path in folder.glob(kind))


def _random_weights(config: PretrainedConfig) -> PreTrainedModel:
    """Return fp32 weights as transformers initialises them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = copy.deepcopy(config)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def probe_rows(prepared: PreparedRun) -> PreparedRun:
    """Return the run on rows for one step: those that hold a long document and others beside it, if there are such.

    Raises:
        ValueError: if the data has fewer rows than a step takes.
    """
    data, needed = prepared.data, prepared.run.sequences_per_step
    assert isinstance(data, TrainingData), "a verification reads no stream"
    rows = data.rows
    if len(rows) < needed:
        raise ValueError(
            f"{name_data(prepared.run.settings)} gives {len(rows)} sequences of up to "
            f"{prepared.run.settings['max_length']:,} tokens, and the step to compare needs {needed}. Use more data, a "
            "smaller --max_length, or --gradient_accumulation_steps 1."
        )
    considered = np.linspace(0, len(rows) - 1, min(len(rows), max(CONSIDERED_ROWS, needed))).round().astype(int)
    lengths = [rows[int(row)]["seq_lengths"] for row in considered]
    best = np.argsort([-int(of_row.max()) * min(len(of_row), 4) for of_row in lengths], kind="stable")[:needed]
    chosen = cast(PackedDataset, Subset(cast(Any, rows), considered[best].tolist()))
    return replace(prepared, data=replace(data, rows=chosen))
