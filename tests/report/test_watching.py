"""The files that a run leaves: its trace, its curves for dashboards, and its page."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import re
import socket
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import pytest

from longctx.regions import PARTS
from longctx.report.page import HIDDEN
from longctx.train import main
from tests.report.browser import needs_browser, shown
from tests.report.test_page import TOKEN, Page
from tests.training.test_training import COMMON, make_documents, run_cases, write_jsonl
from tests.workers import run_ranks

ROOT = Path(__file__).parents[2]
DASHBOARDS = [name for name in ("tensorboard", "trackio") if importlib.util.find_spec(name)]
STEPS, TRACED, MICRO_BATCHES = 4, 2, 2
LAYERS = 2
FORWARD_AND_BACKWARD = 2
RING = {f"ring step {hop}": FORWARD_AND_BACKWARD * LAYERS for hop in range(4)}
REGIONS = {  # of a micro-batch
    "ring": RING,
    "gather": {name: 2 * count for name, count in RING.items()},  # its 2 key/value heads one after the other
    "ulysses": {"exchange": 2 * FORWARD_AND_BACKWARD * LAYERS},
    "hybrid": {f"ring step {hop}": FORWARD_AND_BACKWARD * LAYERS for hop in range(2)}
    | {"exchange": 2 * FORWARD_AND_BACKWARD * LAYERS},
}
ALWAYS = {"attention": LAYERS, "attention backward": LAYERS, "loss": 1, "shard": 1, "pack": 1}
RUN_NAME = "</title><script>alert(1)</script>"


def trained(models, folder, backends):
    """{backend: output_dir} of runs at sp 4, evaluated and traced; no recomputation."""
    data = write_jsonl(folder / "data.jsonl", make_documents([501, 490, 480, 470] * 3))  # in one epoch
    config = folder / "run.yaml"
    config.write_text(json.dumps({"report_to": DASHBOARDS or "none"}))
    common = [flag for flag in COMMON if flag not in ("--report_to", "none")]
    common += ["--config", str(config), "--max_steps", str(STEPS), "--sp", "4", "--engine", "fsdp2"]
    common += ["--gradient_accumulation_steps", str(MICRO_BATCHES), "--dataset_name", data]
    common += ["--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split", "train"]
    common += ["--gradient_checkpointing", "False", "--profile", "True", "--profile_steps", str(TRACED)]
    common += ["--model_name_or_path", models["GQA 4:2"], "--hub_token", TOKEN, "--run_name", RUN_NAME]
    cases = {backend: [*common, "--sp_backend", backend, "--output_dir", str(folder / backend)] for backend in backends}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        environment.setenv("TRACKIO_DIR", str(folder / "trackio"))
        run_ranks(4, "tests.report.test_watching:run_watched", cases, str(folder / "asked"))
    return {backend: folder / backend for backend in backends}


HOST_OF = {  # of the arguments of an audit event
    "socket.connect": lambda sock, address: address[0],
    "socket.sendto": lambda sock, address: address[0],
    "socket.getaddrinfo": lambda host, *_: host,
    "socket.gethostbyname": lambda host: host,
}


def run_watched(cases, path):
    """`run_cases`, and every host that is asked for by Python in `path`.RANK; what follows a call is not watched."""
    with open(f"{path}.{os.environ['RANK']}", "w") as file:

        def watch(event, arguments):
            if event in HOST_OF and getattr(arguments[0], "family", None) != socket.AF_UNIX and not file.closed:
                print(HOST_OF[event](*arguments), file=file)

        sys.addaudithook(watch)
        socket.getaddrinfo("localhost", None)  # it does watch
        run_cases(cases)


@pytest.fixture(scope="module")
def run(models, tmp_path_factory):
    """The output_dir of one of them."""
    return trained(models, tmp_path_factory.mktemp("runs"), ["hybrid"])["hybrid"]


@pytest.mark.long
def test_a_trace_has_every_region_of_a_step(run):
    check_trace(run, "hybrid")


@pytest.mark.long
def test_the_same_of_every_other_backend(models, tmp_path):
    for backend, folder in trained(models, tmp_path, REGIONS.keys() - {"hybrid"}).items():
        check_trace(folder, backend)
        check_parts(folder)


def trace(path):
    """[(name, begin, end)] of our regions and the profiler's steps, in a thread each."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    named = [e for e in events if e.get("ph") == "X" and re.match(r"longctx\.|ProfilerStep", e["name"])]
    of_host = [e for e in named if e["cat"] != "gpu_user_annotation"]
    return [(e["name"].removeprefix("longctx."), e["ts"], e["ts"] + e["dur"]) for e in of_host]


