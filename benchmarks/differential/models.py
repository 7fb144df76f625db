"""The folder of a case's model: a small configuration of its type, random weights, and a byte-level tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .space import ALWAYS_WINDOWED, Case

DIMENSIONS = ("seed", "model", "heads", "head_dim", "layers", "vocab_size", "embeddings", "window", "file_dtype")
"""Those that a model depends on."""

EOS, PAD = 256, 257
CONTEXT = 256
"""max_position_embeddings."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_GROUPED = _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_chunk_size": 16}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"]}
_OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "sarvam_mla"), _LATENT | _GROUPED),
    **dict.fromkeys(("minicpm3", "youtu"), _LATENT),
    "glm4_moe_lite": _LATENT | _GROUPED | {"v_head_dim": 16},
    "afmoe": _EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    "cohere2_moe": _EXPERTS | {"num_experts": 4},
    "dots1": _GROUPED | {"n_shared_experts": 1},
    "exaone_moe": _EXPERTS | {"num_experts": 4},
    "flex_olmo": _EXPERTS | {"num_experts": 4},
    "granitemoe_swa": _LOCAL | {"shared_intermediate_size": 16},
    "granitemoeshared": _LOCAL | {"shared_intermediate_size": 16},
    "hy_v3": _EXPERTS | {"num_experts": 4},
    "mellum": _EXPERTS | {"num_experts": 4},
    "minimax_m2": _EXPERTS | {"num_local_experts": 4},
    "sarvam_moe": _GROUPED,
    "solar_open": _GROUPED,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "flint": _EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "kolibri1": _SHARED,
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "cwm": {"bos_token_id": EOS},
    "ernie4_5_moe": _EXPERTS | {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "glm4_moe": _EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granitemoe": _EXPERTS | {"num_local_experts": 4},
    "granitemoehybrid": _MAMBA2
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    | {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "kimi_linear": _LOCAL
    | {"moe_intermediate_size": 16, "linear_num_heads": 4, "linear_head_dim": 8}
    | {"layer_types": ["linear_attention", "full_attention"]}
    | {name: value for name, value in _LATENT.items() if name != "q_lora_rank"},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS | _EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
    "mimo_v2_flash": _EXPERTS | {"n_routed_experts": 4, "v_head_dim": 8},  # norms of its own 256 are rounded too much
    "mixtral": _EXPERTS | {"num_local_experts": 4},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo_hybrid": {name: value for name, value in _GATED_DELTA.items() if name != "rope_parameters"},
    "olmoe": _EXPERTS | {"num_experts": 4},
    "qwen2_moe": _SHARED,
    "qwen3_moe": _EXPERTS | {"num_experts": 4},
    "qwen3_5_moe_text": _GATED_DELTA | _SHARED,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_next": _GATED_DELTA | _SHARED,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
}
_NO_WINDOW = (
    "dots1",
    "exaone4",
    "mellum",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
"""Types whose default window is left out where a case has none."""
_WINDOW_IN_ALL_LAYERS = ("mistral", "phi3", "starcoder2")


def name_of(case: Case) -> str:
    """The folder's name: cases of equal models share one."""
    key = json.dumps([getattr(case, name) for name in DIMENSIONS])
    return f"{case.model}-{hashlib.sha256(key.encode()).hexdigest()[:10]}"


def settings_of(case: Case) -> dict[str, Any]:
    """The keys of the model's configuration."""
    heads, key_value_heads = map(int, case.heads.split(":"))
    settings: dict[str, Any] = {
        "vocab_size": case.vocab_size,
        "hidden_size": heads * case.head_dim,
        "intermediate_size": 48,
        "num_hidden_layers": case.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": case.head_dim,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "tie_word_embeddings": case.embeddings == "tied",
        **_OF_TYPE.get(case.model, {}),
    }
    if "kv_lora_rank" in settings:  # each head has its own keys; head_dim is that of their rotated part
        settings |= {"num_key_value_heads": heads, "head_dim": settings["qk_rope_head_dim"]}
    if case.window and case.model in _WINDOW_IN_ALL_LAYERS:
        settings["sliding_window"] = case.window
    elif case.window:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        settings |= {"sliding_window": case.window, "use_sliding_window": True, "layer_types": kinds}
    elif case.model in _NO_WINDOW and case.model not in ALWAYS_WINDOWED:
        settings["sliding_window"] = None
    if case.model == "exaone4" and not case.window:
        settings["layer_types"] = ["full_attention"] * 3
    for name in ("layer_types", "no_rope_layers"):
        if name in settings:
            settings[name] = (settings[name] * 2)[: case.layers]
    return settings


def make_model(case: Case, folder: Path) -> None:
    """Write the model, complete or not at all.

    Raises:
        Exception: of transformers, where it has no such model.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if folder.exists():
        return
    torch.manual_seed(case.seed)
    config = CONFIG_MAPPING[case.model](**settings_of(case))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():  # biases, sinks and norms count too
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ids = torch.arange(7)[None]
    model(input_ids=ids, use_cache=False, labels=ids).loss.backward()  # raises where the shapes do not fit
    part = folder.with_name(f"{folder.name}.part")
    model.to(getattr(torch, case.file_dtype)).save_pretrained(part)
    make_tokenizer().save_pretrained(part)
    if case.embeddings == "contradictory":
        config_file = part / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"tie_word_embeddings": True}))
    part.rename(folder)


def make_tokenizer() -> Any:
    """One token for each byte, and four special ones: 256 ends a document, 257 pads, 258 and 259 frame turns."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[0],
        pad_token=special[1],
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
