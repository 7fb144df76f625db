"""Training as one process would do it, without longctx: dense attention under a block-diagonal mask."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from longctx.sequence.layout import Layout


def layout_of(cu_seqlens, branch_starts=None, **spread):
    """The layout of one row with these boundaries of documents; `spread` says over which ranks, and by which plan."""
    tokens = torch.full((1, int(cu_seqlens[-1])), -100)
    layout = Layout.of_documents(tokens, tokens, np.asarray(cu_seqlens[:-1]), branch_starts=branch_starts)
    return dataclasses.replace(layout, **spread)


def train_reference(
    model_folder, documents, *, steps, learning_rate, batches=None, adapt=lambda model: model, label_smoothing=0.0
):
    """AdamW on `documents`, a list of (input_ids, labels), all of them in every step.

    With `batches`, a list of document lists, step i trains on batches[i]; `adapt` changes the model first. Returns
    the losses and the gradient norms, token-weighted over the step, linear schedule, clipping at 1.0, fp32.
    """
    model = adapt(AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager", dtype=torch.float32))
    rates = [learning_rate * (1 - step / steps) for step in range(steps)]
    return adamw_steps(
        model, rates, lambda step: dense_loss(model, documents if batches is None else batches[step], label_smoothing)
    )


def adamw_steps(model, learning_rates, loss_of_step):
    """Losses and gradient norms of steps with these learning rates, no weight decay, clipping at 1.0."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    losses, norms = [], []
    for step, learning_rate in enumerate(learning_rates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss = loss_of_step(step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def dense_loss(model, documents, label_smoothing=0.0):
    """Mean cross-entropy over all label tokens of the documents, with the auxiliary loss of a mixture of experts."""
    coefficient = getattr(model.config, "router_aux_loss_coef", 0)
    if coefficient:  # without the head's own class, which would take the mask [1, 1, T, T] for one of padding
        output, targets = dense_output(model.base_model, documents, output_router_logits=True)
        logits = model.get_output_embeddings()(output.last_hidden_state)[0]
    else:
        logits, targets = dense_logits(model, documents)
    if label_smoothing:
        loss = LabelSmoother(label_smoothing)({"logits": logits}, targets)
    else:
        loss = F.cross_entropy(logits, targets, ignore_index=-100)
    return loss + coefficient * auxiliary_loss(model, output.router_logits) if coefficient else loss


def auxiliary_loss(model, router_logits):
    """Transformers' own, of the logits [T, E] of every layer."""
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return function(tuple(router_logits), model.num_experts, model.num_experts_per_tok)


def dense_logits(model, documents):
    """Logits [T, V] and targets [T] of the documents in one row that keeps them apart."""
    output, targets = dense_output(model, documents)
    return output.logits[0], targets


def dense_output(model, documents, **options):
    """What the model returns for the documents in one row that keeps them apart, and targets [T]."""
    lengths = [len(ids) for ids, _ in documents]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    age = positions[:, None] - positions[None]
    visible = {"full_attention": (document[:, None] == document[None]) & (age >= 0)}
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        visible["sliding_attention"] = visible["full_attention"] & (age < model.config.sliding_window)
    masks = {
        kind: torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)[None, None]
        for kind, pairs in visible.items()
    }
    mask = masks if len(masks) > 1 else masks["full_attention"]
    ids = torch.tensor([token for tokens, _ in documents for token in tokens])
    targets = torch.tensor([token for _, labels in documents for token in [*labels[1:], -100]])
    return model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, **options), targets


def dpo_log_of_trl(model, reference_model, tokenizer, records, folder, *, trainer=None, **options):
    """The log of DPOTrainer with AdamW on the CPU in fp32.

    Args:
        trainer: other arguments of DPOTrainer.
        options: of DPOConfig.
    """
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        output_dir=folder,
        optim="adamw_torch",
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        **options,
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference_model,
        args=args,
        train_dataset=records,
        processing_class=tokenizer,
        **trainer or {},
    )
    trainer.train()
    return trainer.state.log_history
