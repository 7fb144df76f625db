"""The files of a model's folder, each damaged in turn: one line that names it, or a file that is copied unchanged."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig, Qwen3MoeConfig

from longctx import dpo, plan
from longctx.model import config_file
from longctx.model.load import load_config, load_model, load_tokenizer, take_chat_template
from longctx.model.saving import try_saving
from longctx.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from longctx.train import main
from longctx.training.trainer import SequenceTrainer
from tests.workers import run_ranks

WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def folder(saved_model, tmp_path):
    """A copy of a model, to do harm to."""
    return shutil.copytree(saved_model, tmp_path / "model")


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def arguments(folder: Path, *more: str, record: str = '{"text": "one two three"}') -> list[str]:
    (folder.parent / "data.jsonl").write_text(f"{record}\n" * 4)
    return [
        *("--model_name_or_path", str(folder), "--dataset_name", str(folder.parent / "data.jsonl"), "--use_cpu"),
        *("--max_length", "64", "--max_steps", "2", "--output_dir", str(folder.parent / "out"), "--report_to", "none"),
        *more,
    ]


def refused(capsys, given: list[str], run=main) -> str:
    """The one line with which a command refuses its input."""
    assert run(given) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    (line,) = [line for line in printed.err.splitlines() if "error: " in line]
    return line


# generation_config.json

GENERATION_CONFIGS = {
    "a temperature without sampling": ('{"do_sample": false, "temperature": 0.6, "eos_token_id": 7}', "cannot save it"),
    "no JSON": ("{ no", "cannot use it: Expecting property name"),
    "a list": ("[1]", "cannot use it: generation_config.json holds a list"),
    "a value that is refused": ('{"max_new_tokens": -3}', "cannot use it: `max_new_tokens` must be greater than 0"),
    "a part of another type": ('{"watermarking_config": 3}', "cannot use it: 'int' object"),
    "a token id that is none": ('{"eos_token_id": [7, "x"]}', r"cannot use it: eos_token_id is [7, 'x']"),
    "a name of a function": ('{"save_pretrained": 1}', "cannot use it: it sets save_pretrained"),
}


@pytest.mark.parametrize("case", GENERATION_CONFIGS)
def test_a_generation_config_that_cannot_be_saved_is_copied_and_said(folder, case, capsys):
    """The Trainer writes the tokenizer's ids into it before step 1, which makes transformers validate it anew."""
    text, reason = GENERATION_CONFIGS[case]
    (folder / "generation_config.json").write_text(text)
    assert main(arguments(folder, "--save_steps", "1")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "copied unchanged" in line]
    assert len(said) == 1
    assert reason in said[0]
    output = folder.parent / "out"
    for part in (output, output / "checkpoint-1", output / "checkpoint-2"):
        assert (part / "generation_config.json").read_text() == text
    load_model(str(output), load_config(str(output)))  # the next run starts from it


def test_a_generation_config_that_can_be_saved_is_aligned_as_before(folder, capsys):
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "eos_token_id": 7}')
    assert main(arguments(folder)) == 0
    assert "copied unchanged" not in capsys.readouterr().out
    saved = GenerationConfig.from_pretrained(folder.parent / "out")
    assert (saved.temperature, saved.eos_token_id) == (0.6, [256, 7])


# What is saved is tried


@pytest.mark.parametrize("part", ["config", "tokenizer", "adapter"])
def test_parts_that_cannot_be_saved_or_not_be_read_back_are_named(part):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.config.name_or_path = "a/model"
    assert list(try_saving(model, [tokenizer, None])) == []
    if part == "config":
        model.config.rope_parameters = {"rope_type": object()}
    elif part == "tokenizer":
        tokenizer.init_kwargs["added_tokens_decoder"] = tokenizer.init_kwargs["padding_side"] = "middle"
        tokenizer.padding_side = "middle"
    else:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        model.peft_config["default"].rank_pattern = {"q_proj": object()}
    with pytest.raises(ValueError, match=r"^--model_name_or_path a/model: its \w+ cannot be saved and read back"):
        list(try_saving(model, [tokenizer]))


def test_a_model_that_cannot_be_saved_takes_no_step(folder):
    """On two ranks both end, with one line."""
    results = run_ranks(2, f"{__name__}:spoilt", arguments(folder, "--sp", "2"))
    assert [code for code, _ in results] == [2, 2]
    assert "".join(errors for _, errors in results).count("longctx: error: ") == 1
    assert not list((folder.parent / "out").glob("checkpoint-*"))


