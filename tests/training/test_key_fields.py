"""Every key and digest that says "this is the same" changes with every field that it has to know.

The fields are listed by the code itself: flags, dataclass fields, parameters. A new one belongs to no list here, and
the test asks for it: either a change of it changes the key, or it is written down why it must not.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from longctx.data import MixedStream, Mixture, load_records
from longctx.data.contents import cache_folder
from longctx.model.tiny import tiny_config
from longctx.packing import PackedDataset, PackedStream, Packing, PackingReport, plan_packing
from longctx.run.preparation import read_tokenizer
from longctx.run.processes import _decided
from longctx.settings.data import Source
from longctx.settings.dpo import DPO, LOSS_FLAGS
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.checkpoint.files import CheckpointError, Manifest, check_same
from longctx.training.dataset import StreamedData, TrainingData, prepare_data_set
from longctx.training.fingerprint import FilesIdentity, _mixture_identity, data_identity, files_identity, node_identity
from tests.jsonl import write_lines
from tests.small_model import save_with_tokenizer

TEXTS = ["one", "two and more", "three " * 5, "", "five, five, five", "six", "seven " * 9, "eight"]


CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Files of every kind, and another of each."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "model").mkdir()
    save_with_tokenizer(tiny_config(), folder / "model")
    return {
        "text": write_lines(folder / "text.jsonl", [{"text": t or "four", "other": f"{t}."} for t in TEXTS]),
        "more": write_lines(folder / "more.jsonl", [{"text": f"{t}!"} for t in TEXTS]),
        "pairs": write_lines(folder / "pairs.jsonl", [{"prompt": "Why? ", "completion": f"{t}."} for t in TEXTS]),
        "chats": write_lines(folder / "chats.jsonl", [{"messages": CHAT}] * 3),
        "model": str(folder / "model"),
    }


# ------------------------------------------------------------------------------------------------
# What a resumed run has to have as it was
# ------------------------------------------------------------------------------------------------

CHANGED = {  # flags of a run and those of one that must not go on from it, on `text` where nothing else is named
    "dataset_name": ({}, {"dataset_name": "more"}),
    "dataset_text_field": ({}, {"dataset_text_field": "other"}),
    "dataset_train_split": ({}, {"dataset_train_split": "train[:90%]"}),
    "completion_only_loss": ({"dataset_name": "pairs"}, {"completion_only_loss": "False"}),
    "assistant_only_loss": ({"dataset_name": "chats"}, {"assistant_only_loss": "True"}),
    "chat_template_path": ({"dataset_name": "chats"}, {"chat_template_path": "template"}),
    "eos_token": ({}, {"eos_token": "<|im_end|>"}),
    "max_length": ({}, {"max_length": "96"}),
    "shuffle_dataset": ({}, {"shuffle_dataset": "True"}),
    "packing": ({}, {"packing": "False"}),
    "packing_strategy": ({}, {"packing_strategy": "wrapped"}),
    "overlong": ({"max_length": "32", "overlong": "drop"}, {"overlong": "truncate"}),
    "balance_packs": ({}, {"balance_packs": "False"}),
    "train_sampling_strategy": ({}, {"train_sampling_strategy": "sequential"}),
    "dataloader_drop_last": ({}, {"dataloader_drop_last": "True"}),
    "seed": ({}, {"seed": "7"}),
    "data_seed": ({}, {"data_seed": "7"}),
    "dtype": ({}, {"dtype": "bfloat16"}),
    "rope_scaling": ({}, {"rope_scaling": "yarn:2"}),
    "model_init_kwargs": ({}, {"model_init_kwargs": '{"rms_norm_eps": 0.1}'}),
    "use_peft": ({}, {"use_peft": "True"}),
    "lora_alpha": ({"use_peft": "True"}, {"lora_alpha": "64"}),
    "use_rslora": ({"use_peft": "True"}, {"use_rslora": "True"}),
    "model_name_or_path": ({"use_peft": "True"}, {"model_name_or_path": "model"}),
    "dataset_streaming": ({}, {"dataset_streaming": "True", "max_steps": "3"}),
}
STREAM = {"dataset_streaming": "True", "max_steps": "3", "packing": "False"}
"""Without packing no document waits for a pack, whose digest would tell."""
OF_A_STREAM = ["dataset_name", "dataset_text_field", "completion_only_loss", "assistant_only_loss", "eos_token"]
OF_A_STREAM += ["chat_template_path", "max_length", "overlong", "dataloader_drop_last", "model_init_kwargs"]
OF_A_STREAM += ["rope_scaling"]
CHANGED_STREAM = {name: tuple(STREAM | flags for flags in CHANGED[name]) for name in OF_A_STREAM}
OF_THE_OPTIMIZER = sorted(flag.name for flag in SFT.flags.values() if flag.resume == "same")
KNOWN_ELSEWHERE = {
    "by `sequences_per_step`": "per_device_train_batch_size gradient_accumulation_steps global_batch_size",
    "by names and shapes of what is trained": (
        "lora_r lora_target_modules lora_target_parameters lora_modules_to_save use_dora"
    ),
    "by the digest of evaluation data (test_best_model.py)": "dataset_test_split",
    "by the mixture, below": "datasets dataset_weights dataset_stopping_strategy test_split_size",
    "by the identity of 4-bit weights": "load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant",
    "by the model's configuration, which it sets": "router_aux_loss_coef",
    "by the flags of the optimizer": " ".join(OF_THE_OPTIMIZER),
    "by the flags of the loss of pairs": " ".join({*LOSS_FLAGS} - SFT.flags.keys()),
    "another name of `dataset_streaming`": "streaming",
    "hub data, whose tokens or name and configuration are compared": "dataset_config",
}
MAY_CHANGE = {
    "another layout or engine gives the same run": (
        "sp sp_backend cp ring_size measure_links dp_replicate engine num_processes accelerate_config machine_rank "
        "main_process_ip main_process_port use_cpu ddp_timeout"
    ),
    "a memory option changes no result": (
        "memory tiled_mlp tiled_mlp_num_shards heads_k_stride overlap_exchange sequence_chunk_size "
        "offload_optimizer_device offload_param_device offload_optimizer_nvme_path offload_param_nvme_path "
        "learned gradient_checkpointing gradient_checkpointing_kwargs activation_offloading torch_empty_cache_steps "
        "attn_implementation use_liger_kernel liger_kernel_config bnb_4bit_quant_storage"
    ),
    "a compiled layer computes the same": "torch_compile torch_compile_backend torch_compile_mode",
    "padding changes no result": "pad_to_multiple_of pad_token padding_free",
    "how data is read changes no token": (
        "dataset_num_proc dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context"
    ),
    "precision is that of the machine at hand": "tf32 full_determinism communication_data_type",
    "asked for anew from here on, as of a run that is made longer": (
        "num_train_epochs max_steps on_nonfinite early_stopping_patience early_stopping_threshold"
    ),
    "evaluation trains nothing": (
        "eval_strategy eval_on_start eval_delay eval_generate eval_packing eval_steps greater_is_better "
        "metric_for_best_model per_device_eval_batch_size load_best_model_at_end"
    ),
    "logs, files and the hub": (
        "output_dir overwrite_output_dir "
        "logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node "
        "log_level log_level_replica disable_tqdm skip_memory_metrics report_to run_name project trackio_space_id "
        "trackio_bucket_id trackio_static_space_id save_strategy save_steps save_total_limit save_only_model "
        "save_async save_on_each_node resume_from_checkpoint push_to_hub hub_token hub_private_repo hub_model_id "
        "hub_strategy hub_always_push hub_revision debug include_num_input_tokens_seen profile profile_steps "
        "prepare_only dry_run explain"
    ),
    "trusting code changes none": "trust_remote_code",
    "weights are the checkpoint's, and an adapter's base is known by its files": "model_revision",
    "a prompt that is computed once is as one that is computed twice": "share_prompts",
    "the reference is computed before training in any case": "precompute_ref_log_probs precompute_ref_batch_size",
    "both of its values are one loss": "loss_type",
    "has one value that is accepted": "lora_dropout lora_task_type",
}


def listed(table):
    return [name for names in table.values() for name in names.split()]


def test_every_flag_is_known_by_a_resumed_run_or_may_change():
    rows = [*SFT.flags.values(), *(flag for flag in DPO.flags.values() if flag.name not in SFT.flags)]
    acting = {flag.name for flag in rows if not (flag.idle or flag.instead or len(flag.values) == 1)}
    places = [*CHANGED, *listed(KNOWN_ELSEWHERE), *listed(MAY_CHANGE)]
    assert len(places) == len(set(places)), sorted(name for name in places if places.count(name) > 1)
    assert sorted(acting - set(places)) == [], "say what a resumed run does with these flags"
    assert sorted(set(places) - acting) == [], "these flags are gone"


def resolved(data, flags):
    given = {"model_name_or_path": "tiny", "dataset_name": "text", "max_length": "64", "overlong": "split"} | flags
    arguments = [part for name, value in given.items() for part in (f"--{name}", data.get(value, value))]
    return resolve(parse_flags([*arguments, "--use_cpu", "True"]), read_profile({}), {})


def identity(data, flags):
    """As `longctx.run.prepare` makes it, and as JSON gives it back."""
    run = resolved(data, flags)
    rows = prepare_data_set(run.settings, read_tokenizer(run.settings, run.model_config), run.model_config)
    files = files_identity(run.settings, run.model_config, with_model=False)
    return json.loads(json.dumps(data_identity(rows, run.settings, run.model_config, files)))


def refuses(before, now):
    try:
        check_same(a_manifest(data=before), "checkpoint-1", sequences_per_step=4, data=now, optimization={})
    except CheckpointError:
        return True
    return False


def a_manifest(**changed):
    given = {"step": 3, "layout": {"sequences_per_step": 4}, "optimization": {}, "parameters": {}, "data": {}}
    return Manifest(**given | {"progress": {}} | changed)


@pytest.mark.parametrize("changes", [pytest.param(CHANGED, id="data set"), pytest.param(CHANGED_STREAM, id="stream")])
def test_a_run_with_another_value_of_a_flag_that_decides_tokens_or_model_is_no_resumption(changes, data, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    data = data | {"template": str(tmp_path / "template.jinja")}
    known: dict[str, dict] = {}
    for name, (before, after) in changes.items():
        key = json.dumps(before)
        known[key] = known.get(key) or identity(data, before)
        again = identity(data, before) if name in ("seed", "eos_token") else known[key]
        assert not refuses(known[key], again), name
        assert refuses(known[key], identity(data, before | after)), f"--{name}"


def test_model_init_kwargs_are_the_same_however_they_are_spelled(data):
    one, other = (
        identity(data, {"model_init_kwargs": text}) for text in ('{"rms_norm_eps":1e-5}', '{ "rms_norm_eps" : 0.00001}')
    )
    assert not refuses(one, other)


@pytest.mark.parametrize("name", OF_THE_OPTIMIZER)
def test_the_optimizer_s_states_belong_to_its_flags(name):
    before = {name: 1.0}
    check_same(a_manifest(optimization=before), "c", sequences_per_step=4, data={}, optimization={name: 1.0})
    with pytest.raises(CheckpointError, match=f"{name}: 1.0 then, 2.0 now"):
        check_same(a_manifest(optimization=before), "c", sequences_per_step=4, data={}, optimization={name: 2.0})
    with pytest.raises(CheckpointError, match=f"{name}: 1.0 then, None now"):
        check_same(a_manifest(optimization=before), "c", sequences_per_step=4, data={}, optimization={})


def test_a_step_has_as_many_sequences():
    with pytest.raises(CheckpointError, match="written with 4 sequences in a step, and this run has 8"):
        check_same(a_manifest(), "checkpoint-1", sequences_per_step=8, data={}, optimization={})


MIXTURE = Mixture(names=("a", "b"), weights=(1.0, 2.0), stopping_strategy="first_exhausted", seed=1, test_size=None)
OTHER_MIXTURES = {"weights": (2.0, 1.0), "fractions": (0.5, 0.5), "stopping_strategy": "all_exhausted"}
OTHER_MIXTURES |= {"seed": 2, "test_size": 0.5}


def test_a_mixture_is_known_by_all_that_decides_what_is_drawn():
    """But for its names: the documents themselves are compared, or of a stream paths and files."""
    assert {field.name for field in fields(Mixture)} == {"names", *OTHER_MIXTURES}
    for name, value in OTHER_MIXTURES.items():
        assert _mixture_identity(replace(MIXTURE, **{name: value})) != _mixture_identity(MIXTURE), name


def test_a_streamed_mixture_is_known_by_every_field_of_its_entries(data):
    """A fraction is refused in a stream, and data_dir and the like where flags are read."""
    settings = dict(resolved(data, {}).settings)
    base = Source(path="a", name="b", split="c", columns=["d"])
    stream = StreamedData(rows=PackedStream(MixedStream([], Mixture(names=())), 8))
    for name in ("path", "name", "split", "columns"):
        known = []
        for entry in (base, replace(base, **{name: ["x"] if name == "columns" else "x"})):
            of_mixture = {"datasets": [entry], "dataset_weights": None, "dataset_streaming": True}
            known.append(data_identity(stream, settings | of_mixture, tiny_config(), FilesIdentity()))
        assert refuses(*known), name


# ------------------------------------------------------------------------------------------------
# What the ranks and nodes of a run have in common
# ------------------------------------------------------------------------------------------------

OF_A_NODE = {
    "where files are; their contents are compared": "dataset_name model_name_or_path output_dir",
    "what is printed and reported": "disable_tqdm log_level log_level_replica report_to run_name",
    "a secret, and the number of a process": "hub_token local_rank",
}


def test_every_setting_that_is_not_of_a_node_has_to_agree(data, tmp_path):
    assert {flag.name for flag in DPO.flags.values() if flag.node} == {*listed(OF_A_NODE)}
    run = resolved(data, {})
    args = SimpleNamespace(output_dir=str(tmp_path))
    before = _decided(run, args)
    assert {f"--{name}" for name in run.settings} - set(before) == {f"--{name}" for name in listed(OF_A_NODE)}
    for name in run.settings:
        value = "auto" if name == "resume_from_checkpoint" else "something else"
        changed = replace(run)
        vars(changed)["settings"] = {**run.settings, name: value}
        other = _decided(changed, args)
        differs = {key for key in before if before[key] != other[key]} - {"checkpoints"}
        assert differs == (set() if name in listed(OF_A_NODE) else {f"--{name}"}), name


@pytest.mark.parametrize("part", ["mesh", "engine", "backend", "longctx", "torch", "transformers", "trl", "accelerate"])
def test_what_followed_from_settings_and_releases_has_to_agree(part, data, monkeypatch):
    run = resolved(data, {})
    before = _decided(run, None)
    if part == "mesh":
        run = replace(run, world_size=2)
    elif part == "engine":
        run = replace(run, engine="fsdp2")
    elif part == "backend":
        run = replace(run, backend=replace(run.backend, arrangement=replace(run.backend.arrangement, name="ring")))
    elif part == "longctx":
        monkeypatch.setattr("longctx.__version__", "0")
    else:
        others = before | {part: "0"}
        monkeypatch.setattr("longctx.run.processes.version", others.get)
    assert _decided(run, None).get(part) != before.get(part)


def rows_of(packing, documents, evaluation=None):
    names = [field.name for field in fields(PackingReport) if field.type == "int"]
    report = PackingReport(strategy="bfd", overlong="split", **dict.fromkeys(names, 0))
    rows = PackedDataset(documents, packing)
    return TrainingData(documents=documents, rows=rows, report=report, costs=None, evaluation=evaluation)


def a_packing(**changed):
    plan = {"indices": np.array([0, 1], np.uint8), "offsets": np.array([0, 2]), "capacity": 8}
    plan |= {"starts": np.array([0, 0]), "stops": np.array([3, 3])}
    return Packing(**plan | changed)


PLANS = {
    "indices": np.array([1, 0], np.uint8),
    "offsets": np.array([0, 1, 2]),
    "starts": np.array([1, 0]),
    "stops": np.array([3, 2]),
}


def test_nodes_compare_every_array_of_a_plan_and_tokens_of_all_columns(data):
    """`capacity` is a setting, --max_length, and is compared with these."""
    assert {field.name for field in fields(Packing)} == {*PLANS, "capacity"}
    settings = resolved(data, {}).settings
    tokens = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]}
    documents = Dataset.from_dict(tokens)

    def known(packing=None, documents=documents, evaluation=None):
        return node_identity(rows_of(packing or a_packing(), documents, evaluation), FilesIdentity())

    def plan(packing):
        return data_identity(rows_of(packing, documents), settings, tiny_config(), FilesIdentity())["plan"]

    before = known()
    for name, array in PLANS.items():
        other = a_packing(**{name: array})
        assert known(other) != before, name
        assert plan(other) != plan(a_packing()), name
    evaluated = known(evaluation=rows_of(a_packing(), documents))
    assert evaluated != before
    for column in tokens:
        other = Dataset.from_dict(tokens | {column: [[1, 2, 3], [4, 5, 7]]})
        assert known(documents=other) != before, column
        assert known(evaluation=rows_of(a_packing(), other)) != evaluated, column


def test_records_of_files_are_kept_under_the_column_that_is_read(data):
    one, other = (load_records(data["text"], text_field=name) for name in ("text", "other"))
    assert one._fingerprint != other._fingerprint
    assert one._fingerprint == load_records(data["text"])._fingerprint
    assert one._fingerprint != load_records(data["more"])._fingerprint
    assert (one.column_names, other.column_names) == (["text"], ["other"])


# ------------------------------------------------------------------------------------------------
# What is kept on disk; tests/data/test_cache_keys.py has the rest
# ------------------------------------------------------------------------------------------------

PLANNED = {
    "lengths": {"dataset_name": "more"},
    "capacity": {"max_length": "96"},
    "strategy": {"packing_strategy": "wrapped"},
    "overlong": {"overlong": "drop"},
}


def test_plans_are_kept_under_everything_they_depend_on(data, tmp_path, monkeypatch):
    """And without packing under another key than with it, whatever the strategy is called."""
    monkeypatch.setattr("longctx.training.dataset.cache_folder", lambda: tmp_path)
    assert set(inspect.signature(plan_packing).parameters) == {*PLANNED, "turn_ends"}  # by the documents
    seen: set[str] = set()
    for name, changed in {"nothing": {}, **PLANNED, "packing": {"packing": "False"}}.items():
        identity(data, changed)
        now = {path.name for path in tmp_path.glob("plan-*")}
        assert len(now - seen) == 1, name
        seen = now
    identity(data, {})
    assert {path.name for path in tmp_path.glob("plan-*")} == seen
    assert cache_folder() != tmp_path
