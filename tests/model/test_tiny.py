"""The built-in model: same bits everywhere, an ordinary Transformers model and tokenizer otherwise."""

from __future__ import annotations

import hashlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longctx.model.tiny import tiny_model, tiny_tokenizer
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
