"""What tests of settings start from: a launcher that starts nothing, a process without a launcher, and refusals."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from longctx.model.tiny import tiny_config, tiny_tokenizer
from longctx.train import main
from tests.workers import start_rank_0_alone


@pytest.fixture
def launch(monkeypatch, tmp_path):
    """`launch(config file or None, *launcher flags)` -> what `accelerate launch` would start, its environment added."""
    monkeypatch.chdir(tmp_path)  # accelerate leaves a .deepspeed_env file where it is called
    return launcher(monkeypatch)


def launcher(monkeypatch):
    """`accelerate launch` without the start of the processes."""
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as command

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    before, started = dict(os.environ), {}

    def record(environment, **what):
        started.update(what, env={k: v for k, v in environment.items() if before.get(k) != v})
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    monkeypatch.setattr(torchrun, "run", lambda args: record(os.environ, **_where(args)))
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(Popen=lambda cmd, env: record(env, command=cmd)))

    def run(config_file, *flags):
        started.clear()
        chosen = ["--config_file", str(config_file)] if config_file else []
        command.launch_command(command.launch_command_parser().parse_args([*chosen, *flags, "-m", "longctx.train"]))
        return dict(started)

    return run


def _where(args):
    names = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
    return {name: getattr(args, name) for name in names}


@pytest.fixture
def single_process(clean_state, monkeypatch, tmp_path_factory):
    """No GPU and no launcher, nothing is spawned, no weights are read, no trace is left."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    start_rank_0_alone(monkeypatch)
    monkeypatch.setattr("longctx.run.model.load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path_factory.mktemp("called"))  # and not in a model's folder, where a run would write


@pytest.fixture
def refused(capsys):
    """Run longctx.train, and check that it ends with one error that contains all `parts`; returns the error."""

    def run(*arguments: str, parts: tuple[str, ...]) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert error.count("longctx: error: ") == 1
        assert "Traceback" not in error
        for part in parts:
            assert part in error
        return error

    return run


@pytest.fixture(scope="session")
def folder_without_weights(tmp_path_factory):
    """A model's config and tokenizer, no weights: errors in the data come before they would be missed."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_config().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
