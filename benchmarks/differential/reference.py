"""Training as one process does it, in fp32 with stock transformers and peft. This module imports nothing of longctx.

Every document is a forward pass of its own: transformers' eager attention with the mask that transformers makes for a
single sequence, so that neither packing, padding nor positions can go wrong. A step's gradient is that of the sum of
the documents' token losses divided by the number of label tokens in the step.

What the reference has to be told: the documents in the order of the data set, how many of them a step takes, and the
hyperparameters. In the order `random` it is told the log too, and looks for the documents that explain a step's
tokens and loss; each has to be used once an epoch, and the loss of the step after it has to follow from that choice.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .preferences import Preferences

Document = tuple[list[int], list[int]]
IGNORED = -100
NOISE = 1e-3
"""Of the root mean square of all gradients: below it, an adaptive optimizer's step can go either way."""
EQUAL = 1e-6
"""Relative difference of two means of the same losses: fp32 sums a few hundred terms to within this."""
MOST_SEARCHED = 16
"""Documents of which all subsets are looked at; with more, a case takes all of them in every step."""


class NotExplainedError(Exception):
    """No documents that are left in the epoch have a step's tokens and loss."""


def train(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Follow a plan, as benchmarks.differential.commands writes it.

    Returns:
        `steps`: of each, loss, grad_norm, learning_rate, num_tokens, and `loose`: how much the loss can change, to
        first order, where rounding alone decides how an adaptive optimizer moves weights.
        `evaluations`: their losses.
        `weights`: the error of the weights that were saved, where the plan names their folder.
    """
    torch.set_num_threads(1)
    model = load(plan)
    preferences = Preferences(model, plan) if plan.get("preference") else None
    _perturb(model, plan["perturbation"], plan["seed"])
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = _optimizer(model, plan)
    firm = {name: torch.ones_like(value, dtype=torch.bool) for name, value in _trained(model)}
    schedule = _schedule(optimizer, plan)
    steps: list[dict[str, Any]] = []
    evaluations = [_evaluate(model, plan, preferences)] if 0 in plan["evaluate_at"] else []
    num_tokens, rates = 0, 0.0
    batches = _batches(model, plan, preferences)
    for number in range(1, plan["num_steps"] + 1):
        documents = next(batches)
        if preferences:
            loss = preferences.backward(model, documents)
        else:
            loss = _backward(model, documents, plan["smoothing"], plan["aux_loss"])
        _fill_gradients(model)
        loose = rates * _loose_gradient(model, firm)
        grad_norm = float(nn.utils.clip_grad_norm_(model.parameters(), plan["clipping"] or math.inf))
        _keep_firm(model, firm, grad_norm)
        learning_rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=False)
        rates += abs(learning_rate)
        num_tokens += plan["tokens"][number - 1] if plan["tokens"] else sum(len(ids) for ids, _ in documents)
        steps.append(
            {"loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate, "num_tokens": num_tokens}
            | {"loose": loose}
        )
        if number in plan["evaluate_at"]:
            evaluations.append(_evaluate(model, plan, preferences))
            if plan["stops_early"] and len(evaluations) > 1 and not evaluations[-1] > max(evaluations[:-1]):
                break  # a larger loss counts as better there, so that a run that learns stops
    result: dict[str, Any] = {"steps": steps, "evaluations": evaluations}
    if plan["saved"]:
        result["weights"] = _compare_weights(model, start, firm, rates, plan)
    return result


def load(plan: Mapping[str, Any], folder: str | None = None) -> nn.Module:
    """The model of the plan as stock transformers reads it, with a new adapter where the plan has one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(plan["model"], **plan["model_init_kwargs"])
    _scale_rope(config, plan["rope_scaling"])
    model = AutoModelForCausalLM.from_pretrained(
        plan["model"], config=config, attn_implementation="eager", dtype=torch.float32
    )
    if plan["adapter"]:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(plan["seed"])
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **plan["adapter"]))
    return model


