"""Every model type of the allow-list against stock transformers, which sees one document at a time."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing
from trl.trainer.utils import add_fused_lm_head

from longctx import parallelize
from longctx.attention.support import FULL_CAUSAL_MODELS
from tests.workers import run_ranks

LENGTHS = [9, 1, 14, 5, 3]  # 32 tokens: no padding for 2 ranks
TOLERANCE = 1e-5  # fp32; sums of a few hundred terms in another order. Measured: at most 2e-6.
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = dict.fromkeys(FULL_CAUSAL_MODELS, SMALL) | {
    "exaone4": SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    "gemma": SMALL | {"head_dim": 16},
    "helium": SMALL | {"head_dim": 8},
    "hunyuan_v1_dense": SMALL | {"head_dim": 8},
    "mistral": SMALL | {"sliding_window": None},
    "qwen3": SMALL | {"head_dim": 16},
    "seed_oss": SMALL | {"attention_dropout": 0.0, "residual_dropout": 0.0},
}


def make_model(model_type: str) -> PreTrainedModel:
    """Two random layers, the same on every rank; biases and norms are noisy too, so that each of them counts."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**FAMILIES[model_type])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def make_batch() -> dict[str, torch.Tensor]:
    """Five packed documents; the labels of the first tokens of the third are masked."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, 64, (1, sum(LENGTHS)), generator=generator)
    labels = input_ids.clone()
    labels[:, 10:16] = -100
    position_ids = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def stock_step(model: PreTrainedModel):
    """The reference: logits [1, S, V], mean loss and its gradients, each document a forward pass of its own."""
    batch = make_batch()
    logits, total, count = [], torch.zeros(()), 0
    for end, length in zip(accumulate(LENGTHS), LENGTHS, strict=True):
        document = slice(end - length, end)
        output = model(input_ids=batch["input_ids"][:, document], use_cache=False).logits
        targets = batch["labels"][0, document][1:]
        total = total + F.cross_entropy(output[0, :-1], targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
        logits.append(output)
    (total / count).backward()
    return torch.cat(logits, dim=1).detach(), (total / count).detach(), gradients(model)


def largest_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over all parameters, relative to each gradient's norm, or to 1e-3 of all where it vanishes (a bias of keys)."""
    assert actual.keys() == expected.keys()
    total = torch.nn.utils.get_total_norm(expected.values())
    return max(float((actual[n] - e).norm() / e.norm().clamp(min=1e-3 * total)) for n, e in expected.items())


def sharded_step(model_type: str, sp: int, backend: str) -> dict[str, float]:
    """Relative errors of logits, loss and gradients on this rank against `stock_step`."""
    model, batch = make_model(model_type), make_batch()
    expected_logits, expected_loss, expected_gradients = stock_step(model)
    model, sequence = parallelize(model, sp, sp_backend=backend)
    shard = sequence.shard(batch)
    logits = model(**shard.inputs).logits
    assert logits.shape[1] == sum(LENGTHS) // sp
    assert shard.context.calls == model.config.num_hidden_layers
    loss = sequence.loss(logits, shard.shift_labels, sequence.count_label_tokens([batch]))
    loss.backward()
    mean_loss = loss.detach().clone()
    actual_gradients = gradients(model)
    if sp > 1:  # the mean over ranks, as data-parallel engines take it
        for value in (mean_loss, *actual_gradients.values()):
            dist.all_reduce(value)
            value /= dist.get_world_size()
    whole = sequence.unshard(logits.detach(), shard.layout)
    return {
        "logits": float((whole - expected_logits).norm() / expected_logits.norm()),
        "loss": float((mean_loss / expected_loss - 1).abs()),
        "gradients": largest_error(actual_gradients, expected_gradients),
    }


@pytest.mark.parametrize("model_type", FULL_CAUSAL_MODELS)
def test_packed_documents_equal_stock_transformers(model_type):
    errors = sharded_step(model_type, 1, "auto")
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("model_type", FULL_CAUSAL_MODELS)
def test_fused_head_of_the_trainer_equals_stock_transformers(model_type):
    """The trainer's loss comes from TRL's fused LM head, which must know every family's scaling of the logits."""
    model, batch = make_model(model_type), make_batch()
    _, expected_loss, expected_gradients = stock_step(model)
    model, sequence = parallelize(model, 1)
    add_fused_lm_head(model)
    shard = sequence.shard(batch)
    output = model(**shard.inputs, shift_labels=shard.shift_labels, fused_lm_head=True)
    loss = sequence.reduce(-output.log_probs, sequence.count_label_tokens([batch]))
    loss.backward()
    assert float((loss.detach() / expected_loss - 1).abs()) <= TOLERANCE
    assert largest_error(gradients(model), expected_gradients) <= TOLERANCE


def all_families() -> dict[tuple[str, str], dict[str, float]]:
    """Every family and backend on one process group."""
    return {
        (model_type, backend): sharded_step(model_type, dist.get_world_size(), backend)
        for model_type in FULL_CAUSAL_MODELS
        for backend in ("ring", "ulysses")
    }


def test_two_ranks_equal_stock_transformers():
    for results in run_ranks(2, f"{__name__}:all_families"):
        assert len(results) == 2 * len(FULL_CAUSAL_MODELS)
        wrong = {case: errors for case, errors in results.items() if not max(errors.values()) <= TOLERANCE}
        assert not wrong


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # its older name works everywhere
@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, {"use_reentrant": False}, {"selective": True}], ids=str)
def test_gradient_checkpointing_changes_nothing(kwargs):
    """What --gradient_checkpointing_kwargs can ask for; `selective` is TRL's."""
    model, batch = make_model("llama"), make_batch()
    _, expected_loss, expected_gradients = stock_step(model)
    model, sequence = parallelize(model, 1)
    if kwargs.pop("selective", False):
        enable_selective_activation_checkpointing(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None)
    model.enable_input_require_grads()
    shard = sequence.shard(batch)
    logits = model(**shard.inputs).logits
    loss = sequence.loss(logits, shard.shift_labels, sequence.count_label_tokens([batch]))
    loss.backward()
    assert shard.context.calls > model.config.num_hidden_layers  # attention ran again in the backward pass
    assert float((loss.detach() / expected_loss - 1).abs()) <= TOLERANCE
    assert largest_error(gradients(model), expected_gradients) <= TOLERANCE
