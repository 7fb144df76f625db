"""The arguments for TRL's SFTTrainer: the run's own, without what longctx has done already."""

from __future__ import annotations

import copy

from trl import SFTConfig

from longctx.untrusted.files import is_template_file
from longctx.upstream.trl_internals import leave_out_token

LAYER_KEYWORDS = ("selective", "whole_layers", "offload")
"""Keywords of checkpointing that longctx.parallelize carries out."""


def without_data_preparation(args: SFTConfig) -> SFTConfig:
    """Return the run's arguments for SFTTrainer, which say that data is ready.

    Otherwise TRL would refuse packing with our collator, and prepare and truncate the data by itself.
    """
    prepared = copy.copy(args)
    leave_out_token(prepared)
    prepared.packing = prepared.padding_free = prepared.eval_packing = prepared.assistant_only_loss = False
    prepared.include_for_metrics = []  # the evaluation loop would gather the inputs
    prepared.completion_only_loss = None
    if prepared.chat_template_path and not is_template_file(prepared.chat_template_path):
        prepared.chat_template_path = None  # the tokenizer has it; TRL would also resize the embeddings
    prepared.restore_callback_states_from_checkpoint = False  # ResumableTrainer restores them
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # one argument, two names
        if given := getattr(prepared, name, None):
            setattr(prepared, name, {key: value for key, value in given.items() if key not in LAYER_KEYWORDS})
    prepared.dataset_kwargs = {**(prepared.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return prepared
