"""What a run shows of itself: its bar, where its time goes, its trace and its page."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import itertools
import json
import os
import pty
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import termios
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from longctx.forecast.closed_form import Breakdown
from longctx.forecast.expected_step import ExpectedStep
from longctx.launch.console import Line, show_summary
from longctx.launch.terminal import HAS_STARTED, say_hello
from longctx.regions import PARTS, Clock
from longctx.report import svg as charts
from longctx.report.charts import MOST_ROWS, all_charts
from longctx.report.page import HIDDEN, RunReport, without_secrets
from longctx.train import main
from longctx.training.peak_memory import GIB, PeakMemory
from longctx.training.progress import ROWS_PER_HEADER, StepLines
from tests.training.test_training import COMMON, make_documents, run_cases, write_jsonl
from tests.workers import run_ranks

# Where the time goes


def test_a_part_inside_another_is_counted_once():
    clock = Clock()
    assert clock.switch("attention") == "rest"  # idle: nothing is counted
    clock.start(torch.device("cpu"))
    begin = time.perf_counter()
    clock.switch("attention")
    time.sleep(0.02)
    before = clock.switch("communication")
    time.sleep(0.04)
    clock.switch(before)
    time.sleep(0.02)
    clock.switch("rest")
    with clock.paused():
        paused = time.perf_counter()
        clock.switch("attention")
        time.sleep(0.03)
        paused = time.perf_counter() - paused
    seconds, elapsed = clock.read(), time.perf_counter() - begin
    assert seconds["attention"] >= 0.04
    assert seconds["communication"] >= 0.04
    assert sum(seconds.values()) == pytest.approx(elapsed - paused, abs=2e-3)
    clock.reset({"data": 1.5})
    assert clock.read()["data"] == 1.5
    assert clock.read()["attention"] == 0


class Stream:
    """A device that is asked to note the time, and comes to it later."""

    def __init__(self):
        self.noted, self.done = 0, 0

    def event(self):
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.noted += 1
        self.place = self.stream.noted

    def query(self):
        return self.place <= self.stream.done

    def elapsed_time(self, end):
        assert end.query(), "asked for a time that has not come: a synchronisation"
        return 1000.0 * (end.place - self.place)


def test_on_a_gpu_events_are_read_when_they_have_come(monkeypatch):
    """A second passes from each event to the next. A stand-in for a GPU says when it has got to an event."""
    stream, clock = Stream(), Clock()
    monkeypatch.setattr(clock, "_event", stream.event)
    clock.start(torch.device("cuda"))  # 1: rest
    clock.switch("attention")  # 2
    clock.switch("communication")  # 3
    clock.switch("attention")  # 4
    clock.switch("rest")  # 5
    assert set(clock.read().values()) == {0.0}  # 6, and the device has come to none
    stream.done = 3
    assert clock.read() == dict.fromkeys(PARTS, 0.0) | {"rest": 1.0, "attention": 1.0}  # 7
    with clock.paused():  # 8
        clock.switch("attention")
    stream.done = stream.noted  # 9: the end of the pause
    seconds = clock.read()
    assert (seconds["attention"], seconds["communication"]) == (2.0, 1.0)
    assert seconds["rest"] == 1 + 3  # up to 2, and from 5 to 8; the pause is not in it


# The lines


class Terminal(io.StringIO):
    def isatty(self):
        return True


LOGS = {"loss": 2.3456, "tokens_per_second": 12345.6, "tokens_per_second_per_device": 3086.4, "grad_norm": 1.0}
LOGS |= {"learning_rate": 2e-5, "attention_imbalance": 1.02}
HOST = PeakMemory(
    allocated=(0, 0),
    reserved=(0, 0),
    host=(2 * GIB, 3 * GIB),
    retries=(0, 0),
    device_total=(0, 0),
    host_total=(24 * GIB, 24 * GIB),
)
GPU = replace(HOST, allocated=(61 * GIB, 73 * GIB), device_total=(80 * GIB, 80 * GIB))


def follow(output, *, is_first=True, steps=(5, 6), logs=LOGS, memory=HOST, max_steps=10):
    """What a resumed run of these steps, with an evaluation after each, prints on `output`."""
    with contextlib.redirect_stdout(output):
        lines, control = StepLines(SimpleNamespace(peak_memory=memory), ranks_per_node=2), TrainerControl()
        args = TrainingArguments(output_dir="unused", use_cpu=True)
        state = TrainerState(max_steps=max_steps, global_step=steps[0] - 1, is_world_process_zero=is_first)
        lines.on_train_begin(args, state, control)
        for state.global_step in steps:
            lines.on_log(args, state, control, logs=logs | {"loss": 2.3456 + state.global_step})
            for _ in range(2):
                lines.on_prediction_step(args, state, control, eval_dataloader=[1, 2])
            lines.on_log(args, state, control, logs={"eval_loss": 1.5, "eval_runtime": 75.0})
        lines.on_log(args, state, control, logs={"train_runtime": 5000.0, "train_loss": 2.0})
    return output.getvalue() if isinstance(output, io.StringIO) else None


def test_a_file_has_one_plain_line_a_step_under_its_header():
    header, *lines, empty, end = follow(io.StringIO()).splitlines()
    titles = "step loss grad norm learn. rate tokens/s per device memory GiB imbalance time left"
    assert header.split() == titles.split()
    assert [len(line) for line in (lines[0], lines[2])] == [len(header)] * 2
    assert lines[0].split() == ["5/10", "7.346", "1.00", "2.0e-05", "12.3k", "3.09k", "5.0/24.0", "1.02", "0", "s"]
    assert lines[1::2] == [f"evaluated after step {step}: loss 1.5, in 1:15" for step in (5, 6)]
    assert (empty, end) == ("", "trained   2 steps in 1:23:20, mean loss 2")
    assert follow(io.StringIO(), is_first=False) == ""


def test_a_gpu_has_its_utilisation_and_its_own_memory():
    _, line, *_ = follow(io.StringIO(), logs=LOGS | {"mfu": 0.4167}, memory=GPU).splitlines()
    assert line.split()[5:8] == ["3.09k", "42%", "73.0/80.0"]


def test_the_header_comes_again():
    printed = follow(io.StringIO(), steps=range(1, ROWS_PER_HEADER + 2), max_steps=30).splitlines()
    headers = [index for index, line in enumerate(printed) if line.split()[:1] == ["step"]]
    assert headers == [0, 1 + 2 * ROWS_PER_HEADER]


def read_all(leader):
    """What has been written to a terminal until its other end is closed."""
    seen = b""
    with contextlib.suppress(OSError):  # that it is closed
        while read := os.read(leader, 2**16):
            seen += read
    os.close(leader)
    return seen.decode()


@pytest.mark.parametrize(("columns", "title"), [(80, "mem GiB"), (120, "memory GiB")])
def test_a_row_fits_into_the_terminal_and_is_coloured(columns, title, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))  # rich asks the standard streams, which are pytest's here
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, columns))
    with open(follower, "w") as terminal:
        follow(terminal, logs=LOGS | {"mfu": 0.4}, memory=GPU, steps=(5, 6, 1000), max_steps=1000)
    seen = read_all(leader)
    assert "evaluation: batch 1 of 2" in seen
    assert re.search(r"\x1b\[33m *73.0/80.0\x1b\[0m", seen), "memory that is nearly full is yellow"
    lines = re.sub(r"\x1b\[[\d;]*m", "", seen).splitlines()
    assert title in lines[0]
    assert max(map(len, lines)) <= columns


def test_a_summary_is_short_and_explained_when_asked(capsys):
    lines = [Line("batch", "8 a step", "8 a step = 2 × 4"), Line("mesh", "4 processes"), Line("note", "evil\x1b[2J")]
    show_summary(lines, explain=False)
    short = capsys.readouterr().out
    assert short.split("\n\n")[:3] == ["\nmesh      4 processes", "batch     8 a step", "note      evil\\x1b[2J"]
    assert "--explain" in short
    show_summary(lines, explain=True)
    explained = capsys.readouterr().out
    assert "batch     8 a step = 2 × 4\n" in explained
    assert "--explain" not in explained


def test_a_run_says_hello_once(monkeypatch, capsys):
    monkeypatch.delenv(HAS_STARTED, raising=False)
    for _ in range(2):  # the second time as a process that the first has started
        say_hello("0.1.0")
    assert capsys.readouterr().out.count("longctx 0.1.0 is starting") == 1


def test_the_first_sign_of_life_comes_before_the_slow_imports():
    program = "import sys, longctx.__main__, longctx.train, longctx.launch.terminal as t"
    program += "; t.say_hello(longctx.__version__)"
    program += "; sys.exit(bool({'torch', 'transformers', 'rich'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name != HAS_STARTED}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "is starting" in done.stdout


@pytest.mark.long
def test_a_resumed_run_of_two_ranks_has_a_line_a_step_in_a_terminal_and_elsewhere(models, tmp_path):
    """Evaluated; steps are counted on from the one that the run is resumed from."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([90, 7, 41, 130, 64] * 4))
    flags = [*COMMON, "--disable_tqdm", "False", "--sp", "2", "--use_cpu", "True", "--dataset_name", data]
    flags += ["--eval_strategy", "steps", "--eval_steps", "2", "--dataset_test_split", "train"]
    flags += ["--per_device_eval_batch_size", "1"]
    flags += ["--save_strategy", "steps", "--save_steps", "2", "--resume_from_checkpoint", "auto"]
    flags += ["--model_name_or_path", models["GQA 4:2"], "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, "-m", "longctx.train", *flags, "--max_steps"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    log = tmp_path / "log"
    with log.open("w") as file:
        subprocess.run([*command, "2"], stdout=file, stderr=file, env=environment, check=True, timeout=300)
    assert re.findall(r"^ *(\d)/2 ", log.read_text(), re.MULTILINE) == ["1", "2"]
    assert not re.search(r"[\r\x1b]", log.read_text())
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 120))
    with subprocess.Popen([*command, "4"], stdin=follower, stdout=follower, stderr=follower, env=environment) as run:
        os.close(follower)
        seen = read_all(leader)
    assert run.returncode == 0, seen
    assert re.findall(r"^ *(\d)/4 ", seen.replace("\r", ""), re.MULTILINE) == ["3", "4"]
    assert "evaluation: batch 1 of" in seen
    assert seen.count("after step 4: loss ") == 1
    assert "{'" not in seen