def spoilt(given):
    """As `outcome`, of a run whose tokenizer cannot be saved from the moment at which the Trainer prepares training."""
    prepare = SequenceTrainer._prepare_for_training

    def spoil(self, *args, **kwargs):
        self.processing_class.init_kwargs["spoilt"] = object()
        return prepare(self, *args, **kwargs)

    SequenceTrainer._prepare_for_training = spoil
    return outcome(given)


def outcome(given):
    """What a run ends with on this rank: exit code and errors."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        return main(given), errors.getvalue()


# Names and sizes


@pytest.mark.parametrize("key", ["vocab", "vocab_file", "anything"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("path", ["{}/secret.txt", "../secret.txt", "link.txt"])
def test_tokenizer_files_open_nothing_outside_their_folder(folder, tmp_path, monkeypatch, file, key, path):
    (tmp_path / "secret.txt").write_text("a secret\n")
    (here := tmp_path / "some" / "where").mkdir(parents=True)  # ../ leads to the secret from the folder alone
    monkeypatch.chdir(here)
    (here / "link.txt").symlink_to("../../secret.txt")
    (folder / file).touch()
    (folder / file).write_text(
        json.dumps(json.loads((folder / file).read_text() or "{}") | {key: path.format(tmp_path)})
    )
    for load in (load_tokenizer, lambda name: take_chat_template(tiny_tokenizer(), name)):
        with pytest.raises(ValueError, match=rf"{file} sets {key} to .*(secret|link)\.txt', a file outside"):
            load(str(folder))


def test_a_vocabulary_elsewhere_would_be_opened(folder, tmp_path):
    """What is refused above is what transformers does; a path that leads nowhere, as old files have, is no matter."""
    (tmp_path / "secret.txt").write_text("[UNK]\na secret\n")
    change(folder / "tokenizer_config.json", vocab=str(tmp_path / "secret.txt"), tokenizer_class="BertTokenizer")
    (folder / "tokenizer.json").unlink()
    assert "a secret" in AutoTokenizer.from_pretrained(folder).get_vocab()
    with pytest.raises(ValueError, match="a file outside"):
        load_tokenizer(str(folder))
    shutil.copy(Path(config_file.__file__), folder / "own.txt")
    tiny_tokenizer().save_pretrained(folder)
    change(folder / "tokenizer_config.json", tokenizer_file="/home/else/tokenizer.json", vocab=str(folder / "own.txt"))
    load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *((name, 16) for name in ("config.json", "tokenizer_config.json", "generation_config.json", "vocab.json")),
        *(("chat_template.jinja", 16), ("tokenizer.model", 16)),
        *(("tokenizer.json", 256), ("model.safetensors.index.json", 256)),
    ],
)
def test_files_that_are_too_large_are_not_parsed(folder, name, limit, capsys):
    with (folder / name).open("a") as file:
        file.truncate((limit << 20) + 1)
    line = refused(capsys, arguments(folder))
    assert f"{name} has {(limit << 20) + 1:,} bytes, and the limit for {name} is {limit} MiB" in line


# The end-of-text token


@pytest.mark.parametrize(
    ("token", "reason"), [("", "empty"), ("e", "ordinary text"), (" ", "ordinary text"), ("the end", "ordinary text")]
)
@pytest.mark.parametrize(
    "record",
    [
        '{"text": "one e"}',
        '{"prompt": "one ", "completion": "two"}',
        '{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}',
    ],
    ids=["text", "completion", "chat"],
)
def test_an_end_that_text_holds_is_refused(folder, record, token, reason, capsys):
    change(folder / "tokenizer_config.json", eos_token=token)
    line = refused(capsys, arguments(folder, record=record))
    assert f"EOS token is {token!r}, which" in line
    assert reason in line


def test_an_end_of_several_tokens_is_refused(folder, capsys):
    """A normaliser takes the end apart before the tokenizer looks for it."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"String": "<|end"}, "content": "the end"}
    for token in values["added_tokens"]:
        token |= {"normalized": True, "special": False}
    values["added_tokens"] = [token for token in values["added_tokens"] if "end" not in token["content"]]
    values["model"]["vocab"]["<|endoftext|>"] = 256
    (folder / "tokenizer.json").write_text(json.dumps(values))
    change(folder / "tokenizer_config.json", added_tokens_decoder={}, extra_special_tokens=[], eos_token=None)
    line = refused(capsys, arguments(folder, "--eos_token", "<|endoftext|>", "--pad_token", "<|pad|>"))
    assert "EOS token is '<|endoftext|>', which the tokenizer splits" in line


