"""The page of a run shows its results and settings, but no secrets."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from longctx.forecast.cost import Cost
from longctx.machine.here import Machine
from longctx.regions import PARTS
from longctx.report import svg as charts
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
        checkpoints=[hostile],
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
    memory = of_ranks(torch.arange(300, 400)[:, None] / 10, ["allocated"], "gib_")
    history = [
        {"step": step, "loss": 5 / step, "memory": memory, "seconds": seconds, "tokens_per_second": 1e5}
        for step in range(1, 3001)
    ]
    history[1000]["loss"] = 99.0
    history[1500]["loss"] = float("nan")
    html = report(history=history).html()
    assert len(html) < 10**6
    page = Page(html)
    assert page.tags.count("tr") <= MOST_ROWS + 10
    assert f"Every {-(-3000 // MOST_ROWS)}th of 3,000 logged steps" in html
    assert {"the fullest rank", "mean", "lowest"} <= set(page.text)
    assert "Where the time went" in page.text
    assert "Where the time went, by rank" not in page.text
    assert "nan" not in " ".join(re.findall(r'points="[^"]*"', html))
    loss = re.search(r"<title>Loss over steps</title>.*?</svg>", html)[0]
    highest = min(float(y) for y in re.findall(r",([\d.]+)", re.search(r'points="([^"]+)"', loss)[1]))
    assert highest < charts.TOP + 20  # the one step at 99 is seen


def test_where_the_time_went_is_a_mean_in_a_long_run():
    """All of a step's time is attention's, and all of the next step's is the rest: half of each."""
    history = [
        {
            "step": step,
            "loss": 1.0,
            "seconds": of_ranks(
                torch.tensor([[part == ("attention", "rest")[step % 2] for part in PARTS]]).double(), PARTS
            ),
        }
        for step in range(4 * charts.MOST_POINTS)
    ]
    [chart] = re.findall(r"<title>Where the time went, over steps</title>.*?</svg>", report(history=history).html())
    areas = re.findall(r'<polygon class="area[^>]* points="([^"]*)"', chart)
    heights = [sorted({float(y) for y in re.findall(r",([\d.]+)", area)}) for area in areas]
    assert [len(both) for both in heights] == [2, 2]
    assert heights[0][0] == heights[1][1] == pytest.approx((heights[0][1] + heights[1][0]) / 2, abs=0.1)


@pytest.mark.parametrize("seconds", [{}, {"rest": {"mean": 1.0}}, {part: [1.0, 2.0] for part in PARTS}])
@pytest.mark.parametrize("host", [{}, {"gib_by_rank": []}, {"gib_by_rank": [1.0, 2.0], "rank_of_max": 1}])
def test_a_page_leaves_out_what_the_log_lacks(seconds, host):
    """Entries of earlier releases listed the ranks; those of the step after it are drawn."""
    later = {
        "seconds": of_ranks(torch.ones(1, len(PARTS)), PARTS),
        "memory": of_ranks(torch.ones(1, 1), ["host"], "gib_"),
    }
    history = [{"step": 1, "loss": 2.0, "seconds": seconds, "memory": {"host": host}}, {"step": 2, "loss": 1.0} | later]
    assert "Where the time went, by rank" in Page(report(history=history).html()).text
    assert "Peak host memory by rank, GiB" in Page(report(history=history[:1]).html()).text


def test_a_page_of_an_evaluation_alone_has_its_loss():
    page = Page(report(history=[{"step": 0, "eval_loss": 1.2345}]).html())
    assert page.text.count("1.2345") == 1, "in the table"
    assert page.text[page.text.index("last evaluation") + 1] == "1.234"


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


def test_values_are_under_the_mouse_a_long_line_has_a_moving_mean_and_flat_charts_are_folded():
    history = [
        {"step": step, "loss": 5.0 + (-1) ** step, "grad_norm": 1.0 / step, "padding_fraction": 0.0}
        for step in range(1, 31)
    ]
    html = report(history=history).html()
    assert "<title>training, step 3: 4</title>" in html
    assert "<title>gradient norm, step 4: 0.25</title>" in html
    means = re.findall(r"<title>training, moving mean, step \d+: ([\d.]+)</title>", html)
    assert len(means) == 30
    assert all(4.5 < float(mean) < 5.5 for mean in means[15:]), "the loss is 4 and 6 by turns"
    assert ["moving mean" in report(history=history[:steps]).html() for steps in (19, 20)] == [False, True]
    [padding] = re.findall(r"<details class=flat><summary>(.*?)</summary>", html)
    assert padding == "Padding: 0% in all steps"
    longer = [{"step": step, "loss": 1.0 / step} for step in range(1, 1001)]
    assert 50 < report(history=longer).html().count("<title>training, step ") <= 100


def test_charts_of_padding_and_imbalance_are_folded_unless_they_need_attention():
    low = [
        {"step": step, "loss": 5.0, "padding_fraction": 0.001 * step, "attention_imbalance": 1 + step / 100}
        for step in (1, 2)
    ]
    folded = re.findall(r"<details class=flat><summary>(.*?)</summary>", report(history=low).html())
    assert folded == ["Padding: at most 0.2%", "Attention imbalance: at most 1.02"]
    high = [entry | {"padding_fraction": 0.02 * entry["step"] ** 2, "attention_imbalance": 1.2} for entry in low]
    folded = re.findall(r"<details class=flat><summary>(.*?)</summary>", report(history=high).html())
    assert folded == ["Attention imbalance: 1.2 in all steps"]


def test_a_page_without_a_step_says_so():
    assert Page(report().html()).tags.count("svg") == 9
    assert report().html().count(">not recorded</text>") == 9


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([5.474, 5.361], ["5.350", "5.375", "5.400", "5.425", "5.450", "5.475"]),
        ([0, 58000], ["0", "20k", "40k", "60k"]),
        ([0, 1e30], ["0", "2e+29", "4e+29", "6e+29", "8e+29", "1e+30"]),
    ],
)
def test_ticks_have_the_digits_that_tell_them_apart(values, ticks):
    axis = charts.Axis.of(values, 0, 100)
    assert [charts._tick_writer(axis)(tick) for tick in axis.ticks] == ticks


@pytest.mark.parametrize(("steps", "ticks"), [(3, [1, 2, 3]), (10, [2, 4, 6, 8, 10]), (12, [5, 10])])
def test_ticks_of_steps_are_whole(steps, ticks):
    assert charts.Axis.of(range(1, steps + 1), 0, 100, whole=True).ticks == ticks


def test_a_run_on_preferences_has_charts_of_its_rewards():
    rewards = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "rewards/margins": 1.0, "rewards/accuracies": 0.75}
    steps = [{"step": step, "loss": 0.6} | rewards for step in (1, 2)]
    evaluated = {"step": 2, "eval_loss": 0.5, "eval_rewards/margins": 1.2, "eval_rewards/accuracies": 1.0}
    drawn = [re.search("<figcaption>(.*?)</figcaption>", chart)[1] for chart in all_charts([*steps, evaluated], steps)]
    assert drawn[1:4] == ["Rewards", "Reward margins", "Reward accuracies"]
    page = "".join(all_charts([*steps, evaluated], steps)[1:4])
    assert re.findall("<li>.*?</i>(.*?)</li>", page) == ["chosen", "rejected", *["training", "evaluation"] * 2]
    assert not any("Reward" in chart for chart in all_charts([], [{"step": 1, "loss": 0.6}]))
