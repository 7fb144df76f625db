"""Input that cannot be trained on exactly ends with exit code 2 and one error: the value, the limit, the remedy."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from multiprocessing.connection import Listener

import pytest
from accelerate.state import AcceleratorState
from transformers import CONFIG_MAPPING, LlamaConfig

from longctx.attention.backends import BACKENDS
from longctx.model.allow_list import check_model
from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from longctx.train import main
from tests.workers import run_main

OWN = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib"]


@pytest.fixture(autouse=True)
def single_process(monkeypatch, tmp_path):
    """No GPU and no launcher, nothing is spawned, no weights are read, no trace is left."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    monkeypatch.setattr("longctx.launch.spawn.spawn", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("longctx.run.model.load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    AcceleratorState._reset_state(True)
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def refused(capsys):
    """Run longctx.train, assert that it refuses with one error that holds every one of `parts`; returns the error."""

    def run(*arguments: str, parts: tuple[str, ...]) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert error.count("longctx: error: ") == 1
        assert "Traceback" not in error
        for part in parts:
            assert part in error
        return error

    return run


@pytest.fixture(scope="session")
def folder_without_weights(tmp_path_factory):
    """A model's config and tokenizer, no weights: errors in the data come before they would be missed."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_config().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


# ------------------------------------------------------------------------------------------------
# Flags, processes and devices: before anything is started
# ------------------------------------------------------------------------------------------------


def test_sp_does_not_divide_the_processes(refused, monkeypatch):
    refused("--sp", "2", "--num_processes", "3", parts=("--sp 2", "3 processes", "Use --sp 1 | 3", "multiple of 2"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    refused("--sp", "4", parts=("--sp 4", "6 processes", "Use --sp 1 | 2 | 3 | 6"))


def test_dp_replicate_does_not_divide(refused):
    refused(
        "--dp_replicate", "3", "--num_processes", "4", parts=("--dp_replicate 3", "4 data-parallel", "divisor of 4")
    )


def test_more_ranks_than_devices(refused, monkeypatch, without_preflight):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 2)
    refused(*OWN, "--sp", "4", parts=("4 processes", "2 are visible", "--sp 2", "--use_cpu"))
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    refused(*OWN, "--sp", "4", parts=("4 processes", "2 are visible", "--sp 2", "--use_cpu"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # a launcher that does not say: one GPU for each process, perhaps
    assert main([*OWN, "--sp", "4", "--dry_run"]) == 0


def test_accelerate_launch_in_each_of_several_tasks(refused, srun_task, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    refused("--sp", "4", parts=("in each of srun's 4 tasks", "srun longctx train"))


def test_a_profile_in_each_of_several_tasks(refused, srun_task):
    refused("--accelerate_config", "fsdp2", parts=("fsdp2 in 4 tasks on a node", "--ntasks-per-node 1"))


def test_a_first_node_without_address(refused, srun_task, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "no-such-node[3-4]")
    refused("--sp", "4", parts=("no-such-node3", "Set MASTER_ADDR"))


def test_flags_of_machines_without_a_profile(refused):
    refused("--machine_rank", "1", parts=("--machine_rank 1 only takes effect", "to the launcher"))


@pytest.fixture
def srun_task(monkeypatch):
    """What srun tells the first of four tasks on a node."""
    told = {"STEP_NUM_TASKS": "4", "STEP_TASKS_PER_NODE": "4", "STEP_NODELIST": "localhost", "JOB_ID": "7"}
    for name, value in (told | {"STEP_ID": "0", "NODEID": "0", "LOCALID": "0", "PROCID": "0"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_launcher_and_num_processes_disagree(refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused("--num_processes", "2", parts=("--num_processes 2", "started 4", "Leave the flag out"))


def test_only_one_rank_of_a_machine_says_what_all_find(capsys, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--sp", "3"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sp", ["0", "-2"])
def test_degrees_below_one(sp, refused):
    refused("--sp", sp, parts=(f"--sp {sp}", "at least 1"))


def test_unknown_backend(refused):
    listed = ", ".join(map(repr, ["auto", *BACKENDS.spread]))
    refused("--sp", "2", "--sp_backend", "spiral", parts=("spiral", listed))


def test_ring_sizes_that_do_not_fit(refused):
    refused("--sp", "4", "--ring_size", "2", parts=("--ring_size 2", "--sp_backend hybrid"))
    hybrid = ["--sp", "6", "--sp_backend", "hybrid", "--ring_size"]
    refused(*hybrid, "4", parts=("--ring_size 4", "divisor of 6"))
    refused(*hybrid, "2", parts=("leaves 3 Ulysses ranks", "4 heads"))


def test_ulysses_lists_the_legal_sizes_where_heads_do_not_fit(refused):
    refused("--sp", "3", "--sp_backend", "ulysses", parts=("4 ", "--sp 1, 2, 4", "--sp_backend ring"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--cp", "2", "--sp", "4"], ("--cp 2", "--sp 4")),
        (["--cp", "2", "--sp_backend", "ulysses"], ("--cp 2", "ulysses")),
        (["--engine", "fsdp2"], ("fsdp2", "this run has one")),
        (["--sp", "2", "--dp_replicate", "2", "--engine", "deepspeed"], ("--dp_replicate 2", "--engine fsdp2")),
        (["--dp_replicate", "2"], ("--dp_replicate 2", "2 processes", "leave it out")),
        (["--max_length", "1"], ("--max_length 1", "below 2")),
        (["--sp", "2", "--pad_to_multiple_of", "6"], ("--pad_to_multiple_of 6", "multiple of 4", "use 12")),
        (["--pad_to_multiple_of", "many"], ("--pad_to_multiple_of many", "auto")),
        (["--per_device_train_batch_size", "0"], ("--per_device_train_batch_size 0", "below 1")),
        (["--gradient_accumulation_steps", "0"], ("--gradient_accumulation_steps 0", "below 1")),
        (["--ddp_timeout", "0"], ("--ddp_timeout 0", "below 1")),
        (["--max_grad_norm", "-1"], ("--max_grad_norm -1", "Use 0")),
        (["--attn_implementation", "flash"], ("--attn_implementation flash", "flash_attention_2")),
        (["--chat_template_path", "none.jinja"], ("--chat_template_path none.jinja", ".jinja")),
        (["--accelerate_config", "fsdp9"], ("--accelerate_config fsdp9", "fsdp2")),
        (["--logging_steps", "0"], ("--logging_steps 0", "at least 1", "--logging_strategy no")),
        (["--output_dir", "/proc/nothing"], ("--output_dir /proc/nothing: /proc cannot be", "Choose another")),
        (["--model_init_kwargs", '{"num_attention_heads": 0}'], ("--model_init_kwargs", "num_attention_heads to 0")),
        (["--report_to", "nothing"], ("--report_to nothing", "Use none, all", "tensorboard")),
        (["--report_to", "neptune"], ("--report_to neptune", "not installed", "--report_to none")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_contradict_each_other_or_their_limits(arguments, parts, refused):
    if "--sp_backend" not in arguments and "--sp" in arguments and "--engine" not in arguments:
        arguments = [*arguments, "--sp_backend", "ring"] if "--cp" not in arguments else arguments
    refused(*arguments, parts=parts)


RING, ULYSSES = ["--sp", "2", "--sp_backend", "ring"], ["--sp", "2", "--sp_backend", "ulysses"]
MEMORY_OPTIONS = {
    "unknown preset": (["--memory", "most"], ("most", "'balanced', 'longest', 'fastest'")),
    "no heads": ([*ULYSSES, "--heads_k_stride", "0"], ("--heads_k_stride 0", "below 1")),
    "overlap of no exchange": (
        [*RING, "--overlap_exchange", "True"],
        ("--overlap_exchange True", "--sp_backend ulysses"),
    ),
    "chunks and overlap": (
        [*ULYSSES, "--sequence_chunk_size", "64", "--overlap_exchange", "True"],
        ("--sequence_chunk_size 64", "--overlap_exchange", "one of the two"),
    ),
    "chunks and heads": (
        ["--sequence_chunk_size", "64", "--heads_k_stride", "1"],
        ("--sequence_chunk_size 64", "--heads_k_stride", "one of the two"),
    ),
    "no tiles": (["--tiled_mlp_num_shards", "0"], ("--tiled_mlp_num_shards 0", "below 1")),
    "tiles of none": (
        ["--tiled_mlp", "False", "--tiled_mlp_num_shards", "2"],
        ("--tiled_mlp_num_shards 2", "--tiled_mlp False"),
    ),
    "no chunk": ([*ULYSSES, "--sequence_chunk_size", "0"], ("--sequence_chunk_size 0", "below 1")),
    "chunks, not recomputed": (
        ["--sequence_chunk_size", "64", "--gradient_checkpointing", "False"],
        ("--sequence_chunk_size 64", "checkpointing is off"),
    ),
    "chunks and tiles": (
        ["--sequence_chunk_size", "64", "--tiled_mlp", "True"],
        ("64", "--tiled_mlp", "one of the two"),
    ),
    "every k without any": (
        ["--gradient_checkpointing", "False", "--gradient_checkpointing_kwargs", '{"every_n_layers": 2}'],
        ("every_n_layers", "checkpointing is off", "--activation_checkpointing True"),
    ),
    "every 0": (["--gradient_checkpointing_kwargs", '{"every_n_layers": 0}'], ("every_n_layers 0", "at least 1")),
    "no mapping": (["--gradient_checkpointing_kwargs", "{every: 2}"], ("{every: 2}", "not a JSON object", "Example")),
    "offload to where": (
        ["--gradient_checkpointing_kwargs", '{"offload": "cpu"}'],
        ("offload 'cpu'", "neither true, false nor a number of layers"),
    ),
    "bf16 sums of fp32": (
        [*RING, "--communication_data_type", "bf16"],
        ("--communication_data_type bf16", "trains in fp32", "--bf16 True"),
    ),
    "reduced by nobody": (["--communication_data_type", "fp32"], ("--communication_data_type fp32", "engine is none")),
    "offloaded by nobody": (
        ["--offload_optimizer_device", "cpu"],
        ("--offload_optimizer_device cpu", "engine is none", "--engine deepspeed"),
    ),
    "optimizer alone on FSDP2": (
        [*RING, "--offload_optimizer_device", "cpu"],
        ("--offload_optimizer_device cpu", "FSDP2", "Use --offload_param_device cpu", "--engine deepspeed"),
    ),
    "disk of FSDP2": (
        [*RING, "--offload_param_device", "nvme", "--offload_param_nvme_path", "."],
        ("--offload_param_device nvme", "option of DeepSpeed ZeRO-3", "--engine deepspeed"),
    ),
    "no folder": (
        [*ULYSSES, "--offload_optimizer_device", "nvme"],
        ("--offload_optimizer_device nvme", "add --offload_optimizer_nvme_path"),
    ),
    "folder for nothing": (
        [*ULYSSES, "--offload_param_nvme_path", "swap"],
        ("--offload_param_nvme_path swap", "--offload_param_device nvme", "is none. Set it to nvme"),
    ),
    "no such disk": (
        [*ULYSSES, "--offload_param_device", "nvme", "--offload_param_nvme_path", "/dev/null/swap"],
        ("--offload_param_nvme_path /dev/null/swap", "not a folder that can be written", "local SSD"),
    ),
    "2^31 tokens": (
        ["--max_length", "1073741824", "--per_device_train_batch_size", "2"],
        ("--max_length 1073741824", "2,147,483,648 tokens", "2,147,483,647", "int32"),
    ),
    "2^31 sums": (
        [*RING, "--max_length", "1073741824", "--per_device_train_batch_size", "1"],
        ("--max_length 1073741824", "2,147,483,648 sums of 4 heads on a rank", "2,147,483,647", "raise --sp"),
    ),
}


@pytest.mark.parametrize("case", MEMORY_OPTIONS)
def test_memory_options_that_the_run_has_no_place_for(case, refused):
    arguments, parts = MEMORY_OPTIONS[case]
    refused(*OWN, *arguments, parts=parts)


@pytest.mark.parametrize(
    ("device", "stage", "parts"),
    [
        (["--offload_param_device", "cpu"], "2", ("--offload_param_device cpu", "ZeRO-3", "the run has ZeRO-2")),
        (
            ["--offload_optimizer_device", "nvme", "--offload_optimizer_nvme_path", "."],
            "2",
            ("--offload_optimizer_device nvme", "ZeRO-3", "the run has ZeRO-2"),
        ),
    ],
)
def test_offloading_that_the_zero_stage_does_not_have(device, stage, parts, refused, launched_by_accelerate):
    launched_by_accelerate("ACCELERATE_USE_DEEPSPEED", "true")
    launched_by_accelerate("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    refused(*OWN, *device, parts=parts)


def test_host_memory_that_is_not_there(refused, monkeypatch, without_preflight):
    monkeypatch.setattr("longctx.settings.machine_checks.available_host_memory", lambda: 2**30)
    offloads = [*OWN, *RING, "--activation_offloading", "True", "--per_device_train_batch_size", "1"]
    assert main([*offloads, "--max_length", "65536", "--dry_run"]) == 0
    refused(
        *offloads,
        *("--max_length", "8388608"),
        parts=("GiB of host memory", "2 processes", "checkpoints", "1.0 GiB are available", "--max_length"),
    )


def test_a_folder_for_temporary_files_too_deep_for_workers_sockets(refused, monkeypatch):
    deep = "/tmp/" + "d" * 71
    monkeypatch.setattr("tempfile.tempdir", deep)
    refused("--dataloader_num_workers", "2", parts=("--dataloader_num_workers 2", deep, "more than 75", "Set TMPDIR"))
    for folder, fits in ((deep[:-1], True), (deep, False)):
        os.makedirs(inner := f"{folder}/pymp-12345678", exist_ok=True)
        try:
            with pytest.raises(OSError, match="too long") if not fits else contextlib.nullcontext():
                Listener(f"{inner}/listener-12345678", "AF_UNIX").close()
        finally:
            shutil.rmtree(folder)


def test_disk_and_op_that_are_not_there(refused, monkeypatch, tmp_path):
    flags = [*OWN, *ULYSSES, "--offload_optimizer_device", "nvme", "--offload_optimizer_nvme_path", str(tmp_path)]
    monkeypatch.setattr("longctx.settings.machine_checks._has_async_io", lambda use_cpu: False)
    refused(*flags, parts=("nvme", "async_io", "libaio-dev", "ds_report"))
    monkeypatch.setattr("longctx.settings.machine_checks.shutil.disk_usage", lambda folder: FullDisk)
    refused(*flags, parts=(f"--offload_optimizer_nvme_path {tmp_path}", "0.0 GiB free"))


class FullDisk:
    free = 1000


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ('{"hidden": 5}', ("hidden", "qwen3", "hidden_size")),
        ('{"dtype": "bfloat16"}', ("dtype bfloat16", "--dtype")),
        ('{"a": ', ("not a JSON object",)),
        ('{"num_hidden_layers": 3}', ("num_hidden_layers is set to 3", "2 layers", "Use 1 to 2")),
        ('{"num_hidden_layers": 0}', ("num_hidden_layers is set to 0", "Use 1 to 2")),
        ('["a"]', ("not a JSON object",)),
    ],
)
def test_model_init_kwargs_that_would_not_act(kwargs, parts, refused):
    refused("--model_init_kwargs", kwargs, parts=parts)


# ------------------------------------------------------------------------------------------------
# The launcher's profile and the installed packages
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def launched_by_accelerate(monkeypatch):
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch.setenv


def test_tensor_parallel_profile(refused, launched_by_accelerate):
    launched_by_accelerate("PARALLELISM_CONFIG_TP_SIZE", "2")
    refused(parts=("parallelism_config_tp_size 2", "Set it to 1", "torchtitan"))


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("torch", []),
        ("transformers", []),
        ("trl", []),
        ("accelerate", ["--sp", "2", "--sp_backend", "ring"]),
        ("deepspeed", ["--sp", "2", "--sp_backend", "ulysses"]),
    ],
)
def test_package_versions_below_the_minimum(package, arguments, refused, monkeypatch):
    installed = importlib.metadata.version
    monkeypatch.setattr(
        "longctx.settings.machine_checks.version", lambda name: "0.1.2" if name == package else installed(name)
    )
    refused(*arguments, parts=(f"{package} 0.1.2 is installed", " needs ", f"pip install -U '{package}>="))


def test_a_backend_asks_only_for_what_it_needs(monkeypatch):
    installed = importlib.metadata.version
    monkeypatch.setattr(
        "longctx.settings.machine_checks.version", lambda name: "0.1.2" if name == "deepspeed" else installed(name)
    )
    assert main(["--sp", "2", "--sp_backend", "ring", "--dry_run"]) == 0


# ------------------------------------------------------------------------------------------------
# Models: from the config alone, in folders that hold nothing else
# ------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
MODELS = {
    "sliding window": ("llama", {"sliding_window": 8}, ("sliding_window is 8", "mistral")),
    "chunked layers": (
        "qwen3",
        {"layer_types": ["chunked_attention", "full_attention"]},
        ("layer_types holds chunked_attention", "sliding_attention are supported"),
    ),
    "uneven heads": (
        "qwen3",
        {"num_key_value_heads": 3},
        ("num_attention_heads is 4, which is not a multiple of num_key_value_heads, 3",),
    ),
    "soft-capping": (
        "gemma3_text",
        {"attn_logit_softcapping": 50.0},
        ("attn_logit_softcapping is 50.0", "soft-capped attention scores"),
    ),
    "mamba": ("mamba", {"state_size": 4}, ("'mamba'", "state_size is 4", "state-space", "llama")),
    "mamba and attention": ("jamba", {}, ("'jamba'", "mamba_d_state")),
    "linear attention": ("minimax", {}, ("layer_types holds linear_attention",)),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, ("router_jitter_noise is 0.1", "--model_init_kwargs")),
    "chunks without a size": (
        "llama4_text",
        {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 2},
        ("layer_types holds chunked_attention",),
    ),
    "bidirectional": ("gemma", {"use_bidirectional_attention": True}, ("use_bidirectional_attention", "non-causal")),
    "encoder": ("bert", {}, ("'bert'", "not known to be exact", "llama")),
    "alibi": ("bloom", {}, ("'bloom'", "not known to be exact", "llama")),
    "part of a larger model": ("paligemma", {}, ("its text part, 'gemma',",)),
    "attention dropout": ("llama", {"attention_dropout": 0.1}, ("attention_dropout is 0.1", "--model_init_kwargs")),
    "other dropout": ("phi", {"resid_pdrop": 0.2}, ("resid_pdrop is 0.2", "--model_init_kwargs")),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ("rope_type is 'dynamic'", "default, linear, llama3, proportional, yarn"),
    ),
    "long rope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
            "original_max_position_embeddings": 64,
        },
        ("rope_type is 'longrope'", "default, linear, llama3, proportional, yarn"),
    ),
}


def save_config(folder, model_type, **settings):
    small = {} if model_type in ("paligemma", "bert", "bloom", "mamba") else SMALL
    if model_type == "phi3":
        small = small | {"pad_token_id": 0}
    CONFIG_MAPPING[model_type](**small | settings).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_not_known_to_be_exact(case, tmp_path, refused):
    model_type, settings, parts = MODELS[case]
    folder = save_config(tmp_path, model_type, **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    refused("--model_name_or_path", folder, "--dataset_name", "stdlib", parts=("refused", *parts))


def test_compiled_mixtures_of_experts(tmp_path, refused):
    given = [
        "--model_name_or_path",
        save_config(tmp_path, "mixtral", num_key_value_heads=2),
        "--dataset_name",
        "stdlib",
    ]
    refused(*given, "--torch_compile", "True", parts=("--torch_compile True with mixtral", "Leave out --torch_compile"))


def test_expert_parallelism_is_refused_with_what_is_missing(tmp_path, refused):
    given = [
        "--model_name_or_path",
        save_config(tmp_path, "mixtral", num_key_value_heads=2),
        "--dataset_name",
        "stdlib",
    ]
    parts = ("sets ep_size", "device meshes of their own", "FSDP2 and ZeRO-3 shard experts, too")
    refused(*given, "--model_init_kwargs", '{"ep_size": 2}', parts=parts)


@pytest.mark.parametrize(
    ("model_type", "name", "part"),
    [
        ("llama", "eager", "llama is no mixture of experts"),
        ("mixtral", "deepgemm", "Use eager, batched_mm, grouped_mm"),
    ],
)
def test_ways_to_compute_experts_that_are_not_compared(model_type, name, part, tmp_path, refused):
    given = [
        "--model_name_or_path",
        save_config(tmp_path, model_type, num_key_value_heads=2),
        "--dataset_name",
        "stdlib",
    ]
    kwargs = ["--model_init_kwargs", json.dumps({"experts_implementation": name})]
    refused(*given, *kwargs, parts=(f"sets experts_implementation {name}", part))


@pytest.mark.parametrize(
    ("model_type", "kind"), [("llama", "is no mixture of experts"), ("hunyuan_v1_moe", "has no such loss")]
)
def test_a_coefficient_for_routers_without_an_auxiliary_loss(model_type, kind, tmp_path, refused):
    given = ["--model_name_or_path", save_config(tmp_path, model_type), "--dataset_name", "stdlib"]
    parts = ("--router_aux_loss_coef 0.1", f"{model_type} {kind}", "Leave it out")
    refused(*given, "--router_aux_loss_coef", "0.1", parts=parts)


def test_the_remedy_for_dropout_works(tmp_path, without_preflight):
    folder = save_config(tmp_path, "llama", attention_dropout=0.1)
    remedy = ["--model_init_kwargs", '{"attention_dropout": 0.0}']
    assert main(["--model_name_or_path", folder, "--dataset_name", "stdlib", "--dry_run", *remedy]) == 0


def test_code_of_the_models_own(tmp_path, refused):
    folder = save_config(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "own.Model"}}))
    given = ("--model_name_or_path", folder, "--dataset_name", "stdlib", "--trust_remote_code")
    refused(*given, parts=("--trust_remote_code", "'llama'", "Leave the flag out"))


def test_a_configuration_of_the_models_own():
    class OwnConfig(LlamaConfig):
        pass

    with pytest.raises(ValueError, match=r"Its config OwnConfig is code of the model's own\. Use one of the types"):
        check_model(OwnConfig())
    check_model(LlamaConfig())


def test_float16_weights(tmp_path, refused):
    folder = save_config(tmp_path, "llama", dtype="float16")
    given = ("--model_name_or_path", folder, "--dataset_name", "stdlib")
    refused(*given, "--dtype", "auto", parts=("--dtype auto means torch.float16", "--dtype float32 or bfloat16"))
    refused(*given, "--dtype", "float16", parts=("--dtype float16", "Use float32 or bfloat16 or auto"))


def test_no_such_model(tmp_path, refused):
    refused("--model_name_or_path", str(tmp_path), "--dataset_name", "stdlib", parts=(str(tmp_path), "'tiny'"))


def test_no_tokenizer(tmp_path, refused):
    folder = save_config(tmp_path, "llama")
    refused("--model_name_or_path", folder, "--dataset_name", "stdlib", parts=(folder, "tokenizer", "tokenizer.json"))


def test_no_tokenizer_where_transformers_makes_one_without_files(tmp_path, refused):
    folder = save_config(tmp_path, "qwen3", num_key_value_heads=4)
    parts = (folder, "finds 1 special tokens and no others", "tokenizer.json")
    refused("--model_name_or_path", folder, "--dataset_name", "stdlib", parts=parts)


# ------------------------------------------------------------------------------------------------
# Data: before weights, which the model's folder does not have
# ------------------------------------------------------------------------------------------------

TEXT = [{"text": "x" * length} for length in (10, 30, 50)]
IDS = {"input_ids": [5, 6, 7, 8]}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


DATA = {
    "nothing": ("", [], ("data.jsonl", "empty, 0 records", "at least one")),
    "too long": (
        lines(*TEXT),
        ["--max_length", "20"],
        (
            "2 of 3 documents are longer than max_length = 20",
            "the longest is document 2 with 51",
            "--overlong truncate  cuts 42 of the 93 tokens",
            "--overlong drop      drops 2 documents with 82",
            "--overlong split     makes 5 pieces of them, 0 tokens lost",
        ),
    ),
    "too long, not packed": (lines(*TEXT), ["--max_length", "20", "--packing", "False"], ("2 of 3", "--overlong drop")),
    "all labels masked": (lines(IDS | {"labels": [5, -100, -100, -100]}), [], ("every label is -100", "1 documents")),
    "too few labels": (lines(IDS | {"labels": [5, 6]}), [], ("2 entries", "has 4", "per token")),
    "malformed line": (
        lines(*TEXT) + '{"text": \n',
        [],
        ("data.jsonl:4", "malformed JSON", "one JSON object per line"),
    ),
    "another kind of value": (lines(*TEXT, {"text": 5}), [], ("data.jsonl:4", "int", "string")),
    "another column": (lines({"body": "x"}), [], ("data.jsonl:1", "body", "--dataset_text_field")),
    "ids beyond the vocabulary": (lines({"input_ids": [5, 99999]}), [], ("99999", "0 to 271", "tokenizer")),
    "no such split": (lines(*TEXT), ["--dataset_train_split", "dev"], ("dev", "train")),
    "no such pad token": (lines(*TEXT), ["--pad_token", "<none>"], ("--pad_token '<none>'", "vocabulary")),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_trained_on(case, tmp_path, folder_without_weights, refused):
    content, arguments, parts = DATA[case]
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    given = ("--model_name_or_path", folder_without_weights, "--dataset_name", str(path), "--use_cpu")
    refused(*given, *arguments, parts=parts)


def test_pad_token_that_the_model_lacks(tmp_path, refused):
    """The pad token is a part of every padded batch, whatever the documents hold."""
    config = tiny_config()
    config.vocab_size = 250
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "data.jsonl").write_text(lines(IDS))
    given = ("--model_name_or_path", str(tmp_path), "--dataset_name", str(tmp_path / "data.jsonl"), "--use_cpu")
    refused(*given, parts=("'<|pad|>' has number 257", "0 to 249", "--pad_token"))


def test_weights_that_are_not_there(tmp_path, folder_without_weights, refused, monkeypatch):
    from longctx.model.load import load_model

    monkeypatch.setattr("longctx.run.model.load_model", load_model)
    (tmp_path / "data.jsonl").write_text(lines(*TEXT))
    given = ("--model_name_or_path", folder_without_weights, "--dataset_name", str(tmp_path / "data.jsonl"))
    refused(*given, "--use_cpu", parts=(folder_without_weights, "weights", "cannot be read"))


def test_weights_of_which_some_are_missing(tmp_path):
    """transformers draws them at random, with a warning."""
    from safetensors.torch import load_file, save_file

    from longctx.model.load import load_config, load_model

    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for 1 parameters .* such as model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path), load_config(str(tmp_path)))


def test_data_that_cannot_be_read(tmp_path, folder_without_weights, refused):
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "\xff"}\n')
    given = ("--model_name_or_path", folder_without_weights, "--use_cpu", "--dataset_name")
    refused(*given, str(tmp_path / "data.jsonl"), parts=("data.jsonl:1", "not UTF-8", "0xff"))
    refused(*given, str(tmp_path / "none.jsonl"), parts=("none.jsonl", "no such file", "'stdlib'"))


# ------------------------------------------------------------------------------------------------
# Real processes
# ------------------------------------------------------------------------------------------------

TIMED = """
import runpy, sys, time
import longctx.settings.resolve, longctx.settings.flags, longctx.run, longctx.launch.spawn
start = time.monotonic()
try:
    runpy.run_module("longctx.train", run_name="__main__")
