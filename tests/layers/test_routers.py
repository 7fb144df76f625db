"""Mixtures of experts: the routers' auxiliary loss over all tokens of a step, and the load of experts.

The reference is one process: each document is a forward pass of stock transformers, and the auxiliary loss is
transformers' own function of the router logits of all documents of the step.
"""

from __future__ import annotations

import json
from contextlib import contextmanager

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longctx import parallelize
from longctx.model.allow_list import AUXILIARY_LOSS_MODELS
from longctx.training.metrics import TokenMeans
from tests.few import together
from tests.model.more_families import EXPERTS
from tests.model.test_models import FAMILIES, documents_of_batch, gradients, largest_error, make_batch, make_model
from tests.model.test_models import LENGTHS as DOCUMENT_LENGTHS
from tests.model.test_peft import Adapt
from tests.reference import adamw_steps, auxiliary_loss
from tests.small_model import save_with_tokenizer
from tests.training.test_training import make_documents, relative, write_jsonl
from tests.workers import run_ranks

STEPS, RATE = 3, 5e-3
COEFFICIENT = 0.3  # large, so that a wrong loss shows
LENGTHS = [90, 7, 41, 1, 130, 64, 2, 33, 17, 88]
COMMON = ["--max_steps", str(STEPS), "--learning_rate", str(RATE), "--max_length", "256", "--logging_steps", "1"]
COMMON += ["--per_device_train_batch_size", "1", "--save_strategy", "no"]
COMMON += ["--report_to", "none", "--disable_tqdm", "True"]
SMALL = EXPERTS | {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "moe_intermediate_size": 32,
    "router_aux_loss_coef": COEFFICIENT,
    "eos_token_id": 256,
    "pad_token_id": 257,
}


def save_model(folder, model_type="qwen3_moe", **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**SMALL | settings), dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[257].normal_(std=0.02)  # else padding routes zeros, and has no gradient
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                parameter.mul_(30)  # far from balanced, with loads that differ
    save_with_tokenizer(model, folder)
    return str(folder)


@contextmanager
def router_logits_of(model):
    """[T, E] of each layer, as its router returns them; transformers 5.17 has no Granite model return them."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    found = []

    def record(router, _, output):
        found.append(next(x for x in output if x.is_floating_point() and x.shape[-1] == len(router.weight)))

    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def stock_loss(model, documents, coefficient):
    """Loss of all documents with its auxiliary part, that part, and the load of each layer's experts [L, E]."""
    total, count, routed = torch.zeros(()), 0, []
    for ids, labels in documents:
        with router_logits_of(model) as router_logits:
            output = model(input_ids=torch.tensor([ids]), use_cache=False, output_router_logits=True)
        targets = torch.tensor([*labels[1:], -100])
        total = total + torch.nn.functional.cross_entropy(output.logits[0], targets, ignore_index=-100, reduction="sum")
        count += int((targets != -100).sum())
        routed.append(tuple(router_logits) if output.router_logits is None else output.router_logits)
    layers = tuple(torch.cat(of_documents) for of_documents in zip(*routed, strict=True))
    stock = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    aux_loss, top_k = auxiliary_loss(stock, layers), stock.num_experts_per_tok
    load = torch.stack([logits.topk(top_k).indices.flatten().bincount(minlength=logits.shape[1]) for logits in layers])
    return total / count + coefficient * aux_loss, float(aux_loss.detach()), load


def reference(folder, documents, *, coefficient=COEFFICIENT, adapt=lambda model: model):
    """Losses, gradient norms, auxiliary losses, and loads of the steps."""
    model = adapt(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32))
    seen = []

    def step(number):
        loss, aux_loss, load = stock_loss(model, documents, coefficient)
        seen.append((aux_loss, load))
        return loss

    losses, norms = adamw_steps(model, [RATE * (1 - number / STEPS) for number in range(STEPS)], step)
    return losses, norms, *map(list, zip(*seen, strict=True))


