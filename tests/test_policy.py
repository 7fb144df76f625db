"""`sequence.policy_loss` on four processes, packed and padded, against TRL's GRPOTrainer on one, with one batch.

TRL computes its loss with its own code, from log-probabilities of stock attention on each document alone. In fp64, as
in tests/layers/test_log_probs.py, with its tolerance.
"""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import longctx
from longctx.collate import SequenceCollator
from longctx.model.tiny import tiny_model
from longctx.policy import PolicyLoss
from tests.layers.test_log_probs import ENGINES, LEARNING_RATE, TOLERANCE, dense_model, flat_gradient, wrapped
from tests.layers.test_routers import COEFFICIENT, save_model
from tests.workers import run_ranks

PROMPTS = [30, 2, 55, 7, 20, 11, 40, 3]
ANSWERS = [40, 3, 66, 1, 17, 64, 20, 31]
GROUPS = [7, 7, 7, 3, 3, 5, 5, 5]
"""Groups, which the deal to ranks and micro-batches cuts in two."""
STEPS = 3

OPTIONS = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo", "beta": 0.04, "delta": 1.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1, "temperature": 0.7},
    "sapo": {"loss_type": "sapo", "beta": 0.1, "use_bias_correction_kl": False},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 70},
}
LAYOUTS = [("ring", 4, True), ("ulysses", 2, True), ("hybrid", 4, False), ("gather", 2, False)]
CASES = [(name, LAYOUTS[number % 2]) for number, name in enumerate(OPTIONS)]
CASES += [("gspo", LAYOUTS[2]), ("grpo", LAYOUTS[3])]


def make_answers():
    """Return the answers of one step as records, with old and reference log-probabilities of their tokens."""
    rng = np.random.default_rng(0)
    records = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = rng.integers(3, 250, prompt + answer)
        labels = np.where(np.arange(len(ids)) < prompt, -100, ids)
        if answer > 60:  # what a tool returned
            labels[prompt + 20 : prompt + 30] = -100
        record = {"input_ids": ids, "labels": labels, "advantage": rng.normal()}
        record |= {name: rng.normal(0, 0.2, len(ids)) * (labels != -100) for name in ("old", "ref")}
        records.append(record | {"ratio": rng.uniform(0.5, 2, len(ids))})
    return records


def dealt(records, dims, rank, *, at_once):
    """The answers of a data-parallel rank, in two micro-batches of unequal numbers or in one."""
    mine = list(np.array_split(np.arange(len(records)), dims.dp)[dims.dp_rank(rank)])
    return [mine] if at_once else [mine[:1], mine[1:]]


def placed(batch, values):
    """Values of documents' tokens at their places in a batch, [B, S]."""
    result = torch.zeros(batch["input_ids"].shape, dtype=torch.float64)
    if batch["input_ids"].shape[0] == 1:
        flat = np.concatenate(values)
        result[0, : len(flat)] = torch.from_numpy(flat)
    else:
        for row, of_document in zip(result, values, strict=True):
            row[: len(of_document)] = torch.from_numpy(of_document)
    return result


