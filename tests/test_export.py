"""`longctx export`: what it writes equals what transformers and peft load and merge, to the bit, or it is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from longctx.__main__ import main
from longctx.model import merge
from longctx.model.tiny import tiny_model, tiny_tokenizer
from longctx.train import main as train
from longctx.training.checkpoint import weights
from longctx.untrusted.confined import Bounds
from tests.few import few
from tests.model.test_models import make_model
from tests.small_model import save_with_tokenizer
from tests.training.test_training import make_documents, write_jsonl

peft = pytest.importorskip("peft")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 272,
}
TIED = Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)  # with biases
UNTIED = LlamaConfig(**SIZES, num_key_value_heads=2)
EXPERTS = Qwen3MoeConfig(**SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
CONV1D = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=272, n_positions=64)
LAYERS = {"target_modules": ["q_proj", "down_proj"]}


def save_base(folder, config=UNTIED, dtype=torch.bfloat16):
    torch.manual_seed(0)
    save_with_tokenizer(AutoModelForCausalLM.from_config(config, dtype=dtype), folder)
    return str(folder)


def save_adapter(folder, base, **settings):
    """Save an adapter of random weights, and return what peft merges of it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **LAYERS, **settings})
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    adapted.save_pretrained(folder)
    base_model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return peft.PeftModel.from_pretrained(base_model, folder).merge_and_unload().state_dict()


def export(folder, output, *flags):
    return main(["export", str(folder), "--output_dir", str(output), *map(str, flags)])