@torch.no_grad()
def _perturb(model: nn.Module, size: float, seed: int) -> None:
    """Change every weight by a part of itself of about this size: what rounding does somewhere in any run."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters() if size else ():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


def _scale_rope(config: Any, scaling: Mapping[str, Any] | None) -> None:
    """In transformers' words: the frequencies' parameters, and the longer context that follows."""
    if not scaling:
        return
    parameters = dict(scaling)
    original = parameters.pop("original_max_position_embeddings", config.max_position_embeddings)
    if parameters["rope_type"] != "linear":
        parameters["original_max_position_embeddings"] = original
    own = {
        name: config.rope_parameters[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if name in config.rope_parameters
    }
    config.rope_parameters = own | parameters
    config.max_position_embeddings = int(original * parameters["factor"])
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original


# ------------------------------------------------------------------------------------------------
# Loss
# ------------------------------------------------------------------------------------------------


def _num_labels(document: Document) -> int:
    """The first token is no target."""
    return sum(label != IGNORED for label in document[1][1:])


def _loss_sum(model: nn.Module, document: Document, smoothing: float) -> torch.Tensor:
    """Sum of the document's token losses; with smoothing ε, (1 - ε) of the target's and ε of the vocabulary's mean."""
    return _loss_of(model(input_ids=torch.tensor([document[0]]), use_cache=False).logits, document, smoothing)


def _loss_of(logits: torch.Tensor, document: Document, smoothing: float) -> torch.Tensor:
    logits, targets = logits[0, :-1].float(), torch.tensor(document[1][1:])
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    if smoothing:
        uniform = -F.log_softmax(logits, dim=-1).mean(dim=-1)[targets != IGNORED].sum()
        loss = (1 - smoothing) * loss + smoothing * uniform
    return loss


def _backward(model: nn.Module, documents: Sequence[Document], smoothing: float, aux_loss: float) -> float:
    """The step's gradient; returns its mean loss, 0 where no token has a label."""
    model.train()
    count = sum(map(_num_labels, documents))
    total = 0.0
    if aux_loss and documents:
        whole = _with_aux_loss(model, documents, smoothing, aux_loss)
        whole.backward()
        total, count, documents = float(whole.detach()), 1, []
    for document in documents:
        if _num_labels(document):
            loss = _loss_sum(model, document, smoothing)
            (loss / count).backward()
            total += float(loss)
    return total / count if count else 0.0