def step_of(sequence, model, records, options, packed, backward=torch.Tensor.backward, *, at_once=False):
    """The loss of one step and, for each micro-batch, what else is returned."""
    policy = PolicyLoss(**options)
    collate = SequenceCollator(pad_token_id=0, pad_to_multiple_of=sequence.dims.multiple, padding_free=packed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    dealing = dealt(records, sequence.dims, rank, at_once=at_once)
    batches = [collate([records[number] for number in numbers]) for numbers in dealing]
    groups = [torch.tensor([GROUPS[number] for number in numbers]) for numbers in dealing]
    counts = sequence.count_policy_step(batches, groups)
    loss, outputs = 0.0, []
    for numbers, batch, its_groups in zip(dealing, batches, groups, strict=True):
        with torch.no_grad():
            now = sequence.log_probs(model, batch, temperature=policy.temperature)
        mine = [records[number] for number in numbers]
        values = {name: placed(batch, [record[name] for record in mine]) for name in ("old", "ref", "ratio")}
        result = sequence.policy_loss(
            model,
            batch,
            torch.tensor([record["advantage"] for record in mine]),
            now + values["old"].to(now),
            counts=counts,
            policy=policy,
            ref_log_probs=now + values["ref"].to(now) if policy.beta else None,
            importance_sampling_ratio=values["ratio"] if policy.loss_type == "dapo" else None,
            groups=its_groups,
        )
        backward(result.loss)
        loss += result.loss.detach()
        outputs.append(result)
    if dist.is_initialized():
        dist.all_reduce(loss)
    return loss.item() / sequence.dims.world_size, counts, outputs


def of_every_case(cases):
    """{case: (loss, gradient, measures of the last micro-batch)}."""
    results = {}
    for name, (backend, sp, packed) in cases:
        model, sequence = longctx.parallelize(tiny_model(torch.float64), sp=sp, sp_backend=backend)
        loss, counts, outputs = step_of(sequence, model, make_answers(), OPTIONS[name], packed)
        assert counts.tokens == sum(ANSWERS) - 20
        assert counts.sequences == len(ANSWERS)
        assert counts.group_tokens == {3: 18, 5: 105, 7: 99}
        results[name, (backend, sp, packed)] = loss, flat_gradient(model), outputs[-1]
    return results


def dense_measures(model, record, temperature=1.0):
    """Log-probabilities and entropies of an answer's document, [n − 1], from stock transformers.

    TRL divides the logits by the temperature in the method that this stands for.
    """
    ids = torch.from_numpy(record["input_ids"])
    every = (model(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
    return every.gather(-1, ids[1:, None])[:, 0], -(every.exp() * every).sum(-1)


class Accelerator(SimpleNamespace):
    def gather(self, values):
        return values

    def reduce(self, values, reduction):
        return values


def loss_of_trl(model, records, options):
    """GRPOTrainer's `_compute_loss` of all answers in one batch, whose log-probabilities are dense."""
    from collections import defaultdict

    from trl import GRPOConfig, GRPOTrainer

    policy = PolicyLoss(**options)
    measures = [dense_measures(model, record, policy.temperature) for record in records]
    width = max(len(record["labels"]) for record in records) - 1

    def padded(rows):
        return torch.stack([F.pad(torch.as_tensor(row), (0, width - len(row))) for row in rows])

    logps, entropies = (padded(part) for part in zip(*measures, strict=True))
    mask = padded([(record["labels"][1:] != -100).astype(np.int64) for record in records])
    shift = {name: padded([record[name][1:] for record in records]) for name in ("old", "ref", "ratio")}
    args = GRPOConfig(use_cpu=True, bf16=False, report_to="none", **options)
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(num_processes=1),
        _metrics={"train": defaultdict(list)},
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=policy.loss_type == "dapo",
        vllm_importance_sampling_correction=True,
        epsilon_low=args.epsilon,
        epsilon_high=high,
        max_completion_length=args.max_completion_length,
        _entropy_bonus_enabled=False,
        **{name: getattr(args, name) for name in ("importance_sampling_level", "beta", "loss_type")},
    )
    trainer.args.steps_per_generation = 1
    empty = torch.zeros(len(records), 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": torch.tensor([record["advantage"] for record in records]),
        "old_per_token_logps": logps.detach() + shift["old"],
        "ref_per_token_logps": logps.detach() + shift["ref"],
        "importance_sampling_ratio": shift["ratio"],
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.fixture(scope="module")
def expected():
    """{name: (loss, gradient)} of TRL."""
    results = {}
    for name, options in OPTIONS.items():
        model = dense_model()
        loss = loss_of_trl(model, make_answers(), options)
        loss.backward()
        results[name] = loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return results


@pytest.fixture(scope="module")
def results():
    return run_ranks(4, f"{__name__}:of_every_case", CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_is_that_of_trl(case, results, expected):
    loss, gradient = expected[case[0]]
    for of_rank in results:
        assert of_rank[case][0] == pytest.approx(loss, rel=TOLERANCE)
        assert (of_rank[case][1] - gradient).norm() <= TOLERANCE * gradient.norm()


def test_measures_are_those_of_the_dense_model(results):
    case = ("grpo", ("gather", 2, False))
    records, outputs = make_answers()[1:4], results[0][case][2]
    model = dense_model()
    for row, record in enumerate(records):
        learnt = torch.from_numpy(record["labels"][1:] != -100)
        with torch.no_grad():
            log_probs, entropy = (values * learnt for values in dense_measures(model, record))
        length = len(learnt) + 1
        torch.testing.assert_close(outputs.log_probs[row, 1:length], log_probs, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(outputs.entropy[row, 1:length], entropy, rtol=TOLERANCE, atol=TOLERANCE)
        difference = torch.from_numpy(record["ref"][1:])
        kl = (difference.exp() - difference - 1) * learnt
        torch.testing.assert_close(outputs.kl[row, 1:length], kl, rtol=TOLERANCE, atol=TOLERANCE)
        ratio = torch.from_numpy(-record["old"][1:]).exp()
        low = (ratio < 0.8) & (record["advantage"] < 0) & learnt
        high = (ratio > 1.2) & (record["advantage"] > 0) & learnt
        assert torch.equal(outputs.clipped[row, 1:length], high.double() - low.double())
        assert not any(outputs[field][row, length:].any() for field in range(1, 5))
    measures = outputs.log_probs, outputs.entropy, outputs.kl, outputs.clipped
    assert [part.requires_grad for part in (outputs.loss, *measures)] == [True, False, False, False, False]


def test_defaults_are_those_of_trl():
    """But for `max_completion_length`, which has to be named where it is a divisor."""
    from trl import GRPOConfig

    theirs = {field.name: field.default for field in fields(GRPOConfig)}
    ours = {field.name: field.default for field in fields(PolicyLoss) if field.name in theirs}
    assert len(ours) == len(fields(PolicyLoss)) - 1  # normalization
    assert {name: theirs[name] for name in ours} == ours | {"max_completion_length": 512}


def test_advantages_of_tokens_and_current_log_probs():
    """A document's advantage for each of its tokens, and the model's own log-probabilities, are what is left out."""
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    records = make_answers()
    batch = SequenceCollator(0, 64, padding_free=True)(records)
    counts, values = sequence.count_policy_step([batch]), [record["advantage"] for record in records]
    of_tokens = placed(batch, [np.full(len(r["labels"]), value) for r, value in zip(records, values, strict=True)])
    with torch.no_grad():
        now = sequence.log_probs(model, batch)
    losses = [
        sequence.policy_loss(model, batch, *given, counts=counts).loss
        for given in ([torch.tensor(values)], [torch.tensor(values), now], [of_tokens])
    ]
    assert [float(loss) for loss in losses] == pytest.approx([float(losses[0])] * 3, rel=1e-6)


def test_group_normalization_is_the_mean_over_groups():
    model, sequence = longctx.parallelize(tiny_model(torch.float64), sp=1)
    records = make_answers()
    loss, _, _ = step_of(sequence, model, records, {"normalization": "group"}, True)
    of_groups = {group: [] for group in GROUPS}
    for record, group in zip(records, GROUPS, strict=True):
        ratio, advantage = np.exp(-record["old"]), record["advantage"]
        losses = -np.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage) * record["ratio"]
        of_groups[group] += list(losses[record["labels"] != -100])
    assert loss == pytest.approx(np.mean([np.mean(losses) for losses in of_groups.values()]), rel=TOLERANCE)


def scores_of_steps(sequence, model, backward, step):
    """Sums of the log-probabilities of all answers in steps of plain SGD, whose loss compares each with itself."""
    scores = []
    for _ in range(STEPS):
        outputs = step_of(sequence, model, make_answers(), {"loss_type": "grpo"}, True, backward, at_once=True)[2]
        score = outputs[0].log_probs.double().sum()
        if dist.is_initialized():
            dist.all_reduce(score)
        scores.append(score.item() / sequence.dims.sp)
        step()
    return scores


def steps_of(engine):
    """At sp 2 × dp 2 on an engine."""
    model, sequence = longctx.parallelize(tiny_model(), sp=2, sp_backend=ENGINES[engine])
    return scores_of_steps(sequence, *wrapped(engine, model))


def steps_of_one_process():
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return scores_of_steps(sequence, model, torch.Tensor.backward, step)


@pytest.mark.parametrize("engine", [pytest.param("fsdp2", marks=pytest.mark.long), "deepspeed"])
def test_an_engine_takes_the_steps_of_one_process(engine):
    """On FSDP2 with a ring, and on ZeRO-3 with Ulysses. fp32: sums in another order."""
    expected = steps_of_one_process()
    assert abs(expected[-1] - expected[0]) > 1e-3 * abs(expected[0])
    for scores in run_ranks(4, f"{__name__}:steps_of", engine):
        assert scores == pytest.approx(expected, rel=1e-6)


def test_another_answer_on_a_rank_of_the_group_is_refused():
    for message in run_ranks(2, f"{__name__}:with_different_answers"):
        assert "given different advantages" in message


def with_different_answers():
    model, sequence = longctx.parallelize(tiny_model(), sp=2)
    [batch] = [SequenceCollator(0, sequence.dims.multiple, padding_free=True)(make_answers())]
    counts = sequence.count_policy_step([batch])
    advantages = torch.arange(8.0) + dist.get_rank()
    with pytest.raises(ValueError, match="different") as error:
        sequence.policy_loss(model, batch, advantages, counts=counts)
    return str(error.value)


def shifted(log_probs):
    return F.pad(log_probs.flatten()[1:], (0, 1)).view(log_probs.shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.ones(7)}, "has shape .7,., and the batch has 9 documents, 8 of them with labels"),
        ({"advantages": torch.ones(2, 3)}, "Give a value for each token"),
        ({"old_log_probs": "shifted"}, "is not 0 for 1[0-9] tokens whose label is −100"),
        ({"policy": {"beta": 0.1}}, "beta 0.1 needs ref_log_probs"),
        ({"policy": {"normalization": "group"}}, "Pass groups"),
        ({"policy": {"loss_type": "bnpo"}}, "Use dapo"),
        ({"policy": {"loss_type": "vespo"}}, "'vespo' is not supported: use one of"),
        ({"policy": {"loss_type": "ppo"}}, "use one of grpo, sapo, dapo"),
        ({"policy": {"loss_type": "cispo"}}, "largest weight of a token"),
        ({"policy": {"loss_type": "dr_grpo"}}, "divides by max_completion_length, which is None"),
        ({"policy": {"normalization": "tokens"}}, "normalization 'tokens' is not known"),
        ({"policy": {"importance_sampling_level": "word"}}, "use token or sequence"),
        ({"policy": {"temperature": 0.0}}, "temperature 0.0 is not above 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input(changes, message):
    model, sequence = longctx.parallelize(tiny_model(), sp=1)
    batch = SequenceCollator(0, 64, padding_free=True)(make_answers())
    counts = sequence.count_policy_step([batch])
    with torch.no_grad():
        log_probs = sequence.log_probs(model, batch)
    given = {"advantages": torch.ones(8), "old_log_probs": log_probs, **changes}
    if given["old_log_probs"] == "shifted":
        given["old_log_probs"] = shifted(log_probs)
    options = given.pop("policy", {})
    with pytest.raises(ValueError, match=message):
        sequence.policy_loss(model, batch, **given, counts=counts, policy=PolicyLoss(**options))


def gradients_of_experts(folder, coefficient):
    """Of two micro-batches of a mixture of experts, by parameter."""
    model = AutoModelForCausalLM.from_pretrained(folder, output_router_logits=coefficient > 0)
    model.config.router_aux_loss_coef = coefficient
    model, sequence = longctx.parallelize(model, sp=1)
    collate = SequenceCollator(257, 64, padding_free=True)
    records = make_answers()
    parts = records[:3], records[3:]
    batches = [collate(part) | {"lengths": [len(record["labels"]) for record in part]} for part in parts]
    counts = sequence.count_policy_step(batches)
    sequence.count_experts(model, batches)
    for batch, of_batch in zip(batches, parts, strict=True):
        advantages = torch.tensor([record["advantage"] for record in of_batch])
        sequence.policy_loss(model, batch, advantages, counts=counts).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_auxiliary_loss_of_experts_is_that_of_all_documents_of_the_step(tmp_path):
    """What the loss adds to the gradients is what transformers' own function gives for the step's real tokens."""
    folder = save_model(tmp_path)
    without, with_loss = (gradients_of_experts(folder, coefficient) for coefficient in (0.0, COEFFICIENT))
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = [
        model(input_ids=torch.from_numpy(record["input_ids"])[None], output_router_logits=True).router_logits
        for record in make_answers()
    ]
    layers = tuple(torch.cat(of_layer) for of_layer in zip(*logits, strict=True))
    (COEFFICIENT * load_balancing_loss_func(layers, 8, 2)).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 0:
            added = with_loss[name] - without[name]
            # fp32, as the experts' kernel has no fp64, and a difference of larger gradients.
            assert (added - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_weights_keep_the_names_of_transformers():
    assert longctx.parallelize(tiny_model(), sp=1)[0].state_dict().keys() == tiny_model().state_dict().keys()


def test_groups_that_do_not_fit_are_refused():
    _, sequence = longctx.parallelize(tiny_model(), sp=1)
    batch = SequenceCollator(0, 64, padding_free=True)(make_answers())
    with pytest.raises(ValueError, match="2 tensors of groups for 1 batches"):
        sequence.count_policy_step([batch], [torch.tensor(GROUPS)] * 2)
    counts = sequence.count_policy_step([batch], [torch.tensor(GROUPS)])
    with pytest.raises(ValueError, match=r"groups \[9\] were not counted"):
        counts.document_weights(torch.tensor([4]), PolicyLoss(normalization="group"), torch.tensor([9]))