def inside(event, events, prefix):
    return any(name.startswith(prefix) and begin <= event[1] and event[2] <= end for name, begin, end in events)


def check_trace(folder, backend):
    assert {path.name for path in (folder / "profile").iterdir()} == {f"rank-{r}.json.gz" for r in range(4)}
    for rank in range(4):
        events = trace(folder / "profile" / f"rank-{rank}.json.gz")
        steps = [event for event in events if event[0].startswith("ProfilerStep")]
        assert [name for name, *_ in steps] == ["ProfilerStep#2", "ProfilerStep#3"]
        [evaluation] = [event for event in events if event[0] == "evaluation"]
        assert inside(evaluation, steps[:1], "Profiler"), "after the step before the first"
        of_steps = [event for event in events if event[0] != "wait" and not inside(event, [evaluation], "evaluation")]
        for step, reads in zip(steps, (1, 0), strict=True):  # one step ahead, and the last step none
            counts = Counter(e[0] for e in of_steps if inside(e, [step], "Profiler") and e != step)
            regions = {name: MICRO_BATCHES * count for name, count in (ALWAYS | REGIONS[backend]).items()}
            assert counts == Counter(regions | {"data": reads, "pack": MICRO_BATCHES * reads})
        within = {"ring step": "attention", "pack": "data", "exchange": "ProfilerStep"}
        for event in of_steps:
            for prefix, outer in within.items():
                if event[0].startswith(prefix):
                    assert inside(event, events, outer), event


def test_the_page_names_every_region():
    page = (ROOT / "docs/howto/watch.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`longctx\.([a-zN ]+)`", page.replace("step N", "step")))
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "longctx").rglob("*.py"))
    assert named == {name.rstrip("0 ") for name in re.findall(r'with .*region\(f?"([a-z0 ]+)', code)}


@pytest.mark.long
def test_parts_add_up_to_the_time_between_log_lines(run):
    check_parts(run)


