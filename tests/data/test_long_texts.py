"""Long texts are tokenised in pieces, which need less memory, where that changes no token."""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from longctx.data import token_ids as module
from longctx.data.token_ids import token_ids

BOS, EOS, PIECE = "<|begin|>", "<|end|>", 3000
TALK = (
    "the model reads long texts and writes them down; 12345 x=[1,2]\t don't  naïve Übung Привет мир \u0301e 第一 行。"
)
WORDS = (*TALK.split(" "), EOS)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="never")
WORDS_OF_QWEN = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STAGES = {
    "GPT-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "Qwen": (normalizers.NFC(), pre_tokenizers.Sequence([pre_tokenizers.Split(WORDS_OF_QWEN, "isolated"), BYTES])),
    "Mistral": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
    "Llama 2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "spaces within tokens": (None, BYTES),
    "Unigram": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)),
    "fixed lengths": (None, pre_tokenizers.Sequence([pre_tokenizers.FixedLength(10), BYTES])),
}
"""Normalizer and pre-tokenizer of each kind of tokenizer. All are BPE tokenizers, except for Unigram."""
CUT = ("GPT-2", "Qwen", "Mistral")


def make_text(length: int, seed: int = 0) -> str:
    """Words, now and then two spaces, a tab, the end of a line or of a paragraph, and special tokens."""
    draw = random.Random(seed)
    gaps = [" "] * 20 + ["  ", "\t", "\n", "\n\n", "\r\n", " \n "]
    text = ""
    while len(text) < length:
        text += "".join(draw.choice(WORDS) + draw.choice(gaps) for _ in range(1000))
    return text[:length]


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with these stages, which begins every text with a token and ends it with another one."""
    is_unigram = name == "Unigram"
    backend = Tokenizer(models.Unigram() if is_unigram else models.BPE(unk_token=None))
    normalizer, pre_tokenizer = STAGES[name]
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = {"fixed lengths": STAGES["GPT-2"][1], "Llama 2": METASPACE}.get(name, pre_tokenizer)
    trainer = trainers.UnigramTrainer if is_unigram else trainers.BpeTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [BOS, EOS], "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator([make_text(20_000, seed=1)], trainer(vocab_size=700, **options))
    backend.pre_tokenizer = pre_tokenizer
    ends = [(token, backend.token_to_id(token)) for token in (BOS, EOS)]
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", STAGES)
def test_long_texts_have_the_tokens_of_the_tokenizer(name, special, monkeypatch):
    monkeypatch.setattr(module, "_CHARACTERS_AT_A_TIME", PIECE)
    tokenizer = make_tokenizer(name)
    texts = [make_text(length, seed=length) for length in (40_000, 10, PIECE, 7 * PIECE)]
    expected = tokenizer(texts, add_special_tokens=special)["input_ids"]
    assert [ids.tolist() for ids in token_ids(tokenizer, texts, add_special_tokens=special)] == expected
    pieces = list(module._pieces(tokenizer.backend_tokenizer, texts[0]))
    assert "".join(pieces) == texts[0]
    assert (len(pieces) > 8) == (name in CUT)


def test_lines_are_cut_where_there_are_no_spaces(monkeypatch):
    monkeypatch.setattr(module, "_CHARACTERS_AT_A_TIME", PIECE)
    tokenizer, text = make_tokenizer("Qwen"), "第一行。\n第二行\n" * 3000
    assert token_ids(tokenizer, [text])[0].tolist() == tokenizer(text)["input_ids"]
    assert len(list(module._pieces(tokenizer.backend_tokenizer, text))) > 3


def test_settings_saved_with_a_tokenizer_do_not_cut_or_pad():
    tokenizer = make_tokenizer("GPT-2")
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    [ids] = token_ids(tokenizer, ["the model reads long texts"])
    assert 3 < len(ids) < 50


def test_a_subclass_with_a_call_of_its_own_is_called(monkeypatch):
    class Own(PreTrainedTokenizerFast):
        def __call__(self, texts, **options):
            return {"input_ids": [[7]] * len(texts)}

    tokenizer = Own(tokenizer_object=make_tokenizer("GPT-2").backend_tokenizer)
    assert [ids.tolist() for ids in token_ids(tokenizer, ["a", "b"])] == [[7], [7]]
