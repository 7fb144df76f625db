"""Multimodal checkpoints, trained on text: the text part that is loaded, against the whole model of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from longctx import parallelize
from longctx.__main__ import main
from longctx.model.allow_list import MULTIMODAL_MODELS, UnsupportedModelError, check_model
from longctx.model.load import load_config, load_model
from longctx.model.multimodal import names_in_whole
from longctx.model.rope import extended
from longctx.model.tiny import tiny_tokenizer
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from tests.few import few
from tests.model.more_families import GEMMA4, LFM3, LLAMA4
from tests.model.test_families import documents_loss
from tests.model.test_models import (
    EXPERTS,
    GROUPED_EXPERTS,
    LATENT,
    LINEAR,
    SMALL,
    TOLERANCE,
    WINDOW,
    step_errors,
    stock_pass,
)
from tests.parity_page import MODELS as MODELS_PAGE
from tests.reference import adamw_steps
from tests.small_model import save_with_tokenizer
from tests.training.test_training import make_documents, write_jsonl
from tests.workers import run_ranks

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"depth": 1, "num_heads": 2, "embed_dim": 16, "out_hidden_size": 32, "image_size": 16, "patch_size": 4}
VISION |= {"num_key_value_heads": 2, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]}
AXES = {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
HALF_AXES = {"head_dim": 8, "rope_parameters": AXES["rope_parameters"] | {"partial_rotary_factor": 0.5}}
HALF_AXES["rope_parameters"]["mrope_section"] = [1, 0, 1]
PART = {  # settings of each type of text part
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "deepseek_v3": LATENT | GROUPED_EXPERTS,
    "exaone4": WINDOW,
    "gemma3_text": WINDOW | {"head_dim": 16},
    "gemma4_text": {key: value for key, value in GEMMA4.items() if key not in SMALL} | WINDOW,
    "glm4v_moe_text": HALF_AXES
    | EXPERTS
    | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4v_text": HALF_AXES,
    "gemma4_unified_text": {key: value for key, value in GEMMA4.items() if key not in SMALL} | WINDOW,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {key: value for key, value in LFM3.items() if key not in SMALL or value != SMALL[key]},
    "llama4_text": {key: value for key, value in LLAMA4.items() if key not in SMALL or value != SMALL[key]},
    "mistral": {"sliding_window": None},
    "qwen2_5_vl_text": AXES,
    "qwen2_vl_text": AXES,
    "qwen3": {"head_dim": 16},
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS | {"num_experts": 4, "head_dim": 8},
    "qwen3_vl_moe_text": AXES | EXPERTS | {"num_experts": 4},
    "qwen3_vl_text": AXES,
}
KINDS = {
    model_type: (model_type, CONFIG_MAPPING[model_type]().get_text_config().model_type)
    for model_type in MULTIMODAL_MODELS
    if model_type in CONFIG_MAPPING  # see test_types_are_left_out_only_before_the_release_that_added_them
}
KINDS |= {f"llava of {part}": ("llava", part) for part in MULTIMODAL_MODELS["llava"] if part != KINDS["llava"][1]}
KINDS |= {"glm46v of experts": ("glm46v", "glm4v_moe_text"), "gemma3, head of its own": ("gemma3", "gemma3_text")}

EACH = few(KINDS, ["gemma3", "qwen3_vl_moe"])


def make_whole(kind):
    """A small random model with its vision part; biases and norms are noisy too."""
    model_type, part = KINDS[kind]
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    vision = (default.vision_config or CONFIG_MAPPING["gemma4_vision"]()).to_dict()
    vision = {"model_type": vision["model_type"]} | {key: value for key, value in VISION.items() if key in vision}
    text = SMALL | {"model_type": part} | PART.get(part, {})
    extra: dict[str, Any] = {
        name: 60 for name in ("image_token_index", "image_token_id", "video_token_id") if hasattr(default, name)
    }
    if model_type == "gemma4":  # whose image tokens the whole reads as padding
        extra = {"audio_config": None}
        vision |= {"head_dim": 8, "position_embedding_size": 16}
    if kind == "gemma3, head of its own":
        extra["tie_word_embeddings"] = False
    config = config_class(text_config=text, vision_config=vision, **extra)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in whole.named_buffers():
            if name in whole.state_dict():
                buffer.add_(torch.rand_like(buffer), alpha=0.2)
    return whole.eval()  # Gemma 3 asks for the types of tokens while it is trained


def save_whole(kind, folder):
    """Save it with a tokenizer, and return it."""
    whole = make_whole(kind)
    save_with_tokenizer(whole, folder)
    return whole


def callable_part(whole):
    """What computes logits. The whole Llama 4 of transformers 5.24 calls its text part with the embeddings of tokens,
    and then fails for want of `image_outputs`: so tests make that call."""
    return whole.language_model if whole.config.model_type == "llama4" else whole


def whole_step(whole, names):
    """Logits [1, S, V], mean loss and gradients by the text part's names, each document a forward pass of its own."""
    logits, loss = stock_pass(callable_part(whole))
    held = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    gradients = {name: held[whole_name].clone() for name, whole_name in names.items() if whole_name in held}
    assert held.keys() == {names[name] for name in gradients}  # the vision part gets none
    whole.zero_grad()
    return logits, loss, gradients


