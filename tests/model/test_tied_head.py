"""Models whose config.json says that the head is tied to the embeddings, while the files hold a head of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import peft
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from longctx.model.load import load_config, load_model
from longctx.model.tied_head import untie_as_stored
from longctx.model.tiny import tiny_tokenizer
from longctx.upstream.accelerate_internals import ENGINE_ENVIRONMENT
from tests.model.test_models import SMALL
from tests.model.test_peft import Adapt
from tests.reference import train_reference
from tests.small_model import save_with_tokenizer
from tests.training.test_training import COMMON, LEARNING_RATE, STEPS, check, make_documents, run_cases, write_jsonl
from tests.workers import one_by_one, run_ranks


def save_contradictory(folder, model_type="llama", **saving):
    """Save a model whose head differs from its embeddings, with a config.json that says they are tied."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SMALL | {"vocab_size": 260, "tie_word_embeddings": False})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder, **saving)
    tiny_tokenizer().save_pretrained(folder)
    say_tied(folder, True)
    return model


def say_tied(folder, tied):
    path = Path(folder, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": tied}))


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


def run_stages(cases):
    """Run cases one after the other; those with ZeRO-2 in their name at that stage, as a profile would ask for it."""
    results = {}
    for case, arguments in one_by_one(cases):
        if "ZeRO-2" in case:
            os.environ.update(ENGINE_ENVIRONMENT["deepspeed"], ACCELERATE_DEEPSPEED_ZERO_STAGE="2")
        results |= run_cases({case: arguments})
    return results


LAYOUTS = {
    "ring on FSDP2": ["--sp", "2", "--sp_backend", "ring"],
    "ulysses on ZeRO-3": ["--sp", "2", "--sp_backend", "ulysses", "--engine", "deepspeed"],
    "dp on FSDP2": ["--engine", "fsdp2", "--num_processes", "2"],
    "ring on ZeRO-3": ["--sp", "2", "--sp_backend", "ring", "--engine", "deepspeed"],
    "ulysses on ZeRO-2": ["--sp", "2", "--sp_backend", "ulysses", "--engine", "deepspeed"],
}
LORA = ["--use_peft", "True", "--lora_target_modules", "q_proj", "down_proj", "--lora_r", "4"]


@pytest.mark.long
def test_a_head_of_its_own_is_trained_as_it_is(tmp_path, parity_table):
    """Five steps and the saved model against one process, all weights and LoRA, and copies that are equal."""
    save_contradictory(tmp_path / "apart")
    save_with_tokenizer(AutoModelForCausalLM.from_config(load_config(str(tmp_path / "apart"))), tmp_path / "equal")
    store_both(tmp_path / "equal")
    documents = make_documents([90, 7, 41, 1, 130, 64])
    data = write_jsonl(tmp_path / "data.jsonl", documents)
    lora = Adapt(r=4, lora_alpha=32, target_modules=["q_proj", "down_proj"])
    kinds = {"apart": ("apart", [], None), "equal": ("equal", [], None), "lora": ("apart", LORA, lora)}
    cases, references, trained = {}, {}, {}
    for kind, (folder, flags, adapt) in kinds.items():
        kept = []
        references[kind] = train_reference(
            tmp_path / folder,
            documents,
            steps=STEPS,
            learning_rate=LEARNING_RATE,
            adapt=lambda model, adapt=adapt, kept=kept: kept.append(adapt(model) if adapt else model) or kept[0],
        )
        trained[kind] = logits_of(kept[0])
        for layout in LAYOUTS:
            case = f"{kind}, {layout}"
            cases[case] = [*COMMON, *LAYOUTS[layout], *flags, "--model_name_or_path", str(tmp_path / folder)]
            cases[case] += ["--dataset_name", data, "--output_dir", str(tmp_path / case)]
    for case, results in run_ranks(2, f"{__name__}:run_stages", cases)[0].items():
        kind = case.partition(",")[0]
        check(results, references[kind], case, "torchrun", parity_table)
        torch.testing.assert_close(saved_logits(tmp_path, case, kind), trained[kind], rtol=1e-3, atol=1e-4)


def saved_logits(tmp_path, case, kind):
    """Logits of what a run has saved, loaded by stock transformers and peft."""
    if kind == "lora":
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "apart")
        return logits_of(peft.PeftModel.from_pretrained(base, tmp_path / case))
    saved = json.loads((tmp_path / case / "config.json").read_text())
    assert saved["tie_word_embeddings"] is (kind == "equal")
    return logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / case))


def store_both(folder):
    """Write the head of a tied model a second time, as torch's own files always do."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["safetensors", "shards", "torch", "gpt_neox"])
def test_the_configuration_says_what_is_loaded(kind, tmp_path):
    """Whatever the files are, and whatever they call the two matrices."""
    expected = logits_of(
        save_contradictory(
            tmp_path,
            "gpt_neox" if kind == "gpt_neox" else "llama",
            **({"max_shard_size": "30KB"} if kind == "shards" else {}),
        )
    )
    if kind == "torch":
        from safetensors.torch import load_file

        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    config = load_config(str(tmp_path))
    assert config.tie_word_embeddings
    assert untie_as_stored(config, str(tmp_path)) is (kind != "torch")  # whose files are not opened before they load
    model = load_model(str(tmp_path), load_config(str(tmp_path)))
    assert not model.config.tie_word_embeddings
    assert model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)
    model.tie_weights()  # as wrappers do
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)


def test_a_head_that_is_missing_is_refused_with_the_remedy(tmp_path):
    """The opposite contradiction: untied by config.json, and no head in the files. transformers draws one at random."""
    save_contradictory(tmp_path / "apart")
    config = load_config(str(tmp_path / "apart"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    say_tied(tmp_path / "tied", False)
    folder = str(tmp_path / "tied")
    with pytest.raises(ValueError, match=r"no weights .* lm_head\.weight.*--model_init_kwargs .*tie_word_embeddings"):
        load_model(folder, load_config(folder))
    model = load_model(folder, load_config(folder, tie_word_embeddings=True))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_parallelize_corrects_the_configuration_of_a_loaded_model(tmp_path):
    from longctx import parallelize

    save_contradictory(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings
    parallelize(model, 1)
    assert not model.config.tie_word_embeddings
