"""`python -m longctx.verify`: exact runs pass; a run that is broken on purpose fails, and the culprit is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from longctx.forecast.model_sizes import ModelSizes
from longctx.model.tiny import tiny_model
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.settings.rules import fill
from longctx.training.reference import check_reference_fits, reference_bytes
from longctx.verify import machine, parity
from longctx.verify.__main__ import _result, with_defaults
from longctx.verify.machine import check_settings, check_shared_memory, check_versions
from longctx.verify.parity import gradient_errors, worst_gradient
from longctx.verify.report import Check, Finding, as_json, as_table, culprit, error_check
from longctx.verify.setup import few_layers
from tests.few import few
from tests.model.more_families import SMALL
from tests.small_model import save_with_tokenizer
from tests.workers import run_main, run_ranks, start_rank_0_alone

ROOT = Path(__file__).parents[2]
ERRORS = ["loss", "largest gradient error", "gradient norm"]
CHECKS = ["shard length", "document isolation", "label shift", "loss denominator", *ERRORS]
QUICK = ["--sp", "2", "--max_length", "128"]


def verify(*arguments, launcher=("-m",), environment=os.environ):
    """(exit code, what --json prints, stderr) of a verification in processes of its own."""
    env = environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *launcher, "longctx.verify", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=ROOT)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def verify_on_ranks(*arguments):
    """The same on two ranks that a launcher has started."""
    ranks = run_main(2, "longctx.verify.__main__", ["--json", *arguments])
    assert [code for code, *_ in ranks] == [ranks[0][0]] * 2
    code, printed, errors = ranks[0]
    return code, json.loads(printed) if printed else None, errors


def folder_with(config, folder):
    """A model's folder with nothing but its config.json."""
    config.save_pretrained(folder)
    return folder


LARGE = Qwen3Config(
    **SMALL | {"vocab_size": 300, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 6, "intermediate_size": 96},
    sliding_window=32,
    use_sliding_window=True,
    layer_types=["sliding_attention"] * 3 + ["full_attention"] * 3,
)


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--sp_backend", "ulysses"], verify_on_ranks),  # ZeRO-3
        (["--sp_backend", "ring"], verify_on_ranks),  # FSDP2
        *(
            pytest.param(arguments, verify, marks=pytest.mark.long)
            for arguments in (
                ["--sp_backend", "ulysses"],
                ["--sp_backend", "ring"],
                ["--sp_backend", "ulysses", "--num_processes", "4"],  # dp 2
                ["--sp_backend", "gather", "--bf16", "True"],
            )
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
def test_what_is_exact_passes(arguments, start, tmp_path):
    """A folder with weights of a user's own."""
    save_with_tokenizer(tiny_model(), tmp_path)
    code, result, stderr = start(*QUICK, "--model_name_or_path", str(tmp_path), *arguments)
    assert code == 0, (result, stderr)
    assert result["ok"] is True
    assert result["culprit"] is None
    bounds = {check["name"]: check["bound"] for check in result["checks"]}
    of_errors = [bounds[name] for name in ERRORS]
    if "--bf16" in arguments:
        assert of_errors == [of_errors[0]] * 3
        assert of_errors[0] > 1e-3
    else:
        assert of_errors[:2] == [1e-5, 1e-5] <= of_errors[1:]
    assert [check["name"] for check in result["checks"]][: len(CHECKS)] == CHECKS
    assert result["run"]["engine"] == ("deepspeed" if "ulysses" in arguments else "fsdp2")
    assert result["run"]["num_layers"] == 2
    found = {finding["name"] for finding in result["machine"]}
    assert {"versions", "devices", "shared memory", "attention kernel", "settings"} <= found
    assert {"all-to-all", "p2p, all ranks at once"} <= found
    assert "longctx: taking the step on one device" in stderr
    assert "[WARNING]" not in stderr
    assert "DeepSpeed" not in stderr


@pytest.mark.long
def test_a_config_alone_is_enough_and_accelerate_may_start_it(tmp_path):
    """Random weights, tiny's tokenizer, the first four of six layers, so that both kinds are among them."""
    folder = folder_with(LARGE, tmp_path)
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m")
    arguments = ["--model_name_or_path", str(folder), "--num_layers", "4", "--sp_backend", "ring"]
    code, result, stderr = verify(*QUICK, *arguments, launcher=launcher)
    assert code == 0, (result, stderr)
    assert (result["run"]["num_layers"], result["run"]["vocab_size"]) == (4, 272)


BROKEN = {
    "documents": "document isolation",
    "labels": "label shift",
    "loss": "loss denominator",
    "count": "loss denominator",
    "cut": "shard length",
    "gradients": "largest gradient error",
    "bits": "document isolation",
}


@pytest.mark.parametrize("broken", few(BROKEN, ["documents"]))
def test_what_is_broken_fails_and_is_named(broken):
    backend = "ulysses" if broken in ("count", "gradients") else "ring"
    arguments = ["--json", *QUICK, "--sp_backend", backend]
    ranks = run_ranks(2, "tests.broken_verify:verify_broken", broken, arguments, backend=None)
    assert [code for code, _ in ranks] == [1, 1]
    result = json.loads(ranks[0][1])
    assert result["ok"] is False
    off = [check["name"] for check in result["checks"] if not check["ok"]]
    assert result["culprit"] == off[0] == BROKEN[broken], result


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--sp", "3", "--sp_backend", "ulysses"], ["3", "4"]),
        (["--num_layers", "9"], ["--num_layers 9", "has 2 layers", "Use 1 to 2"]),
        (["--jsn"], ["--jsn is not a flag", "Did you mean --json?"]),
    ],
)
def test_bad_input_ends_with_2_and_one_line(arguments, parts, capsys, monkeypatch):
    from longctx.verify.__main__ import main

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    start_rank_0_alone(monkeypatch)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("longctx: error:")
    assert all(part in captured.err for part in parts), captured.err


