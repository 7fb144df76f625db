"""Every refusal in longctx/ has its line in tests/refusals.tsv and a test that meets it, some of them here.

While tests run, tests/conftest.py holds the table against what they really met; see tests/refusals.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, LlamaConfig

from benchmarks.memory.step import StepSettings, fake_process_group
from benchmarks.memory.trace import MemoryTracer
from benchmarks.shapes import shape_of
from longctx.attention.backends import BACKENDS
from longctx.attention.choice import Documents, choose_backend, documents_given
from longctx.attention.interface import longctx_attention
from longctx.attention.operator import varlen_attention
from longctx.collate.sequence import _varlen_arguments
from longctx.data import Mixture
from longctx.data.columns import arrow_table, token_columns
from longctx.data.contents import file_state
from longctx.data.mixing import _order, _part, _Reader
from longctx.forecast.cost import reach
from longctx.launch.network import choose_interface
from longctx.launch.slurm import first_host
from longctx.layers.checkpoints import LayerCheckpoints
from longctx.layers.chunked.layer import _chunk_of, install_chunked
from longctx.layers.tiled_mlp import install_tiled_mlp
from longctx.machine.here import Machine
from longctx.model.adapter import check_adapter
from longctx.model.files import without_weights
from longctx.model.load import _config_errors
from longctx.model.tiny import tiny_config, tiny_model
from longctx.packing import plan_packing
from longctx.parallel import parallelize
from longctx.ring.attention import ring_schedule
from longctx.ring.planner import plan_ring
from longctx.ring.transport import check_shard
from longctx.sequence.batch import AttentionKind
from longctx.sequence.mesh import ParallelDims
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.train import main
from longctx.training.evaluation import rows_to_evaluate
from longctx.ulysses.attention import ulysses_attention
from longctx.ulysses.exchange import exchange_attention
from longctx.ulysses.head_chunks import _Heads
from longctx.ulysses.stages import check_stride
from longctx.verify.setup import check_engine, probe_rows
from tests import refusals
from tests.attention.test_choice import QWEN3_8B, a_setup
from tests.forecast.test_by_hand import MODEL, ULYSSES
from tests.model.test_models import SHARED_KEYS, make_model
from tests.training.test_key_fields import a_packing, resolved, rows_of

# ------------------------------------------------------------------------------------------------
# The table
# ------------------------------------------------------------------------------------------------


def test_the_table_has_every_refusal_and_no_other():
    """A refusal that was taken away, given other words or added: see tests/refusals.py for how to write the table."""
    table, found = refusals.read_table(), refusals.refusals()
    moved = refusals.moved(table)
    gone = set(table) - set(found) - set(moved.values())
    assert sorted(gone) == [], "these refusals are gone: is what they stopped now exact?"
    assert sorted(set(found) - set(table) - set(moved)) == [], "these have no test: run pytest --record-refusals"
    assert moved == {}, "these refusals have moved: run pytest tests/test_refusal_table.py --record-refusals"
    assert refusals.read_texts().keys() <= {row.template for row in found}, "texts of refusals that are gone"


def test_every_refusal_has_a_test_or_a_reason():
    for row, test in refusals.read_table().items():
        if test.startswith("("):
            assert test != refusals.UNMET, f"{row} has neither a test nor a reason"
            assert len(test) > 20, f"{row}: {test} is no reason"
        else:
            assert refusals.is_test(test), f"{row}: there is no test {test}"


def test_a_condition_that_never_holds_is_noticed():
    """The check itself: a test that ran and did not meet its refusal, one that did, and one that ran in part."""
    row, test = next(
        (row, test) for row, test in refusals.read_table().items() if test.startswith("tests/ring/test_ring_plan")
    )
    run = refusals.RefusalsMet()
    run.collected[test] = run.passed[test] = 1
    assert (row, test) in run.missed()
    run.met[test] = {refusals.refusals()[row][0]: {"text": None}}
    assert (row, test) not in run.missed()
    assert "    new: text" in list(run.changed())
    run.met.clear()
    run.partial.add(test)
    assert run.missed() == []


# ------------------------------------------------------------------------------------------------
# Calls of the package's own functions
# ------------------------------------------------------------------------------------------------

Q = torch.zeros(1, 4, 8, 4)
PLAN = plan_ring(np.array([0, 16]), 2)
ALONE = np.array([0, 8])


class IsCausal(torch.nn.Module):
    is_causal = True


def attend(**changed):
    given = {"attention_mask": None, "sequence": object()} | changed
    return longctx_attention(given.pop("module", IsCausal()), Q, Q, Q, **given)


def an_mlpless_model():
    return torch.nn.Linear(2, 2)


def a_run(**changed):
    return SimpleNamespace(**{"settings": {"load_in_4bit": False}, "engine": "fsdp2"} | changed)


ONE_DOCUMENT = Documents(rows=[np.array([64])], source="one document")
CALLS = {
    "backend": (lambda: choose_backend("spiral", a_setup(2, *QWEN3_8B)), "--sp_backend spiral is unknown"),
    "no backend": (
        lambda: choose_backend("auto", a_setup(2, *QWEN3_8B), ONE_DOCUMENT, pad_to_multiple_of=1),
        r"auto finds no backend for sp 2 \(.*Lower --sp, or name a backend",
    ),
    "dtypes": (lambda: varlen_attention(Q, Q.double(), Q, ALONE), "attention takes one dtype"),
    "integers": (lambda: varlen_attention(Q.int(), Q.int(), Q.int(), ALONE), "attention takes one dtype"),
    "devices": (lambda: varlen_attention(Q, Q.to("meta"), Q, ALONE), "k on meta"),
    "sinks": (
        lambda: varlen_attention(Q, Q, Q, ALONE, sinks=torch.zeros(3)),
        r"sinks has shape \(3,\), expected \[4\]",
    ),
    "mask": (lambda: attend(attention_mask=Q), "asks for a mask"),
    "dropout": (lambda: attend(dropout=0.1), "asks for dropout=0.1"),
    "not causal": (lambda: attend(module=SimpleNamespace(is_causal=False)), "asks for is_causal=False"),
    "bias": (lambda: attend(position_bias=Q), "asks for position_bias"),
    "window": (lambda: AttentionKind(window=0), "window 0 must be at least 1"),
    "chunk": (lambda: AttentionKind(chunk_size=0), "chunk_size 0 must be at least 1"),
    "soft cap": (lambda: AttentionKind(softcap=0.0), "softcap 0.0 must be above 0"),
    "chunks of none": (
        lambda: install_chunked(tiny_model(), 0, torch.device("cpu"), LayerCheckpoints()),
        "sequence_chunk_size 0 is below 1",
    ),
    "2^31 tokens": (lambda: _varlen_arguments(np.array([0, 1 << 30, 1 << 31])), "more than 32-bit cu_seq_lens"),
    "no table": (lambda: arrow_table([1]), "expected a datasets.Dataset or a pyarrow.Table, got list"),
    "no tokens": (lambda: token_columns(pa.table({"a": ["x"]}), ["a"]), "column 'a' is not a list of numbers"),
    "no host": (lambda: first_host(""), "names no host. Set MASTER_ADDR"),
    "heads of ranks": (lambda: shape_of(MODEL, world_size=8, sp=8), "exchanges tokens for heads among 8 ranks"),
    "no limit": (
        lambda: reach(ULYSSES, Machine.of("H100", 2, device_bytes=float("inf"), host_bytes=float("inf"))),
        "limit no length",
    ),
    "traced engine": (lambda: StepSettings(length=8, engine="zero3"), "DeepSpeed does not run on fake tensors"),
    "traced ranks": (lambda: StepSettings(length=8, engine="none", sp=2), "engine 'none' with 2 devices"),
    "traced documents": (lambda: StepSettings(length=8, document_lengths=[3]), "sum to 3, and length is 8"),
    "offloaded": (lambda: MemoryTracer(on_host=["weights"]), "on_host .'weights'. is not what an engine offloads"),
    "degrees": (lambda: ParallelDims(world_size=3, ring=2), "3 processes cannot be arranged"),
    "degree 0": (lambda: ParallelDims(world_size=0, ring=0), "0 processes cannot be arranged"),
    "strategy": (lambda: plan_packing(np.array([1]), 4, strategy="best"), "unknown packing strategy 'best'"),
    "lengths of nothing": (lambda: documents_given(tiny_model().config, []), "are not lengths of documents"),
    "length 0": (lambda: documents_given(tiny_model().config, [3, 0]), "are not lengths of documents"),
    "parts of tokens": (lambda: documents_given(tiny_model().config, [2.5]), "are not lengths of documents"),
    "tiles": (lambda: install_tiled_mlp(tiny_model(), -1), "tiled_mlp_num_shards -1 is not a number of tiles"),
    "no MLP": (lambda: install_tiled_mlp(an_mlpless_model(), 2), "No MLP was found in Linear"),
    "heads at a time": (lambda: check_stride(0), "heads_k_stride 0 must be at least 1"),
    "4-bit verified": (
        lambda: check_engine(a_run(settings={"load_in_4bit": True})),
        "only weights that are not quantised",
    ),
    "FSDP1 verified": (lambda: check_engine(a_run(engine="fsdp1")), "fsdp_version 1 keeps the gradients"),
}


def a_prepared_run(num_rows):
    """Of a verification, with this many rows for a step of two."""
    data = rows_of(a_packing(), Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]}))
    assert len(data.rows) == num_rows
    settings = {"datasets": [], "dataset_name": "stdlib", "max_length": 8}
    return SimpleNamespace(data=data, run=SimpleNamespace(settings=settings, sequences_per_step=2))


def contradicting_config():
    with _config_errors("model"):
        raise TypeError("hidden_size")


LINEAR = SimpleNamespace(config=CONFIG_MAPPING["qwen3_next"]())
MIXED = Mixture(names=("a", "b"), weights=(1.0, 1e-10), stopping_strategy="all_exhausted")
CALLS |= {
    "adapter on FSDP1": (
        lambda: check_adapter(
            resolved({}, {"dataset_name": "stdlib", "use_peft": "True"}).settings, tiny_config(), "fsdp1"
        ),
        "--use_peft on FSDP1 is not verified",
    ),
    "endless mixture": (lambda: _order([1, 10], MIXED), "would draw .* documents"),
    "nothing to test on": (
        lambda: _part(np.arange(1), Mixture(names=("a",), test_size=0.5), "train"),
        "--test_split_size 0.5 of 1 documents",
    ),
    "a stream that became shorter": (lambda: _Reader(iter([])).take("a"), "a has fewer documents"),
    "a file that is gone": (lambda: file_state(Path("/nonexistent/data.jsonl")), "data.jsonl"),
    "no configuration": (contradicting_config, "its config.json cannot be used: hidden_size"),
    "no model": (
        lambda: without_weights(LlamaConfig(hidden_size=8, num_attention_heads=2, hidden_act="none")),
        "no model can be made of its config.json",
    ),
    "nothing to evaluate": (lambda: rows_to_evaluate(None), "there is no evaluation data"),
    "texts to evaluate": (
        lambda: rows_to_evaluate(Dataset.from_dict({"text": ["a"]})),
        "sequences to evaluate need input_ids, and these have .'text'.",
    ),
    "rows of another type": (lambda: rows_to_evaluate([1]), "the type list"),
    "too few rows to verify": (lambda: probe_rows(a_prepared_run(1)), "gives 1 sequences of up to 8 tokens"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_cannot_be_exact_are_refused(case):
    call, words = CALLS[case]
    with pytest.raises(ValueError, match=words):
        call()


OF_TWO_RANKS = {
    "another group": (lambda group: ring_schedule(plan_ring(np.array([0, 18]), 3), group), "The plan is for 3 ranks"),
    "transport": (lambda group: ring_schedule(PLAN, group, transport="post"), "transport 'post' is unknown"),
    "stride 0": (
        lambda group: ring_schedule(PLAN, group, transport="gather", heads_k_stride=0),
        "heads_k_stride 0 must be at least 1",
    ),
    "stride in a ring": (lambda group: ring_schedule(PLAN, group, heads_k_stride=1), "goes with transport='gather'"),
    "length": (lambda group: check_shard(PLAN, Q[:, :, :4], Q, Q), r"q has shape \(1, 4, 4, 4\)"),
    "rows": (lambda group: check_shard(PLAN, Q, Q.repeat(2, 1, 1, 1), Q), r"k has shape \(2, 4, 8, 4\)"),
    "dimensions": (lambda group: check_shard(PLAN, Q, Q, Q[0]), r"v has shape \(4, 8, 4\)"),
    "no heads": (lambda group: check_shard(PLAN, Q[:, :0], Q, Q), r"q has shape \(1, 0, 8, 4\)"),
    "shared heads": (lambda group: check_shard(PLAN, Q, Q[:, :3], Q[:, :3]), "4 query heads cannot share"),
    "k unlike v": (lambda group: check_shard(PLAN, Q, Q[:, :2], Q[:, :1]), "4 query heads cannot share"),
    "Ulysses' length": (lambda group: ulysses_attention(Q, Q, Q, ALONE, group), "but cu_seqlens ends at 8"),
    "Ulysses' heads": (lambda group: exchange_attention(Q[:, :3], Q, Q, group, attend), "3 "),
    "heads in stages": (lambda group: _Heads.of(Q[:, :3], Q, group), "3 "),
    "a group is there": (lambda group: fake_process_group(2).__enter__(), "A process group is there already"),
}


def test_tensors_that_do_not_suit_two_ranks_are_refused():
    import torch.distributed as dist

    with fake_process_group(2):
        for call, words in OF_TWO_RANKS.values():
            with pytest.raises(ValueError, match=words):
                call(dist.group.WORLD)


# ------------------------------------------------------------------------------------------------
# Launchers
# ------------------------------------------------------------------------------------------------


def test_a_node_with_several_interfaces_asks_for_one(monkeypatch):
    monkeypatch.setattr("longctx.launch.network._is_loopback", lambda host: True)
    monkeypatch.setattr("longctx.launch.network._interfaces", lambda: {"eth0": set(), "eth1": set()})
    with pytest.raises(ValueError, match=r"interfaces eth0, eth1\. Set GLOO_SOCKET_IFNAME"):
        choose_interface({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"})


PROFILES = {
    "fp16": ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision fp16"),
    "cp and sp": (
        {"PARALLELISM_CONFIG_CP_SIZE": "2", "PARALLELISM_CONFIG_SP_SIZE": "2"},
        "parallelism_config_cp_size 2 and parallelism_config_sp_size 2",
    ),
    "shards": ({"PARALLELISM_CONFIG_DP_SHARD_SIZE": "3"}, "parallelism_config_dp_shard_size 3"),
    "another model's layers": (
        {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
        | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3DecoderLayer,GPT2Block"},
        "fsdp_transformer_layer_cls_to_wrap GPT2Block in .* whose layers are ",
    ),
    "ZeRO-0": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"},
        "ZeRO stage 0 is not verified",
    ),
}


@pytest.mark.parametrize("case", PROFILES)
def test_profiles_that_cannot_be_exact_are_refused(case):
    environment, words = PROFILES[case]
    environment = {"ACCELERATE_MIXED_PRECISION": "no", "RANK": "0", "WORLD_SIZE": "4"} | environment
    flags = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--use_cpu", "True"]
    with pytest.raises(ValueError, match=words):
        resolve(parse_flags(flags), read_profile(environment), environment)


CHUNKS = {"qwen3_next": "this model's recurrent layers carry a state", SHARED_KEYS: "this model's layers take inputs"}


@pytest.mark.parametrize("family", CHUNKS)
def test_chunks_of_such_layers_are_refused_before_weights(family, tmp_path):
    """And a preset does without them."""
    make_model(family).config.save_pretrained(tmp_path)
    flags = ["--model_name_or_path", str(tmp_path), "--dataset_name", "stdlib", "--use_cpu", "True"]
    with pytest.raises(ValueError, match=CHUNKS[family]):
        resolve(parse_flags([*flags, "--sequence_chunk_size", "8"]), read_profile({}), {}).memory_options  # noqa: B018
    longest = resolve(parse_flags([*flags, "--memory", "longest"]), read_profile({}), {}).memory_options
    assert longest.sequence_chunk_size is None


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------

COMMANDS = {
    "no steps traced": ("--profile_steps 0", "--profile_steps 0 is below 1"),
    "traced too late": ("--profile True --max_steps 2", "--profile True starts to trace after the first"),
    "processes": ("--num_processes -1", "--num_processes -1 is below 1"),
    "padding": ("--pad_to_multiple_of 0", "--pad_to_multiple_of 0 is below 1"),
    "no object": ("--activation_checkpointing_kwargs [1]", "is not understood. Use a JSON object"),
    "evaluated": ("--load_best_model_at_end True", "needs evaluation data"),
    "evaluated by none": (
        "--eval_strategy steps --per_device_eval_batch_size 0",
        "--per_device_eval_batch_size 0 is below 1",
    ),
    "evaluated never": ("--eval_strategy steps --eval_steps 1.5", "--eval_steps 1.5 is neither"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command_lines_that_cannot_be_exact_are_refused(case, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    monkeypatch.setattr("longctx.run.model.load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.chdir(tmp_path)
    flags, words = COMMANDS[case]
    given = ["--model_name_or_path", "tiny", "--dataset_name", "stdlib", "--dry_run", "True"]
    assert main([*given, *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_chunks_are_refused_for_a_backend_that_has_no_schedule(monkeypatch):
    monkeypatch.setitem(BACKENDS, "ring", replace(BACKENDS["ring"], schedule=None))
    with fake_process_group(2), pytest.raises(ValueError, match="sequence_chunk_size 8 with sp_backend ring, which"):
        parallelize(tiny_model(), 2, sp_backend="ring", sequence_chunk_size=8)


def test_chunks_of_what_is_no_token_s_are_refused():
    with pytest.raises(ValueError, match="layers are given a tensor mask of shape"):
        _chunk_of(torch.zeros(3, 3), slice(0, 2), "mask")
