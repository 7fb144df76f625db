"""--torch_compile: compiled layers against stock transformers, and what they are not verified with."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING

from longctx import parallelize
from longctx.layers.compiled import check_compile, install_compiled
from longctx.model.allow_list import has_experts
from longctx.model.tiny import tiny_config
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.model.test_models import FAMILIES, TOLERANCE, make_model, step_errors, stock_step
from tests.workers import run_ranks


def compiled_errors(family: str, sp: int, backend: str = "auto", compiler: str = "inductor") -> dict[str, float]:
    """Relative errors of loss and gradients against stock transformers, one document at a time."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model(family)
    expected = stock_step(model)
    model, sequence = parallelize(model, sp, sp_backend=backend)
    install_compiled(model, backend=compiler)
    model.gradient_checkpointing_enable()
    model.train()
    errors = step_errors(model, sequence, expected)
    assert counters["stats"]["unique_graphs"] > 0
    return errors


COMPILED = [
    name for name, (model_type, settings) in FAMILIES.items() if not has_experts(CONFIG_MAPPING[model_type](**settings))
]


@pytest.mark.parametrize(
    ("family", "compiler"),
    [("llama", "aot_eager"), *(pytest.param(name, "inductor", marks=pytest.mark.long) for name in COMPILED)],
)
def test_compiled_layers_equal_stock_transformers(family, compiler):
    """With graphs that are traced forward and backward, and as Inductor compiles them, which takes half a minute."""
    errors = compiled_errors(family, 1, compiler=compiler)
    assert max(errors.values()) <= TOLERANCE, errors


def families_on_ranks(families: list[str]) -> dict[tuple[str, str], dict[str, float]]:
    return {(family, name): compiled_errors(family, 2, name) for family in families for name in ("ring", "ulysses")}


@pytest.mark.long
def test_compiled_layers_on_two_ranks_equal_stock_transformers():
    for results in run_ranks(2, f"{__name__}:families_on_ranks", ["llama", "qwen3, windows", "qwen3_5_text"]):
        assert all(max(errors.values()) <= TOLERANCE for errors in results.values()), results


REFUSED = {
    "chunks": (["--sequence_chunk_size", "64"], "--sequence_chunk_size 64, which runs layers chunk by chunk"),
    "tiles": (["--tiled_mlp", "True"], "--tiled_mlp True, which runs MLPs tile by tile"),
    "number of tiles": (["--tiled_mlp_num_shards", "4"], "--tiled_mlp_num_shards 4, which runs MLPs tile by tile"),
    "adapter": (["--use_peft", "True"], "--use_peft True, which puts adapters into layers"),
    "Liger": (["--use_liger_kernel", "True"], "--use_liger_kernel True, which puts kernels of its own into layers"),
    "ZeRO": (["--sp", "2", "--sp_backend", "ulysses"], "the engine is deepspeed, .* Use --engine fsdp2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_compiled_layers_are_not_verified_with_is_refused(case, monkeypatch):
    monkeypatch.setattr("longctx.settings.arrange.check_liger_machine", lambda *_, **__: None)  # it needs a GPU
    flags, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"--torch_compile True.*{message}"):
        resolve(parse_flags(["--torch_compile", "True", *flags]), read_profile({}), {})


@pytest.mark.parametrize("memory", ["longest", "auto"])
def test_presets_leave_compiled_layers_whole(memory):
    flags = ["--sp", "2", "--sp_backend", "ring", "--torch_compile", "True", "--memory", memory]
    memory_options = resolve(parse_flags(flags), read_profile({}), {}).memory_options
    assert (memory_options.sequence_chunk_size, memory_options.tiled_mlp_num_shards) == (None, None)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    settings = dict.fromkeys(("sequence_chunk_size", "tiled_mlp", "use_liger_kernel", "use_peft"))
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler, and no-such-compiler is not found"):
        check_compile({**settings, "torch_compile_backend": None}, "fsdp2", tiny_config())
    check_compile({**settings, "torch_compile_backend": "aot_eager"}, "fsdp2", tiny_config())


def test_the_flag_reaches_the_layers_and_not_the_trainer():
    run = resolve(parse_flags(["--sp", "2", "--sp_backend", "ring", "--torch_compile", "True"]), read_profile({}), {})
    arguments = run.training_arguments()
    assert run.settings["torch_compile"] is True
    assert (arguments["torch_compile"], arguments["torch_compile_backend"]) == (False, None)