finally:
    print(time.monotonic() - start)
"""


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names} | {"CUDA_VISIBLE_DEVICES": ""}


def test_a_wrong_flag_ends_at_once_with_one_line():
    command = [sys.executable, "-c", TIMED, "--sp", "3", "--sp_backend", "ulysses"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(errors) == 1
    assert errors[0].startswith("longctx: error: ")
    assert float(done.stdout.split()[-1]) < 10  # seconds after imports


def test_an_error_in_the_data_is_shown_once_and_ends_every_rank(tmp_path, folder_without_weights):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines(*TEXT) + "{\n")
    arguments = ["--sp", "2", "--sp_backend", "ring", "--dataset_name", str(path), "--use_cpu", "True"]
    arguments += ["--model_name_or_path", folder_without_weights, "--output_dir", str(tmp_path / "out")]
    ranks = run_main(2, "longctx.train", arguments, timeout=120)
    assert [code for code, *_ in ranks] == [2, 2]
    shown = "".join(text for _, *printed in ranks for text in printed)
    assert shown.count("longctx: error: ") == 1, shown
    assert f"{path}:4: malformed JSON" in shown
    assert "Traceback" not in shown, shown


@pytest.mark.long
def test_an_error_in_the_data_is_shown_once_and_ends_every_process(tmp_path, folder_without_weights):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines(*TEXT) + "{\n")
    command = [sys.executable, "-m", "longctx.train", "--sp", "2", "--sp_backend", "ring", "--dataset_name", str(path)]
    command += ["--model_name_or_path", folder_without_weights, "--output_dir", str(tmp_path / "out")]
    start = time.monotonic()
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())
        assert process.wait(120) not in (0, None)
    shown = (tmp_path / "log").read_text()
    assert shown.count("longctx: error: ") == 1, shown
    assert f"{path}:4: malformed JSON" in shown
    assert "Traceback" not in shown, shown
    assert not children_of(str(path)), f"processes are left after {time.monotonic() - start:.0f} s"


def children_of(argument: str) -> list[str]:
    """Command lines of running processes with this argument."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline") as file:
                arguments = file.read().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if argument in arguments:
            found.append(" ".join(arguments))
    return found
