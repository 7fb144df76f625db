"""Every command of README.md, CONTRIBUTING.md and docs/ is executed."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

import longctx.settings.arrange
import longctx.settings.machine_checks
import longctx.settings.model_config
import longctx.settings.resolve
from benchmarks.differential.__main__ import _parser as differential_parser
from benchmarks.gpu.__main__ import _parser as gpu_parser
from benchmarks.max_length.__main__ import _parser as bench_parser
from benchmarks.published import CONFIGS
from longctx.export import _parser as export_parser
from longctx.machine.here import Machine
from longctx.plan import _parser as plan_parser
from longctx.plan import main as plan
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.verify.machine import DISTRIBUTION

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = {
    "longctx.train": "train",
    "longctx.verify": "verify",
    "longctx.plan": "plan",
    "benchmarks.max_length": "bench",
}
QWEN3_4B = CONFIGS["Qwen/Qwen3-4B"]
SIZES = CONFIGS | {
    "Qwen/Qwen3-4B-Instruct-2507": type(QWEN3_4B)(**QWEN3_4B.to_dict() | {"max_position_embeddings": 262144})
}
DEVELOPMENT = {"ruff", "mypy", "pytest", "mkdocs", "source", "python"}
"""Programs of CONTRIBUTING.md, which .ci/run and tests here run."""


class Block(NamedTuple):
    page: Path
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command, those joined by && apart; comments and continued lines are read as a shell does."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [list(w) for line in words for is_and, w in itertools.groupby(line, "&&".__eq__) if not is_and]

    @property
    def is_script(self) -> bool:
        return self.text.startswith("#!")


def blocks() -> list:
    """All of them, named by their page and line."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(Block(page, match[1]), id=f"{page.relative_to(ROOT)}:{line}"))
    return found


BLOCKS = blocks()


# What a command starts


class Started(NamedTuple):
    command: str
    """train, verify, plan, bench or export."""
    flags: list[str]
    nodes: int = 1
    processes: int = 1
    """Of a node; 1 for those that longctx starts itself."""
    config_file: Path | None = None


def started(words: list[str]) -> Started | None:
    """What a command line of ours starts, by the launcher's own parser; None for another program."""
    program, *rest = words
    if program == "longctx":
        return Started(rest[0], rest[1:])
    if program == "python" and rest[0] == "-m":
        return Started(MODULES[rest[1]], rest[2:]) if rest[1] in MODULES else None
    if program == "torchrun":
        from torch.distributed.run import parse_args

        args = parse_args(rest)
        nodes = int(args.nnodes.partition(":")[0])
        if not args.module:
            assert (ROOT / args.training_script).is_file()
            return None
        return Started(MODULES[args.training_script], args.training_script_args, nodes, int(args.nproc_per_node))
    if program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        args = launch_command_parser().parse_args(rest[1:])
        assert rest[0] == "launch"
        assert args.module
        config = ROOT / args.config_file if args.config_file else None
        assert config is None or config.is_file()
        found = Started(MODULES[args.training_script], args.training_script_args, config_file=config)
        return found._replace(processes=args.num_processes) if args.num_processes else found
    return None


def needs_more_than_is_here(words: list[str]) -> bool:
    """A model of the hub, data of the reader's, an ellipsis, another machine."""
    text = " ".join(words)
    return bool(re.search(r"\w/\w[\w.-]*\d|\bmy[-_]|examples/|…|--rdzv_endpoint|--machine_rank|--gpus 1 2 4 8", text))


# Read and resolved


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A place with the reader's data; models of the hub are those of the same sizes that are published."""
    load = longctx.settings.model_config.load_config
    monkeypatch.setattr(
        longctx.settings.model_config, "load_config", lambda name, *a, **k: SIZES.get(name) or load(name, *a, **k)
    )
    monkeypatch.setattr(longctx.settings.model_config, "load_whole_config", lambda *_, **__: None)
    monkeypatch.setattr(longctx.settings.arrange, "QLORA_VERSIONS", {})  # bitsandbytes is in no extra of the tests
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def check(words: list[str]) -> None:
    """Fails for a command that is not one of ours, of pip, or of development."""
    if words[0] == "pip":
        return check_installation(words)
    if words[0] in ("git", "cd"):
        assert words in (["git", "clone", "REPOSITORY", "longctx"], ["cd", "longctx"])
        return None
    if words[0] in ("docker", "sky"):
        return check_deployment(words)
    if words[0] in DEVELOPMENT and started(words) is None:
        return check_development(words)
    if words[0] == "sbatch":
        assert (ROOT / "examples/slurm" / words[1]).is_file()
        return check_flags(Started("train", words[2:], nodes=2, processes=8))
    run = started(words)
    if run is None:
        assert words[0] == "torchrun", f"{shlex.join(words)} is not a command that is run or read here"
        return None  # of examples/, which tests/test_examples.py runs
    return check_flags(run)


