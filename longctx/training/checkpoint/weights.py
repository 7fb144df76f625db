"""A model's weights in Transformers' files, of which a rank holds one at a time in host memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from longctx.ranks.agreement import broadcast_object, gather_objects, gathered_on_first, on_all_ranks
from longctx.training.checkpoint.shards import name_without_wrappers
from longctx.upstream.accelerate_internals import fsdp1_ranges, fsdp2_plugin
from longctx.upstream.deepspeed_internals import is_managed

FILE_BYTES = 5 * 10**9
"""Most bytes in a file, unless one layer has more."""

_LAYER = re.compile(r".*?\.\d+\.")


Save = Callable[[dict[str, Tensor], Path, dict[str, str]], None]
"""safetensors' `save_file`, or what writes the file later."""


def write_model(trainer: Any, folder: Path, *, exact: bool = False, save: Save = save_file) -> list[Path]:
    """Write a trainer's model and what belongs to it as a Transformers folder. Called by all ranks together.

    The Trainer would gather the whole model in rank 0's memory, even if an adapter alone is trained.

    Args:
        exact: whether to write trained weights as the optimizer updates them, which is fp32 under ZeRO with bf16.
        save: writes a file of weights, which this rank owns.

    Returns:
        The files of weights that this rank has passed to `save`. Rank 0 has written all others.
    """
    model, args = trainer.model, trainer.args
    if trainer.is_fsdp_enabled and fsdp2_plugin(trainer.accelerator) is None:  # FSDP1 gathers flat parameters alone
        states = on_all_ranks(lambda: trainer.accelerator.get_state_dict(model))
    elif hasattr(model, "peft_config"):
        states = on_all_ranks(lambda: adapter_weights(model, keep=trainer.is_world_process_zero()))
    else:
        on_all_ranks(lambda: trainer._save(str(folder), {}))
        owners = args.world_size
        if args.save_on_each_node or args.save_only_model:  # other nodes may not see the folder
            owners = gather_objects(args.process_index - args.local_process_index).count(0)
        return write_weights(model, folder, rank=args.process_index, owners=owners, exact=exact, save=save)
    on_all_ranks(lambda: trainer._save(str(folder), states))
    return []


def names_kept(model: PreTrainedModel) -> set[str]:
    """Return the names of weights that `write_weights` writes under their own names and with their own values.

    Transformers renames or converts those of some types.
    """
    if fsdp1_ranges(model):  # which gathers the whole model to name its tensors
        return set()
    held = {name: torch.empty(_shape(tensor), device="meta") for name, tensor in _held(model).items()}
    stored = revert_weight_conversion(model, dict(held))
    return {name for name, tensor in held.items() if stored.get(name) is tensor}


