"""The built-in model `tiny`: a small Qwen3-style model and its byte-level tokenizer, made in code.

No download and no file is needed. The weights are a function of the configuration alone: every engine,
rank and world size gets the same bits, so that runs on different engines can be compared number by number.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TINY = "tiny"
"""Value of `--model_name_or_path` that selects this model."""

MAX_POSITION_EMBEDDINGS = 1_048_576
_NUM_BYTES = 256
_EOS, _PAD, _IM_START, _IM_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = (_EOS, _PAD, _IM_START, _IM_END)
_VOCAB_MULTIPLE = 16
_WEIGHT_SEED = 20_250_101
_WEIGHT_STD = 0.02

# ChatML. The end-of-turn token lies inside the generation block, so a model trained on assistant tokens only
# learns to stop; the line break after it is part of the frame, not of the answer.
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}"
    "{{- message['content'] + '<|im_end|>' }}"
    "{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def tiny_config() -> Qwen3Config:
    """Tiny model: 2 layers, hidden size 128, 4 query and 2 KV heads of size 32, tied embeddings."""
    vocab_size = -(-(_NUM_BYTES + len(_SPECIAL_TOKENS)) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000_000.0},
        initializer_range=_WEIGHT_STD,
        attention_dropout=0.0,
        use_sliding_window=False,
        tie_word_embeddings=True,
        eos_token_id=_NUM_BYTES,
        pad_token_id=_NUM_BYTES + 1,
        bos_token_id=None,
        dtype="float32",
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: one token per UTF-8 byte (ids 0..255) and four special tokens (ids 256..259).

    Every text round-trips: `decode(encode(text)) == text`. `save_pretrained` writes an ordinary folder.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    # No merges, so splitting into words would change nothing but the time.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_EOS,
        pad_token=_PAD,
        additional_special_tokens=[_IM_START, _IM_END],
        model_max_length=MAX_POSITION_EMBEDDINGS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )


def tiny_model(dtype: torch.dtype = torch.float32, config: Qwen3Config | None = None) -> Qwen3ForCausalLM:
    """Build the tiny model on the CPU with weights that depend on `config` alone.

    Matrices are drawn from normal(0, 0.02) by a generator of our own, in the order of their sorted names
    and in float32, then cast to `dtype`; norm weights are 1, biases 0. Neither the global random state (left
    as it was) nor an active DeepSpeed ZeRO-3 configuration changes a bit: the parameters are never partitioned here,
    the engine does that when it wraps the model.

    Args:
        dtype: dtype of the returned parameters.
        config: another Qwen3 configuration to fill the same way; `tiny_config()` if None.
    """
    config = tiny_config() if config is None else config
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config)
    generator = torch.Generator(device="cpu").manual_seed(_WEIGHT_SEED)
    with torch.no_grad():
        # named_parameters() lists a tied matrix once, under its first name.
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _WEIGHT_STD, generator=generator)
    model.config.dtype = dtype
    torch.nn.Module.to(model, dtype)
    return model