def part_step(folder, kind, sp, backend):
    """Relative errors of logits, loss and every gradient of the packed documents on this rank."""
    whole = make_whole(kind)
    model = load_model(folder, load_config(folder)).train()
    expected = whole_step(whole, names_in_whole(model, whole))
    return step_errors(*parallelize(model, sp, sp_backend=backend), expected)


@pytest.mark.parametrize("kind", EACH)
def test_the_text_part_equals_the_whole(kind, tmp_path):
    """Loaded from files of the whole; each of its parameters comes from there."""
    save_whole(kind, tmp_path)
    check_model(load_config(str(tmp_path)))
    errors = part_step(str(tmp_path), kind, 1, "auto")
    assert max(errors.values()) <= TOLERANCE, errors


def part_steps(cases):
    return {case: part_step(*case[:2], 2, case[2]) for case in cases}


def backends_of(kind):
    return ("ulysses",) if "qwen3_5" in KINDS[kind][1] else ("ring", "ulysses")


@pytest.mark.long
def test_two_ranks_equal_the_whole(tmp_path):
    cases = []
    for number, kind in enumerate(KINDS):
        folder = str(tmp_path / str(number))
        save_whole(kind, folder)
        cases += [(folder, kind, backend) for backend in backends_of(kind)]
    for results in run_ranks(2, f"{__name__}:part_steps", cases):
        wrong = {case[1:]: errors for case, errors in results.items() if not max(errors.values()) <= TOLERANCE}
        assert not wrong
        assert list(results) == cases


def put_back(trained, whole, folder):
    return main(["export", str(trained), "--model_name_or_path", str(whole), "--output_dir", str(folder)])


