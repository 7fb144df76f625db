"""One optimizer step of the trainer on its engine, compared with the same step on one device.

Errors are looked for where they arise, in order of cause and effect, so that the first check that is off names the
culprit: the cut, the isolation of documents, the shift of labels, the denominator of the loss, and then what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, PreTrainedModel, PrinterCallback, TrainerCallback

from longctx.attention.interface import NAME, longctx_attention
from longctx.data import IGNORE_INDEX
from longctx.forecast.model_sizes import ModelSizes
from longctx.layers.loss import token_losses
from longctx.model.recurrent import num_mixing_layers
from longctx.ranks.agreement import gather_objects, on_all_ranks
from longctx.recurrent.layers import recurrent_layers
from longctx.run import first_step_batches
from longctx.training.reference import check_reference_fits, documents_of, single_device_step
from longctx.training.trainer import SequenceTrainer
from longctx.upstream.deepspeed_internals import call_before_step, is_managed
from longctx.upstream.transformers_internals import supports_sdpa
from longctx.verify.report import Check, error_check

FP32_BOUND = 1e-5
"""Relative; the same sums in another order differ by about 1e-7."""

ROUNDING_FACTOR = 1.5
"""Times the error that one device has by rounding alone: in bf16, to fp32, and in the sum of a norm, to fp64."""

NEGLIGIBLE = 1e-3
"""A parameter's gradient is compared relative to its norm, or to this part of the whole norm where it is smaller."""

Gradients = Mapping[str, Tensor]
Batches = Sequence[Sequence[Mapping[str, Tensor]]]
"""Micro-batches of every data-parallel rank's step, uncut."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The step on one device. Only rank 0 has it."""

    loss: float
    grad_norm: float
    """Added up in fp64."""
    gradients: Gradients
    """Gradients on the CPU, by the parameter's name."""
    bounds: tuple[float, float, float]
    """Largest errors allowed of the loss, any parameter's gradient, and the norm."""


def check_parity(trainer: SequenceTrainer, sp: int) -> list[Check]:
    """Train one step and compare it with one device. All ranks call this together, before any other step.

    Args:
        trainer: with data for one step; without clipping.
        sp: ranks that are to share a sequence.

    Returns:
        The checks, on rank 0 complete.

    Raises:
        ValueError: if the GPU cannot hold the step on one device.
    """
    batches = [first_step_batches(trainer, dp_rank) for dp_rank in range(trainer.sequence.dims.dp)]
    on_all_ranks(lambda: _check_reference_fits(trainer, batches))
    reference = _reference(trainer, [batch for of_rank in batches for batch in of_rank])
    step = _Step(trainer, sp, batches, reference)
    trainer.add_callback(step)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    if reference is None:
        return step.checks
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    loss_bound, gradient_bound, norm_bound = reference.bounds

    def compared(name: str, logged: float, expected: float, bound: float) -> Check:
        return error_check(name, _relative(logged, expected), bound, f"{logged:.6f}, one device {expected:.6f}")

    name, worst = worst_gradient(step.errors, reference.gradients)
    detail = f"in {name}, of {len(step.errors)} parameters"
    return [
        *step.checks,
        compared("loss", logged["loss"], reference.loss, loss_bound),
        error_check("largest gradient error", worst, gradient_bound, detail),
        compared("gradient norm", logged["grad_norm"], reference.grad_norm, norm_bound),
    ]


