"""Statements about the code in README.md, CONTRIBUTING.md and docs/ are true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache

import pytest

from benchmarks import small_gpus
from benchmarks.differential.__main__ import _parser as differential_parser
from benchmarks.gpu.__main__ import _parser as gpu_parser
from benchmarks.max_length.__main__ import _parser as bench_parser
from longctx.attention.backends import BACKENDS
from longctx.plan import _parser as plan_parser
from longctx.settings.dpo import DPO
from longctx.settings.flags import SFT
from tests import refusals
from tests.modules import load
from tests.test_docs import PAGES, ROOT


@cache
def messages() -> list[str]:
    """Strings of longctx/ and of the sweep's pictures, with … for what is filled in.

    Those that stand behind each other in the code are one.

    What is wrong with a flag's value is said behind the flag and its value, as in `--… … is unknown`.
    """
    found = [
        f"--{refusal.function.split()[1]} … {re.sub('{.*?}', '…', refusal.message)}"
        for refusal in refusals.refusals()
        if refusal.function.startswith("RULES ")
    ]
    for path in [*(ROOT / "longctx").rglob("*.py"), ROOT / "benchmarks" / "pictures.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
                if path.name == "schema.py":
                    found.append(f"--… … {found[-1]}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(quote: str, message: str) -> bool:
    """Whether the words of a quote stand in a message in their order, nothing but … between and beside them."""
    gap = r"(?:…|\W)*"
    parts = [re.escape(part.strip(" .,:;()")) for part in quote.split("…")]
    return re.search(gap.join(part for part in parts if part), message) is not None


QUOTES = re.findall(r"^> `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("quote", QUOTES)
def test_a_message_of_troubleshooting_is_one_of_the_code(quote):
    assert any(is_said(quote, message) for message in messages()), f"nothing in longctx/ says {quote!r}"


def test_a_message_that_the_code_does_not_have_is_seen():
    assert not any(is_said("--sp … does not suit the … processes", message) for message in messages())
    assert len(QUOTES) == len(re.findall(r"^> ", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)) >= 10


def test_every_backend_is_explained():
    """In docs/concepts.md: the head of the table "Which backend", and a line of "What a rank holds"."""
    concepts = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    head = re.search(r"^## Which backend\n\n\|(.+)\|$", concepts, re.MULTILINE)
    assert head is not None
    for name in BACKENDS.spread:
        assert name in re.findall(r"\w+", head[1].lower()), f"docs/concepts.md, Which backend, has no column for {name}"
        assert re.search(rf"^- \*\*{name}\*\* ", concepts, re.MULTILINE | re.IGNORECASE), (
            f"docs/concepts.md does not say what a rank holds under {name}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_that_a_page_names_exist(page):
    """In coming-from.md the left column is other projects', and in after-training.md what is no Bash."""
    text = page.read_text(encoding="utf-8")
    if page.name == "after-training.md":
        text = re.sub(r"^```text\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    if page.name == "coming-from.md":
        text = re.sub(r"^\| .*? \| ", "| ", text, flags=re.MULTILINE)
    of_launchers = {
        "accelerate": "config_file multi_gpu num_machines mixed_precision dynamo_backend deepspeed_multinode_launcher",
        "torchrun": "nproc_per_node nnodes rdzv_backend rdzv_id rdzv_endpoint max_restarts signals_to_handle "
        "shutdown_timeout",
        "deepspeed": "no_ssh num_nodes num_gpus node_rank master_addr hostfile module",
        "slurm": "nodes ntasks gpus cpus time job signal requeue open wait distribution resv pty exclusive",
        "mkdocs": "strict",
        "docker and sky": "ipc env secret",
        "pip": "upgrade index",
        "vllm and lm_eval": "max hf metadata gen_kwargs",  # --max-lora-rank, --hf-overrides
    }
    ours = {action.dest for parser in (plan_parser(), bench_parser()) for action in parser._actions}
    ours |= {"config", "json", "num_layers", "version", "help", "support"}
    named = set(re.findall(r"(?<![\w-])--([a-z]\w*)", text))
    if page.name == "CONTRIBUTING.md":
        ours |= {"check", "output", "record", "against"}
        ours |= {action.dest for parser in (differential_parser(), gpu_parser()) for action in parser._actions}
        ours |= {"list", "only", "seventh", "touched", "at_most"}  # of benchmarks.mutants, and of pytest here
    named = {name for name in named if not DPO.find(name.removeprefix("no_"))}
    assert named - ours - set(" ".join(of_launchers.values()).split()) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_parts_that_a_page_links_exist(page):
    for path, part in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        if "reference/" in path and not target.exists():  # made by docs/pages.py, and checked by mkdocs
            continue
        assert target.exists(), path
        if part and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert part in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, part


def test_the_drawings_are_those_of_the_plans():
    drawings = load(ROOT / "docs" / "drawings.py")
    for name, draw in drawings.DRAWINGS.items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == draw(), "run python docs/drawings.py"


def test_the_flags_page_names_every_flag():
    page, _, of_dpo = load(ROOT / "docs" / "pages.py").flags_page().partition("## Flags of longctx dpo")
    changed = {name for name, flag in DPO.flags.items() if flag is not SFT.flags.get(name)}
    assert re.findall(r"^\| `--(\w+)`", page, re.MULTILINE) == sorted(SFT.flags, key=[*SFT.flags].index)
    assert set(re.findall(r"^\| `--(\w+)`", of_dpo, re.MULTILINE)) == changed
    named = set(re.findall(r"`--(\w+)`", page + of_dpo))
    assert {name for name in named if not DPO.find(name)} == {"help", "config_file", "no_FLAG"}
    assert "| `--optim` | `adamw_torch_fused` `adamw_torch` `sgd` `rmsprop` | `adamw_torch_fused` |" in page
    assert "| `--packing` | true or false | `True` (TRL: `False`) |" in page
    assert "| `--beta` | a number above 0 | `0.1` |" in of_dpo


def test_the_lengths_in_the_readme_are_those_of_its_table():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"For (\S+) on (\d+) × H100 80 GB, it predicts sequences of (\S+) tokens, or (\S+) with any memory options "
        r"\(\[table\]\((\S+)\)\)",
        text,
    )
    model, gpus, *lengths, table = said.groups()
    rows = (ROOT / table).read_text(encoding="utf-8").partition(f"## {model}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"^\| {gpus} \| \w+ \| ([\d,]+) \| ([\d,]+) \|", rows, re.MULTILINE)
    longest = max(found, key=lambda row: int(row[0].replace(",", "")))
    balanced, with_longest = (int(length.replace(",", "")) for length in longest)
    assert lengths == [f"{balanced // 1000}k", f"{with_longest // 100_000 / 10}M"]  # rounded down


def test_the_results_in_the_readme_are_those_of_their_pages():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    slower, faster = re.search(r"a default run is (\S+) to (\S+) times as fast as TRL's", text).groups()
    ours, trls = re.search(r"trains sequences of (\S+) tokens, and TRL (\S+) \(", text).groups()
    least, most = re.search(r"the gradient is off by (\d+)% to (\d+)% without", text).groups()
    gpu = (ROOT / "benchmarks/results/gpu_H200/README.md").read_text(encoding="utf-8")
    speeds = re.findall(
        r"^\| Qwen/\S+(?:, 4 layers)? \| [\d,]+ \| auto \|.*\| (\d\.\d\d) \| [^|]+ \|$", gpu, re.MULTILINE
    )
    assert len(speeds) == 6
    assert [f"{float(speed):.1f}" for speed in (min(speeds), max(speeds))] == [slower, faster]
    assert re.findall(r"^\| (?:TRL|balanced) \| ([\d,]+) \| [\d,]+ \| [\d.]+ \|$", gpu, re.MULTILINE) == [trls, ours]
    stock = (ROOT / "benchmarks/results/elsewhere_cpu_2026-11-28.md").read_text(encoding="utf-8")
    errors = re.findall(
        r"^\| (?!control).*relative error of the gradient \| 0 \| (\S+) \| (\S+) \|$", stock, re.MULTILINE
    )
    assert {f"{float(error):.0%}" for error, _ in errors} == {f"{least}%", f"{most}%"}
    assert "With longctx, it is exact to 1e-6" in text
    assert all(float(error) <= 1e-6 for _, error in errors)


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason='the docs extra: pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.relative_to(tmp_path).parent.as_posix() for path in tmp_path.rglob("index.html")}
    assert {".", "concepts", "howto/launch", "reference/flags", "reference/python", "troubleshooting"} <= pages


SMALL_CARDS = ROOT / "docs/howto/small-gpus.md"


@pytest.mark.long
def test_small_cards_have_the_table_of_their_benchmark():
    """The table of the smaller model on the smaller cards is predicted anew: lengths, speeds and flags."""
    page = SMALL_CARDS.read_text(encoding="utf-8")
    assert "\n".join(small_gpus.table(small_gpus.MODELS[0], "RTX 4090")) in page


@pytest.mark.long
def test_small_cards_have_all_tables_of_their_benchmark():
    assert small_gpus.section() in SMALL_CARDS.read_text(encoding="utf-8")
