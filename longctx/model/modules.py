"""Checks of a model's modules, and what its configuration says about them."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def check_modules(model: PreTrainedModel) -> None:
    """Check that the modules of a model are supported. Call this before anything is changed in the model.

    Raises:
        ValueError: for a model that is wrapped or compiled already, one without a linear head, and active dropout.
    """
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings") or hasattr(model, "_orig_mod"):  # of torch.compile
        raise ValueError(
            f"{name} is not a model of transformers. Call parallelize with the model itself, and wrap or compile it "
            "afterwards."
        )
    if not isinstance(head := model.get_output_embeddings(), nn.Linear):
        raise ValueError(
            f"the head of {name} is {type(head).__name__}, and the loss needs a linear one. Use a causal language "
            "model without an adapter on its head."
        )
    if any(adapter.is_prompt_learning for adapter in getattr(model, "peft_config", {}).values()):
        raise ValueError("adapters that learn a prompt or a prefix add tokens, which is not supported. Use LoRA.")
    if active := [at for at, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]:
        raise ValueError(
            f"{active[0]} drops values with p {model.get_submodule(active[0]).p}, and random masks would differ "
            "between one device and several. Build the model with a dropout of 0, and adapters with lora_dropout=0."
        )


def say_whether_tied(model: PreTrainedModel) -> None:
    """Set in the configuration whether head and embeddings are tied, since wrappers tie them if it says so.

    transformers leaves them untied if a model's files hold different values for them, whatever config.json says.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None:
        model.config.tie_word_embeddings = head.weight is embeddings.weight