# config.json

DAMAGE = {
    "hidden_act": ["os.system", 3, None, [], True],
    "attention_dropout": [-1, "0.1", 2.0, float("nan")],
    "sliding_window": [0, -5, "x"],
    "pad_token_id": [99_999, -300, "x"],
    "rope_parameters": [{"rope_type": "default", "rope_theta": value} for value in ("abc", 0, -1.0)]
    + [{"rope_type": "yarn", "rope_theta": 1e4, "factor": "x"}, {"rope_type": "yarn"}, 5],
    "rms_norm_eps": [-1.0, float("nan"), "x"],
    "hidden_size": [0, -1, 1.5, "x", [1], {"a": 1}],
    "num_attention_heads": [0, 3, "x", 99_999],
    "num_key_value_heads": [0, 3, "x"],
    "num_hidden_layers": [0, "x", 99_999],
    "layer_types": [["x"], 3, ["full_attention"] * 9],
    "vocab_size": [0, "x", 1.5],
}


@pytest.mark.parametrize("key", DAMAGE)
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_damaged_values_of_a_configuration_are_one_line(saved_model, tmp_path, kind, key, capsys):
    """As `longctx plan`, a dry run and a run on preferences read it: before data and weights."""
    config = tiny_config()
    config.update({"num_hidden_layers": 1, "layer_types": ["full_attention"], "max_position_embeddings": 512})
    if kind == "qwen3_moe":
        values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        config = Qwen3MoeConfig(**values, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    for value in DAMAGE[key]:
        given = {key: value} | ({"use_sliding_window": True, "max_window_layers": 0} if key == "sliding_window" else {})
        folder = tmp_path / "model"
        config.save_pretrained(folder)
        change(folder / "config.json", **given, **({"layer_types": None} if key == "sliding_window" else {}))
        for run, more in ((main, ["--dry_run"]), (dpo.main, ["--dry_run"]), (plan.main, None)):
            words = arguments(folder, *more) if more else ["--model_name_or_path", str(folder)]
            line = refused(capsys, words, run)
            assert "config.json" in line, (value, line)


# Weights


def rewrite(folder: Path, changes: dict[str, torch.Tensor], *, pickled: bool = False) -> None:
    weights = load_file(folder / "model.safetensors") | changes
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"])
def test_weights_of_other_types_are_refused(folder, dtype, pickled, capsys):
    weight = load_file(folder / "model.safetensors")[WEIGHT]
    rewrite(folder, {WEIGHT: weight.to(getattr(torch, dtype))}, pickled=pickled)
    assert f"{WEIGHT} is of type" in refused(capsys, arguments(folder))


def test_a_buffer_may_be_of_another_type(folder):
    rewrite(folder, {"model.layers.0.self_attn.bias": torch.ones(4, dtype=torch.bool)})
    load_model(str(folder), load_config(str(folder)))


def test_a_weight_in_two_files_is_refused(folder, capsys):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {"a.safetensors": weights, "b.safetensors": {WEIGHT: weights[WEIGHT] + 1, "other.weight": torch.ones(2)}}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    names = dict.fromkeys(weights, "a.safetensors") | {"other.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert f"b.safetensors holds the tensor '{WEIGHT}', which another file has too" in refused(
        capsys, arguments(folder)
    )


def test_a_name_with_control_characters_is_printed_escaped(folder, capsys):
    rewrite(folder, {"x\x1b[31m\nowned": torch.ones(2)})
    assert r"holds the tensor 'x\x1b[31m\nowned'" in refused(capsys, arguments(folder))


@pytest.mark.parametrize("given", [[], ["--sp", "2"]])
def test_weights_that_are_not_finite_are_refused_where_they_are_trained(folder, given, capsys):
    weights = load_file(folder / "model.safetensors")
    weights[WEIGHT][0, 0] = float("nan")
    rewrite(folder, weights)
    words = f"{WEIGHT} has NaN or infinite values"
    if given:
        results = run_ranks(2, f"{__name__}:outcome", arguments(folder, *given))
        assert [code for code, _ in results] == [2, 2]
        assert words in "".join(errors for _, errors in results)
    else:
        assert words in refused(capsys, arguments(folder))


def test_an_embedding_of_an_unused_word_may_be_nan(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][270] = float("nan")
    rewrite(folder, weights)
    change(folder / "config.json", tie_word_embeddings=False)
    rewrite(folder, {"lm_head.weight": torch.ones_like(weights["model.embed_tokens.weight"])})
    assert main(arguments(folder)) == 0
