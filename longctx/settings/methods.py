"""The training methods of longctx's commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, eq=False, kw_only=True)
class Method:
    """What the commands of training methods differ in, before data and model are read."""

    module: str
    """The module of its command, which its processes run."""
    config: tuple[str, str]
    """The dataclass that has its flags, besides those that all methods share: module and name."""
    usage: str
    description: str
    help: Mapping[str, str]
    """Flags of its own for --help, with a summary of each; empty if it has none."""
    hidden: frozenset[str] = frozenset()
    """Flags that --help leaves out."""

    @property
    def command(self) -> str:
        """The name of its command."""
        return self.module.rpartition(".")[2]

    @property
    def reads_pairs(self) -> bool:
        """Whether its records are pairs of answers."""
        return self is DPO

    @property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """The dataclasses whose fields are flags, with modules that have them."""
        shared = ("longctx.settings.flags", "SequenceArguments"), ("trl", "ScriptArguments")
        return *shared, ("trl", "DatasetMixtureConfig"), self.config, ("trl", "ModelConfig")


SFT = Method(
    module="longctx.train",
    config=("trl", "SFTConfig"),
    usage="longctx train [--sp N] [--FLAG VALUE ...] [--config FILE]",
    description="Fine-tune a language model on sequences that are spread over --sp devices.",
    help={},
)
DPO = Method(
    module="longctx.dpo",
    config=("longctx.settings.preference", "PreferenceConfig"),
    usage="longctx dpo --model_name_or_path MODEL --dataset_name DATA [--sp N] [--FLAG VALUE ...]",
    description="Train a language model on pairs of chosen and rejected answers that are spread over --sp devices.",
    help={
        "beta": "How far the model may move from the reference",
        "loss_type": "sigmoid, ipo, simpo, sft, … [sigmoid]",
        "loss_weights": "Weight of each of several losses",
        "reference_free": "Compare with no reference model",
        "share_prompts": "Compute a pair's prompt once [True]",
    },
    hidden=frozenset({"assistant_only_loss"}),
)
