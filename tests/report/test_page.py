"""The page of a run shows its results and settings, but no secrets."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from longctx.forecast.cost import Cost
from longctx.machine.here import Machine
from longctx.packing import plan_packing
from longctx.regions import PARTS
from longctx.report import svg
from longctx.report.charts import MOST_ROWS, all_charts
from longctx.report.page import HIDDEN, RunReport, without_secrets
from longctx.training.peak_memory import of_ranks

TOKEN = "hf_NoSuchTokenNoSuchTokenNoSuchToken"


class Page(HTMLParser):
    """What is in a page: tags in order, addresses, text; and whether every tag that is opened is closed."""

    VOID = ("meta", "link", "br", "line", "circle", "rect", "polyline", "polygon")

    def __init__(self, html):
        super().__init__()
        self.tags, self.addresses, self.open, self.text = [], [], [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("href", "src", "xlink:href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def report(**settings):
    plain = {"name": "run", "ended": "Finished.", "is_complete": True, "history": [], "description": []}
    plain |= {"command": ["longctx", "train"], "given": {}, "settings": {}, "versions": {}, "written": "now"}
    return RunReport(**plain | settings)


def test_a_page_says_no_secret_and_runs_nothing_of_what_it_shows(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-some-service")
    hostile = "<img src=x onerror=alert(1)>\x00\udcff\u202e'\"&{style}"
    html = report(
        name=hostile,
        ended=f"Failed: 401 for https://me:secret-word@hub.example/x with a-key-of-some-service and {TOKEN}",
        history=[{"step": 1, "packing": {hostile: hostile}}],
        description=[f"data      {hostile}"],
        command=["python", "--hub-token", "short", f"--hub_token={TOKEN}", hostile],
        given={"hub_token": "tiny", "output_dir": hostile},
        settings={"hub_token": "another-token", "model_name_or_path": "another-token/x"},
        checkpoints=[Path(hostile.replace("\x00", ""), "checkpoint-1")],
    )
    page = html.write(tmp_path).read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["run_report.html"]
    for secret in ("short", TOKEN, "tiny", "another-token", "a-key-of-some-service", "secret-word"):
        assert secret not in page.partition("</style>")[2], secret
    assert page.count(HIDDEN) >= 8
    assert "img" not in Page(page).tags
    assert "hub.example" in page


def test_secrets_of_a_command_line():
    given = ["train", "--hub_token", "x", "--eos_token", "y", "--hub-token=z", "--push_to_hub_token", "w", "--sp", "2"]
    shown = ["train", "--hub_token", HIDDEN, "--eos_token", "y", f"--hub_token={HIDDEN}", "--push_to_hub_token"]
    assert without_secrets(given) == [*shown, HIDDEN, "--sp", "2"]


def test_a_page_of_a_long_run_on_many_ranks_is_short():
    seconds = of_ranks(torch.arange(10, 110)[:, None].expand(-1, len(PARTS)) / 100, PARTS)
    same = {"seconds": seconds, "tokens_per_second": 1e5, "peak_memory_gib_max": 40.0, "peak_memory_gib_min": 30.0}
    history = [{"step": step, "loss": 5 / step} | same for step in range(1, 3001)]
    history[1000]["loss"] = 99.0
    history[1500]["loss"] = float("nan")
    html = report(history=history).html()
    assert len(html) < 10**6
    page = Page(html)
    assert page.tags.count("tr") <= MOST_ROWS + 10
    assert f"Every {-(-3000 // MOST_ROWS)}th of 3,000 logged steps" in html
    assert {"the fullest rank", "the emptiest rank"} <= set(page.text)
    assert "nan" not in " ".join(re.findall(r'points="[^"]*"', html))


@pytest.mark.parametrize("length", [1, 399, 400, 401, 1600, 1601])
def test_a_long_line_has_the_means_of_its_intervals(length):
    """Values are 0 and 1 by turns."""
    drawn = svg.averaged([(step, step % 2) for step in range(length)])
    size = -(-length // svg.MOST_POINTS)
    assert len(drawn) == -(-length // size)
    assert drawn[0] == ((size - 1) / 2, size // 2 / size)
    assert drawn[-1][0] == pytest.approx(length - 1, abs=size / 2)


@pytest.mark.parametrize("seconds", [{}, {"rest": {"mean": 1.0}}, {part: [1.0, 2.0] for part in PARTS}])
def test_a_page_leaves_out_what_the_log_lacks(seconds):
    """Entries of earlier releases listed the ranks; those of the step after it count."""
    later = {"seconds": of_ranks(torch.ones(1, len(PARTS)), PARTS), "peak_host_memory_gib_max": 1.5}
    history = [{"step": 1, "loss": 2.0, "seconds": seconds, "peak_memory_gib_max": None}]
    assert Page(report(history=history).html()).tags.count("svg") == 1
    page = Page(report(history=[*history, {"step": 2, "loss": 1.0} | later]).html())
    assert "Peak host memory, GiB" in page.text
    assert "GPU" not in " ".join(page.text)
    total = len(PARTS) + ("rest" in seconds and "data" not in seconds)
    assert dict(itertools.pairwise(page.text))["time in steps"] == f"{total} s"


def test_a_loss_that_is_no_number_is_said_and_not_drawn():
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}]
    html = report(history=history).html()
    assert dict(itertools.pairwise(Page(html).text))["last loss"] == "nan"
    assert "<td>nan</td>" in html
    assert "<desc>training: from 2 at step 1 to 2 at step 1</desc>" in html


def test_a_page_shows_what_the_run_has_shown_and_what_was_predicted():
    history = [{"step": 1, "loss": 2.0, "tokens_per_second_per_device": 1500.0, "peak_memory_gib_max": 40.0}]
    expected = Cost(
        device={"parameters": 50.0 * 2**30, "fixed": 5.0 * 2**30},
        host={},
        moment="loss",
        host_moment="step",
        seconds={"linear": 1.0},
        disk={},
        length=1,
        tokens=1766,
        world_size=1,
        machine=Machine.of("H100", 1),
    )
    results = [("Exactness", "step 1 matched one device to 2e-07"), ("Memory", "these settings reach <800k> tokens")]
    text = Page(report(history=history, forecast=expected, results=results).html()).text
    assert {text for _, text in results} <= {part.strip() for part in text}
    following = dict(itertools.pairwise(text))
    assert (following["tokens/s/device"], following["tokens/s/device, predicted"]) == ("1.5k", "1.77k")
    assert (following["peak GPU memory"], following["peak GPU memory, predicted"]) == ("40 GiB", "50 GiB")
    unknown = replace(expected, machine=Machine.of("CPU", 1))
    assert "predicted" not in report(history=history, forecast=unknown).html()


def test_a_long_loss_has_a_moving_mean_and_flat_charts_are_folded():
    steps = range(1, 31)
    history = [{"step": n, "loss": 5.0 + (-1) ** n, "grad_norm": 1.0 / n, "padding_fraction": 0.0} for n in steps]
    html = report(history=history).html()
    [mean] = re.findall(r"moving mean: from 4 at step 1 to ([\d.]+) at step 30", html)
    assert 4.5 < float(mean) < 5.5, "the loss is 4 and 6 by turns"
    assert ["moving mean" in report(history=history[:steps]).html() for steps in (19, 20)] == [False, True]
    [padding] = re.findall(r"<details class=flat><summary>(.*?)</summary>", html)
    assert padding == "Padding: 0% in all steps"


def test_a_page_tells_packing_in_words_and_of_checkpoints_their_losses_and_sizes(tmp_path):
    _, packing = plan_packing([300, 40, 90], 128, overlong="truncate")
    history = [{"step": 0, "packing": packing.to_dict() | {"passes": 2}}, {"step": 2, "loss": 3.25}]
    history += [{"step": 4, "loss": 2.5}, {"step": 4, "eval_loss": 2.75}]
    for step in (1, 2, 5):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(1_234_000))
    kept = [tmp_path / f"checkpoint-{step}" for step in (1, 2, 5)]
    text = Page(report(history=history, checkpoints=kept).html()).text
    assert set(str(packing).split("; ")) < set(text)
    assert "172 tokens cut off (40.00%)" in text
    assert "the data set was begun 2 times" in text
    following = dict(itertools.pairwise(text))
    assert following["checkpoint-1"] == f"1.23MB, {kept[0]}"
    assert following["checkpoint-2"] == f"loss 3.25, 1.23MB, {kept[1]}"
    assert following["checkpoint-5"] == f"loss 2.5 at step 4, evaluation 2.75 at step 4, 1.23MB, {kept[2]}"


def test_a_run_on_preferences_has_charts_of_its_rewards():
    rewards = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "rewards/margins": 1.0, "rewards/accuracies": 0.75}
    steps = [{"step": step, "loss": 0.6} | rewards for step in (1, 2)]
    evaluated = {"step": 2, "eval_loss": 0.5, "eval_rewards/margins": 1.2, "eval_rewards/accuracies": 1.0}
    html = all_charts([*steps, evaluated])
    titles = ["Rewards", "Reward margins", "Reward accuracies"]
    assert [title for title in re.findall("<figcaption>(.*?)</figcaption>", html) if "Reward" in title] == titles
    legends = [re.findall("<li>.*?</i>(.*?)</li>", one) for one in html.split("<figcaption>") if "Reward" in one]
    assert legends == [["chosen", "rejected"], ["training", "evaluation"], ["training", "evaluation"]]
    assert "Reward" not in all_charts([{"step": 1, "loss": 0.6}])