def resolved(*arguments):
    profile = read_profile({})
    return resolve(with_defaults(parse_flags(arguments), profile), profile, {})


def test_large_models_are_verified_on_layers_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr("longctx.verify.setup.LARGE", 1000)
    run = resolved("--model_name_or_path", str(folder_with(LARGE, tmp_path)), "--use_cpu", "True")
    config = few_layers(run, None).model_config
    assert config.num_hidden_layers == 4
    assert config.layer_types == LARGE.layer_types[:4]
    assert few_layers(run, 1).model_config.layer_types == ["sliding_attention"]
    assert run.model_config.num_hidden_layers == 6
    assert few_layers(resolved("--use_cpu", "True"), None).model_config.num_hidden_layers == 2


def test_what_the_user_sets_stays():
    flags = with_defaults(parse_flags(["--max_length", "64", "--dataset_name", "x.jsonl"]), read_profile({}))
    assert (flags["max_length"], flags["dataset_name"], flags["overlong"]) == (64, "x.jsonl", "split")
    flags = with_defaults(parse_flags([]), read_profile({}))
    assert (flags["model_name_or_path"], flags["dataset_name"]) == ("tiny", "stdlib")
    run = resolved("--global_batch_size", "8")
    assert (run.settings["per_device_train_batch_size"], run.settings["gradient_accumulation_steps"]) == (2, 4)


def test_what_a_profile_sets_stays(tmp_path):
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
    profile = read_profile(env)
    flags = fill(with_defaults(parse_flags([]), profile), profile)
    assert (flags["per_device_train_batch_size"], flags["max_grad_norm"], flags["max_length"]) == (3, 0.5, 512)


def test_flags_without_effect_on_one_step_are_fixed():
    given = {"max_steps": "9", "optim": "adamw_torch", "max_grad_norm": "1", "eval_strategy": "steps"}
    given |= {"logging_steps": "7", "report_to": "all", "save_strategy": "steps", "push_to_hub": "True"}
    flags = parse_flags([word for name, value in given.items() for word in (f"--{name}", value)])
    fixed = with_defaults(flags, read_profile({}))
    assert {name: fixed[name] for name in given} == {
        "max_steps": 1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "eval_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "push_to_hub": False,
    }


def test_the_first_check_that_is_off_is_the_culprit():
    fine = error_check("loss", 1e-7, 1e-5, "1 and 1")
    off = error_check("gradient norm", float("nan"), 1e-5, "nan")
    after = Check("largest gradient error", 2.0, 1e-5, False, "")
    assert culprit([fine]) is None
    assert culprit([fine, off, after]) is off
    assert json.loads(as_json({"sp": 2}, [fine, off], []))["culprit"] == "gradient norm"
    slow = Finding("settings", "NCCL_P2P_DISABLE=1", "unset it")
    assert json.loads(as_json({"sp": 2}, [fine], [slow]))["ok"]  # it is advice
    assert [line.split()[0:2] for line in as_table([fine, off]).splitlines()][1] == ["loss", "1.0e-07"]
    assert "OFF" in as_table([fine, off]).splitlines()[2]
    for checks, last in (([fine], "exact: sp 2 and one device agree"), ([fine, off], "NOT exact: gradient norm: nan")):
        assert _result(resolved("--sp", "2"), checks, [slow], 1.0, for_scripts=False).splitlines()[-1] == last


def test_gradients_that_are_missing_or_not_numbers_are_the_worst():
    expected = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2)}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0, 1e-3])}
    errors = gradient_errors(found, expected, 5.0)
    assert errors == pytest.approx({"a": 0.1, "b": 0.2})  # b: relative to 1e-3 of the whole
    assert worst_gradient(errors, expected) == ("b", errors["b"])
    assert worst_gradient({"a": 0.1}, expected) == ("b", float("inf"))
    name, error = worst_gradient({"a": float("nan"), "b": 0.2}, expected)
    assert name == "a"
    assert not error_check("largest gradient error", error, 1.0, name).ok


def test_errors_above_the_promised_ones_fail():
    """1e-5 relative in fp32, which the README names; NaN is above every bound."""
    for error, ok in ((0.9e-5, True), (1.1e-5, False), (float("nan"), False)):
        assert error_check("loss", error, parity.FP32_BOUND, "").ok == ok
    assert parity.ROUNDING_FACTOR == 1.5


