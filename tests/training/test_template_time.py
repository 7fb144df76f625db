"""A chat template that writes the date writes the day on which the run began, whenever the run is resumed."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import datasets
import pytest
from safetensors.torch import load_file

from longctx.train import main
from tests.jsonl import write_lines
from tests.training.test_training import flags_of_run

DATE = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
CHATS = [{"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}]} for n in (1, 2, 5)]


@pytest.mark.parametrize("stream", ["False", "True"])
def test_a_run_that_is_resumed_on_another_day_trains_on_the_same_text(stream, models, tmp_path, monkeypatch):
    """Also in another folder, and with an empty cache."""
    data, template = write_lines(tmp_path / "data.jsonl", CHATS), tmp_path / "date.jinja"
    template.write_text(DATE)
    given = ["--chat_template_path", str(template), "--dataset_streaming", stream, "--max_steps", "2"]
    given += ["--max_length", "64", "--save_strategy", "steps", "--save_steps", "1"]

    def train(name, *more, day):
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime(2026, 12, 31, 23, 59) + timedelta(days=day)

        monkeypatch.setattr("longctx.run.preparation.datetime", Clock)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / f"cache of {name}, day {day}"))
        assert main([*flags_of_run(models["GQA 4:2"], data, tmp_path / name), *given, *more]) == 0
        return load_file(tmp_path / name / "model.safetensors"), json.loads((tmp_path / name / "run.json").read_text())

    whole, record = train("whole", day=0)
    checkpoint = str(tmp_path / "whole" / "checkpoint-1")
    resumed, of_resumed = train("resumed", "--resume_from_checkpoint", checkpoint, day=1)
    tomorrow, of_tomorrow = train("tomorrow", day=1)
    assert record["began"] == of_resumed["began"] == "2026-12-31T23:59:00"
    assert of_tomorrow["began"] == "2027-01-01T23:59:00"
    assert all((whole[name] == resumed[name]).all() for name in whole)
    assert any((whole[name] != tomorrow[name]).any() for name in whole)
