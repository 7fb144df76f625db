"""A checkpoint's weights: Transformers' files from several ranks, which hold what the ranges of the states hold."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longctx.model.tiny import tiny_model
from longctx.training.checkpoint import saving, weights
from tests.few import few
from tests.training.test_engines_of_models import MODELS
from tests.training.test_training import COMMON, logs_of_cases, make_documents, write_jsonl
from tests.workers import run_ranks

SMALL = 40_000
"""Most bytes of a file, so that a small model has several."""
ENGINES = {"FSDP2": ["--sp", "2", "--sp_backend", "ring"], "ZeRO-3": ["--sp", "2", "--sp_backend", "ulysses"]}
ADAPTERS = {
    "LoRA": [],
    "DoRA": ["--use_dora", "True", "--lora_target_modules", "q_proj", "down_proj"],
    "LoRA with a whole norm": ["--lora_modules_to_save", "norm", "--eval_strategy", "steps", "--eval_steps", "1"],
}


def save(cases):
    """Train each case for a step and save it; returns the files that this rank has written, and what it gathered."""
    files, gathered = [], Counter()
    write, gather = saving.save_file, weights._whole

    def save_file(tensors, path, metadata):
        files.append(Path(path).name)
        write(tensors, path, metadata)

    def whole(tensor, *, keep, exact=False):
        gathered[keep] += 1
        return gather(tensor, keep=keep, exact=exact)

    smaller, noted = patch.object(weights, "FILE_BYTES", SMALL), patch.object(saving, "save_file", save_file)
    with smaller, noted, patch.object(weights, "_whole", whole):
        logs_of_cases(cases)
    return files, gathered


def run(cases, flags, folder, models):
    """Save a checkpoint for each case on two ranks, and return what `save` does."""
    data = write_jsonl(folder / "data.jsonl", make_documents([90, 40]))
    common = [*COMMON, "--max_steps", "1", "--bf16", "False", "--dataset_name", data, *flags]
    common += ["--model_name_or_path", models["GQA 4:2"], "--save_strategy", "steps", "--save_steps", "1"]
    arguments = {case: [*common, *own, "--output_dir", str(folder / case)] for case, own in cases.items()}
    return run_ranks(2, f"{__name__}:save", arguments)


def ranges(folder):
    """The fp32 weights that the states hold, by name."""
    parts = {}
    for file in folder.glob("states-*.safetensors"):
        for key, values in load_file(file).items():
            kind, start, name = key.split("|", 2)
            if kind == "weight":
                parts.setdefault(name, {})[int(start)] = values
    return {name: torch.cat([held[start] for start in sorted(held)]) for name, held in parts.items()}


def test_several_ranks_write_the_files_of_a_model(models, tmp_path):
    """A checkpoint has the weights once, and as the optimizer updates them: in fp32, also where layers use bf16."""
    cases = ENGINES | {"ZeRO-3, bf16": [*ENGINES["ZeRO-3"], "--bf16", "True"]}
    results = run(cases, [], tmp_path, models)
    mine = [Counter(files) for files, _ in results]
    assert not mine[0].keys() & mine[1].keys()
    for case in cases:
        folder = tmp_path / case / "checkpoint-1"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {path.name: load_file(path) for path in folder.glob("model-*.safetensors")}
        assert files.keys() == {*index["weight_map"].values()}
        assert files.keys() <= mine[0].keys() | mine[1].keys()
        assert not (folder / "model.safetensors").exists()
        assert len(files) > 2
        found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        assert not ranges(folder)
        final = {name: x for file in folder.parent.glob("model*.safetensors") for name, x in load_file(file).items()}
        assert {tensor.dtype for tensor in final.values()} == {torch.bfloat16 if "bf16" in case else torch.float32}
        for name, values in final.items():
            assert torch.equal(found.pop(name).to(values.dtype), values), name
        assert not found, "tied weights are there once"
        _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values()), loading


def test_weights_that_are_converted_are_ranges_as_well(tmp_path):
    """The model's files have their other names, and a run goes on from the ranges."""
    config = CONFIG_MAPPING["mixtral"](**MODELS["mixtral"][1])
    model = AutoModelForCausalLM.from_config(config)
    names = {name for name, _ in model.named_parameters()}
    kept = weights.names_kept(model)
    assert kept < names
    assert all("experts" in name or "gate" in name for name in names - kept), names - kept
    weights.write_weights(model, tmp_path, rank=0, owners=1)
    stored = load_file(tmp_path / "model.safetensors")
    held = model.state_dict()
    assert all(torch.equal(stored[name], held[name]) for name in kept)
    assert not names - kept & stored.keys()


@pytest.mark.parametrize("engine", few(ENGINES, 1))
def test_of_an_adapter_nothing_else_is_gathered(engine, models, tmp_path):
    """The file has PEFT's own names, and the values that the states hold, also after an evaluation."""
    flags = ["--use_peft", "True", "--dataset_test_split", "train", *ENGINES[engine]]
    results = run(ADAPTERS, flags, tmp_path, models)
    total = 0
    for case in ADAPTERS:
        folder = tmp_path / case / "checkpoint-1"
        found = load_file(folder / "adapter_model.safetensors")
        total += 2 * len(found)  # of the checkpoint, and of the result
        for name, values in ranges(folder).items():
            assert torch.equal(found.pop(saved_name(name)).flatten(), values), name
        assert not found
    assert [gathered for _, gathered in results] == [Counter({True: total}), Counter({False: total})]
    assert [files for files, _ in results] == [[], []]


def test_an_adapter_is_saved_with_the_buffers_of_its_modules():
    config = CONFIG_MAPPING["glm4_moe"](**MODELS["glm4_moe"][1])
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    expected = get_peft_model_state_dict(model)
    assert any(name.endswith("e_score_correction_bias") for name in expected)
    found = get_peft_model_state_dict(model, state_dict=weights.adapter_weights(model, keep=True))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def saved_name(name):
    """PEFT's name in a file for one of a model's parameters."""
    name = name.replace(".modules_to_save.default", "").replace("vector.default.weight", "vector")
    return name.replace(".default", "")


def write_where_a_file_cannot_be(folder):
    """Write a model into a folder that has a folder in the place of rank 1's first file; returns its error."""
    model = tiny_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with patch.object(weights, "FILE_BYTES", SMALL):
        try:
            weights.write_weights(model, Path(folder), rank=dist.get_rank(), owners=dist.get_world_size())
        except Exception as error:
            return str(error)
    return None


def test_a_rank_that_cannot_write_ends_when_all_are_through(tmp_path):
    with patch.object(weights, "FILE_BYTES", SMALL):
        count = len(list(weights._files(weights._held(tiny_model()))))
    (tmp_path / f"model-00002-of-{count:05d}.safetensors").mkdir()
    first, second = run_ranks(2, f"{__name__}:write_where_a_file_cannot_be", str(tmp_path))
    assert "rank 1 stopped with" in first
    assert "directory" in first
    assert "directory" in second