def check_run(log, expected, case):
    losses, norms, aux_losses, loads = expected
    steps = [entry for entry in log if "loss" in entry]
    assert len(steps) == STEPS
    for name, values in (("loss", losses), ("grad_norm", norms), ("aux_loss", aux_losses)):
        found = [entry[name] for entry in steps]
        assert relative(found[:1], values[:1]) <= 1e-5, (case, name, found, values)
        assert relative(found, values) <= 1e-4, (case, name, found, values)
    for evaluation in (entry for entry in log[:2] if "eval_loss" in entry):  # of the same documents, before training
        assert evaluation["eval_loss"] == pytest.approx(losses[0], rel=1e-5)
        assert evaluation["eval_aux_loss"] == pytest.approx(aux_losses[0], rel=1e-5)
    load = loads[0].double()
    of_layers = steps[0]["experts"]  # to four digits
    assert of_layers["max_over_mean"] == pytest.approx((load.amax(1) / load.mean(1)).tolist(), abs=1e-4)
    assert of_layers["unused_fraction"] == pytest.approx((load == 0).double().mean(1).tolist(), abs=1e-4)
    assert steps[0]["expert_load_imbalance"] == pytest.approx(float((load.amax(1) / load.mean(1)).max()))
    assert steps[0]["unused_experts_fraction"] == pytest.approx(float((load == 0).double().mean()))


def experts(name):
    return ["--model_init_kwargs", json.dumps({"experts_implementation": name})]