def _fill_gradients(model: nn.Module) -> None:
    for _, parameter in _trained(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _with_aux_loss(model: Any, documents: Sequence[Document], smoothing: float, coefficient: float) -> torch.Tensor:
    """The mean loss, with transformers' auxiliary loss of the router logits of all documents."""
    total, count, routed = torch.zeros(()), sum(map(_num_labels, documents)), []
    for document in documents:
        output = model(input_ids=torch.tensor([document[0]]), use_cache=False, output_router_logits=True)
        if _num_labels(document):
            total = total + _loss_of(output.logits, document, smoothing)
        routed.append(output.router_logits)
    stock = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = tuple(torch.cat(logits) for logits in zip(*routed, strict=True))
    balance = sys.modules[type(stock).__module__].load_balancing_loss_func  # type: ignore[attr-defined]
    aux_loss = balance(layers, stock.num_experts, stock.num_experts_per_tok)
    return total / max(count, 1) + coefficient * aux_loss


@torch.no_grad()
def _evaluate(model: nn.Module, plan: Mapping[str, Any], preferences: Preferences | None) -> float:
    if preferences:
        return preferences.evaluate(model, plan["evaluation"])
    model.eval()
    documents, count = plan["evaluation"], sum(map(_num_labels, plan["evaluation"]))
    if not count:
        return math.nan
    if plan["aux_loss"]:
        return float(_with_aux_loss(model, documents, plan["smoothing"], plan["aux_loss"]))
    learnt = [document for document in documents if _num_labels(document)]
    return sum(float(_loss_sum(model, document, plan["smoothing"])) for document in learnt) / count


# ------------------------------------------------------------------------------------------------
# Which documents each step takes
# ------------------------------------------------------------------------------------------------


def _batches(
    model: nn.Module, plan: Mapping[str, Any], preferences: Preferences | None
) -> Iterator[Sequence[Document]]:
    documents, rows = plan["documents"], plan["rows"]
    if plan["order"] == "whole":
        return itertools.repeat(documents)
    if plan["order"] == "sequential":
        stop = len(documents) // rows * rows if plan["drop_last"] else len(documents)
        epoch = [documents[start : min(start + rows, stop)] for start in range(0, stop, rows)]
        return itertools.cycle(epoch)
    return _found(model, plan, preferences)


def _found(
    model: nn.Module, plan: Mapping[str, Any], preferences: Preferences | None = None
) -> Iterator[Sequence[Document]]:
    """The documents of each step, found by its loss among those that are left in the epoch.

    Documents without labels change nothing but the number of tokens, and are not looked for; a step of them alone has
    a loss of 0. With `drop_last`, an epoch ends where the log says so, and what is left then is not used. Pairs, whose
    losses are all equal in the first step, are found by the log-probabilities of their chosen answers.
    """
    left: list[Document] = []
    before = 0.0
    for number, (tokens, loss, epoch) in enumerate(zip(plan["tokens"], plan["losses"], plan["epochs"], strict=True), 1):
        is_new, before = before % 1 == 0, epoch
        if loss == 0:
            yield []
            continue
        if not left or (is_new and plan["drop_last"]):
            left = [document for document in plan["documents"] if _num_labels(document)]
        step = _explain(model, left, tokens, loss, preferences or plan["smoothing"], number)
        yield [left[place] for place in step]
        left = [document for place, document in enumerate(left) if place not in step]


@torch.no_grad()
def _explain(
    model: nn.Module, left: Sequence[Document], tokens: int, loss: float, by: float | Preferences, number: int
) -> set[int]:
    """The places in `left` whose mean loss is nearest to the logged one, within the tokens of the step.

    Of equally near ones, those with the most tokens are taken: two equal documents have the mean loss of one.
    """
    if isinstance(by, Preferences):
        sums, counts = np.array([by.chosen(model, pair) for pair in left]), np.ones(len(left))
    else:
        sums = np.array([float(_loss_sum(model, document, by)) for document in left])
        counts = np.array([_num_labels(document) for document in left])
    lengths = np.array([len(ids) for ids, _ in left])
    subsets = (np.arange(1, 1 << len(left))[:, None] >> np.arange(len(left))) & 1
    possible = subsets[subsets @ lengths <= tokens]
    if not len(possible):
        raise NotExplainedError(f"step {number}: none of the {len(left)} documents that are left has {tokens} tokens")
    errors = np.abs((possible @ sums) / (possible @ counts) - loss)
    near = possible[errors <= errors.min() + EQUAL * loss]
    return set(np.flatnonzero(near[(near @ lengths).argmax()]).tolist())


# ------------------------------------------------------------------------------------------------
# Optimizer
# ------------------------------------------------------------------------------------------------


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _optimizer(model: nn.Module, plan: Mapping[str, Any]) -> torch.optim.Optimizer:
    """torch's own; biases and norms do not decay, as in transformers' Trainer."""
    from transformers.trainer_pt_utils import get_parameter_names

    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decays = set(get_parameter_names(model, [nn.LayerNorm], patterns))
    groups = [
        {"params": [p for name, p in _trained(model) if name in decays], "weight_decay": plan["weight_decay"]},
        {"params": [p for name, p in _trained(model) if name not in decays], "weight_decay": 0.0},
    ]
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "rmsprop": torch.optim.RMSprop,
        "adamw_torch": torch.optim.AdamW,
        "adamw_torch_fused": torch.optim.AdamW,
    }
    return kinds[plan["optimizer"]]([group for group in groups if group["params"]], lr=plan["learning_rate"])