def adapter_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return what PEFT saves of a model's adapter, under the names of the state dict, in host memory.

    Nothing else is gathered. Called by all ranks together.

    Args:
        keep: whether this rank wants them, which rank 0 does; others get {}.
    """
    from peft import get_peft_model_state_dict

    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    held = {name_without_wrappers(name): tensor for name, tensor in named.items()}
    names: list[str] = []
    if keep:  # PEFT asks the hub about the base model, and ranks must gather alike
        saved = {id(tensor) for tensor in get_peft_model_state_dict(model, state_dict=dict(held)).values()}
        names = [name for name, tensor in held.items() if id(tensor) in saved]
    whole = {name: _whole(held[name], keep=keep) for name in broadcast_object(names)}
    return {name: tensor for name, tensor in whole.items() if tensor is not None}


def write_weights(
    model: PreTrainedModel, folder: Path, *, rank: int, owners: int, exact: bool = False, save: Save = save_file
) -> list[Path]:
    """Write the weights of a model, file by file, each by one of the first `owners` ranks in turn.

    Layers are gathered one after the other. Tied weights are written once, under their first name. Called by all ranks
    together.

    Returns:
        This rank's files.

    Raises:
        OSError, SafetensorError, RefusedOnAllRanks: once all ranks are through, on the one that could not write a file,
            and on the others.
    """
    held = _held(model)
    files = list(_files(held, exact=exact))
    written: dict[Path, Future[tuple[dict[str, str], int]]] = {}

    def write(path: Path, layers: list[dict[str, Any]]) -> tuple[dict[str, str], int]:
        stored: dict[str, Tensor] = {}
        while layers:  # each of which is freed as soon as it is converted
            stored |= {name: t.contiguous() for name, t in revert_weight_conversion(model, layers.pop(0)).items()}
        save(stored, path, {"format": "pt"})
        return dict.fromkeys(stored, path.name), sum(tensor.nbytes for tensor in stored.values())

    with ThreadPoolExecutor(1) as writer:  # which writes while the files of other ranks are gathered
        for number, file in enumerate(files):
            path = folder / SAFE_WEIGHTS_NAME
            if len(files) > 1:
                path = folder / f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            is_owner = number % owners == rank
            if is_owner:
                wait(written.values())
            layers: list[dict[str, Any]] = [
                {name: _whole(held[name], keep=is_owner, exact=exact) for name in layer} for layer in file
            ]
            if is_owner:
                written[path] = writer.submit(write, path, layers)
            del layers
    reports = gathered_on_first(lambda: [file.result() for file in written.values()])

    def write_index() -> None:
        index = {
            "metadata": {
                "total_parameters": sum(prod(_shape(tensor)) for tensor in held.values()),
                "total_size": sum(size for report in reports for _, size in report),
            },
            "weight_map": {name: file for report in reports for names, _ in report for name, file in names.items()},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    on_all_ranks(lambda: write_index() if len(files) > 1 and rank == 0 else None)
    return [*written]


def _held(model: Any) -> dict[str, Tensor]:
    """Return what this rank has of the tensors that are saved, by name; of tied ones, the first."""
    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    seen: set[int] = set()
    held = {}
    for wrapped, tensor in model.state_dict(keep_vars=True).items():
        name = name_without_wrappers(wrapped)
        if name not in ignored and id(tensor) not in seen:
            seen.add(id(tensor))
            held[name] = tensor
    return held


def _files(held: dict[str, Tensor], *, exact: bool = False) -> Iterator[list[list[str]]]:
    """Yield the layers of each file as lists of names: transformers may store several tensors of a layer as one."""
    layers: dict[str, list[str]] = {}
    for name in held:
        found = _LAYER.match(name)
        layers.setdefault(found[0] if found else name, []).append(name)
    file: list[list[str]] = []
    size = 0
    for layer in layers.values():
        added = sum(prod(_shape(held[name])) * _itemsize(held[name], exact=exact) for name in layer)
        if file and size + added > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append(layer)
        size += added
    yield file


def _is_fp32(tensor: Any, *, exact: bool) -> bool:
    """Whether ZeRO's fp32 weight is written in the place of the one that layers compute with."""
    return exact and tensor.requires_grad and is_managed(tensor)


def _itemsize(tensor: Tensor, *, exact: bool) -> int:
    return 4 if _is_fp32(tensor, exact=exact) else tensor.element_size()


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _whole(tensor: Any, *, keep: bool, exact: bool = False) -> Tensor | None:
    """Gather a tensor, and return it in host memory if it is to be kept. Called by all ranks together."""
    whole: Any = tensor.detach()
    if isinstance(tensor, DTensor):
        whole = whole.to(tensor.device_mesh.device_type).full_tensor()
    elif _is_fp32(tensor, exact=exact):
        from deepspeed.utils import safe_get_full_fp32_param

        whole = safe_get_full_fp32_param(tensor).detach()
    elif hasattr(tensor, "ds_numel"):
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([tensor]):
            return tensor.detach().to("cpu", copy=True) if keep else None
    return whole.to("cpu") if keep else None