class _Step(TrainerCallback):
    """Looks at the engine's model before the step, and at its gradients before they are used."""

    def __init__(self, trainer: SequenceTrainer, sp: int, batches: Batches, reference: Reference | None):
        self.trainer, self.sp, self.batches, self.reference = trainer, sp, batches, reference
        self.checks: list[Check] = []
        self.errors: dict[str, float] = {}
        """The error of every parameter's gradient, on rank 0."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = self.trainer.model_wrapped
        model.eval()
        with torch.no_grad():
            self.checks = probe(model, self.trainer, self.sp, self.batches)
        model.train()
        if self.trainer.is_deepspeed_enabled:  # its engine takes the step inside of backward
            call_before_step(model, lambda: self._compare_gradients(model.module))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.is_deepspeed_enabled:
            self._compare_gradients(self.trainer.model)

    def _compare_gradients(self, model: torch.nn.Module) -> None:
        """Compare the gradients, which are gathered one by one. All ranks call this together."""
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if is_managed(parameter):
                from deepspeed.utils import safe_get_full_grad

                gradient = safe_get_full_grad(parameter)
            else:
                gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            if self.reference is not None:
                expected = self.reference.gradients[name]
                found = torch.zeros_like(expected) if gradient is None else gradient.cpu().float()
                self.errors |= gradient_errors({name: found}, {name: expected}, self.reference.grad_norm)


def _reference(trainer: SequenceTrainer, batches: Sequence[Mapping[str, Tensor]]) -> Reference | None:
    """Return the reference on rank 0, with transformers' own attention; afterwards the model is as before."""
    if trainer.sequence.rank != 0:
        return None
    model: PreTrainedModel = trainer.model
    device, home = trainer.sequence.device, model.device
    on_device = [
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]
    model.to(device)
    model.set_attn_implementation("sdpa" if supports_sdpa(model) else "eager")

    def step(*, autocast: bool) -> tuple[float, float, Gradients]:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
            loss, norm = single_device_step(model, on_device, trainer.args.label_smoothing_factor)
        gradients = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).cpu().float()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        return loss, norm, gradients

    loss, summed_norm, gradients = step(autocast=False)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    # Engines add the norm up in fp32, in which torch's CPU kernel loses 4e-3 over 50M elements, on one device too.
    bounds = FP32_BOUND, FP32_BOUND, max(FP32_BOUND, ROUNDING_FACTOR * _relative(summed_norm, norm))
    if trainer.args.bf16:
        worst = ROUNDING_FACTOR * max(gradient_errors(step(autocast=True)[2], gradients, norm).values())
        bounds = worst, worst, worst  # loss and norm are single numbers, which may agree by chance
    model.zero_grad()
    model.set_attn_implementation(NAME)
    model.to(home)
    return Reference(loss=loss, grad_norm=norm, gradients=gradients, bounds=bounds)


def _check_reference_fits(trainer: SequenceTrainer, batches: Batches) -> None:
    """Check on rank 0, which runs the reference's step, that it fits one device."""
    device, model = trainer.sequence.device, trainer.model
    if trainer.sequence.rank != 0 or device.type != "cuda":
        return
    longest = max(len(ids) for of_rank in batches for batch in of_rank for ids, _ in documents_of(batch))
    free, _ = torch.cuda.mem_get_info(device)
    check_reference_fits(ModelSizes.of_model(model), longest, free, has_scores=not supports_sdpa(model))


def gradient_errors(actual: Gradients, expected: Gradients, expected_norm: float) -> dict[str, float]:
    """Return the error of each parameter's gradient, relative to the norm of the expected one.

    A norm below NEGLIGIBLE of the whole gradient's is replaced by that part of it.
    """
    return {
        name: float((actual[name] - gradient).double().norm())
        / max(float(gradient.double().norm()), NEGLIGIBLE * expected_norm)
        for name, gradient in expected.items()
    }


def worst_gradient(errors: Mapping[str, float], expected: Gradients) -> tuple[str, float]:
    """The parameter with the largest error, and the error: NaN is the largest, a gradient that is missing infinite."""
    if missing := sorted(expected.keys() - errors.keys()):
        return missing[0], math.inf
    name = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return name, errors[name]


def _relative(actual: float, expected: float) -> float:
    return abs(actual / expected - 1) if expected else abs(actual)


