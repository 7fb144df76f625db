"""Training on two soft GPUs (tests/softcuda): what only a device with its own memory, threads and NCCL can show."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from longctx import parallelize
from tests.reference import train_reference
from tests.test_models import TOLERANCE, largest_error, make_batch, make_model, stock_step
from tests.test_training import COMMON, LEARNING_RATE, SHAPES, STEPS, check, make_documents, write_jsonl

WRAPPINGS = ("layers", "every part", "layers, kept whole")
TRAINED = {"all": "", "adapters": "q_proj", "adapters of the last layer": "1.mlp.down_proj"}


def chunked_errors(wrapping: str, trained: str, accumulation: int) -> float:
    """The largest relative error of a gradient of the sequence-chunked step under FSDP2 on this rank's GPU.

    Args:
        trained: parameters with another name are frozen.
        accumulation: equal micro-batches, whose mean has the gradient of one of them.
    """
    torch.cuda.set_device(dist.get_rank())
    model, batch = make_model("llama"), make_batch()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    _, _, expected = stock_step(model)
    model, sequence = parallelize(model, 2, sp_backend="ulysses", sequence_chunk_size=3)
    model.to(sequence.device)
    mesh = init_device_mesh("cuda", (2,))
    layers, rest = model.model.layers, [model.model.embed_tokens, model.model.norm]
    for part in [*layers, *(rest if wrapping == "every part" else [])]:
        fully_shard(part, mesh=mesh, reshard_after_forward=wrapping != "layers, kept whole")
    fully_shard(model, mesh=mesh)
    count = sequence.count_label_tokens([batch] * accumulation)
    for _ in range(accumulation):
        shard = sequence.shard(batch)
        outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
        sequence.reduce(outputs.losses, count).backward()
    found = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return largest_error(found, expected)


def all_chunked_errors() -> dict[tuple, float]:
    cases = [(wrapping, name, n) for wrapping in WRAPPINGS for name in TRAINED for n in (1, 2)]
    return {case: chunked_errors(case[0], TRAINED[case[1]], case[2]) for case in cases}


def test_the_chunked_step_hands_all_gradients_to_fsdp2(soft_gpus):
    """Hidden states are on the host and parameters on the GPU: their parts of backward must not be two threads."""
    for errors in soft_gpus.run(2, f"{__name__}:all_chunked_errors"):
        assert len(errors) == 18
        assert max(errors.values()) <= TOLERANCE, errors


def step_in_threads() -> None:
    model, sequence = parallelize(make_model("llama"), 1, sequence_chunk_size=8, device=torch.device("cuda", 0))
    shard = sequence.shard(make_batch())
    outputs = model.to("cuda")(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    with torch.autograd.set_multithreading_enabled(True), pytest.raises(ValueError, match="several threads"):
        outputs.losses.sum().backward()
    outputs = model(**shard.inputs, shift_labels=shard.shift_labels, token_outputs=True)
    outputs.losses.sum().backward()


def test_the_chunked_step_refuses_to_go_backward_in_several_threads(soft_gpus):
    soft_gpus.run(1, f"{__name__}:step_in_threads", backend=None)


CHUNKS = ["--sequence_chunk_size", "50"]
RUNS = {  # DeepSpeed's last: transformers keeps its configuration for the rest of the process
    "ring, fsdp2": ["--sp_backend", "ring"],
    "ulysses, fsdp2": ["--sp_backend", "ulysses", "--engine", "fsdp2"],
    "ulysses, fsdp2, chunks": ["--sp_backend", "ulysses", "--engine", "fsdp2", *CHUNKS],
    "ulysses, zero3": ["--sp_backend", "ulysses", "--engine", "deepspeed"],
    "ulysses, zero3, chunks": ["--sp_backend", "ulysses", "--engine", "deepspeed", *CHUNKS],
}


def arguments_of(flags, models, tmp_path, data):
    common = [*COMMON, *SHAPES["packed"][1], "--sp", "2", "--model_name_or_path", models["GQA 4:2"]]
    return [*common, *flags, "--dataset_name", data, "--output_dir", str(tmp_path / "out")]


def test_training_on_soft_gpus_equals_one_process(models, tmp_path, parity_table, soft_gpus):
    """In fp32, with the tolerances of training on CPUs."""
    documents = make_documents(SHAPES["packed"][0])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    cases = {case: arguments_of([*flags, "--bf16", "False"], models, tmp_path, data) for case, flags in RUNS.items()}
    reference = train_reference(models["GQA 4:2"], documents, steps=STEPS, learning_rate=LEARNING_RATE)
    for case, results in soft_gpus.run(2, "tests.test_training:run_cases", cases, backend=None)[0].items():
        check(results, reference, case, "soft GPUs", parity_table)
