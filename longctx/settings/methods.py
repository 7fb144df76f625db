"""Training methods other than supervised fine-tuning, none of which is built in: messages say where to find them."""

from __future__ import annotations

from longctx.settings.flag_sources import read_dataclass

METHODS = ("dpo", "grpo", "kto", "orpo", "ppo", "reward", "rloo")
"""Methods that users may name as a command, as in `trl dpo`."""

POINTER = (
    "longctx train does supervised fine-tuning (SFT). DPO at --sp N is examples/dpo.py; for other methods, compute "
    "log-probabilities and their gradients at --sp N in a loop of your own (docs/howto/preference.md), or use TRL's "
    "trainers where one device holds a sequence"
)


def methods_with(flag: str) -> list[str]:
    """Return TRL's methods that have a flag of this name, spelled as in TRL."""
    configs = {method: read_dataclass("trl", f"{method}Config") for method in ("DPO", "GRPO", "KTO", "Reward", "RLOO")}
    return [method for method, config in configs.items() if config and flag in config]
