"""Errors that other trainers were reported to make, silently, each shown not to be made here.

Two runs of the real trainer on two ranks, ring attention on FSDP2 and Ulysses on ZeRO-2, against one process that runs
stock transformers with dense attention. Bound 1e-5 relative, fp32: sums run in another order.
"""

from __future__ import annotations

import importlib.metadata
import os

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.matrix import SETUPS
from tests.model.more_families import SMALL
from tests.reference import train_reference
from tests.small_model import save_with_tokenizer
from tests.training.test_evaluation import dense_means
from tests.training.test_training import make_documents, relative, write_jsonl
from tests.workers import run_ranks

BOUND = 1e-5
VISIBLY = 1e-3
"""How far the wrong number is from the right one, at least, on this data: else a test would prove nothing."""
EPOCHS = 2
PACK = 256
LEARNING_RATE = 5e-3
LENGTHS = [90, 7, 41, 1, 127, 64, 2, 33, 17, 88]
EVAL_LENGTHS = [50, 3, 121, 2, 1, 64, 9]
WINDOW = 24
PAD = 257


class Peers:
    """What the runs logged and one process finds, by run."""

    def __init__(self, folder):
        self.train, self.evaluation = make_documents(LENGTHS, masked=0.97), make_documents(EVAL_LENGTHS, seed=1)
        (folder / "data").mkdir()
        write_jsonl(folder / "data" / "train.jsonl", self.train)
        write_jsonl(folder / "data" / "test.jsonl", self.evaluation)
        self.models = {"ring": save_model(folder / "full"), "ulysses": save_model(folder / "windows", window=WINDOW)}
        common = ["--dataset_name", str(folder / "data"), "--max_length", str(PACK)]
        common += ["--learning_rate", str(LEARNING_RATE), "--num_train_epochs", str(EPOCHS), "--packing", "True"]
        common += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4", "--logging_steps", "1"]
        common += ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "True"]
        evaluates = [
            "--eval_strategy",
            "steps",
            "--eval_steps",
            "100",
            "--eval_on_start",
            "True",
            "--eval_packing",
            "False",
        ]
        setups = {"ring": SETUPS["ring, FSDP2"], "ulysses": SETUPS["ulysses, ZeRO-2"]}
        cases = {}
        for name, setup in setups.items():
            paths = ["--model_name_or_path", self.models[name], "--output_dir", str(folder / f"out {name}")]
            cases[name] = [*common, *evaluates, *setup.flags, *paths], dict(setup.env)
        self.by_rank = run_ranks(2, f"{__name__}:train_all", cases)
        self.expected = {name: self.reference(folder) for name, folder in self.models.items()}

    def reference(self, model):
        """(losses, gradient norms) of one process; 4 packs a step are more than there are."""
        return train_reference(model, self.train, steps=EPOCHS, learning_rate=LEARNING_RATE)

    def logged(self, name, key):
        return [entry[key] for entry in self.by_rank[0][name]["log"] if key in entry]


def save_model(folder, window=None):
    config = Qwen3Config(
        **SMALL | {"vocab_size": 272, "head_dim": 8, "pad_token_id": PAD, "max_position_embeddings": 32768},
        use_sliding_window=window is not None,
        sliding_window=window,
        layer_types=["sliding_attention" if window else "full_attention"] * 2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    save_with_tokenizer(model, folder)
    return str(folder)


def train_all(cases):
    """{case: its log, the tokens that reached the model in training and beside it, the rows that it predicted}."""
    from accelerate.state import AcceleratorState

    from longctx.run import fit, load, prepare

    before, results = dict(os.environ), {}
    for case, (arguments, environment) in cases.items():
        AcceleratorState._reset_state()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before | environment)
        prepared = prepare(resolve(parse_flags(arguments), read_profile(), os.environ))
        model, seen, evaluated = load(prepared), [], []
        model.get_input_embeddings().register_forward_pre_hook(recorder(seen, evaluated))
        trainer = fit(prepared, model)
        predicted = trainer.predict(prepared.data.evaluation.documents).predictions
        results[case] = {"log": trainer.state.log_history, "seen": seen, "evaluated": evaluated}
        results[case]["predicted"] = [len(row) for row in predicted]
    return results


def recorder(seen, evaluated):
    """A hook that adds the tokens of every micro-batch in training to `seen`, and of all others to `evaluated`."""

    def record(module, inputs):
        (seen if module.training else evaluated).append(inputs[0].flatten().tolist())

    return record


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    return Peers(tmp_path_factory.mktemp("peers"))


def test_packed_ring_loss_is_not_inflated(peers):
    """axolotl #3608: a ring that rotated keys across documents gave a pack 1.83 times the loss."""
    assert relative(peers.logged("ring", "loss")[:1], peers.expected["ring"][0][:1]) <= BOUND
    as_one = [([token for ids, _ in peers.train for token in ids], [label for _, ls in peers.train for label in ls])]
    contaminated = train_reference(peers.models["ring"], as_one, steps=1, learning_rate=LEARNING_RATE)
    assert relative(contaminated[0], peers.expected["ring"][0][:1]) > VISIBLY


