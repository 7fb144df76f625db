"""How several data sets are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The requested mixture of data sets, by name."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """How often each data set gives the next document, against the others; None: their documents follow each other."""
    fractions: tuple[float, ...] | None = None
    """TRL's fractions: each data set's share of a mixture of first documents, as large as can be without repeats."""
    stopping_strategy: str = "first_exhausted"
    """The strategy of datasets.interleave_datasets: when no more documents are drawn."""
    seed: int = 0
    test_size: float | None = None
    """Share of documents, drawn at random, that are kept for evaluation."""

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Mixture:
        """
        Args:
            settings: every flag's value, `datasets` as a list of trl's DatasetConfig.
        """
        weights, sources = settings["dataset_weights"], settings["datasets"]
        fractions = [source.fraction for source in sources if source.fraction is not None]
        return cls(
            names=tuple(map(_name, sources)),
            weights=None if weights is None else tuple(weights),
            fractions=tuple(fractions) or None,
            stopping_strategy=settings["dataset_stopping_strategy"],
            seed=settings["seed"],
            test_size=settings["test_split_size"],
        )

    def shares(self) -> tuple[float, ...] | None:
        """Return the share of each data set in the documents, 1 in sum; None if none was given."""
        asked = self.weights or self.fractions
        return tuple(share / sum(asked) for share in asked) if asked else None

    def __str__(self) -> str:
        shares = self.shares() or [None] * len(self.names)
        named = (f"{name} {share:.1%}" if share else name for name, share in zip(self.names, shares, strict=True))
        if len(self.names) == 1:
            return self.names[0]
        return f"a mixture of {', '.join(named)}{f', until {self.stopping_strategy}' if self.weights else ''}"


def _name(source: Any) -> str:
    config = f" {source.name}" if source.name else ""
    return f"{source.path}{config}" + (f" [{source.split}]" if source.split != "train" else "")


def name_data(settings: Mapping[str, Any]) -> str:
    """Return the name of the data set, or of the mixture."""
    return str(Mixture.of_settings(settings)) if settings["datasets"] else str(settings["dataset_name"])
