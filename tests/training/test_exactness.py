"""exactness.json: each run says whether its first step was compared with one device; page and card cite it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longctx.train import main
from longctx.training.exactness import EXACTNESS_FILE, NOT_LOGGED, NOT_THE_DEMO, NOT_YET, Exactness

NUMBERS = ": loss {0:.6f} and 2.000000, gradient norm 4.000000 and 4.000000"
FLAGS = ["--use_cpu", "True", "--max_length", "128", "--per_device_train_batch_size", "1", "--warmup_steps", "0"]


@pytest.mark.parametrize(
    ("loss", "bf16", "said"),
    [
        (2.000002, False, "step 1 matched one device to 1e-06"),
        (2.002, False, "step 1 differs from one device by 1e-03, more than 1e-05"),
        (2.002, True, "step 1 in bf16 matched one device in fp32 to 1e-03"),
        (2.2, True, "step 1 in bf16 differs from one device in fp32 by 1e-01, more than 1e-02"),
        (float("nan"), False, "step 1 differs from one device by nan, more than 1e-05"),
    ],
)
def test_a_comparison_says_by_how_much_and_in_which_precision(loss, bf16, said, tmp_path):
    exactness = Exactness.of_step((loss, 2.0), (4.0, 4.0), bf16=bf16)
    exactness.write(tmp_path)
    assert str(Exactness.read(tmp_path)) == str(exactness) == said + NUMBERS.format(loss)
    assert exactness.matched == ("matched" in said)


def test_a_run_that_goes_on_tells_of_the_start_that_compared(tmp_path):
    compared = Exactness.of_step((2.0, 2.0), (4.0, 4.0), bf16=False)
    for earlier, expected in ((None, NOT_THE_DEMO), (Exactness(compared=False, reason=NOT_YET), NOT_THE_DEMO)):
        if earlier is not None:
            earlier.write(tmp_path)
        assert Exactness.of_start(is_demo=False, resume_from=tmp_path / "checkpoint-1").reason == expected
    compared.write(tmp_path)
    assert str(Exactness.of_start(is_demo=True, resume_from=tmp_path / "checkpoint-1")) == str(compared)
    assert Exactness.of_start(is_demo=True, resume_from=None).reason == NOT_YET, "a run that begins again"
    whole = (tmp_path / EXACTNESS_FILE).read_text()
    for damaged in ("{", "[" * 10**5, "[]", '{"compared": true, "reason": "x"}', whole.replace("4.0", '"4.0"')):
        (tmp_path / EXACTNESS_FILE).write_text(damaged)
        assert Exactness.of_start(is_demo=True, resume_from=tmp_path / "checkpoint-1").reason == NOT_YET


@pytest.mark.long
def test_the_demo_compares_its_first_step_and_keeps_that_when_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path("longctx-output", "run_report.html")
    assert main([*FLAGS, "--max_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]) == 0
    first = json.loads(Path("longctx-output", EXACTNESS_FILE).read_text())
    assert (first["compared"], first["matched"]) == (True, True)
    assert first["difference"] < first["tolerance"] == 1e-5
    assert f"{Exactness.read(page.parent)} ({EXACTNESS_FILE})" in page.read_text()
    assert main([*FLAGS, "--max_steps", "2", "--resume_from_checkpoint", "auto"]) == 0
    assert json.loads(Path("longctx-output", EXACTNESS_FILE).read_text()) == first
    assert main([*FLAGS, "--max_steps", "2", "--logging_steps", "2"]) == 0
    assert Exactness.read(Path("longctx-output-2")).reason == NOT_LOGGED