def probe(model: torch.nn.Module, trainer: SequenceTrainer, sp: int, batches: Batches) -> list[Check]:
    """Check each place where errors would arise, on the first micro-batch. All ranks call this together.

    Args:
        model: as the engine has it.
        sp: ranks that are to share a sequence.
        batches: of the step.
    """
    dims = trainer.sequence.dims
    batch = batches[dims.dp_rank(trainer.sequence.rank)][0]
    documents = documents_of(batch)
    with _recorded_attention(model) as lengths:
        shard = trainer.sequence.shard(batch)
        logits = model(**shard.inputs).logits
    found = gather_objects(
        [
            _check_lengths(lengths, logits, batch["input_ids"].numel() // sp, trainer),
            _check_isolation(model, trainer, batch, documents, logits),
            _check_labels(trainer, shard, documents),
            _check_denominator(trainer, shard, logits, batches),
        ]
    )
    off = {  # the first rank's
        check.name: replace(check, detail=f"rank {rank}: {check.detail}")
        for rank, checks in reversed(list(enumerate(found)))
        for check in checks
        if not check.ok
    }
    return [off.get(check.name, check) for check in found[0]]


@contextmanager
def _recorded_attention(model: torch.nn.Module) -> Iterator[list[int]]:
    """Record how many tokens each attention layer, linear or not, sees on this rank in each call."""
    lengths: list[int] = []

    def recorded(module: torch.nn.Module, query: Tensor, *args: Any, **kwargs: Any):
        lengths.append(query.shape[2])
        return longctx_attention(module, query, *args, **kwargs)

    def recorded_linear(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        lengths.append((*args, kwargs.get("hidden_states"))[0].shape[1])

    AttentionInterface.register(NAME, recorded)
    hooks = [layer.register_forward_pre_hook(recorded_linear, with_kwargs=True) for layer in recurrent_layers(model)]
    try:
        yield lengths
    finally:
        AttentionInterface.register(NAME, longctx_attention)
        for hook in hooks:
            hook.remove()


def _check_lengths(lengths: list[int], logits: Tensor, expected: int, trainer: SequenceTrainer) -> Check:
    layers = num_mixing_layers(trainer.model.config)
    seen = sorted(set(lengths)) or [0]
    ok = len(lengths) == layers and seen == [expected] and logits.shape[:2] == (1, expected)
    detail = f"tokens of the sequence that a rank has in attention, in each of {layers} layers"
    if not ok:
        detail = (
            f"attention ran {len(lengths)} times in {layers} layers, on {' and '.join(map(str, seen))} tokens, and the "
            f"output has shape {tuple(logits.shape)}: the sequence is not cut into sp equal shards"
        )
    return Check("shard length", " and ".join(f"{length:,}" for length in seen), f"{expected:,}", ok, detail)


def _check_isolation(
    model: torch.nn.Module,
    trainer: SequenceTrainer,
    batch: Mapping[str, Tensor],
    documents: Sequence[tuple[Tensor, Tensor]],
    logits: Tensor,
) -> Check:
    """Change the first token of the longest document but the last: which documents' outputs change, bit for bit?"""
    sequence = trainer.sequence
    bounds = [0, *accumulate(len(ids) for ids, _ in documents)]
    changed = max(range(max(len(documents) - 1, 1)), key=lambda i: len(documents[i][0]))
    input_ids = batch["input_ids"].clone()
    token = input_ids.view(-1)[bounds[changed] : bounds[changed] + 1]
    token.copy_(torch.where(token > 0, token - 1, token + 1))
    shard = sequence.shard({**batch, "input_ids": input_ids})
    before = sequence.unshard(logits, shard.layout).flatten(0, 1)
    after = sequence.unshard(model(**shard.inputs).logits, shard.layout).flatten(0, 1)
    different = [i for i, (a, b) in enumerate(pairwise(bounds)) if not torch.equal(before[a:b], after[a:b])]
    ok = different == [changed]
    detail = f"documents whose outputs change with a token of document {changed}, of {len(documents)}"
    if not ok:
        detail = (
            f"a changed token of document {changed} changes the outputs of "
            f"{'documents ' + ', '.join(map(str, different)) if different else 'none'}: packed documents are not "
            "isolated, and a model learns from others' text"
        )
    shown = ", ".join(map(str, different[:4])) + "…" * (len(different) > 4)
    return Check("document isolation", shown, str(changed), ok, detail)


def _check_labels(trainer: SequenceTrainer, shard: Any, documents: Sequence[tuple[Tensor, Tensor]]) -> Check:
    """Check that each token's target is the token that follows it in its document."""
    expected = torch.cat([F.pad(labels[1:], (0, 1), value=IGNORE_INDEX) for _, labels in documents])
    actual = trainer.sequence.unshard(shard.shift_labels, shard.layout).flatten().cpu()
    wrong = int((actual != expected).sum())
    detail = "tokens whose target is not the next token of their document"
    if wrong:
        at = int((actual != expected).nonzero()[0])
        detail = (
            f"token {at} has target {int(actual[at])} and the next token of its document is {int(expected[at])}: "
            "labels are not shifted by one within each document"
        )
    return Check("label shift", str(wrong), "0", not wrong, detail)


def _check_denominator(trainer: SequenceTrainer, shard: Any, logits: Tensor, batches: Batches) -> Check:
    """Is the mean over ranks of a micro-batch's loss the sum of its token losses over the step's label tokens?"""
    sequence = trainer.sequence
    own = batches[sequence.dims.dp_rank(sequence.rank)]
    expected_count = sum(
        int((labels[1:] != IGNORE_INDEX).sum()) for of_rank in batches for b in of_rank for _, labels in documents_of(b)
    )
    count = sequence.count_label_tokens(own)
    summed = F.cross_entropy(
        logits.flatten(0, 1).double(), shard.shift_labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    share = sequence.label_loss(token_losses(logits, shard.shift_labels), count).double()
    if dist.is_initialized():
        dist.all_reduce(summed)
        dist.all_reduce(share)
    denominator = float(summed) / (float(share) / sequence.dims.world_size) if float(share) else float("nan")
    error = _relative(denominator, expected_count)
    detail = f"the step's loss is divided by {expected_count:,} label tokens"
    if not error <= FP32_BOUND:
        detail = (
            f"the loss is divided by {denominator:,.1f} where the step has {expected_count:,} label tokens: "
            "it must be a sum over all ranks and micro-batches, divided once by their number"
        )
    return error_check("loss denominator", error, FP32_BOUND, detail)
