"""Small configurations of decoders, with everything switched on by which their layers differ from Llama's."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

EXPERTS = SMALL | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}
ALL_HEADS = SMALL | {"num_key_value_heads": 4}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
CAPPED = (
    SMALL
    | WINDOW
    | {"head_dim": 16, "query_pre_attn_scalar": 16}
    | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}
)
GEMMA4 = SMALL | {
    "head_dim": 4,
    "global_head_dim": 8,
    "sliding_window": 4,
    "final_logit_softcapping": 1.0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 260,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": True,
}
LFM3 = SMALL | {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "sliding_window": 4,
    "head_dim": 8,
    "conv_bias": True,
    "conv_L_cache": 5,
}
LLAMA4 = SMALL | {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_layers": [1, 2],
    "no_rope_layers": [1, 1, 0],
    "attention_chunk_size": 4,
    "floor_scale": 3,
    "attn_scale": 0.7,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}

LATENT = {  # multi-head latent attention, whose values are narrower than its queries
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
KIMI_LINEAR = (
    SMALL
    | {name: size for name, size in LATENT.items() if name != "q_lora_rank"}
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "mlp_layer_types": ["sparse", "dense"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
    }
)

MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus1p5_text": ("apertus1p5_text", SMALL),
    "aria_text": ("aria_text", SMALL | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "bitnet": ("bitnet", SMALL),
    "exaone": ("exaone", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "flint, sinks and windows": ("flint", EXPERTS | WINDOW | {"mlp_only_layers": [0]}),
    "gemma2, windows, capped scores": ("gemma2", CAPPED),
    "gemma4_text, windows, shared keys": (
        "gemma4_text",
        GEMMA4 | {"num_hidden_layers": 4, "layer_types": WINDOW["layer_types"] * 2, "num_kv_shared_layers": 2},
    ),
    "gemma4_text, windows, experts": (
        "gemma4_text",
        GEMMA4
        | WINDOW
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ),
    "gemma4_unified_text, windows": ("gemma4_unified_text", GEMMA4 | WINDOW),
    "granite_swa, windows": ("granite_swa", SMALL | WINDOW | MULTIPLIERS | {"layer_rope_theta": [1e4, 0]}),
    "hyperclovax": ("hyperclovax", SMALL | MULTIPLIERS),
    "internlm3": ("internlm3", SMALL | {"bias": True, "qkv_bias": True}),
    "iquestcoder": ("iquestcoder", SMALL | {"attention_bias": True}),
    "jais2": ("jais2", SMALL | {"head_dim": 8}),
    "kolibri1, windows": ("kolibri1", EXPERTS | WINDOW | {"shared_expert_intermediate_size": 16}),
    "kimi_linear": ("kimi_linear", KIMI_LINEAR),
    "kimi_linear, no experts": (
        "kimi_linear",
        KIMI_LINEAR | {"q_lora_rank": 16, "mlp_layer_types": ["dense", "dense"]},
    ),
    "lfm3, windows": ("lfm3", LFM3),
    "llama4_text, chunks, temperatures": ("llama4_text", LLAMA4),
    "mimo_v2_flash, windows, narrow values": (
        "mimo_v2_flash",
        SMALL
        | WINDOW
        | {"head_dim": 12, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "mlp_layer_types": ["sparse", "dense"]},
    ),
    "ministral, windows": ("ministral", SMALL | WINDOW | {"head_dim": 16}),
    "ministral3": (
        "ministral3",
        SMALL
        | {"head_dim": 16}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
            | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    "nanochat, capped logits": ("nanochat", SMALL | {"final_logit_softcapping": 1.0}),
    "persimmon": ("persimmon", ALL_HEADS),
    "vaultgemma, windows, capped scores": ("vaultgemma", CAPPED),
    "youtu": ("youtu", SMALL | LATENT),
}
"""Name -> (model_type, settings). A name with "window" in it has windows."""