def tensors_of(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def check_loads(folder, expected):
    """transformers loads every weight of the folder, and nothing else, as expected to the bit."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    wrong = [key for key, value in expected.items() if loaded[key].dtype != value.dtype or not loaded[key].equal(value)]
    assert not wrong
    return model


def refused(capsys, folder, output, *flags):
    """Return the one line that an export is refused with, of which nothing is left."""
    capsys.readouterr()
    assert export(folder, output, *flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("longctx: error: ")
    assert not output.exists()
    assert not output.with_name(f"{output.name}.partial").exists()
    return line


KINDS = {
    "LoRA": (UNTIED, {}),
    "LoRA, tied": (TIED, {}),
    "all-linear": (UNTIED, {"target_modules": "all-linear"}),
    "rsLoRA": (UNTIED, {"use_rslora": True}),
    "DoRA": (UNTIED, {"use_dora": True}),
    "patterns": (UNTIED, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 5.5}}),
    "one layer": (UNTIED, {"layers_to_transform": [1]}),
    "expression": (UNTIED, {"target_modules": r".*\.1\..*(q|v)_proj", "exclude_modules": r".*v_proj"}),
    "modules to save": (UNTIED, {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "embeddings": (UNTIED, {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "biases of layers": (TIED, {"bias": "lora_only"}),
    "all biases": (TIED, {"bias": "all"}),
    "bias of B": (TIED, {"target_modules": ["q_proj"], "lora_bias": True}),
    "a parameter": (UNTIED, {"target_modules": [], "target_parameters": ["mlp.down_proj.weight"]}),
    "transposed": (CONV1D, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "beside experts": (EXPERTS, {"target_modules": ["q_proj", "o_proj"]}),
    "experts": (EXPERTS, {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for dtype in (torch.bfloat16, torch.float32) for kind in ("rsLoRA", "DoRA", "experts")),
        *(pytest.param(kind, torch.bfloat16, marks=pytest.mark.long) for kind in KINDS),
    ],
)
def test_an_adapter_is_merged_as_peft_merges_it(kind, dtype, tmp_path, capsys):
    config, settings = KINDS[kind]
    base = save_base(tmp_path / "base", config, dtype)
    merged = save_adapter(tmp_path / "adapter", base, **settings)
    before = AutoModelForCausalLM.from_pretrained(base, dtype="auto").state_dict()
    assert any(not merged[name].equal(value) for name, value in before.items())
    assert export(tmp_path / "adapter", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert f"The adapter {tmp_path / 'adapter'} was merged into {base}." in said
    assert ("All weights were loaded at once" in said) == (kind == "experts")
    check_loads(tmp_path / "out", merged)
    assert tensors_of(tmp_path / "out").keys() == tensors_of(tmp_path / "base").keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(make(config)).__name__]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny_tokenizer().chat_template
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def make(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_an_adapter_in_half_precision_is_merged_in_fp32(tmp_path):
    """As peft does, whatever the dtype of the file."""
    base = save_base(tmp_path / "base", dtype=torch.float32)
    save_adapter(tmp_path / "adapter", base, modules_to_save=["norm"])
    change_weights(tmp_path / "adapter", lambda held: held.update({name: held[name].bfloat16() for name in held}))
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    merged = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().state_dict()
    assert export(tmp_path / "adapter", tmp_path / "out") == 0
    check_loads(tmp_path / "out", merged)


def test_the_base_is_where_it_is_said_to_be(tmp_path, capsys):
    """By the flag, where the folder that the adapter names has moved; its own config.json comes first."""
    base = save_base(tmp_path / "base")
    merged = save_adapter(tmp_path / "adapter", base)
    Path(base).rename(tmp_path / "moved")
    assert "neither a folder with the config.json" in refused(capsys, tmp_path / "adapter", tmp_path / "out")
    assert export(tmp_path / "adapter", tmp_path / "out", "--model_name_or_path", tmp_path / "moved") == 0
    check_loads(tmp_path / "out", merged)
    config = json.loads((tmp_path / "moved" / "config.json").read_text())
    (tmp_path / "adapter" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert export(tmp_path / "adapter", tmp_path / "again", "--model_name_or_path", tmp_path / "moved") == 0
    assert check_loads(tmp_path / "again", merged).config.rms_norm_eps == 1e-3


def change_config(folder, name="adapter_config.json", **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder, change):
    path = next(iter(folder.glob("*.safetensors")))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


ENDLESS = r"([a-z0-9_.]+)+!"
A = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
CONFIGS = {
    "endless target_modules": ({"target_modules": ENDLESS}, "it ran for more than 3 s of CPU time"),
    "endless exclude_modules": ({"exclude_modules": ENDLESS}, "it ran for more than 3 s of CPU time"),
    "endless rank_pattern": ({"rank_pattern": {ENDLESS: 4}}, "it ran for more than 3 s of CPU time"),
    "no expression": ({"target_modules": "(("}, "does not fit a llama model: missing ), unterminated subpattern"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, "sets layer_replication to [[0, 2], [1, 2]], with which"),
    "single tokens": ({"trainable_token_indices": [1]}, "sets trainable_token_indices to [1], with which a merge"),
    "changed base": ({"init_lora_weights": "pissa"}, "sets init_lora_weights to 'pissa', with which a merge"),
    "other method": ({"peft_type": "LOHA"}, "sets peft_type to 'LOHA', with which a merge is not known"),
    "other task": ({"task_type": "SEQ_CLS"}, "sets task_type to 'SEQ_CLS', with which a merge"),
    "key of another release": ({"use_new": True}, "sets use_new to True, with which a merge is not known"),
    "NaN alpha": ({"lora_alpha": float("nan")}, "holds NaN or infinity once the adapter is merged"),
    "infinite alpha": ({"alpha_pattern": {"q_proj": float("inf")}}, "q_proj.weight holds NaN or infinity"),
    "alpha too large": ({"lora_alpha": 1e42}, "holds NaN or infinity once the adapter is merged"),
    "rank as text": ({"r": "4"}, "sets r to '4'; expected int"),
    "modules as a number": ({"target_modules": 5}, "sets target_modules to 5; expected list[str] | str | None"),
    "truth as text": ({"use_rslora": "false"}, "sets use_rslora to 'false'; expected bool"),
    "ranks as text": ({"rank_pattern": {"q_proj": "4"}}, "sets rank_pattern to {'q_proj': '4'}; expected"),
    "no rank": ({"r": 0}, "does not fit a llama model: `r` should be a positive integer"),
    "other rank": ({"r": 5}, "does not fit a llama model: Error(s) in loading state_dict"),
    "other layers": ({"target_modules": ["q_proj"]}, "down_proj.lora_A.weight has no place in it"),
    "more layers": ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, "k_proj.lora_A.weight is missing"),
    "no such layers": ({"target_modules": ["query"]}, "does not fit a llama model: Target modules"),
    "module not saved": ({"modules_to_save": ["norm"]}, "layernorm.weight' (KeyError)"),
    "no base": ({"base_model_name_or_path": None}, "names no base model. Name it with --model_name_or_path"),
    "no list": ([], "holds a list, expected an object"),
}
WEIGHTS = {
    "NaN": (lambda held: held[A].fill_(float("nan")), "down_proj.weight holds NaN or infinity"),
    "missing": (lambda held: held.pop(A), f"the tensor {A} is missing"),
    "one more": (lambda held: held.update({f"{A}2": held[A].clone()}), f"the tensor {A}2 has no place in it"),
    "other shape": (lambda held: held.update({A: held[A][:2].clone()}), "size mismatch"),
    "whole numbers": (lambda held: held.update({A: held[A].int()}), f"{A} is of type I32; expected"),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    save_adapter(folder / "adapter", save_base(folder / "base"))
    return folder / "adapter"


@pytest.fixture
def attacked(adapter, tmp_path, monkeypatch):
    """A copy of the adapter; 3 s of CPU time are allowed."""
    monkeypatch.setattr(merge, "BOUNDS", Bounds(seconds=3, memory_bytes=merge.BOUNDS.memory_bytes))
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


@pytest.mark.parametrize("kind", few(CONFIGS, CONFIGS.keys() - {"endless exclude_modules", "endless rank_pattern"}))
def test_an_adapter_config_that_is_not_merged_exactly_is_refused(kind, attacked, tmp_path, capsys):
    values, message = CONFIGS[kind]
    if isinstance(values, dict):
        change_config(attacked, **values)
    else:
        (attacked / "adapter_config.json").write_text(json.dumps(values))
    assert message in refused(capsys, attacked, tmp_path / "out")


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_of_an_adapter_that_do_not_belong_are_refused(kind, attacked, tmp_path, capsys):
    change, message = WEIGHTS[kind]
    change_weights(attacked, change)
    assert message in refused(capsys, attacked, tmp_path / "out")


def test_a_bias_that_the_base_has_no_place_for_is_refused(attacked, tmp_path, capsys):
    change_config(attacked, lora_bias=True)
    path = attacked / "adapter_model.safetensors"
    held = load_file(path)
    biases = {name.replace("B.weight", "B.bias"): value[:, 0].clone() for name, value in held.items() if "_B" in name}
    save_file(held | biases, path, {"format": "pt"})
    line = refused(capsys, attacked, tmp_path / "out")
    assert "PEFT cannot merge model.layers.0.mlp.down_proj: Impossible to merge LoRA with `lora_bias=True`" in line


@pytest.mark.parametrize("settings", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens"]}])
def test_one_of_two_tied_matrices_is_not_changed(settings, tmp_path, capsys):
    save_adapter(tmp_path / "adapter", save_base(tmp_path / "base", TIED), **settings)
    line = refused(capsys, tmp_path / "adapter", tmp_path / "out")
    assert "this model's embeddings are tied to its head: merged, the other of the two would change as well" in line


def test_folders_that_hold_no_model_or_two_are_refused(adapter, tmp_path, capsys):
    out = tmp_path / "out"
    assert "is not a folder" in refused(capsys, tmp_path / "none", out)
    (tmp_path / "empty").mkdir()
    assert "has neither weights nor an adapter" in refused(capsys, tmp_path / "empty", out)
    both = shutil.copytree(adapter.parent / "base", tmp_path / "both")
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    assert "holds both an adapter (adapter_config.json) and a whole model" in refused(capsys, both, out)
    base = adapter.parent / "base"
    line = refused(capsys, base, out, "--model_name_or_path", base)
    assert "is not a multimodal model" in line
    quantised = shutil.copytree(base, tmp_path / "quantised")
    change_config(quantised, "config.json", quantization_config={"quant_method": "fp8"})
    line = refused(capsys, adapter, out, "--model_name_or_path", quantised)
    assert "its config.json has a quantization_config" in line
    (attacked := shutil.copytree(adapter, tmp_path / "linked") / "tokenizer.json").unlink(missing_ok=True)
    attacked.symlink_to("/etc/hostname")
    assert "tokenizer.json is a link to /etc/hostname, outside the folder" in refused(capsys, attacked.parent, out)
    attacked.unlink()
    os.mkfifo(attacked)
    assert "is a pipe, expected a regular file" in refused(capsys, attacked.parent, out)
    (attacked.parent / "adapter_model.safetensors").unlink()
    attacked.unlink()
    assert "adapter_model.safetensors is missing" in refused(capsys, attacked.parent, out)


def test_an_output_folder_in_use_is_refused(adapter, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("out", "file"):
        assert export(adapter, tmp_path / name) == 2
        assert f"--output_dir {tmp_path / name} is not empty. Name a new folder." in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_an_interrupted_export(number, adapter, tmp_path, monkeypatch, capsys):
    """The signal comes once half of the modules are merged and written."""
    unchanged, merged = merge._merge, []

    def interrupted(prefix, module):
        merged.append(prefix)
        assert (tmp_path / "out.partial" / "model.safetensors").exists()
        if len(merged) == 2:
            os.kill(os.getpid(), number)
        return unchanged(prefix, module)

    monkeypatch.setattr(merge, "_merge", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert export(adapter, tmp_path / "out") == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(merged) == 2
    assert not list(tmp_path.iterdir())
    assert "longctx: interrupted. Nothing is exported." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_files_are_no_larger_than_the_limit(adapter, tmp_path, monkeypatch):
    """The index says where each tensor is, and adds up their bytes."""
    assert weights.FILE_BYTES == 5 * 10**9
    assert export(adapter, tmp_path / "one") == 0
    monkeypatch.setattr(weights, "FILE_BYTES", 50_000)
    assert export(adapter, tmp_path / "several") == 0
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    held = {path.name: load_file(path) for path in files}
    sizes = [sum(value.nbytes for value in tensors.values()) for tensors in held.values()]
    assert len(sizes) > 2
    assert max(sizes) <= 50_000
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: file for file, tensors in held.items() for name in tensors}
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    check_loads(tmp_path / "several", AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype="auto").state_dict())


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "gpt_oss, sinks and windows"])
def test_weights_are_rounded_to_the_dtype_of_the_configuration(family, tmp_path, capsys):
    """As transformers loads them, which keeps some in fp32; a tensor that is no number of the model stays as it is."""
    save_with_tokenizer(make_model(family), tmp_path / "model")
    change_weights(tmp_path / "model", lambda held: held.update({"mask": torch.tensor([[True, False]])}))
    change_config(tmp_path / "model", "config.json", dtype="bfloat16")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").state_dict()
    kept = [name for name, value in expected.items() if value.dtype == torch.float32]
    assert len(kept) == (2 if family == "deepseek_v3" else 0)
    assert export(tmp_path / "model", tmp_path / "out") == 0
    held = tensors_of(tmp_path / "out")
    assert held.keys() == tensors_of(tmp_path / "model").keys()
    assert held.pop("mask").tolist() == [[True, False]]
    assert {name for name, value in held.items() if value.dtype == torch.float32} == set(kept)
    said = capsys.readouterr().out
    assert f" ({' and '.join(sorted({'BF16', 'BOOL', *(['F32'] if kept else [])}))}, " in said
    assert "F32 weights were converted to the dtype of config.json." in said
    change_weights(tmp_path / "out", lambda held: held.pop("mask"))
    check_loads(tmp_path / "out", expected)
    other = tmp_path / "model"
    change_weights(other, lambda held: held.update({"norm.weight": held["model.norm.weight"].clone()}))
    assert "hold both norm.weight and model.norm.weight" in refused(capsys, other, tmp_path / "two")


RUN = ["--max_steps", "2", "--max_length", "64", "--save_steps", "1", "--report_to", "none", "--use_cpu", "True"]
RUN += ["--learning_rate", "1e-2", "--disable_tqdm", "True", "--overlong", "truncate", "--dataset_name"]


def test_a_run_its_checkpoints_and_its_adapters_are_exported(tmp_path, capsys):
    """Of models of our own; a damaged checkpoint is refused, and a run that has not ended names its newest one."""
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([33, 41, 20, 60]))
    base, run = save_base(tmp_path / "base"), tmp_path / "run"
    assert train([*RUN, data, "--model_name_or_path", base, "--dtype", "bfloat16", "--output_dir", str(run)]) == 0
    for folder in (run, run / "checkpoint-2", run / "checkpoint-1"):
        assert export(folder, tmp_path / f"of-{folder.name}") == 0
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        check_loads(tmp_path / f"of-{folder.name}", model.state_dict())
        assert AutoTokenizer.from_pretrained(tmp_path / f"of-{folder.name}").chat_template
    held = [tensors_of(tmp_path / f"of-{name}") for name in ("run", "checkpoint-2", "checkpoint-1")]
    dtypes = [{value.dtype for value in tensors.values()} for tensors in held]
    assert dtypes == [{AutoModelForCausalLM.from_pretrained(run, dtype="auto").dtype}] * 3
    assert all(value.equal(held[1][name]) for name, value in held[0].items())
    assert not all(value.equal(held[2][name]) for name, value in held[0].items())
    (run / "model.safetensors").unlink()
    line = refused(capsys, run, tmp_path / "out")
    assert (
        f"Export its newest checkpoint: longctx export {run / 'checkpoint-2'} --output_dir {tmp_path / 'out'}" in line
    )
    with open(run / "checkpoint-2" / "model.safetensors", "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\x01")
    line = refused(capsys, run / "checkpoint-2", tmp_path / "out")
    assert "model.safetensors is damaged: its contents have changed since the checkpoint was written" in line


def test_an_adapter_of_the_built_in_model(tmp_path, capsys):
    flags = ["--model_name_or_path", "tiny", "--use_peft", "True", "--lora_r", "2", "--use_dora", "True"]
    data = write_jsonl(tmp_path / "data.jsonl", make_documents([33, 41, 20, 60]))
    assert train([*RUN, data, *flags, "--output_dir", str(tmp_path / "run")]) == 0
    merged = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "run").merge_and_unload().state_dict()
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        assert export(folder, tmp_path / f"of-{folder.name}", "--model_name_or_path", "tiny") == 0
        assert f"The adapter {folder} was merged into tiny." in capsys.readouterr().out
        check_loads(tmp_path / f"of-{folder.name}", merged)
    assert not all(merged[name].equal(value) for name, value in tiny_model().state_dict().items())


MEMORY = """
import sys
from pathlib import Path

import peft.utils.transformers_weight_conversion
import transformers.models.llama.modeling_llama

from longctx.run.exported import export

def most():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

before = most()
export(Path(sys.argv[1]), Path(sys.argv[2]), None, None)
print(most() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from Linux's /proc")
def test_host_memory_holds_one_module_at_a_time(tmp_path):
    """The model has 189 million parameters in 48 layers."""
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 48}
    base = save_base(tmp_path / "base", LlamaConfig(**sizes))
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    arguments = [sys.executable, "-c", MEMORY, tmp_path / "adapter", tmp_path / "out"]
    grown = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert grown < sum(value.nbytes for value in model.state_dict().values()) / 3