def check_installation(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[1] == "install"
    [what] = [word for word in words[2:] if word != "-e"]
    found = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", what)
    assert found is not None, "what the index has by the name of longctx is another project"
    assert "-e" in words
    assert set((found[1] or "").split(",")) - {""} <= extras.keys()


def check_deployment(words: list[str]) -> None:
    """A command that the comment on top of a file of examples/ has; what is trained is a recipe."""
    [file] = [ROOT / "examples" / name for name in ("docker/Dockerfile", "skypilot.yaml") if words[0] in name]
    comments = [line[1:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#   ")]
    assert words in map(shlex.split, comments)
    if "train" in words:
        check_flags(Started("train", words[words.index("train") + 1 :]))
    assert all((ROOT / word).exists() for word in words if word.startswith("examples/"))
    assert all((ROOT / f"configs/recipes/{word[7:]}.yaml").is_file() for word in words if word.startswith("RECIPE="))


def check_development(words: list[str]) -> None:
    """What .ci/run does as well; the files that are named have to be there."""
    for path in (word for word in words[1:] if word.startswith(("tests/", "examples/"))):
        assert (ROOT / path).is_file()
    parsers = {"benchmarks.differential": differential_parser, "benchmarks.gpu": gpu_parser}
    if words[1:2] == ["-m"] and words[2] in parsers:
        parsers[words[2]]().parse_args(words[3:])


def check_flags(run: Started) -> None:
    flags = [flag for flag in run.flags if flag != "…"]
    if run.command == "plan":
        _, others = plan_parser().parse_known_args(flags)
        parse_flags(others)
    elif run.command == "bench":
        bench_parser().parse_args(flags)
    elif run.command == "export":
        export_parser().parse_args(flags)
    else:
        if run.command == "verify":
            flags = [flag for flag in flags if flag != "--json"]
        resolve_launched(run, flags)


def resolve_launched(run: Started, flags: list[str]) -> None:
    """As `--dry_run` does, in the environment that the launcher makes."""
    world = run.nodes * run.processes
    env = launcher_environment(run.config_file)
    if run.config_file and "num_processes" in env:
        world = int(env.pop("num_processes"))
    if world > 1:
        local = world // run.nodes
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}
        env |= {"GROUP_RANK": "0", "ROLE_RANK": "0"}
    given = parse_flags(flags)
    gpus = max(8, world // run.nodes) if given["model_name_or_path"] in SIZES else 0
    with machine_of(gpus):
        resolved = resolve(given, read_profile(env), env)
    assert resolved.dims.world_size == (gpus if given["sp"] == "auto" else max(world, resolved.dims.sp))
    if given["model_name_or_path"] in SIZES:
        assert resolved.forecast is not None
        assert resolved.forecast.fits, resolved.forecast.describe()


@contextmanager
def machine_of(gpus: int) -> Iterator[None]:
    """Let settings be resolved on a machine with so many H100s of 80 GB, which the pages mean by a GPU."""
    here = Machine.of("NVIDIA H100 80GB HBM3", gpus) if gpus else Machine.here(0)
    with (
        patch.object(longctx.settings.resolve, "device_count", return_value=gpus),
        patch.object(longctx.settings.arrange, "check_liger_machine"),
        patch.object(longctx.settings.machine_checks, "available_host_memory", return_value=int(here.host_bytes)),
        patch.object(Machine, "here", return_value=here),
    ):
        yield


def launcher_environment(config_file: Path | None) -> dict[str, str]:
    """What `accelerate launch` exports for a profile."""
    if config_file is None:
        return {}
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(config_file), "-m", "longctx.train"])
    args, _, _ = _validate_launch_command(args)
    before = dict(os.environ)
    changed = {name: value for name, value in prepare_multi_gpu_env(args).items() if before.get(name) != value}
    return changed | {"num_processes": str(args.num_processes)}


@pytest.mark.parametrize("block", [p for p in BLOCKS if not p.values[0].is_script])
def test_a_command_is_one_that_its_programs_take(block, folder):
    for words in block.commands:
        check(words)


def test_a_command_that_nobody_runs_is_seen(folder):
    with pytest.raises(AssertionError, match="not a command that is run or read"):
        check(["conda", "install", "longctx"])
    with pytest.raises(ValueError, match="no_such_flag"):
        check(["longctx", "train", "--no_such_flag", "1"])
    with pytest.raises(ValueError, match="does not divide"):
        check(shlex.split("torchrun --nproc_per_node 8 -m longctx.train --sp 3"))
    with pytest.raises(SystemExit):
        check(shlex.split("longctx plan --gpus none --model_name_or_path tiny"))
    with pytest.raises(AssertionError):
        check(["pip", "install", "-e", ".[no_such_extra]"])
    with pytest.raises(AssertionError, match=r"of 79\.2 GiB of GPU memory"):
        check(shlex.split("longctx train --model_name_or_path Qwen/Qwen3-8B --dataset_name my.jsonl --max_length 8192"))
    with pytest.raises(AssertionError, match="another project"):
        check(["pip", "install", "longctx"])


def test_the_host_memory_that_a_page_names_is_what_its_command_is_predicted_to_need(folder):
    page = (ROOT / "docs/howto/launch.md").read_text(encoding="utf-8")
    [(gib, text)] = re.findall(r"needs about (\d+) GiB of\s+free host memory:\n\n```bash\n(.*?)```", page, re.DOTALL)
    [command] = Block(ROOT, text).commands
    with machine_of(1):
        run = resolve(parse_flags(command[2:]), read_profile({}), {})
    assert run.forecast.host_bytes / 2**30 == pytest.approx(int(gib), rel=0.02)


def test_the_plan_of_a_page_is_what_its_command_prints(folder, capsys):
    page = (ROOT / "docs/howto/length.md").read_text(encoding="utf-8")
    [(command, said)] = re.findall(r"```bash\n(longctx plan .*?)\n```\n\n```text\n(.*?)\n```", page, re.DOTALL)
    assert plan([*shlex.split(command)[2:], "--no_learned"]) == 0
    assert f"\n\n{said}\n\nLongest sequence that fits" in capsys.readouterr().out


def test_nothing_tells_people_to_install_the_other_longctx():
    """The index has another project by that name. Ours is installed from its folder."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION != "longctx"
    folders = ("longctx", "benchmarks", "docs", "examples", "configs", ".ci")
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())]
    texts = {path: path.read_text(encoding="utf-8", errors="ignore") for path in paths if path.suffix != ".pyc"}
    assert len(texts) > 300
    stranger = re.compile(r"\blongctx\[|\bpip\d? +(install|download)\b[^\n`&;]*[ '\"]longctx\b(?!-)")
    assert stranger.search('pip install "longctx[plots]"')
    assert stranger.search("pip install -U longctx")
    assert [f"{path}: {found[0]}" for path, text in texts.items() if (found := stranger.search(text))] == []


# Run as they stand


def runnable() -> list:
    """Commands of ours that have all they need here. The README's first two are run by .ci/run, in new environments."""
    found = []
    for block in BLOCKS:
        for words in block.values[0].commands if not block.values[0].is_script else ():
            ours = words[0] in ("longctx", "accelerate") or (words[:2] == ["python", "-m"] and words[2] in MODULES)
            if ours and not needs_more_than_is_here(words) and "README" not in block.id:
                found.append(pytest.param(words, id=f"{block.id} {' '.join(words[:3])}"))
    return found


@pytest.mark.long
@pytest.mark.parametrize("words", runnable())
def test_a_command_runs_as_it_stands(words, tmp_path):
    done = run_here(words, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def run_here(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    programs = {"longctx": [sys.executable, "-m", "longctx"], "python": [sys.executable]}
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    command = [*programs.get(words[0], words[:1]), *words[1:]]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=580)


def test_there_are_commands_that_run():
    assert len(runnable()) >= 6


def test_the_slurm_script_is_the_one_that_is_tested():
    """By tests/launch/test_slurm.py."""
    [script] = [block.values[0].text for block in BLOCKS if block.values[0].is_script]
    assert script == (ROOT / "examples/slurm/several_nodes.sbatch").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.name)
def test_python_on_a_page_prints_what_its_comments_say(page, capsys):
    """`print(…)  # what it prints`; blocks that need what a run has written are compiled only."""
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        program = compile(code, page.name, "exec")
        said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
        if said:
            exec(program, {})
            assert capsys.readouterr().out.splitlines() == said
