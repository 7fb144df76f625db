"""Checkpoints of runs are known by their contents, and refused by name where they do not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from longctx.regions import PARTS
from longctx.train import main
from longctx.training.checkpoint.files import _digest_of, describe_files
from longctx.training.checkpoint.folder import checkpoint_of, checkpoints
from tests.training.test_training import COMMON, LEARNING_RATE, make_documents, write_jsonl

LENGTHS = [90, 7, 41, 130, 64, 2, 33, 17, 88, 120]


def flags(models, data, output_dir):
    given = [*COMMON, "--model_name_or_path", models["GQA 4:2"], "--dataset_name", str(data), "--max_length", "160"]
    return [*given, "--save_strategy", "steps", "--save_steps", "2", "--output_dir", str(output_dir)]


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    """(data, output_dir) of a run of five steps with checkpoints 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("saved")
    data = write_jsonl(folder / "data.jsonl", make_documents(LENGTHS))
    assert main(flags(models, data, folder / "out")) == 0
    return Path(data), folder / "out"


@pytest.fixture
def data(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS))


@pytest.fixture
def copied(saved, tmp_path):
    """The same to break, without its last checkpoint."""
    shutil.copytree(saved[1], tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    return saved[0], tmp_path / "out"


def test_an_output_dir_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--output_dir", str(tmp_path / "file" / "out")]) == 2
    assert f"{tmp_path}/file is not a folder. Choose another" in capsys.readouterr().err


def test_no_pickle_is_in_what_is_resumed_from(saved):
    files = {path.name for path in (saved[1] / "checkpoint-4").iterdir()}
    assert {"config.json", "model.safetensors", "trainer_state.json", "longctx.json"} <= files
    assert {path for path in files if path.endswith((".pt", ".pth", ".bin", ".pkl"))} == {"training_args.bin"}


def resumed(models, data, output_dir, *more):
    return main([*flags(models, data, output_dir), *more])


@pytest.mark.parametrize("file", ["states-00000-000.safetensors", "longctx.json"])
def test_a_damaged_one_is_named_with_the_older_one(file, copied, models, capsys):
    data, output_dir = copied
    damaged = output_dir / "checkpoint-4" / file
    content = bytearray(damaged.read_bytes())
    content[-4] ^= 1
    damaged.write_bytes(content)
    for asked in ("auto", "True", str(output_dir / "checkpoint-4")):
        assert resumed(models, data, output_dir, "--resume_from_checkpoint", asked, "--max_steps", "9") == 2
        assert f"The one before it has the path {output_dir}/checkpoint-2." in capsys.readouterr().err
    assert resumed(models, data, output_dir, "--resume_from_checkpoint", f"{output_dir}/checkpoint-2") == 0
    assert f"resume    from {output_dir / 'checkpoint-2'}" in capsys.readouterr().out


def _put_elsewhere(folder):
    shutil.move(folder / "model.safetensors", folder.parent / "moved")
    (folder / "model.safetensors").symlink_to(folder.parent / "moved")


def _of_another_step(folder):
    """A file of the same size and time."""
    before = (folder / "model.safetensors").stat()
    shutil.copyfile(folder.parent / "checkpoint-2" / "model.safetensors", folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: next(folder.glob("states-*")).unlink(), "is missing"),
        (lambda folder: os.truncate(folder / "model.safetensors", 100), "has 100 bytes, and was written with"),
        (lambda folder: (folder / "extra.safetensors").touch(), "extra.safetensors is not of this checkpoint"),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
            "model.safetensors.index.json is not of this checkpoint",
        ),
        (_put_elsewhere, "longctx.json names model.safetensors, outside its folder"),
        (_of_another_step, "model.safetensors is damaged: its contents have changed"),
        (lambda folder: (folder / "longctx.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "longctx.json").unlink(), "has no longctx.json"),
        (lambda folder: _edit(folder, format=7), "has format 7, and this version of longctx reads 3"),
        (lambda folder: _edit(folder, files={"../../passwd": {"bytes": 1, "xxh3": ""}}), "outside its folder"),
    ],
)
def test_damage_is_named(damage, message, copied, models, capsys):
    data, output_dir = copied
    damage(output_dir / "checkpoint-4")
    assert resumed(models, data, output_dir, "--resume_from_checkpoint", str(output_dir / "checkpoint-4")) == 2
    assert message in capsys.readouterr().err