ACCUMULATED = ["--packing", "True", "--gradient_accumulation_steps", "2"]
RING = ["--sp", "2", "--sp_backend", "ring", "--engine"]
ULYSSES = ["--sp", "2", "--sp_backend", "ulysses", "--engine"]
CASES = {  # those on DeepSpeed come last, whose changes to torch stay in the process
    "ring": [*RING, "fsdp2", *ACCUMULATED],
    "ulysses, no checkpointing": [*ULYSSES, "fsdp2", *ACCUMULATED, "--gradient_checkpointing", "False"],
    "ulysses, chunked": [*ULYSSES, "fsdp2", *ACCUMULATED, "--sequence_chunk_size", "32"],
    "ring, reentrant": [
        *[*RING, "fsdp2", *ACCUMULATED, "--gradient_checkpointing", "True"],
        *["--gradient_checkpointing_kwargs", '{"use_reentrant": true}'],
    ],
    "ring, offloading": [*RING, "fsdp2", *ACCUMULATED, "--activation_offloading", "True"],
    "ring, eager experts": [*RING, "fsdp2", *ACCUMULATED, *experts("eager")],
    "ulysses, batched experts": [*ULYSSES, "fsdp2", *ACCUMULATED, *experts("batched_mm")],
    "dp, padded": ["--packing", "False", "--per_device_train_batch_size", "5"],
    "ring, padded": [
        *[*RING, "fsdp2", "--packing", "False", "--per_device_train_batch_size", "2"],
        *["--gradient_accumulation_steps", "5"],
    ],
    "ulysses, zero3": [*ULYSSES, "deepspeed", *ACCUMULATED],
    "ulysses, zero3, chunked": [*ULYSSES, "deepspeed", *ACCUMULATED, "--sequence_chunk_size", "32"],
    "ulysses, zero3, eager experts": [*ULYSSES, "deepspeed", *ACCUMULATED, *experts("eager")],
    "ring, zero3, batched experts": [*RING, "deepspeed", *ACCUMULATED, *experts("batched_mm")],
    "ulysses, zero3, tiled grouped experts": [
        *[*ULYSSES, "deepspeed", *ACCUMULATED, *experts("grouped_mm")],
        *["--tiled_mlp", "True", "--tiled_mlp_num_shards", "3"],
    ],
    "ring, zero3, tiled": [*[*RING, "deepspeed", *ACCUMULATED, "--tiled_mlp", "True", "--tiled_mlp_num_shards", "3"]],
}
DEFAULT = ("ring", "ulysses, zero3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("experts"))


ADAPTED = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTER = ["--use_peft", "True", "--lora_target_modules", *ADAPTED]


@pytest.mark.long
@pytest.mark.parametrize("parameters", [[], EXPERTS], ids=["attention", "experts"])
def test_an_adapter_equals_one_process(parameters, folder, tmp_path):
    """Of attention alone, through which the auxiliary loss's gradient passes, and of the experts' own matrices."""
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    flags = [*ADAPTER, *(["--lora_target_parameters", *parameters] if parameters else [])]
    flags += [*COMMON, "--dataset_name", data, "--model_name_or_path", folder]
    adapt = Adapt(r=16, lora_alpha=32, target_modules=ADAPTED, target_parameters=parameters or None)
    expected = reference(folder, documents, adapt=adapt)
    cases = {name: [*flags, *CASES[name], "--output_dir", str(tmp_path / name)] for name in DEFAULT}
    for case, log in run_ranks(2, "tests.training.test_training:logs_of_cases", cases)[0].items():
        check_run(log, expected, case)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    name = next(reversed(cases))
    models = peft.PeftModel.from_pretrained(base, tmp_path / name), adapt.model
    saved, right = (float(stock_loss(model, documents, COEFFICIENT)[0].detach()) for model in models)
    assert saved == pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize(
    "options", ["tiled_mlp True", "sequence_chunk_size 32", "offload_param_device cpu --sp 2", "load_in_4bit True"]
)
def test_adapted_experts_with_memory_options_that_are_not_compared(options, folder, refusal, monkeypatch):
    monkeypatch.setattr("longctx.settings.arrange.QLORA_VERSIONS", {})
    arguments = [*ADAPTER, "--lora_target_parameters", *EXPERTS, *f"--{options}".split(), "--use_cpu"]
    error = refusal(*arguments, "--model_name_or_path", folder)
    assert f"--{options.partition(' --')[0]} with --lora_target_parameters is not verified" in error or (
        "--lora_target_parameters" in error and "with --load_in_4bit True is not verified" in error
    )


@pytest.mark.parametrize("names", together(CASES, DEFAULT))
def test_training_equals_one_process(names, folder, tmp_path):
    """Every step takes all documents, in two packs of unequal tokens, or in rows with padding."""
    documents = make_documents(LENGTHS)
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    common = [*COMMON, "--dataset_name", data, "--model_name_or_path", folder]
    common += ["--eval_strategy", "steps", "--eval_on_start", "True", "--eval_steps", str(STEPS)]
    common += ["--dataset_test_split", "train"]
    expected = reference(folder, documents)
    assert relative(reference(folder, documents, coefficient=0.0)[1][:1], expected[1][:1]) > 1e-2  # the loss acts
    cases = {name: [*common, *CASES[name], "--output_dir", str(tmp_path / name)] for name in names}
    for case, log in run_ranks(2, "tests.training.test_training:logs_of_cases", cases)[0].items():
        check_run(log, expected, case)


# ------------------------------------------------------------------------------------------------
# One's own loop
# ------------------------------------------------------------------------------------------------

DOCUMENTS = make_documents([40, 9, 15, 24], masked=0)


def batches(*groups, padding=0):
    """One packed row of each group of documents, with padding at its end, as collators make them."""
    for group in groups:
        ids = torch.tensor([[token for tokens, _ in group for token in tokens] + [257] * padding])
        lengths = [len(tokens) for tokens, _ in group]
        positions = torch.cat([torch.arange(n) for n in [*lengths, padding]])[None]
        labels = ids.clone()
        labels[:, sum(lengths) :] = -100
        yield {"input_ids": ids, "labels": labels, "position_ids": positions, "lengths": [sum(lengths)]}


def parallel_model(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.output_router_logits = True
    return parallelize(model, 1, **options)


@pytest.mark.parametrize("padding", [0, 6])
def test_the_loop_of_a_user(padding, folder):
    """Two micro-batches of unequal length; the evaluation of the same tokens has the same auxiliary loss."""
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    expected, aux_loss, load = stock_loss(stock, DOCUMENTS, COEFFICIENT)
    expected.backward()
    model, sequence = parallel_model(folder)
    step = list(batches(DOCUMENTS[:3], DOCUMENTS[3:], padding=padding))
    count = sequence.count_label_tokens(step)
    sequence.count_experts(model, step)
    means, total, found, loads = TokenMeans(sequence.device, sequence.routers), 0.0, 0.0, 0.0
    for batch in step:
        shard = sequence.shard(batch)
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
        loss = sequence.reduce(outputs.losses, count)
        loss.backward()
        total += float(loss.detach())
        found += float(sequence.routers.shares[0])
        loads = loads + sequence.routers.latest.load
        with torch.no_grad():
            means.add(shard, outputs)
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    assert found == pytest.approx(aux_loss, rel=1e-5)
    assert means.read()["aux_loss"] == pytest.approx(aux_loss, rel=1e-5)
    assert means.read()["loss"] == pytest.approx(total, rel=1e-5)
    assert torch.equal(loads, load.double())
    assert largest_error(gradients(model), gradients(stock)) <= 1e-5


INSTALLED = [model_type for model_type in AUXILIARY_LOSS_MODELS if model_type in CONFIG_MAPPING]
SP_1 = [(model_type, 1, "auto") for model_type in INSTALLED]
SP_2 = [(model_type, 2, backend) for model_type in INSTALLED for backend in ("ring", "ulysses")]


def errors_of_type(model_type, sp, backend, before=None, after=None):
    """Relative errors of loss, auxiliary loss and gradients of a small model against stock transformers.

    Args:
        before, after: change the model before and after `parallelize`.
    """
    family = next(name for name, (found, _) in FAMILIES.items() if found == model_type)
    model = make_model(family)
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, COEFFICIENT
    expected, aux_loss, _ = stock_loss(model, documents_of_batch(), COEFFICIENT)
    expected.backward()
    expected_gradients = gradients(model)
    if before is not None:
        before(model)
    model, sequence = parallelize(model, sp, sp_backend=backend)
    if after is not None:
        after(model)
    (loss,) = run_step(model, sequence, [{**make_batch(), "lengths": [sum(DOCUMENT_LENGTHS)]}])
    loss.backward()
    actual, found = gradients(model), torch.stack((loss.detach().double(), sequence.routers.shares[0] * sp)) / sp
    if sp > 1:
        for value in (found, *actual.values()):
            dist.all_reduce(value)
        actual = {name: value / sp for name, value in actual.items()}
    right = torch.tensor([float(expected.detach()), aux_loss], dtype=torch.float64)
    return max(float((found / right - 1).abs().max()), largest_error(actual, expected_gradients))


def errors_of_types(cases):
    return {case: errors_of_type(*case) for case in cases}


def test_every_type_has_the_loss_of_transformers():
    assert max(errors_of_types(SP_1).values()) <= 1e-5


@pytest.mark.long
def test_every_type_has_the_loss_of_transformers_on_two_ranks():
    for errors in run_ranks(2, f"{__name__}:errors_of_types", SP_2):
        assert {case: error for case, error in errors.items() if not error <= 1e-5} == {}


def name_block(model):
    """As EXAONE MoE does before transformers 5.19."""
    (block,) = {type(module) for module in model.modules() if type(module).__name__.endswith("Block")}
    model.model._can_record_outputs = {"router_logits": block}


def name_no_router(model):
    """As Granite does before transformers 5.18."""
    model.model._can_record_outputs = {}


def reverse(model):
    """As the routers of Granite return their results before transformers 5.21; a second call undoes the first."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _, args, output: output[::-1])


@pytest.mark.parametrize(("before", "after"), [(name_block, None), (name_no_router, None), (reverse, reverse)])
def test_routers_of_older_releases(before, after):
    assert errors_of_type("qwen3_moe", 1, "auto", before, after) <= 1e-5


def run_step(model, sequence, step, *, count_experts=True):
    count = sequence.count_label_tokens(step)
    if count_experts:
        sequence.count_experts(model, step)
    for batch in step:
        shard = sequence.shard(batch)
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
        yield sequence.reduce(outputs.losses, count)


def test_a_step_whose_choices_are_not_counted(folder):
    model, sequence = parallel_model(folder)
    with pytest.raises(ValueError, match=r"tokens of this step are not counted.*then count_experts if there"):
        list(run_step(model, sequence, list(batches(DOCUMENTS[:2], DOCUMENTS[2:])), count_experts=False))
    (batch,) = batches(DOCUMENTS)
    list(run_step(model, sequence, [batch]))
    with pytest.raises(ValueError, match=r"tokens of this step are not counted"):  # one micro-batch was announced
        sequence.reduce(torch.zeros(1, 88, requires_grad=True), 1)


def test_a_batch_that_does_not_say_what_padding_is(folder):
    model, sequence = parallel_model(folder)
    (batch,) = batches(DOCUMENTS, padding=2)
    del batch["lengths"]
    with pytest.raises(ValueError, match=r"does not say which tokens are padding\. Add lengths"):
        sequence.shard(batch)
    model.config.output_router_logits = False
    model, sequence = parallelize(model, 1)  # no auxiliary loss
    sequence.shard(batch)
