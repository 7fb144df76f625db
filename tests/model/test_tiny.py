"""The built-in model: same bits everywhere, an ordinary Transformers model and tokenizer otherwise."""

from __future__ import annotations

import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.model.tiny import MAX_POSITION_EMBEDDINGS, tiny_config, tiny_model, tiny_tokenizer
from tests.workers import run_ranks

TEXTS = [
    "",
    " leading and trailing \n\t",
    "def f(x):\r\n    return 'ü€😀'\n",
    "".join(map(chr, range(1, 512))),
    "\u00a0\u2028\ufeff\ufffd",
]

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def _checksum(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def checksum_under_zero3() -> str:
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    config = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1, "zero_optimization": {"stage": 3}}
    kept = HfDeepSpeedConfig(config)
    assert is_deepspeed_zero3_enabled(), kept
    return _checksum(tiny_model())


def test_weights_ignore_the_number_of_threads() -> None:
    expected, threads = _checksum(tiny_model()), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert _checksum(tiny_model()) == expected
    finally:
        torch.set_num_threads(threads)


def test_weights_do_not_change_in_another_process_or_under_zero3() -> None:
    expected = _checksum(tiny_model())
    assert run_ranks(1, f"{__name__}:checksum_under_zero3") == [expected]


def test_global_random_state_is_untouched_and_unread() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    weights = _checksum(tiny_model())
    assert torch.equal(torch.rand(4), expected)
    assert _checksum(tiny_model()) == weights


def test_statistics_and_shapes() -> None:
    model, config = tiny_model(), tiny_config()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.num_hidden_layers == len(model.model.layers) == 2
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert config.vocab_size % 16 == 0
    assert config.attention_dropout == 0.0
    assert config.max_position_embeddings == MAX_POSITION_EMBEDDINGS
    assert set(config.layer_types) == {"full_attention"}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            # 1% of 0.02: 8,192 samples and more estimate a standard deviation to 0.8%; allow three of those.
            assert abs(parameter.std().item() - 0.02) < 0.02 * 0.025, name


def test_another_dtype_is_the_cast_of_the_same_weights() -> None:
    reference, half = tiny_model(), tiny_model(dtype=torch.bfloat16)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name).to(torch.bfloat16)), name
    assert half.config.dtype == torch.bfloat16


def test_another_configuration() -> None:
    config = tiny_config()
    config.num_key_value_heads = 1
    config.attention_bias = True
    model = tiny_model(config=config)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (32, 128)
    assert not model.model.layers[0].self_attn.k_proj.bias.any()


def test_saved_folder_loads_with_the_auto_classes(tmp_path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = (AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path))
    assert _checksum(again) == _checksum(model)
    assert tokenizer_again.get_vocab() == tokenizer.get_vocab()
    assert tokenizer_again.chat_template == tokenizer.chat_template
    for text in TEXTS:
        assert tokenizer_again(text)["input_ids"] == tokenizer(text)["input_ids"]
    ids = torch.tensor([tokenizer("hello world")["input_ids"]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens() -> None:
    tokenizer, config = tiny_tokenizer(), tiny_config()
    assert tokenizer.eos_token_id == config.eos_token_id == 256
    assert tokenizer.pad_token_id == config.pad_token_id == 257
    assert max(tokenizer.get_vocab().values()) < config.vocab_size
    assert tokenizer("a<|endoftext|>b")["input_ids"][1] == 256


def test_chat_template_marks_answers_with_their_end_of_turn() -> None:
    tokenizer = tiny_tokenizer()
    out = tokenizer.apply_chat_template(MESSAGES, return_dict=True, return_assistant_tokens_mask=True)
    text = tokenizer.decode(out["input_ids"])
    assert text.endswith("<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    marked = [token for token, bit in zip(out["input_ids"], out["assistant_masks"], strict=True) if bit]
    assert tokenizer.decode(marked) == "4<|im_end|>yes<|im_end|>"
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False).startswith(prompt)