# Runs: what the trace, the log and the page have of them

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
TOKEN = "hf_NoSuchTokenNoSuchTokenNoSuchToken"


def trained(models, folder, backends):
    """{backend: output_dir} of runs at sp 4, evaluated and traced; no recomputation."""
    data = write_jsonl(folder / "data.jsonl", make_documents([501, 490, 480, 470]))
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
    return [
        (e["name"].removeprefix("longctx."), e["ts"], e["ts"] + e["dur"])
        for e in named
        if e["cat"] != "gpu_user_annotation"
    ]


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
        for step in steps:
            counts = Counter(e[0] for e in of_steps if inside(e, [step], "Profiler") and e != step)
            regions = {name: MICRO_BATCHES * count for name, count in (ALWAYS | REGIONS[backend]).items()}
            assert counts == regions | {"data": 1}
        within = {"ring step": "attention", "pack": "data", "exchange": "ProfilerStep"}
        for event in of_steps:
            for prefix, outer in within.items():
                if event[0].startswith(prefix):
                    assert inside(event, events, outer), event


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
            parts = sum(part[rank] for part in entry["seconds"].values())
            # Each rank looks at its clock when it comes to the log, one of them for tokens per second.
            assert parts == pytest.approx(seconds, abs=0.02 + seconds / 5)
        whole = sum(map(sum, entry["seconds"].values()))
        for part in ("data", "attention", "communication"):
            assert entry[f"{part}_fraction"] == pytest.approx(sum(entry["seconds"][part]) / whole, abs=1e-2)
        assert min(entry["seconds"]["attention"]) > 0
        assert min(entry["seconds"]["communication"]) > 0