def check_parts(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    entries = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    for before, entry in itertools.pairwise(entries):
        seconds = (entry["num_tokens"] - before["num_tokens"]) / entry["tokens_per_second"]
        assert set(entry["seconds"]) == set(PARTS)
        for rank in range(4):
            parts = sum(part["by_rank"][rank] for part in entry["seconds"].values())
            # Each rank looks at its clock when it comes to the log, one of them for tokens per second.
            assert parts == pytest.approx(seconds, abs=0.02 + seconds / 5)
        whole = sum(part["mean"] for part in entry["seconds"].values())
        for part in ("data", "attention", "communication"):
            assert entry[f"{part}_fraction"] == pytest.approx(entry["seconds"][part]["mean"] / whole, abs=1e-2)
        assert entry["seconds"]["attention"]["min"] > 0
        assert entry["seconds"]["communication"]["min"] > 0
        assert len(entry["memory"]["host"]["gib_by_rank"]) == 4
        assert entry["mfu"] is None


def numbers(folder):
    """{step: what the log has of it, under the names of dashboards}; texts and what is unknown left out."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    found = {}
    for entry in history:
        if "packing" not in entry:
            named = {f"train/{n}".replace("train/eval_", "eval/"): v for n, v in entry.items() if n != "step"}
            found.setdefault(entry["step"], {}).update({n: v for n, v in named.items() if isinstance(v, int | float)})
    return found


@pytest.mark.long
@pytest.mark.skipif("tensorboard" not in DASHBOARDS, reason="the tensorboard extra")
def test_tensorboard_has_the_curves_of_the_log(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = (run.parent / "events").iterdir()  # of one rank
    accumulator = EventAccumulator(str(events)).Reload()
    shown = {}
    for name in accumulator.Tags()["scalars"]:
        for point in accumulator.Scalars(name):
            shown.setdefault(point.step, {})[name] = point.value
    expected = numbers(run)
    assert {"train/loss", "train/tokens_per_second", "train/communication_fraction"} <= expected[1].keys()
    assert shown == {step: pytest.approx(values, rel=1e-6) for step, values in expected.items()}  # events are fp32


@pytest.mark.skipif("trackio" not in DASHBOARDS, reason="the trackio extra")
def test_trackio_has_the_curves_of_the_log(run):
    with contextlib.closing(sqlite3.connect(run.parent / "trackio" / "huggingface.db")) as database:
        rows = database.execute("select run_name, metrics from metrics").fetchall()
    shown = {}
    for name, metrics in rows:
        assert name == RUN_NAME
        values = json.loads(metrics)
        shown.setdefault(values.pop("train/global_step"), {}).update(values)
    of_the_whole_run = re.compile("train/(train_|total_flos)")  # no curves, and not sent
    for step, values in numbers(run).items():
        curves = {name: value for name, value in values.items() if not of_the_whole_run.match(name)}
        assert shown.pop(step) == pytest.approx(curves)
    assert shown == {}


def test_a_run_and_its_dashboards_ask_no_other_machine_for_anything(run):
    for rank in range(4):
        asked = (run.parent / f"asked.{rank}").read_text().split("\n")
        assert "localhost" in asked
        assert set(asked) <= {"localhost", "127.0.0.1", "::1", socket.gethostname(), "None", ""}


def test_the_page_of_a_run_is_whole_and_fetches_nothing(run):
    html = (run / "run_report.html").read_text()
    page = Page(html)
    assert "script" not in page.tags
    assert page.addresses == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", html)
    assert TOKEN not in html
    text = " ".join(page.text)
    [command] = re.findall("<h2>Command</h2>.*?<pre[^>]*>(.*?)</pre>", html, flags=re.DOTALL)
    assert " ".join(re.sub("<[^>]*>", " ", command).split()).startswith("longctx train --")
    said = [RUN_NAME, "Finished after 4 steps.", "--sp_backend", "--hub_token", HIDDEN, "world 4 = ", "Command"]
    said += ["these settings reach", "Packing", "Versions", "Checkpoints", "Flags that were set", "All flags"]
    assert not [part for part in said if part not in text]
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert all(f"{entry['loss']:.4f}" in text for entry in history if "loss" in entry)
    [given] = re.findall("<h2>Flags that were set</h2>.*?</table>", html)
    assert "--sp_backend" in given
    assert "--use_liger_kernel" not in given, "which has a default here"
    [numbers] = re.findall(r"<table class=numbers>.*?</table>", html)
    assert numbers.count("<tr>") == 1 + STEPS, "an evaluation is in the row of its step"
    svgs = re.findall(r"<svg.*?</svg>", html)
    drawn = re.findall(r"<figcaption>([^<,]*)", html)
    expected = ["Loss", "Tokens per second", "Gradient norm", "Learning rate", "Padding", "Attention imbalance"]
    assert sorted(drawn) == sorted([*expected, "Peak host memory", "Where the time went"])
    assert "@media (prefers-color-scheme: dark)" in html
    assert len(svgs) == 8
    assert all(re.match(r'<svg [^>]*role="img"><title>[^<]+</title><desc>[^<]+</desc>', svg) for svg in svgs)


@needs_browser
def test_a_browser_shows_the_page_without_an_error_or_a_request(run, tmp_path):
    dom = Page(re.sub(r"<!DOCTYPE html>", "", shown(run / "run_report.html", tmp_path, 390)))
    assert dom.tags.count("svg") == 8
    assert "script" not in dom.tags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile_steps", "0"], "--profile_steps 0 is below 1"),
        (["--profile", "True", "--max_steps", "2"], "Use --max_steps 5 or more"),
    ],
)
def test_a_trace_of_nothing_is_refused(arguments, message, capsys):
    assert main([*arguments, "--model_name_or_path", "tiny", "--dataset_name", "stdlib"]) == 2
    assert message in capsys.readouterr().err
