"""Configuration, tokenizer and weights of the model to train: the built-in `tiny`, a folder or a hub name."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from longctx.tiny import TINY, tiny_config, tiny_model, tiny_tokenizer


def load_config(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, **overrides: Any
) -> PretrainedConfig:
    """The model's configuration; no weights are read.

    Raises:
        ValueError: if there is no such model, with what was looked for.
    """
    if name == TINY:
        config = tiny_config()
        config.update(overrides)
        return config
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code, **overrides)
    except OSError as error:
        raise ValueError(
            f"--model_name_or_path {name} is neither a folder with a config.json, nor a hub model that can be reached, "
            f"nor the built-in {TINY!r}: {error}"
        ) from error


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer that goes with the model, with a pad token (its own, else the end-of-text token)."""
    if name == TINY:
        return tiny_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    name: str,
    config: PretrainedConfig,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The weights, for training, with a configuration of their own. Attention is put in place afterwards."""
    config = copy.deepcopy(config)
    if name == TINY:
        return tiny_model(dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype), config=config)
    return AutoModelForCausalLM.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation="sdpa",
    )
