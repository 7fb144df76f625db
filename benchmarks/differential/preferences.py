"""The loss of pairs of answers on one process, written from the papers. This module imports nothing of longctx.

A pair is one document: the prompt with the chosen answer, then the prompt with the rejected one. Prompts are masked.
Each side is a forward pass of its own, as all documents of the reference are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Document = tuple[list[int], list[int]]
IGNORED = -100


class Preferences:
    """The loss of a step, and what the model gave the answers before training."""

    def __init__(self, model: nn.Module, plan: Mapping[str, Any]):
        """
        Args:
            plan: its `preference` has the options of the loss under the names of TRL's DPOConfig.
        """
        self.options: Mapping[str, Any] = {"beta": 0.1, "loss_weights": None, "ld_alpha": None, "reference_free": False}
        self.options |= plan["preference"]
        weights = self.options["loss_weights"] or [1.0] * len(self.options["loss_type"])
        self.weights = dict(zip(self.options["loss_type"], weights, strict=True))
        model.eval()
        with torch.no_grad():
            self._before = {
                tuple(pair[0]): self._logps(self._tokens(model, pair))
                for pair in plan["documents"] + plan["evaluation"]
            }

    def backward(self, model: nn.Module, pairs: Sequence[Document]) -> float:
        """The step's gradient; returns its loss."""
        model.train()
        return sum(self._backward(model, pair, pairs) for pair in pairs)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, pairs: Sequence[Document]) -> float:
        model.eval()
        return sum(float(self._share(model, pair, pairs)) for pair in pairs) if pairs else math.nan

    def chosen(self, model: nn.Module, pair: Document) -> float:
        """Minus the chosen answer's log-probability, by which a pair is told from others."""
        return -float(self._logps(self._tokens(model, pair))[0])

    def _backward(self, model: nn.Module, pair: Document, pairs: Sequence[Document]) -> float:
        share = self._share(model, pair, pairs)
        share.backward()
        return float(share.detach())

    def _share(self, model: nn.Module, pair: Document, pairs: Sequence[Document]) -> Tensor:
        """The pair's part of the mean over pairs, and with `sft` of the mean over the chosen tokens of all pairs."""
        chosen, rejected = self._tokens(model, pair)
        loss = self._loss(self._logps((chosen, rejected)), (len(chosen), len(rejected)), self._before[tuple(pair[0])])
        num_chosen = sum(sum(label != IGNORED for label in sides(other)[0][1]) for other in pairs)
        return loss / len(pairs) - self.weights.get("sft", 0.0) * chosen.sum() / num_chosen

    def _tokens(self, model: Any, pair: Document) -> tuple[Tensor, Tensor]:
        """float64 [tokens] of each answer: log-probabilities."""
        found = []
        for ids, labels in sides(pair):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            targets = torch.tensor(labels[1:])
            losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
            found.append(-losses[targets != IGNORED].double())
        return found[0], found[1]

    def _logps(self, tokens: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Sums; with `ld_alpha`, the tokens that the other answer does not reach count less (LD-DPO)."""
        alpha, shared = self.options["ld_alpha"], min(map(len, tokens))
        tail = 1.0 if alpha is None else alpha
        chosen, rejected = (side[:shared].sum() + tail * side[shared:].sum() for side in tokens)
        return chosen, rejected

    def _loss(self, logps: tuple[Tensor, Tensor], lengths: tuple[int, int], before: tuple[Tensor, Tensor]) -> Tensor:
        beta, smoothing = self.options["beta"], self.options["label_smoothing"]
        if self.options["reference_free"]:
            before = before[0] * 0, before[1] * 0
        chosen, rejected = (now - then for now, then in zip(logps, before, strict=True))
        margin = beta * (chosen - rejected)
        mean_margin = chosen / lengths[0] - rejected / lengths[1]
        total = torch.zeros((), dtype=torch.float64)
        for name, weight in self.weights.items():
            if name == "sigmoid":
                loss = -F.logsigmoid(margin)
            elif name == "hinge":
                loss = torch.relu(1 - margin)
            elif name == "ipo":
                loss = (mean_margin - 1 / (2 * beta)) ** 2
            elif name == "robust":
                both = (1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
                loss = -both / (1 - 2 * smoothing)
            elif name == "apo_zero":
                loss = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
            elif name == "sppo_hard":
                loss = (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
            elif name == "simpo":
                mean = logps[0] / lengths[0] - logps[1] / lengths[1]
                margin = beta * mean - 0.5  # TRL's default margin
                loss = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
            else:
                assert name == "sft", name
                continue
            total = total + weight * loss
        return total


def sides(pair: Document) -> tuple[Document, Document]:
    """The documents of the chosen and of the rejected side, which begin with the prompt."""
    ids, labels = pair
    middle = next(n for n in range(1, len(ids)) if labels[n] == IGNORED != labels[n - 1])
    return (ids[:middle], labels[:middle]), (ids[middle:], labels[middle:])
