"""Gradients against the loss itself: no reference model, no formula of a backward pass.

Each rank's backward pass has parts that autograd cannot check: messages, merges of blocks, tiles, chunks in host
memory. Here all parameters move a small step along a random direction, forward and back. The change of the loss over
all ranks has to be what the gradients, averaged over all ranks as FSDP and ZeRO do, say it is. A missing reduction, a
factor of sp or dp, or a transposed exchange that is left out changes one side alone.

Type checkers for distributed gradients do not show this: they trust the declared types of hand-written functions,
whose backward passes they never run.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from longctx import parallelize
from longctx.collate import SequenceCollator
from tests.matrix import TRAINED_MODELS
from tests.workers import run_ranks

STEP = 2e-6
"""The distance that every parameter moves, times a standard normal number. A central difference errs by the third
derivative times its square, about 1e-7 here (3e-4 with a step of 1e-4), and fp64 rounding adds 1e-15 / 2e-6."""
TOLERANCE = 2e-6

CASES = {
    "ulysses, dp 2": ("GQA", {"sp": 2, "sp_backend": "ulysses"}),
    "ulysses, fewer key/value heads than ranks": ("GQA", {"sp": 4, "sp_backend": "ulysses"}),
    "ulysses, a head at a time": ("GQA", {"sp": 2, "sp_backend": "ulysses", "heads_k_stride": 1}),
    "ulysses, layers in chunks": ("GQA", {"sp": 2, "sp_backend": "ulysses", "sequence_chunk_size": 7}),
    "ulysses, sinks": ("sinks", {"sp": 2, "sp_backend": "ulysses"}),
    "ring": ("GQA", {"sp": 4, "sp_backend": "ring"}),
    "ring, dp 2, tiled MLP": ("MHA", {"sp": 2, "sp_backend": "ring", "tiled_mlp_num_shards": 3}),
    "ring, windows": ("windows", {"sp": 4, "sp_backend": "ring"}),
    "ring, sinks and windows": ("sinks", {"sp": 2, "sp_backend": "ring"}),
    "gather, a head at a time": ("GQA", {"sp": 4, "sp_backend": "gather", "heads_k_stride": 1}),
    "hybrid": ("GQA", {"sp": 4, "sp_backend": "hybrid"}),
    "one device a sequence": ("MHA", {"sp": 1}),
}


@pytest.fixture(scope="module")
def errors():
    """Relative errors of the directional derivatives by (case, loss), the same on every rank."""
    return run_ranks(4, "tests.training.test_adjoint:all_cases")[0]


@pytest.mark.parametrize("loss", ["mean over label tokens", "weighted log-probabilities"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_loss(errors, case, loss):
    assert errors[case, loss] < TOLERANCE


def all_cases():
    """On every rank: the errors of all cases."""
    return {
        (case, name): _error(*CASES[case], loss)
        for case in CASES
        for name, loss in (("mean over label tokens", _mean_loss), ("weighted log-probabilities", _weighted_loss))
    }


def _error(name, options, loss_of):
    model, sequence = parallelize(_model(name), **options)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]

    def loss():
        value = loss_of(model, sequence)
        whole = value.detach().clone()
        dist.all_reduce(whole)
        return value, whole / dist.get_world_size()

    loss()[0].backward()
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), directions, strict=True))
    dist.all_reduce(slope)
    ends = []
    with torch.no_grad():
        for distance in (STEP, -2 * STEP):
            for p, d in zip(model.parameters(), directions, strict=True):
                p += distance * d
            ends.append(loss()[1])
    expected = float(ends[0] - ends[1]) / (2 * STEP)
    return abs(float(slope) / dist.get_world_size() / expected - 1)


def _mean_loss(model, sequence):
    """As the trainer has it: this rank's share, over documents of unequal length on data-parallel ranks."""
    batch = _batch(sequence)
    shard = sequence.shard(batch)
    outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True, label_smoothing=0.1)
    return sequence.reduce(outputs.losses, sequence.count_label_tokens([batch]))


def _weighted_loss(model, sequence):
    """As preference losses have it: a non-linear function of all tokens, the same on every rank of a sequence."""
    log_probs = sequence.log_probs(model, _batch(sequence))
    return (log_probs.cumsum(-1).tanh() * torch.linspace(-1, 1, log_probs.shape[-1])).sum()


def _batch(sequence):
    """Three documents and padding; another batch on every data-parallel rank."""
    seed = sequence.dims.dp_rank(sequence.rank)
    generator = torch.Generator().manual_seed(seed)
    lengths = (30, 1, 20 + 5 * seed)
    documents = [{"input_ids": torch.randint(256, (n,), generator=generator).tolist()} for n in lengths]
    collate = SequenceCollator(pad_token_id=257, pad_to_multiple_of=sequence.dims.multiple, padding_free=True)
    return collate(documents)


def _model(name):
    """In fp64 throughout: the norms of transformers round to fp32, which a difference of losses would show."""
    kind, values = TRAINED_MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values)
    config._experts_implementation = "eager"  # torch's grouped products have no fp64
    model = AutoModelForCausalLM.from_config(config).double()
    for module in list(model.modules()):
        for child, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(module, child, nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64))
    return model
