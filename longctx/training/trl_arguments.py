"""The arguments that TRL's SFTTrainer is given: the run's own, without what longctx has done already."""

from __future__ import annotations

import copy
import copyreg
from typing import Any

from trl import SFTConfig

from longctx.model.load import is_template_file


def without_data_preparation(args: SFTConfig) -> SFTConfig:
    """Return the arguments that SFTTrainer is given in the place of the run's: those of data that is ready.

    TRL would refuse packing with a collator of one's own, and prepare and truncate the data by itself.
    """
    prepared = copy.copy(args)
    prepared.__class__ = _WithoutToken
    prepared.packing = prepared.padding_free = prepared.eval_packing = prepared.assistant_only_loss = False
    prepared.include_for_metrics = []  # the evaluation loop would gather the inputs
    prepared.completion_only_loss = None
    if prepared.chat_template_path and not is_template_file(prepared.chat_template_path):
        prepared.chat_template_path = None  # the tokenizer has it; TRL would resize the embeddings besides
    prepared.restore_callback_states_from_checkpoint = False  # ResumableTrainer does
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):  # the same by two names
        if given := getattr(prepared, name, None):  # `selective` is carried out by longctx.parallelize
            setattr(prepared, name, {key: value for key, value in given.items() if key != "selective"})
    prepared.dataset_kwargs = {**(prepared.dataset_kwargs or {}), "skip_prepare_dataset": True}
    return prepared


class _WithoutToken(SFTConfig):
    """Arguments as any others, but that training_args.bin, beside every model, is written without the hub's token."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As `SFTConfig` itself: copyreg.__newobj__ would insist on this class.
        return copyreg._reconstructor, (SFTConfig, object, None), vars(self) | {"hub_token": None}  # type: ignore[attr-defined]
