"""`sequence.log_probs` and `document_log_probs` against one process that runs stock attention, a document at a time.

In fp64, though transformers' norms and rotary embeddings round to fp32 inside: a sum in another order can turn that
rounding by a unit in the last place, 6e-8. A gradient that is a factor of sp off, or misses a rank's tokens, is off by
half of itself.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import longctx
from longctx.collate import SequenceCollator
from longctx.model.tiny import tiny_model
from tests.workers import run_ranks

LENGTHS = [40, 3, 101, 1, 17, 64]
TOLERANCE = 1e-6  # measured: at most 1e-7
LEARNING_RATE, STEPS = 1.0, 3
CASES = [
    *((backend, sp, True) for backend, sp in (("ring", 4), ("gather", 4), ("ulysses", 4), ("hybrid", 4), ("ring", 2))),
    *((backend, sp, False) for backend, sp in (("hybrid", 4), ("ring", 2))),
]
ENGINES = {"fsdp2": "ring", "deepspeed": "ulysses"}


def make_documents(seed):
    """(input_ids, labels); the front of each is not learnt."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in LENGTHS:
        ids = rng.integers(3, 250, length)
        documents.append({"input_ids": ids, "labels": np.where(np.arange(length) < length // 3, -100, ids)})
    return documents


def preference_loss(document_sums):
    """Of neighbouring documents; not linear, so that a sum that is a factor off gives another gradient."""
    first, second = document_sums[: len(LENGTHS)].view(-1, 2).unbind(1)
    return -F.logsigmoid(0.1 * (first - second)).mean()


def mixed_loss(log_probs, document_sums):
    """Of sums over documents, and of every token for itself."""
    return preference_loss(document_sums) + (log_probs * torch.linspace(-0.01, 0.02, len(log_probs))).sum().exp()


def dense_log_probs(model, documents):
    """Tokens [T] and documents [n], from stock transformers on each document alone."""
    tokens = []
    for document in documents:
        ids, labels = (torch.tensor(document[name]) for name in ("input_ids", "labels"))
        every = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        targets = labels[1:].clamp(min=0)
        of_labels = every.gather(-1, targets[:, None])[:, 0] * (labels[1:] != -100)
        tokens.append(F.pad(of_labels, (1, 0)))
    return torch.cat(tokens), torch.stack([document.sum() for document in tokens])


def dense_model(dtype=torch.float64):
    model = tiny_model(dtype)
    model.set_attn_implementation("sdpa")
    return model


def make_batch(sequence, documents, packed):
    collator = SequenceCollator(pad_token_id=0, pad_to_multiple_of=sequence.dims.multiple, padding_free=packed)
    return collator(documents)


def flat_gradient(model):
    """Averaged over all ranks, as an engine does."""
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def of_every_backend():
    """{case: (loss, gradient of the mean over data-parallel ranks, log-probs of the documents' tokens)}."""
    results = {}
    for backend, sp, packed in CASES:
        model, sequence = longctx.parallelize(tiny_model(torch.float64), sp=sp, sp_backend=backend)
        documents = make_documents(sequence.dims.dp_rank(dist.get_rank()))
        batch = make_batch(sequence, documents, packed)
        sums = sequence.document_log_probs(model, batch)
        assert len(sums) == len(LENGTHS) + (packed and 226 % sequence.dims.multiple > 0)
        log_probs = sequence.log_probs(model, batch)
        if packed:
            tokens = log_probs[0, : sum(LENGTHS)]
        else:
            assert not log_probs[batch["attention_mask"] == 0].any()
            tokens = log_probs[batch["attention_mask"].bool()]
        loss = mixed_loss(tokens, sums)
        loss.backward()
        with torch.no_grad():
            shard, mine = sequence.shard(batch), sequence.log_probs(model, batch, gather=False)
            assert not sequence.log_probs(model, batch).requires_grad
        assert mine.shape == shard.shift_labels.shape
        assert torch.equal(mine != 0, shard.shift_labels != -100)
        sum_of_shards = mine.sum()
        dist.all_reduce(sum_of_shards, group=sequence.groups.sequence)
        torch.testing.assert_close(sum_of_shards, tokens.sum().detach(), rtol=1e-9, atol=0)
        results[backend, sp, packed] = loss.item(), flat_gradient(model), tokens.detach()
    return results


def wrapped(engine, model):
    """(the model to call, backward, step): plain SGD, which a wrong scale of the gradient shows in."""
    if engine == "deepspeed":
        import deepspeed

        from longctx.upstream.deepspeed_internals import start_deepspeed_on_gloo, stay_on_cpu

        stay_on_cpu()
        start_deepspeed_on_gloo()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        config |= {"gradient_clipping": 0.0}  # 1.0 otherwise
        zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return zero, zero.backward, zero.step
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return model, torch.Tensor.backward, step


def steps_of(engine):
    """The losses of a few steps of plain SGD on preferences, sp 2 × dp 2, this rank's and the last one's too."""
    model, sequence = longctx.parallelize(tiny_model(), sp=2, sp_backend=ENGINES[engine])
    model, backward, step = wrapped(engine, model)
    losses = []
    for number in range(STEPS):
        batch = make_batch(sequence, make_documents(2 * number + sequence.dims.dp_rank(dist.get_rank())), True)
        loss = preference_loss(sequence.document_log_probs(model, batch))
        losses.append(loss.item())
        backward(loss)
        step()
    return losses


def of_everything():
    return of_every_backend(), {engine: steps_of(engine) for engine in ENGINES}


@pytest.fixture(scope="module")
def ranks():
    """What every rank of one group of four found."""
    return run_ranks(4, f"{__name__}:of_everything")


def test_log_probs_and_their_gradients_are_those_of_one_process(ranks, parity_table):
    expected = {}
    for dp in (1, 2):
        model, losses = dense_model(), []
        for dp_rank in range(dp):
            log_probs, sums = dense_log_probs(model, make_documents(dp_rank))
            loss = mixed_loss(log_probs, sums)
            (loss / dp).backward()
            losses.append((loss.item(), log_probs.detach()))
        expected[dp] = losses, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for rank, (results, _) in enumerate(ranks):
        for (backend, sp, packed), (loss, gradient, log_probs) in results.items():
            losses, reference = expected[4 // sp]
            one_loss, tokens = losses[rank // sp]
            error = float((gradient - reference).norm() / reference.norm())
            if rank == 0:
                case = f"log-probs, {backend} sp {sp}, {'packed' if packed else 'padded'}"
                parity_table.append((case, "torchrun", abs(loss / one_loss - 1), error, 0.0))
            torch.testing.assert_close(log_probs, tokens, rtol=TOLERANCE, atol=TOLERANCE)
            assert loss == pytest.approx(one_loss, rel=TOLERANCE)
            assert error <= TOLERANCE


@pytest.mark.parametrize("engine", ENGINES)
def test_steps_on_an_engine_are_those_of_one_process(engine, ranks):
    """Three steps, as a step that a wrong scale makes larger or smaller shows in the losses of the next."""
    model, expected = dense_model(torch.float32), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for number in range(STEPS):
        losses = [
            preference_loss(dense_log_probs(model, make_documents(2 * number + dp_rank))[1]) for dp_rank in range(2)
        ]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
        expected.append([loss.item() for loss in losses])
    untrained = preference_loss(dense_log_probs(dense_model(torch.float32), make_documents(2 * STEPS - 2))[1]).item()
    assert abs(expected[-1][0] / untrained - 1) > 1e-2  # the steps move the loss
    for rank, (_, steps) in enumerate(ranks):
        assert steps[engine] == pytest.approx([both[rank // 2] for both in expected], rel=1e-5)  # fp32


def test_a_wrapper_that_rounds_log_probs_is_refused():
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    batch = make_batch(sequence, make_documents(0), True)

    def rounding(**inputs):
        outputs = model(**inputs)
        return outputs._replace(losses=outputs.losses.bfloat16())

    with pytest.raises(ValueError, match="output_dtype"):
        sequence.log_probs(rounding, batch)