def test_random_weights_are_the_same_everywhere():
    from longctx.verify.setup import _random_weights

    first, second = _random_weights(LARGE).state_dict(), _random_weights(LARGE).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {value.dtype for value in first.values()} == {torch.float32}


def test_versions_outside_the_tested_range_are_named_with_the_command(monkeypatch):
    tested = check_versions()
    assert not tested.remedy
    assert [part.split()[0] for part in tested.value.split(", ")] == [*machine.ALWAYS_NAMED]
    monkeypatch.setattr("longctx.verify.machine.version", lambda name: "9.9" if name == "torch" else "0.1")
    found = check_versions()
    assert found.value.startswith("torch 9.9, transformers 0.1")
    assert "numpy 0.1" in found.value
    assert "pytest" not in found.value  # of an extra
    assert "pip install 'torch<=2." in found.remedy


def test_versions_are_unknown_where_nothing_is_installed():
    assert "pip install -e ." in check_versions("no-such-distribution").remedy


def test_little_shared_memory_is_named_with_its_size(tmp_path, monkeypatch):
    usage = type("Usage", (), {"total": 64 << 20, "free": 63 << 20})
    monkeypatch.setattr("longctx.verify.machine.shutil.disk_usage", lambda folder: usage)
    [finding] = check_shared_memory(tmp_path)
    assert "0.1 of 0.1 GiB" in finding.value
    assert "--shm-size" in finding.remedy
    assert list(check_shared_memory(tmp_path / "missing")) == []


def test_settings_that_slow_a_run_are_named(monkeypatch):
    monkeypatch.setattr("longctx.verify.machine.default_config_file", lambda: None)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [finding.remedy for finding in check_settings({"NCCL_P2P_DISABLE": "0"}, cpu)] == [""]
    slow = check_settings({"NCCL_P2P_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}, gpu)
    assert len(slow) == 3  # and fragments
    assert "NCCL_P2P_DISABLE=1" in [finding.value for finding in slow]
    assert all(finding.remedy for finding in slow)
    monkeypatch.setattr("longctx.verify.machine.default_config_file", lambda: Path("left.yaml"))
    assert "left.yaml" in check_settings({}, cpu)[0].value


# On GPUs


@pytest.mark.parametrize(
    ("gpus", "arguments", "bf16"),
    [(2, [], True), (2, ["--use_cpu", "True"], False), (0, [], False), (2, ["--bf16", "False"], False)],
)
def test_the_precision_is_that_of_training_on_gpus(gpus, arguments, bf16, monkeypatch):
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: gpus)
    profile = read_profile({})
    run = resolve(with_defaults(parse_flags(["--sp", "2", *arguments]), profile), profile, {})
    assert run.settings["bf16"] is bf16


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_kernel_that_is_named_is_that_of_the_step(bf16, dtype, monkeypatch):
    """On a GPU too: each dtype has kernels of its own there."""
    asked = []
    kernel = SimpleNamespace(name="a kernel")
    monkeypatch.setattr(machine, "kernel_of", lambda config, device, dtype: asked.append(dtype) or kernel)
    monkeypatch.setattr(machine.flash_attn, "installed", lambda: [])
    run = SimpleNamespace(settings={"bf16": bf16, "dtype": "float32", "attn_implementation": None}, model_config=LARGE)
    [finding] = machine._kernels(run, torch.device("cuda"))
    assert asked == [getattr(torch, dtype)]
    assert finding.value == f"a kernel for {dtype}, heads of 16"


def test_a_document_that_one_device_cannot_hold_is_refused_with_the_length_that_it_can():
    sizes = ModelSizes.of_config(LARGE)
    available = reference_bytes(sizes, 1000, has_scores=False)
    check_reference_fits(sizes, 1000, available, has_scores=False)
    with pytest.raises(ValueError, match=r"a whole document of 1,001 tokens.*Use --max_length 1000 or less"):
        check_reference_fits(sizes, 1001, available, has_scores=False)
    with pytest.raises(ValueError, match="Use a lower --num_layers, or --use_cpu"):
        check_reference_fits(sizes, 1000, 0, has_scores=False)
    scores = reference_bytes(sizes, 1000, has_scores=True) - available
    assert scores == 6 * 16 * 4 * 1000**2  # layers, bytes, heads, pairs


def test_the_prediction_for_one_device_is_near_what_autograd_saves():
    """Bytes that layers and loss save in fp32, counted as they are saved: predicted is no less, nor twice as much."""
    model = tiny_model(config=LARGE)
    saved: dict[int, int] = {}

    def note(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = 512
    ids = torch.arange(tokens)[None] % 250
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(input_ids=ids, use_cache=False).logits.float()
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    sizes = ModelSizes.of_model(model)
    predicted = reference_bytes(sizes, tokens, has_scores=False) - 8 * sizes.num_parameters
    assert sum(saved.values()) <= predicted <= 2 * sum(saved.values())
