"""The releases of transformers that supported model types need."""

from __future__ import annotations

ADDED_IN = {
    "kolibri1": "5.20",
    "flint": "5.21",
    "internlm3": "5.23",
    "iquestcoder": "5.23",
    "lfm3": "5.23",
    "apertus1p5_text": "5.24",
    "exaone": "5.24",
    "sarvam_mla": "5.24",
    "sarvam_moe": "5.24",
    "hyperclovax_vision_v2": "5.18",
    "minicpmv4_7": "5.18",
    "lfm3_vl": "5.23",
}
"""The release of transformers that added a type, for those that the oldest supported release does not have."""