def _schedule(optimizer: torch.optim.Optimizer, plan: Mapping[str, Any]) -> Any:
    """A warm-up below 1 is a part of the steps, rounded up, as in transformers' TrainingArguments."""
    from transformers import get_scheduler

    warmup = plan["warmup"]
    return get_scheduler(
        plan["schedule"],
        optimizer,
        num_warmup_steps=math.ceil(warmup * plan["num_steps"]) if warmup < 1 else warmup,
        num_training_steps=plan["num_steps"],
        scheduler_specific_kwargs=dict(plan["schedule_kwargs"]),
    )


# ------------------------------------------------------------------------------------------------
# Weights
# ------------------------------------------------------------------------------------------------


def _keep_firm(model: nn.Module, firm: Mapping[str, torch.Tensor], grad_norm: float) -> None:
    """Take out of `firm` the elements whose gradient is so small that rounding decides about its sign.

    A zero counts as small, since rounding need not give one elsewhere (the scores of a window of one token), but for
    the embeddings of tokens that do not occur.
    """
    if grad_norm == 0:  # a step without labels
        return
    trained, embeddings = _trained(model), cast(Any, model).get_input_embeddings().weight
    root_mean_square = grad_norm / math.sqrt(sum(value.numel() for _, value in trained))
    for name, parameter in trained:
        assert parameter.grad is not None, "filled with zeros before"
        size = parameter.grad.abs()
        does_not_occur = (size == 0) & (parameter is embeddings)
        firm[name].logical_and_((size > NOISE * root_mean_square) | does_not_occur)


def _loose_gradient(model: nn.Module, firm: Mapping[str, torch.Tensor]) -> float:
    """Sum of the sizes of the gradients' elements that are not firm."""
    return sum(float(p.grad[~firm[name]].abs().sum()) for name, p in _trained(model) if p.grad is not None)


@torch.no_grad()
def _compare_weights(
    model: nn.Module, start: Mapping[str, torch.Tensor], firm: Mapping[str, torch.Tensor], rates: float, plan: Any
) -> dict[str, Any]:
    """How far the saved weights are from ours, in parts of how far training has moved ours.

    `update` is for SGD, the norm of the difference over that of the update. `firm` and `all` are for adaptive
    optimizers, the largest difference in parts of the sum of the learning rates, which is what they move a weight by:
    of the elements whose gradients stand clear of rounding, and of all.
    """
    saved = dict(_load_saved(plan).named_parameters())
    ours = dict(model.named_parameters())
    if saved.keys() != ours.keys():
        names = sorted(saved.keys() ^ ours.keys())
        return {"names": names[:5]}
    difference = {name: (saved[name].float() - value).abs() for name, value in ours.items()}
    moved = math.sqrt(sum(float((value - start[name]).square().sum()) for name, value in ours.items()))
    apart = math.sqrt(sum(float(value.square().sum()) for value in difference.values()))
    size = math.sqrt(sum(float(value.square().sum()) for value in ours.values()))
    worst = max(difference, key=lambda name: float(difference[name].max()))
    clear = [float(difference[name][mask].max()) for name, mask in firm.items() if mask.any()]
    return {
        "update": apart / moved if moved else apart / size,
        "size": apart / size,
        "firm": max(clear, default=0.0) / rates if rates else 0.0,
        "all": float(difference[worst].max()) / rates if rates else 0.0,
        "worst": worst,
    }


def _load_saved(plan: Mapping[str, Any]) -> nn.Module:
    """What was saved, as transformers and peft read it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not plan["adapter"]:
        return AutoModelForCausalLM.from_pretrained(plan["saved"], dtype=torch.float32)
    from peft import PeftModel

    config = AutoConfig.from_pretrained(plan["model"], **plan["model_init_kwargs"])
    _scale_rope(config, plan["rope_scaling"])
    base = AutoModelForCausalLM.from_pretrained(plan["model"], config=config, dtype=torch.float32)
    return PeftModel.from_pretrained(base, plan["saved"], is_trainable=True)


if __name__ == "__main__":
    print(json.dumps(train(json.loads(Path(sys.argv[1]).read_text())), indent=1))
