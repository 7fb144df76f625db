"""Weights on FSDP2's ranks: read by rows, sent by rank 0, and the same bits either way."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from longctx.model.rows import StoredWeight, obstacle_to_rows
from longctx.model.tiny import tiny_config, tiny_model
from tests.small_model import save_small_model, save_with_tokenizer
from tests.training.test_engines_of_models import save_model
from tests.training.test_training import COMMON, log_of, make_documents, prepared_run, write_jsonl
from tests.workers import one_by_one, run_ranks

FLAGS = [*COMMON, "--max_steps", "1", "--max_length", "64", "--engine", "fsdp2"]
LORA = ["--use_peft", "True", "--lora_target_modules", "q_proj", "v_proj"]
BF16 = ["--dtype", "bfloat16"]
ROUNDED = [*BF16, "--bf16", "True"]
"""Weights are loaded in bf16, and trained in fp32."""
BY_ROWS = {  # ranks, flags, settings of the model, dtype of its files
    "uneven rows": (3, [], {}, torch.float32),
    "a head of its own, and weights rounded": (3, ROUNDED, {"tie_word_embeddings": False}, torch.float32),
    "bf16 files, saved buffers": (2, [], "apertus", torch.bfloat16),
    "LoRA": (3, LORA, {}, torch.float32),
    "LoRA on bf16": (2, [*LORA, *BF16], {}, torch.bfloat16),
    "replicas": (4, ["--dp_replicate", "2"], {}, torch.float32),
}


class _Wrapped(Exception):
    """Ends a run as soon as the engine has wrapped its model."""


def shards_of(cases):
    """{case: (how the weights were loaded, {name: this rank's values, whether they are trained})}."""
    from longctx.run import model as run_model
    from longctx.training import trainer as training

    found, how = {}, []

    def keep(trainer, nonfinite):
        trained = {parameter for group in trainer.optimizer.param_groups for parameter in group["params"]}
        assert trained == {parameter for parameter in trainer.model.parameters() if parameter.requires_grad}
        found.update(trainer.model.named_parameters(remove_duplicate=False), **dict(trainer.model.named_buffers()))
        raise _Wrapped

    training.check_before_training, run_model.show = keep, how.extend
    results, of_adapter = {}, run_model.obstacle_to_adapting_rows
    for case, (arguments, whole) in one_by_one(cases):
        found.clear()
        how.clear()
        run_model.obstacle_to_adapting_rows = (lambda settings: "a test asks for it") if whole else of_adapter
        with pytest.raises(_Wrapped):
            log_of(arguments)
        local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in found.items()}
        values = {name: (value.detach().clone(), found[name].requires_grad) for name, value in local.items()}
        results[case] = str(how), values
    return results


def save(settings, dtype, folder):
    """Save a small model; `settings` are those of a Qwen3, or the name of a family. Returns its path."""
    if isinstance(settings, str):
        save_model(settings, folder)
    else:
        save_small_model(folder, **settings)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(dtype).save_pretrained(folder)
    return str(folder)


def flags_of(num_ranks, folder, tmp_path):
    """A run of the model in `folder`."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([20, 30, 40, 50]))
    given = ["--num_processes", str(num_ranks), "--model_name_or_path", folder, "--dataset_name", data]
    return [*FLAGS, *given, "--output_dir", str(tmp_path / "output")]


def loaded(num_ranks, flags, folder, tmp_path):
    """What `shards_of` finds on every rank, for weights loaded as the run chooses and for those that rank 0 sends."""
    given = [*flags_of(num_ranks, folder, tmp_path), *flags]
    cases = {"chosen": (given, False), "sent": (given, True)}
    return run_ranks(num_ranks, f"{__name__}:shards_of", cases)


def same(values, others):
    """Whether tensors have the same names, shapes, dtypes and bits, and are trained alike."""
    assert values.keys() == others.keys()
    return all(
        (value.dtype, trained) == (other.dtype, is_trained) and torch.equal(value, other)
        for (value, trained), (other, is_trained) in zip(values.values(), others.values(), strict=True)
    )


def check_against_files(ranks, folder, dtype):
    """The ranks' rows together are what transformers reads."""
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    for name, parameter in expected.named_parameters():
        rows = torch.cat([values[name][0] for values in ranks])
        assert torch.equal(rows, parameter.to(rows.dtype)), name
    for name, buffer in expected.named_buffers():
        assert all(torch.equal(values[name][0], buffer) for values in ranks), name


@pytest.mark.long
@pytest.mark.parametrize("case", BY_ROWS)
def test_every_rank_reads_the_bits_that_rank_0_would_send_it(case, tmp_path):
    num_ranks, flags, settings, dtype = BY_ROWS[case]
    folder = save(settings, dtype, tmp_path / "model")
    ranks = loaded(num_ranks, flags, folder, tmp_path)
    assert "every rank reads its own rows" in ranks[0]["chosen"][0]
    assert "rank 0 reads all weights" in ranks[0]["sent"][0]
    for rank in ranks:
        assert same(rank["chosen"][1], rank["sent"][1])
    if "--use_peft" not in flags:
        shards = ranks[: num_ranks // 2 if "--dp_replicate" in flags else num_ranks]
        loaded_in = torch.bfloat16 if flags == ROUNDED else torch.float32
        check_against_files([rank["chosen"][1] for rank in shards], folder, loaded_in)
    else:
        adapters = [torch.cat([rank["chosen"][1][name][0] for rank in ranks]) for name in ranks[0]["chosen"][1]]
        assert any(values.abs().max() > 0 for values in adapters)


BY_ONE = {
    "converted": ([], "qwen3_moe", "weights of a qwen3_moe model are converted"),
    "pytorch_model.bin": ([], {}, "not in safetensors files"),
    "DoRA": ([*LORA, "--use_dora", "True"], {}, "--use_dora"),
    "trained copies": ([*LORA, "--lora_modules_to_save", "norm"], {}, "--lora_modules_to_save"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", BY_ONE)
def test_rank_0_sends_weights_that_cannot_be_read_by_rows(case, tmp_path):
    flags, settings, reason = BY_ONE[case]
    folder = save(settings, torch.float32, tmp_path / "model")
    if case == "pytorch_model.bin":
        weights = Path(folder, "model.safetensors")
        torch.save(load_file(weights), weights.with_name(case))
        weights.unlink()
    ranks = loaded(2, flags, folder, tmp_path)
    assert reason in ranks[0]["chosen"][0]
    assert all(same(rank["chosen"][1], rank["sent"][1]) for rank in ranks)
    if not flags:
        check_against_files([rank["chosen"][1] for rank in ranks], folder, torch.float32)


def rise_of_host_memory(arguments):
    """How far this rank's host memory rises while its model is loaded and wrapped, and the size of its shard; bytes."""
    from longctx.run import fit, load
    from longctx.training import trainer as training

    def measure(trainer, nonfinite):
        shards = [parameter.to_local() for parameter in trainer.model.parameters()]
        raise _Wrapped(sum(shard.nbytes for shard in shards))

    training.check_before_training = measure
    prepared = prepared_run(arguments)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = host_memory("VmRSS")
    with pytest.raises(_Wrapped) as wrapped:
        fit(prepared, load(prepared))
    return host_memory("VmHWM") - before, wrapped.value.args[0]


def host_memory(kind):
    """Bytes of host memory that this process takes (VmRSS), or has taken at most (VmHWM)."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_takes_little_more_host_memory_than_its_shard(num_ranks, tmp_path):
    config, folder = tiny_config(), str(tmp_path / "model")
    config.update({"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22, "vocab_size": 32000})
    config.update({"num_attention_heads": 32, "num_key_value_heads": 16, "layer_types": ["full_attention"] * 22})
    save_with_tokenizer(tiny_model(config=config), folder)
    given = flags_of(num_ranks, folder, tmp_path)
    for rise, shard in run_ranks(num_ranks, f"{__name__}:rise_of_host_memory", given):
        assert shard > 286e6 * 4 / num_ranks
        assert rise < 1.2 * shard


def test_a_file_that_has_become_shorter_since_it_was_checked_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(16))
    place = {"file": file, "start": 0, "nbytes": 16, "shape": (4,)}
    weight = StoredWeight(**place, kind="F32", stored=torch.float32, dtype=torch.float32)
    weight.read(1, torch.empty(3), np.empty(64, dtype=np.uint8))
    with pytest.raises(OSError, match="has become shorter"):
        weight.read(1, torch.empty(4), np.empty(64, dtype=np.uint8))


def refusal_where_the_file_is_gone(arguments, file):
    """What a run ends with on this rank if its weights are removed after they have been checked."""
    from longctx.run import fit, load

    prepared = prepared_run(arguments)
    model = load(prepared)
    Path(file).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="can no longer be read") as refused:
        fit(prepared, model)
    return str(refused.value)


def test_a_file_that_is_gone_when_rows_are_read_ends_all_ranks_with_one_line(tmp_path):
    folder = save({}, torch.float32, tmp_path / "model")
    given = flags_of(2, folder, tmp_path)
    messages = run_ranks(2, f"{__name__}:refusal_where_the_file_is_gone", given, f"{folder}/model.safetensors")
    assert all("No such file" in message for message in messages)


def test_a_weight_that_is_stored_under_two_names_is_refused(tmp_path):
    """Transformers reads both names as that of one parameter."""
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"norm.weight": stored["model.norm.weight"] + 1}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"hold both norm.weight and model.norm.weight"):
        obstacle_to_rows(tiny_model(), str(tmp_path), None)