def logits_of(model):
    with torch.no_grad():
        return callable_part(model.eval())(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("kind", EACH)
def test_what_is_saved_loads_as_text_and_goes_back_into_the_whole(kind, tmp_path):
    """Trained weights in both; the vision part stays as it was, to the bit."""
    before = save_whole(kind, tmp_path / "whole").state_dict()
    model = load_model(str(tmp_path / "whole"), load_config(str(tmp_path / "whole")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / "text")
    expected = logits_of(model)
    text, found = AutoModelForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    torch.testing.assert_close(logits_of(text), expected, rtol=1e-5, atol=1e-5)
    tiny_tokenizer().save_pretrained(tmp_path / "text")
    (tmp_path / "whole" / "preprocessor_config.json").write_text("{}")
    assert put_back(tmp_path / "text", tmp_path / "whole", tmp_path / "back") == 0
    assert (tmp_path / "back" / "preprocessor_config.json").exists()
    whole, found = AutoModelForImageTextToText.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    torch.testing.assert_close(logits_of(whole), expected, rtol=1e-5, atol=1e-5)
    of_text = set(names_in_whole(model, whole).values())
    after = whole.state_dict()
    assert after.keys() == before.keys()
    for name in before.keys() - of_text:
        assert torch.equal(before[name], after[name]), name
    assert before.keys() - of_text


def test_scaled_positions_go_back_too(tmp_path, capsys):
    """What --rope_scaling has changed in the text part; another model's text part is refused."""
    save_whole("qwen3_vl", tmp_path / "whole")
    config = load_config(str(tmp_path / "whole"))
    config = extended(config, {"rope_type": "yarn", "factor": 4.0})
    model = load_model(str(tmp_path / "whole"), config)
    save_with_tokenizer(model, tmp_path / "text")
    assert put_back(tmp_path / "text", tmp_path / "whole", tmp_path / "back") == 0
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    assert whole.config.text_config.max_position_embeddings == 4 * 128
    assert whole.config.text_config.rope_parameters["mrope_section"] == [2, 1, 1]
    torch.testing.assert_close(logits_of(whole), logits_of(model), rtol=1e-5, atol=1e-5)
    assert put_back(tmp_path / "text", tmp_path / "whole", tmp_path / "back") == 2
    assert "is not empty" in capsys.readouterr().err
    assert put_back(tmp_path / "text", tmp_path / "text", tmp_path / "again") == 2
    assert "is not a multimodal model whose text part" in capsys.readouterr().err
    save_whole("llava", tmp_path / "other")
    assert put_back(tmp_path / "text", tmp_path / "other", tmp_path / "again") == 2
    assert (
        "the trained model is a qwen3 model, and the text part of this llava model is a llama"
        in capsys.readouterr().err
    )


def test_weights_of_the_text_part_that_are_not_there(tmp_path):
    """They would be initialised at random; the vision part's may be missing."""
    whole = save_whole("gemma3", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    vision = next(name for name in stored if "vision" in name)
    save_file(
        {name: stored[name] for name in stored if name != vision}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    model = load_model(str(tmp_path), load_config(str(tmp_path)))
    torch.testing.assert_close(logits_of(model), logits_of(whole), rtol=1e-5, atol=1e-5)
    norm = next(name for name in stored if name.endswith("layers.1.input_layernorm.weight") and "vision" not in name)
    without = {name: stored[name] for name in stored if name != norm}
    save_file(without, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for 1 parameters of a gemma3 model"):
        load_model(str(tmp_path), load_config(str(tmp_path)))
    more = stored | {norm.replace("layers.1", "layers.2"): stored[norm].clone()}
    save_file(more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has 1 weights that the text part of a gemma3 model does not have"):
        load_model(str(tmp_path), load_config(str(tmp_path)))


def test_settings_that_the_whole_cannot_have_do_not_go_back(tmp_path, capsys):
    """The experts of Qwen3-VL are always normalised."""
    save_whole("qwen3_vl_moe", tmp_path / "whole")
    config = load_config(str(tmp_path / "whole"))
    config.norm_topk_prob = False
    load_model(str(tmp_path / "whole"), config).save_pretrained(tmp_path / "text")
    assert put_back(tmp_path / "text", tmp_path / "whole", tmp_path / "back") == 2
    assert (
        "norm_topk_prob is False in the trained model, which a qwen3_vl_moe model cannot have"
        in capsys.readouterr().err
    )


def change_text_config(folder, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= values
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("qwen3_vl", "hidden_act", "gelu", None),
        ("qwen2_5_vl", "attention_chunk", 4, "sets attention_chunk to 4, which a qwen2 model does not have"),
        ("gemma3", "final_logit_softcapping", 30.0, "leaves its logits as they are"),
    ],
)
def test_settings_of_the_text_part(kind, key, value, message, tmp_path):
    save_whole(kind, tmp_path)
    change_text_config(tmp_path, **{key: value})
    if message is None:
        assert getattr(load_config(str(tmp_path)), key) == value
        return
    with pytest.raises(ValueError, match=message):
        load_config(str(tmp_path))


def test_the_text_part_is_what_the_flags_change(tmp_path):
    save_whole("qwen3_5", tmp_path)
    flags = ["--model_name_or_path", str(tmp_path), "--dataset_name", "stdlib", "--use_cpu", "True"]
    [note] = [note for note in resolve(parse_flags(flags), read_profile({}), {}).notes if "text part" in note]
    assert note.startswith("this is a qwen3_5 model: its text part (qwen3_5_text) is trained, on text alone, and saved")
    assert f"longctx export DIR --model_name_or_path {tmp_path} --output_dir WHOLE" in note
    assert load_config(str(tmp_path), rms_norm_eps=1e-3).rms_norm_eps == 1e-3
    with pytest.raises(ValueError, match=r"sets hidden, which a qwen3_5_text configuration does not have"):
        load_config(str(tmp_path), hidden=3)


@pytest.mark.parametrize("model_type", ["aya_vision", "cohere2_vision", "gemma3n", "gemma4", "mllama", "paligemma"])
def test_other_multimodal_models_are_refused_by_name(model_type):
    with pytest.raises(UnsupportedModelError, match=rf"{model_type!r} is refused: its text part, '\w+',"):
        check_model(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("kind", few(["gemma3", "qwen3_5", "qwen3_vl_moe"], 1))
def test_an_adapter_goes_back_merged(kind, tmp_path):
    """Its folder is of the text part alone, which peft finds by no name."""
    peft = pytest.importorskip("peft")
    save_whole(kind, tmp_path / "whole")
    model = load_model(str(tmp_path / "whole"), load_config(str(tmp_path / "whole")))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    save_with_tokenizer(adapted, tmp_path / "adapter")
    assert put_back(tmp_path / "adapter", tmp_path / "whole", tmp_path / "back") == 0
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(logits_of(whole), logits_of(adapted), rtol=1e-4, atol=1e-5)


TRAIN = ["--max_steps", "2", "--max_length", "128", "--report_to", "none", "--save_strategy", "no"]
TRAIN += ["--learning_rate", "1e-3", "--use_cpu", "True", "--logging_steps", "1", "--lr_scheduler_type", "constant"]
TRAIN += ["--router_aux_loss_coef", "0"]  # tests/layers/test_routers.py compares the auxiliary loss
ENGINES = {
    "ulysses on FSDP2": (["--sp_backend", "ulysses", "--engine", "fsdp2"], None),
    "ulysses on ZeRO-3": (["--sp_backend", "ulysses", "--engine", "deepspeed"], 3),
}
SOME = ("gemma3", "qwen3_5", "mistral3", "qwen2_5_vl", "qwen3_vl_moe", "glm4v_moe", "llama4")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kinds", "sp", "layouts"), [(SOME, 2, ENGINES), (tuple(KINDS), 4, {"auto": ([], None)})], ids=["some", "all"]
)
def test_the_command_trains_the_text_part_as_one_process(kinds, sp, layouts, tmp_path, monkeypatch, parity_table):
    """Two steps: losses and norms of the whole on one process, and the same weights put back."""
    documents = make_documents([33, 7, 41, 1, 20])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    runs, references = {}, {}
    for kind in kinds:
        folder = tmp_path / kind
        monkeypatch.setitem(SMALL, "vocab_size", 260)
        whole = save_whole(kind, folder)
        run = callable_part(whole)
        references[kind] = (*adamw_steps(whole, [1e-3] * 2, lambda step, m=run: documents_loss(m, documents)), whole)
        for layout, (flags, zero_stage) in layouts.items():
            given = [*TRAIN, "--sp", str(sp), *flags, "--model_name_or_path", str(folder)]
            given += ["--dataset_name", data, "--output_dir", str(tmp_path / f"{kind}-{layout}")]
            runs[kind, layout] = given, zero_stage
    logs = run_ranks(sp, "tests.training.test_engines_of_models:run_cases", runs, timeout=1500)[0]
    assert list(logs) == list(runs)
    for (kind, layout), steps in logs.items():
        losses, norms, whole = references[kind]
        errors = [abs(loss / expected - 1) for (loss, _), expected in zip(steps, losses, strict=True)]
        norm = abs(steps[0][1] / norms[0] - 1)
        assert max(errors) <= 1e-4
        assert max(errors[0], norm) <= 1e-5
        parity_table.append((f"{kind} whole, {layout} sp {sp}", MODELS_PAGE, errors[0], norm, max(errors)))
        saved = tmp_path / f"{kind}-{layout}"
        text = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        torch.testing.assert_close(logits_of(text), logits_of(whole), rtol=1e-3, atol=1e-3)
        assert put_back(saved, tmp_path / kind, tmp_path / "back" / f"{kind}-{layout}") == 0
        back = AutoModelForImageTextToText.from_pretrained(tmp_path / "back" / f"{kind}-{layout}", dtype=torch.float32)
        torch.testing.assert_close(logits_of(back), logits_of(text), rtol=1e-5, atol=1e-5)