def _edit(folder, **values):
    """Of the manifest, by somebody who knows its digest."""
    path = folder / "longctx.json"
    known = json.loads(path.read_text())
    del known["xxh3"]
    for name, value in values.items():
        known[name] = known[name] | value if isinstance(known[name], dict) else value
    path.write_text(json.dumps(known | {"xxh3": _digest_of(known)}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gradient_accumulation_steps", "2"], "written with 1 sequences in a step, and this run has 2"),
        (["--max_length", "192"], "max_length: 160 then, 192 now"),
        (["--seed", "7"], "seed: 42 then, 7 now"),
        (["--overlong", "drop"], "overlong: raise then, drop now"),
        (["--learning_rate", "1e-4"], "learning_rate: 0.005 then, 0.0001 now"),
        (["--use_peft", "True"], "use_peft: None then, True now"),
        (["--model_name_or_path", "MQA 4:1"], "model_config num_key_value_heads: 2 then, 1 now"),
        (["--model_init_kwargs", '{"rms_norm_eps": 1e-3}'], "model_config rms_norm_eps: 1e-06 then, 0.001 now"),
        (["--dtype", "bfloat16"], "dtype: float32 then, bfloat16 now"),
        (["--dataloader_drop_last", "True"], "dataloader_drop_last: False then, True now"),
        (["--warmup_steps", "2"], "warmup_steps: 0 then, 2.0 now"),
        (["--max_grad_norm", "7"], "max_grad_norm: 1.0 then, 7.0 now"),
        (["--label_smoothing_factor", "0.1"], "label_smoothing_factor: 0.0 then, 0.1 now"),
        (["--resume_from_checkpoint", "nowhere"], "nowhere is not a folder"),
    ],
)
def test_another_run_does_not_go_on(more, message, copied, models, capsys):
    data, output_dir = copied
    folder = str(output_dir / "checkpoint-4")
    more = [models.get(part, part) for part in more]
    assert resumed(models, data, output_dir, "--resume_from_checkpoint", folder, *more) == 2
    assert message in capsys.readouterr().err


def _sign(folder):
    """Give a checkpoint digests that fit what is in it now, as an attacker would."""
    names = [name for name in json.loads((folder / "longctx.json").read_text())["files"] if (folder / name).is_file()]
    _edit(folder, files=describe_files(folder, [folder / name for name in names]))