def test_evaluation_is_not_multiplied_by_cp(peers):
    """transformers #48167: `eval_loss` came out as cp_size times its value, and early stopping believed it."""
    for name, model in peers.models.items():
        expected = dense_means(model, peers.evaluation)[0]["loss"]
        assert relative(peers.logged(name, "eval_loss")[:1], [expected]) <= BOUND


def test_evaluation_is_cut_over_the_ranks(peers):
    """transformers #46868: evaluation had no sequence parallelism, and no memory for what training had room for."""
    for name in peers.models:
        halves = [max(map(len, rank[name]["evaluated"])) for rank in peers.by_rank]
        assert halves[0] == halves[1]
        assert max(EVAL_LENGTHS) <= sum(halves) < max(EVAL_LENGTHS) + 16


def test_prediction_returns_every_row_once(peers):
    """transformers #48842: `predict` under context parallelism returned each row cp_size times, and cut."""
    for results in peers.by_rank:
        assert results["ring"]["predicted"] == results["ulysses"]["predicted"] == EVAL_LENGTHS


def test_sharding_is_no_no_op(peers):
    """transformers #48663, review: cp_size without a second flag did nothing; every rank had all.

    A micro-batch of a rank is half of a pack, and both ranks' tokens of an epoch are the data, once.
    """
    data = sorted(token for ids, _ in peers.train for token in ids)
    for name in peers.models:
        seen = [results[name]["seen"] for results in peers.by_rank]
        assert all(0 < len(micro) <= PACK // 2 for rank in seen for micro in rank)
        epoch = [token for rank in seen for micro in rank[: len(rank) // EPOCHS] for token in micro]
        assert sorted(token for token in epoch if token != PAD) == data


def test_steps_and_epochs_do_not_depend_on_cp(peers):
    """axolotl #3218: with context parallelism a run of one epoch stopped at 5.42, since the step count was scaled."""
    for name in peers.models:
        losses = [entry for entry in peers.by_rank[0][name]["log"] if "loss" in entry]
        assert [round(entry["epoch"], 6) for entry in losses] == [1, 2]
        tokens = sum(LENGTHS)
        assert [entry["num_tokens"] for entry in losses] == [tokens, 2 * tokens]


def test_gradients_are_not_multiplied_by_sp(peers):
    """DeepSpeed #5248, and TRL with Ulysses on ZeRO-1 and 2: gradients came out sp times as large; clipping hid it."""
    assert relative(peers.logged("ulysses", "grad_norm")[:1], peers.expected["ulysses"][1][:1]) <= BOUND


def test_a_sliding_window_is_not_lost(peers):
    """unsloth #8253, and Ulysses with sdpa: a window that never reached the kernel became full attention."""
    losses = peers.expected["ulysses"][0]
    assert relative(peers.logged("ulysses", "loss"), losses) <= 1e-4  # over AdamW's steps
    assert relative(peers.logged("ulysses", "loss")[:1], losses[:1]) <= BOUND
    full = Qwen3ForCausalLM.from_pretrained(peers.models["ulysses"])
    full.config.update({"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "sliding_window": None})
    full.save_pretrained(f"{peers.models['ulysses']}-full")
    lost = train_reference(f"{peers.models['ulysses']}-full", peers.train, steps=1, learning_rate=LEARNING_RATE)
    assert relative(lost[0], losses[:1]) > VISIBLY


def test_accumulation_is_no_mean_of_means(peers):
    """transformers #34191: micro-batches with few labels counted as much as those with many."""
    for name in peers.models:
        assert relative(peers.logged(name, "loss"), peers.expected[name][0]) <= 1e-4
        assert relative(peers.logged(name, "loss")[:1], peers.expected[name][0][:1]) <= BOUND


def test_deepspeed_that_reads_parameters_too_early_is_refused(monkeypatch):
    """DeepSpeed #8539: before 0.19.8 it waited for the last of a module's all-gathers, which gloo may end first."""
    installed = importlib.metadata.version
    flags = parse_flags(["--sp", "2", "--sp_backend", "ulysses", "--use_cpu", "True"])
    env = {"RANK": "0", "WORLD_SIZE": "2"}
    monkeypatch.setattr(
        "longctx.settings.machine_checks.version", lambda name: "0.19.7" if name == "deepspeed" else installed(name)
    )
    with pytest.raises(ValueError, match=r"deepspeed 0\.19\.7 .*needs 0\.19\.8 or later.*pip install"):
        resolve(flags, read_profile(env), env)
    monkeypatch.setattr(
        "longctx.settings.machine_checks.version", lambda name: "0.19.8" if name == "deepspeed" else installed(name)
    )
    assert resolve(flags, read_profile(env), env).engine == "deepspeed"
