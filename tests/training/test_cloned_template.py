"""`--chat_template_path` with another tokenizer, beside TRL's SFTTrainer, which also resizes the model's embeddings."""

from __future__ import annotations

import pytest
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, clone_chat_template

import longctx.run.training as training
from longctx.model.tiny import tiny_tokenizer
from longctx.train import main
from tests.jsonl import write_lines

CHATS = [{"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}]} for n in (3, 5, 9)]
GIVEN = {"max_steps": 3, "per_device_train_batch_size": 1, "learning_rate": 1e-3, "max_length": 64, "logging_steps": 1}
GIVEN |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "train_sampling_strategy": "sequential"}
GIVEN |= {"use_cpu": True, "bf16": False}
NOTE = "TRL would also resize the model's 272 embeddings to 320"


def _losses(log):
    return [entry["loss"] for entry in log if "loss" in entry]


def _train(monkeypatch, model, data, output, *more):
    trainers, build = [], training.build_trainer
    monkeypatch.setattr(training, "build_trainer", lambda *a: trainers.append(build(*a)) or trainers[-1])
    given = [part for name, value in GIVEN.items() for part in (f"--{name}", str(value))]
    given += ["--model_name_or_path", str(model), "--dataset_name", data, "--output_dir", str(output), *more]
    code = main([*given, "--packing", "False"])
    return code, _losses(trainers[-1].state.log_history) if trainers else []


@pytest.mark.long
@pytest.mark.parametrize("added", [[], ["<|turn|>"]])
def test_trl_resizes_the_model_and_longctx_says_that_it_does_not(added, models, tmp_path, monkeypatch, capsys):
    """The model that TRL's function returns gives TRL's losses."""
    data, other = write_lines(tmp_path / "data.jsonl", CHATS), tiny_tokenizer()
    other.add_tokens(added, special_tokens=True)
    other.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{{ eos_token }}{% endfor %}"
    other.eos_token = "<|im_end|>"
    other.save_pretrained(tmp_path / "other")
    read = (cls.from_pretrained(models["GQA 4:2"]) for cls in (AutoModelForCausalLM, AutoTokenizer))
    args = SFTConfig(str(tmp_path / "trl"), chat_template_path=str(tmp_path / "other"), **GIVEN)
    records = load_dataset("json", data_files=data, split="train", cache_dir=str(tmp_path / "cache"))
    trainer = SFTTrainer(next(read), args=args, train_dataset=records, processing_class=next(read))
    trainer.train()

    asked = ("--chat_template_path", str(tmp_path / "other"))
    code, losses = _train(monkeypatch, models["GQA 4:2"], data, tmp_path / "alone", *asked)
    said = capsys.readouterr()
    if added:
        assert code == 2
        assert "1 tokens that the model's tokenizer lacks, such as '<|turn|>'" in said.err
    else:
        assert NOTE in said.out
        assert losses[0] != pytest.approx(_losses(trainer.state.log_history)[0], abs=0.05)
    read = (cls.from_pretrained(models["GQA 4:2"]) for cls in (AutoModelForCausalLM, AutoTokenizer))
    model, tokenizer, _ = clone_chat_template(*read, asked[1])
    model.save_pretrained(tmp_path / "cloned")
    tokenizer.save_pretrained(tmp_path / "cloned")
    code, losses = _train(monkeypatch, tmp_path / "cloned", data, tmp_path / "out")
    assert code == 0
    assert losses == pytest.approx(_losses(trainer.state.log_history), abs=2e-5)
    assert NOTE not in capsys.readouterr().out