def numbers(folder):
    """{step: what the log has of it, under the names of dashboards}; texts and what is unknown left out."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    found = {}
    for entry in history:
        if "packing" not in entry:
            named = {f"train/{n}".replace("train/eval_", "eval/"): v for n, v in entry.items() if n != "step"}
            found.setdefault(entry["step"], {}).update({n: v for n, v in named.items() if isinstance(v, int | float)})
    return found


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


def test_the_page_of_a_run_is_whole_and_fetches_nothing(run):
    html = (run / "run_report.html").read_text()
    page = Page(html)
    assert "script" not in page.tags
    assert page.addresses == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", html)
    assert TOKEN not in html
    text = " ".join(page.text)
    for said in (
        RUN_NAME,
        "Finished after 4 steps.",
        "--sp_backend",
        "--hub_token",
        HIDDEN,
        "world 4 = ",
        "these settings reach",
    ):
        assert said in text, said
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert all(f"{entry['loss']:.4f}" in text for entry in history if "loss" in entry)
    [numbers] = re.findall(r"<table class=numbers>.*?</table>", html)
    assert numbers.count("<tr>") == 1 + STEPS, "an evaluation is in the row of its step"
    svgs = re.findall(r"<svg.*?</svg>", html)
    assert len(svgs) == 9
    assert all(re.match(r'<svg [^>]*role="img"><title>[^<]+</title><desc>[^<]+</desc>', svg) for svg in svgs)
    assert not any("not recorded" in svg for svg in svgs)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (apt-get install chromium)")
def test_a_browser_shows_the_page_without_an_error_or_a_request(run, tmp_path):
    log = tmp_path / "net.json"
    path = run / "run_report.html"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,844", "--enable-logging=stderr"]
    flags += [f"--log-net-log={log}", "--disable-background-networking", f"--user-data-dir={tmp_path / 'user'}"]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", f"file://{path}"], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr
    dom = Page(re.sub(r"<!DOCTYPE html>", "", done.stdout))
    assert dom.tags.count("svg") == 9
    assert "script" not in dom.tags
    assert done.returncode == 0
    asked = re.findall(r'"url":"([^"]+)"', log.read_text())
    assert [url for url in asked if not re.match(r"file:|data:|https?://[^/]*(google|gvt1)", url)] == []


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
    seconds = {part: [0.1 + rank / 100 for rank in range(100)] for part in PARTS}
    memory = {"allocated": {"gib_by_rank": [30 + rank / 10 for rank in range(100)]}}
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
    assert "The first 64 of 100 ranks." in html
    assert "nan" not in " ".join(re.findall(r'points="[^"]*"', html))
    loss = re.search(r"<title>Loss over steps</title>.*?</svg>", html)[0]
    highest = min(float(y) for y in re.findall(r",([\d.]+)", re.search(r'points="([^"]+)"', loss)[1]))
    assert highest < charts.TOP + 20  # the one step at 99 is seen


def test_a_page_of_an_evaluation_alone_has_its_loss():
    page = Page(report(history=[{"step": 0, "eval_loss": 1.2345}]).html())
    assert page.text.count("1.2345") == 1, "in the table"
    assert page.text[page.text.index("last evaluation") + 1] == "1.234"


def test_a_page_shows_what_the_run_has_shown_and_what_was_predicted():
    history = [{"step": 1, "loss": 2.0, "tokens_per_second_per_device": 1500.0, "peak_memory_gib_max": 40.0}]
    memory = Breakdown(device={"parameters": 50.0 * 2**30, "fixed": 5.0 * 2**30}, host={}, moment="loss")
    sizes = {"gpu_bytes": 80 * 2**30, "host_bytes": 10**12}
    expected = ExpectedStep(memory=memory, **sizes, seconds=1.0, tokens_per_second_per_device=1766.0)
    results = [("Exactness", "step 1 matched one device to 2e-07"), ("Memory", "these settings reach <800k> tokens")]
    text = Page(report(history=history, forecast=expected, results=results).html()).text
    assert {text for _, text in results} <= {part.strip() for part in text}
    following = dict(itertools.pairwise(text))
    assert (following["tokens/s/device"], following["tokens/s/device, predicted"]) == ("1.5k", "1.77k")
    assert (following["peak GPU memory"], following["peak GPU memory, predicted"]) == ("40 GiB", "50 GiB")
    unknown = replace(expected, seconds=None, tokens_per_second_per_device=None, gpu_bytes=0)
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
    assert "moving mean" not in report(history=history[:10]).html()
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


def test_a_run_on_preferences_has_charts_of_its_rewards():
    rewards = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "rewards/margins": 1.0, "rewards/accuracies": 0.75}
    steps = [{"step": step, "loss": 0.6} | rewards for step in (1, 2)]
    evaluated = {"step": 2, "eval_loss": 0.5, "eval_rewards/margins": 1.2, "eval_rewards/accuracies": 1.0}
    drawn = [re.search("<figcaption>(.*?)</figcaption>", chart)[1] for chart in all_charts([*steps, evaluated], steps)]
    assert drawn[1:4] == ["Rewards", "Reward margins", "Reward accuracies"]
    page = "".join(all_charts([*steps, evaluated], steps)[1:4])
    assert re.findall("<li>.*?</i>(.*?)</li>", page) == ["chosen", "rejected", *["training", "evaluation"] * 2]
    assert not any("Reward" in chart for chart in all_charts([], [{"step": 1, "loss": 0.6}]))
