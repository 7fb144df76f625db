"""Packed documents in a model with gated delta layers (Qwen3.5), by release of transformers and TRL.

Each release runs in a new virtual environment with the torch of this one; making them takes about five minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .steps import (
    PACKED_LENGTHS,
    ROW_LENGTH,
    WEIGHT_STD,
    Outcome,
    Row,
    load_model,
    make_documents,
    require,
    run_group,
    show,
)

RELEASES = {"5.8.1": "1.4.0", "5.19.0": "1.16.0", "5.24.0": "1.16.0"}
"""Of transformers, each with a release of TRL. From 5.20 on, it refuses what its paths in PyTorch cannot do."""
PROGRAM = "import sys, stock_recurrent; stock_recurrent.main(*sys.argv[1:])"
WAYS = {
    "SFTTrainer": "SFTTrainer with packing",
    "flattening": "Trainer with DataCollatorWithFlattening",
}
LAYERS = {"Qwen3.5": ["linear_attention"] * 3 + ["full_attention"], "control": ["full_attention"] * 4}
"""Models: three gated delta layers to one of full attention, as in Qwen3.5, and its control."""


def recurrent_case(model: str) -> Iterator[Row]:
    """A tiny Qwen3.5 replaces the case's usual model."""
    with tempfile.TemporaryDirectory() as folder:
        documents = {"packed": _ids(PACKED_LENGTHS), "pair": _ids([ROW_LENGTH // 2] * 3)}
        Path(folder, "documents.json").write_text(json.dumps(documents))
        for name in LAYERS:
            write_qwen3_5(f"{folder}/{name}", LAYERS[name])
        ours = {name: require(run_group(1, longctx_step, folder=f"{folder}/{name}", **documents)) for name in LAYERS}
        for transformers, trl in RELEASES.items():
            python = make_environment(Path(folder, transformers), transformers, trl)
            for way in WAYS:
                for name in LAYERS:
                    stock = stock_step(python, f"{folder}/{name}", f"{folder}/documents.json", way)
                    yield from _rows(
                        name, f"{WAYS[way]}, Qwen3.5, {_releases(way, transformers, trl)}", stock, ours[name]
                    )


def _releases(way: str, transformers: str, trl: str) -> str:
    return f"transformers {transformers}" + (f" and TRL {trl}" if way == "SFTTrainer" else "")


def _rows(name: str, situation: str, stock: Outcome, ours: Outcome) -> Iterator[Row]:
    template = "loss {loss:.4f}, norm {norm:.4f}"
    exact = show(ours, "loss {exact_loss:.4f}, norm {exact_norm:.4f}")
    if name == "control":
        situation = f"control: {situation}, full attention in every layer"
    yield Row(situation, exact, show(stock, template), show(ours, template))
    if stock.error is None:
        cells = show(stock, "{gradient_error:.1e}"), show(ours, "{gradient_error:.1e}")
        yield Row(f"{situation}; relative error of the gradient", "0", *cells)
        cells = show(stock, "{logit_change:.1e}"), show(ours, "{logit_change:.1e}")
        largest = show(ours, "0 (logits up to {largest_logit:.1f})")
        yield Row(f"{situation}; change of document 2's logits when document 1 is replaced", largest, *cells)


def _ids(lengths: Any) -> list[list[int]]:
    return [ids for ids, _ in make_documents(lengths)]


def write_qwen3_5(folder: str, layer_types: list[str]) -> None:
    """Save a random text part of Qwen3.5 and its tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    from longctx.model.tiny import tiny_config, tiny_tokenizer

    tiny = tiny_config()
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    names += ["eos_token_id", "pad_token_id", "tie_word_embeddings"]
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    config = Qwen3_5TextConfig(
        **{name: getattr(tiny, name) for name in names},
        **heads,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        initializer_range=WEIGHT_STD,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def make_environment(folder: Path, transformers: str, trl: str) -> str:
    """Make a virtual environment with these releases, and return its Python."""
    same = [f"{name}=={version(name).partition('+')[0]}" for name in ("torch", "accelerate", "datasets", "numpy")]
    packages = [*same, f"transformers=={transformers}", f"trl=={trl}"]
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
    return python


def stock_step(python: str, folder: str, documents: str, way: str) -> Outcome:
    """The results of `stock_recurrent.py` in another environment."""
    command, here = [python, "-c", PROGRAM, folder, documents, way], Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    if done.returncode:
        raise RuntimeError(f"stock_recurrent.main ended with exit code {done.returncode}\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    if kernels := found.pop("kernels"):
        raise RuntimeError(f"{python} has {', '.join(kernels)}; this case is about the paths of PyTorch alone.")
    error = found.pop("error", None)
    return Outcome(value=found, error=error and error.partition(". ")[0], log=done.stderr)


def longctx_step(*, folder: str, packed: list[list[int]], pair: list[list[int]]) -> dict[str, float]:
    """The same results of longctx on one device, beside exact ones, each document a forward pass of its own."""
    import longctx
    from longctx.collate import SequenceCollator

    from .stock_recurrent import exact, gradient_of

    exact_loss, exact_gradient = exact(folder, packed)
    model, sequence = longctx.parallelize(load_model(folder), 1)
    collator = SequenceCollator(0, padding_free=True)

    def forward(documents: list[list[int]]) -> Any:
        batch = collator([{"input_ids": torch.tensor(ids)} for ids in documents])
        count = sequence.count_label_tokens([batch])
        shard = sequence.shard(batch)
        logits = model(**shard.inputs).logits
        return logits, sequence.loss(logits, shard.shift_labels, count)

    _, loss = forward(packed)
    loss.backward()
    gradient = gradient_of(model)
    with torch.no_grad():
        logits = [forward([first, pair[1]])[0][0, len(first) :] for first in (pair[0], pair[2])]
    return {
        "exact_loss": exact_loss,
        "exact_norm": float(exact_gradient.norm()),
        "loss": loss.item(),
        "norm": float(gradient.norm()),
        "gradient_error": float((gradient - exact_gradient).norm() / exact_gradient.norm()),
        "logit_change": float((logits[0] - logits[1]).abs().max()),
        "largest_logit": float(logits[0].abs().max()),
    }