def _edit_json(name, **values):
    def edit(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def _last(value):
    def change(tensor):
        tensor.view(-1)[-1] = value
        return tensor

    return change


def _states(kind, change, file="states-00000-000.safetensors"):
    """Change all tensors of a file whose names begin like this; a tensor that becomes None is left out."""

    def edit(folder):
        tensors = load_file(folder / file)
        for name in [name for name in tensors if name.startswith(kind)]:
            found = change(tensors.pop(name).clone())
            tensors |= {} if found is None else {name: found}
        save_file(tensors, folder / file)

    return edit


def _manifest(**values):
    return lambda folder: _edit(folder, **values)


def _state(**values):
    return _edit_json("trainer_state.json", **values)


def _progress(**values):
    return _manifest(progress={"ranks": [{"loss": 0.0, "last_logged": 0, "total_loss": 0.0} | values]})


ENTRY = "trainer_state.json is damaged: log_history has an entry"
SECONDS_IN_WORDS = {"step": 1, "seconds": {part: {"mean": "long"} for part in PARTS}}
NO_PROGRESS = {"ranks": [], "expert_load": []}
STOPPING = {"EarlyStoppingCallback": {"attributes": [1]}}
NO_MOMENTS = "states-00000-000.safetensors is damaged: File does not contain tensor exp_avg_sq|0|"
FORGED = {
    "a negative second moment": (_states("exp_avg_sq", _last(-1e-3)), "states-00000-000.safetensors: exp_avg_sq"),
    "a NaN moment": (_states("exp_avg", _last(float("nan"))), "holds a value of nan"),
    "an infinite weight": (
        _states("model.norm", _last(float("inf")), "model.safetensors"),
        "model.safetensors: weight of model.norm.weight holds a value of inf",
    ),
    "a negative step": (_states("step", _last(-1.0)), "holds a value of -1, below 0"),
    "a step to come": (_states("step", _last(1e6)), "1e+06, and the checkpoint is of step 4"),
    "no second moments": (_states("exp_avg_sq", lambda tensor: None), NO_MOMENTS),
    "no optimizer": (_edit_json("index.json", kinds={}), "optimizer states of no kind, and --optim adamw_torch"),
    "another optimizer": (_edit_json("index.json", kinds={"square_avg": False}), "optimizer states square_avg, and"),
    "a matrix": (_states("exp_avg", lambda tensor: tensor[None]), "], expected ["),
    "whole numbers": (_states("exp_avg", lambda tensor: tensor.int()), "of type I32"),
    "a step of two": (_states("step", lambda tensor: tensor.repeat(2)), "type F32 and shape [2], expected one value"),
    "another step": (_state(global_step=2), "trainer_state.json is damaged: global_step is 2"),
    "no log": (_state(log_history=None), "trainer_state.json is damaged: log_history is None"),
    "a loss in words": (_state(log_history=[{"step": 1, "loss": "low"}]), ENTRY),
    "a log of numbers": (_state(log_history=[1]), "trainer_state.json is damaged: "),
    "a log without steps": (_state(log_history=[{"loss": 1.0}]), "trainer_state.json is damaged: 'step'"),
    "a packing of a list": (_state(log_history=[{"step": 1, "packing": [1]}]), ENTRY),
    "times in words": (_state(log_history=[SECONDS_IN_WORDS]), ENTRY),
    "memory in words": (_state(log_history=[{"step": 1, "memory": {"host": {"gib_by_rank": ["all"]}}}]), ENTRY),
    "an unknown field": (_state(more=1), "trainer_state.json is damaged: "),
    "no JSON": (lambda folder: (folder / "trainer_state.json").write_text("{"), "trainer_state.json is damaged: "),
    "no state": (lambda folder: (folder / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "a callback": (_state(stateful_callbacks={"TrainerControl": 1}), "trainer_state.json is damaged: "),
    "a list of attributes": (_state(stateful_callbacks=STOPPING), "damaged: stateful_callbacks has no attributes"),
    "random numbers": (_edit_json("random-00000.json", torch=[1, 2]), "random-00000.json is damaged: "),
    "a generator": (_edit_json("random-00000.json", numpy=["MT19937", "x"]), "random-00000.json is damaged: "),
    "no progress": (_manifest(progress=NO_PROGRESS), "longctx.json is damaged: the progress of no rank"),
    "infinite progress": (_progress(loss=float("inf"), total_loss=0), "longctx.json is damaged: "),
    "no sums": (_progress(), "longctx.json is damaged: 'metrics'"),
    "a position": (_manifest(position={"document": 1}), "only a stream has one"),
    "parameters": (_manifest(parameters={"lm_head.weight": "wide"}), "is of another model: "),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_checkpoint_is_refused_by_the_file(case, copied, models, capsys):
    """Whoever writes a checkpoint can give it digests that fit. One that cannot be gone on from ends in one line."""
    forge, message = FORGED[case]
    data, output_dir = copied
    folder = output_dir / "checkpoint-4"
    forge(folder)
    _sign(folder)
    assert resumed(models, data, output_dir, "--resume_from_checkpoint", str(folder)) == 2
    error = capsys.readouterr().err
    assert error.count("longctx: error: ") == 1
    assert message in error


@pytest.mark.parametrize("is_of_this_run", [True, False])
def test_a_forged_state_chooses_neither_the_best_model_nor_the_flags(is_of_this_run, copied, models):
    """The best model is one of this run, wherever the state says that it lies, and flags are this run's."""
    data, output_dir = copied
    folder, best = output_dir / "checkpoint-4", output_dir / "checkpoint-2"
    forged = {"save_steps": 1, "logging_steps": 5, "eval_steps": 1, "max_steps": 0}
    forged |= {"best_model_checkpoint": "/of/another/run/checkpoint-2", "best_global_step": 2, "best_metric": 1.0}
    _edit_json("trainer_state.json", **forged)(folder)
    _sign(folder)
    if not is_of_this_run:
        _edit(best, run="another")
    assert resumed(models, data, output_dir, "--resume_from_checkpoint", str(folder), "--max_steps", "7") == 0
    state = json.loads((output_dir / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == (str(best) if is_of_this_run else None)
    assert (state["save_steps"], state["logging_steps"]) == (2, 1)
    assert state["max_steps"] == state["global_step"] == 7
    assert sorted(path.name for path in output_dir.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (2, 4, 6, 7)]
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry][-3:] == [5, 6, 7]


def test_a_checkpoint_has_no_learning_rates_of_its_own(saved):
    """They follow from the step and the flags of the run that goes on."""
    manifest = json.loads((saved[1] / "checkpoint-4" / "longctx.json").read_text())
    assert "base_lrs" not in json.dumps(manifest)
    assert manifest["optimization"]["learning_rate"] == LEARNING_RATE


def test_weights_that_are_not_finite_are_not_saved(data, models, tmp_path, capsys):
    """In the last step nothing looks at the loss of the weights that it leaves; the exit code says it."""
    more = ["--max_steps", "1", "--learning_rate", "3e38", "--save_strategy", "no", "--optim", "sgd"]
    more += ["--lr_scheduler_type", "constant", "--weight_decay", "1000"]
    assert main([*flags(models, data, tmp_path / "out"), *more]) == 1
    assert "is NaN or infinite after step 1, so the model is not saved" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_base_model_changed_in_its_middle_is_refused(data, models, tmp_path, capsys):
    """With its size, its ends and its times as they were."""
    shutil.copytree(models["GQA 4:2"], tmp_path / "base")
    common = [*flags(models, data, tmp_path / "out"), "--model_name_or_path", f"{tmp_path}/base", "--use_peft", "True"]
    assert main(common) == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-5")
    common += ["--resume_from_checkpoint", "auto"]
    assert main([*common, "--lora_alpha", "7"]) == 2
    assert "lora_alpha: 32 then, 7 now" in capsys.readouterr().err
    weights = tmp_path / "base" / "model.safetensors"
    content, before = bytearray(weights.read_bytes()), weights.stat()
    middle = len(content) // 2
    assert len(content) > 2 * ((64 << 10) + 4000), "the ends are not the middle"
    content[middle : middle + 4000] = bytes(4000)
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert main(common) == 2
    assert "(base_model: " in capsys.readouterr().err


def last_state(output_dir):
    return json.loads((output_dir / "trainer_state.json").read_text())


@pytest.mark.parametrize("longer", [["--max_steps", "8"], ["--max_steps", "-1", "--num_train_epochs", "2"]])
def test_a_run_that_is_made_longer_has_the_learning_rates_of_its_new_length(longer, copied, models, caplog):
    data, output_dir = copied
    for folder in (output_dir, output_dir / "checkpoint-4"):
        (folder / "training_args.bin").write_bytes(b"a file that is never read")
    _sign(output_dir / "checkpoint-4")
    assert resumed(models, data, output_dir, "--resume_from_checkpoint", "auto", *longer) == 0
    assert "checkpoint-4 is of a run of 5 steps, and this one has 8" in caplog.text
    rates = [entry["learning_rate"] for entry in last_state(output_dir)["log_history"] if "loss" in entry]
    assert rates[4:] == pytest.approx([LEARNING_RATE * (1 - step / 8) for step in (4, 5, 6, 7)])


def test_behind_the_last_step_nothing_is_trained(saved, models, tmp_path, capsys):
    """Nor is anything in the folder lost."""
    data, whole = saved
    shutil.copytree(whole, tmp_path / "out")
    assert resumed(models, data, tmp_path / "out", "--resume_from_checkpoint", "auto") == 0
    assert "has finished 5 steps of 5 asked for: nothing is left to do" in capsys.readouterr().out
    assert last_state(tmp_path / "out")["global_step"] == 5
    assert len(checkpoints(tmp_path / "out")) == 3
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.long
def test_the_best_model_is_found_where_its_folder_was_moved_to(data, models, tmp_path):
    evaluated = ["--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split", "train"]
    evaluated += ["--load_best_model_at_end", "True", "--metric_for_best_model", "loss", "--greater_is_better", "True"]
    assert main([*flags(models, data, tmp_path / "before"), *evaluated, "--max_steps", "4"]) == 0
    shutil.copytree(saved_best := tmp_path / "before" / "checkpoint-2", tmp_path / "kept")
    (tmp_path / "before").rename(tmp_path / "after")
    assert not saved_best.exists()
    assert resumed(models, data, tmp_path / "after", "--resume_from_checkpoint", "auto", *evaluated) == 0
    best, ended = (tmp_path / folder / "model.safetensors" for folder in ("kept", "after"))
    assert best.read_bytes() == ended.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_what_rank_0_cannot_write_ends_all_ranks_at_once(strategy, data, models, tmp_path):
    """A checkpoint, or the model at the end, where files may have 100 KiB, as with a quota."""
    command = [sys.executable, "-m", "longctx.train", *flags(models, data, tmp_path / "out"), "--sp", "2", "--use_cpu"]
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "bash", *command, "--save_strategy", strategy]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=280)
    assert done.returncode not in (0, None)
    (line,) = [text for text in done.stderr.splitlines() if "could not be written" in text]
    assert "File too large" in line
    assert "Traceback" not in done.stderr


def test_changed_data_is_refused_though_it_has_the_same_lengths(copied, models, tmp_path, capsys):
    data = write_jsonl(tmp_path / "data.jsonl", make_documents(LENGTHS, seed=1, masked=0.4))
    folder = str(copied[1] / "checkpoint-4")
    assert resumed(models, data, copied[1], "--resume_from_checkpoint", folder) == 2
    error = capsys.readouterr().err
    assert "contents: " in error
    assert "documents: " not in error


def test_a_changed_stream_is_refused(data, models, tmp_path, capsys):
    """It is known by its files; one that is longer would give other rows only later on."""
    common = [*flags(models, data, tmp_path / "out"), "--dataset_streaming", "True"]
    assert main(common) == 0
    common += ["--resume_from_checkpoint", "auto"]
    write_jsonl(tmp_path / "data.jsonl", make_documents([*LENGTHS, 3]))
    assert main(common) == 2
    assert "(files: " in capsys.readouterr().err


def test_nothing_to_resume(data, models, tmp_path, capsys):
    assert resumed(models, data, tmp_path / "out", "--resume_from_checkpoint", "True") == 2
    assert "has no complete checkpoint" in capsys.readouterr().err
    assert checkpoint_of("auto", tmp_path / "out") is None
