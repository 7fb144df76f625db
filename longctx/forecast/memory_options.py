"""Memory levers, which let sequences be longer, resolved from `--memory` and the flag of each.

An explicit flag, or a key of the launcher's profile, overrides the preset. PRESETS lists what each preset sets where
the run supports it. Every lever is exact; most cost time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

NONE, CPU, NVME = "none", "cpu", "nvme"

AUTO = "auto"
"""The value of --sp and --memory that stands for what the forecast chooses."""

CHUNK_TOKENS = 8192
"""Most tokens of a rank that the sequence-chunked step of a preset has on the device at a time."""
FEWEST_CHUNKS = 4
"""Chunks into which it cuts a short sequence."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "balanced": {},
    "fastest": {"activation_checkpointing": False},
    "longest": {
        "activation_checkpointing": True,
        "activation_offloading": True,
        "selective": False,
        "sequence_chunk_size": CHUNK_TOKENS,
        "tiled_mlp": True,
        "heads_k_stride": 1,
        "offload_optimizer_device": CPU,
        "offload_param_device": CPU,
        "small_buckets": True,
    },
}
"""What each value of --memory sets, by flag. `longest` leaves out what the run does not support, see `_possible`.
`balanced` leaves everything at its default."""

PROFILE_LEVERS = (
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "communication_data_type",
)
"""Flags that an accelerate profile or a DeepSpeed file can set as well."""

OWN_FLAGS = (*PROFILE_LEVERS, "tiled_mlp", "tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size")


class RunTraits(NamedTuple):
    """The properties of a run that decide which levers it supports."""

    backend_can_chunk: bool
    """Whether the sequence-chunked step runs on the attention backend."""
    engine: str
    """deepspeed, fsdp2, fsdp1 or none."""
    zero_stage: int | None
    bf16: bool
    local_tokens: int
    """Most tokens of a micro-batch on one rank."""
    has_linear_attention: bool
    """Whether layers carry a state through all tokens."""

    @property
    def can_chunk(self) -> bool:
        return self.backend_can_chunk and not self.has_linear_attention and self.engine != "fsdp1"


@dataclass(frozen=True, kw_only=True)
class Levers:
    """The resolved value of every lever of a run."""

    memory: str
    """The preset."""
    set_by_preset: tuple[str, ...]
    """Names of the levers that the preset set."""
    activation_checkpointing: bool
    every_n_layers: int
    """One in this many layers is checkpointed."""
    activation_offloading: bool
    """Whether what the backward pass needs waits in host memory."""
    selective: bool | None
    """Whether checkpoints keep attention's output; None means the backend's default."""
    checkpoint_kwargs: Mapping[str, Any]
    """Keywords for torch.utils.checkpoint."""
    tiled_mlp_num_shards: int | None
    """Tiles of the MLP; 0 derives their number from the length, and None means no tiles."""
    heads_k_stride: int | None
    sequence_chunk_size: int | None
    offload_optimizer_device: str
    offload_param_device: str
    offload_optimizer_nvme_path: str | None
    offload_param_nvme_path: str | None
    communication_data_type: str
    """fp32, bf16, or auto: fp32 on FSDP2, the training precision on DeepSpeed."""
    small_buckets: bool
    """Whether DeepSpeed reduces, fetches and keeps less at a time than a layer."""

    @property
    def offloads(self) -> bool:
        """Whether anything is kept off the devices."""
        places = {self.offload_optimizer_device, self.offload_param_device}
        return places != {NONE} or self.activation_offloading or self.sequence_chunk_size is not None

    def settings(self) -> dict[str, Any]:
        """Return every lever by its flag, and by its older name if it has one."""
        kwargs = dict(self.checkpoint_kwargs)
        if self.every_n_layers > 1:
            kwargs["every_n_layers"] = self.every_n_layers
        if self.selective is not None:
            kwargs["selective"] = self.selective
        return {
            "activation_checkpointing": self.activation_checkpointing,
            "activation_checkpointing_kwargs": kwargs or None,
            "gradient_checkpointing": self.activation_checkpointing,
            "gradient_checkpointing_kwargs": kwargs or None,
            "activation_offloading": self.activation_offloading,
            "tiled_mlp": self.tiled_mlp_num_shards is not None,
            **{name: getattr(self, name) for name in OWN_FLAGS if name != "tiled_mlp"},
        }

    def parallelize_arguments(self) -> dict[str, Any]:
        """Return the levers that `longctx.parallelize` carries out, by keyword."""
        keywords = {
            "selective_checkpointing": self.selective,
            "heads_k_stride": self.heads_k_stride,
            "tiled_mlp_num_shards": self.tiled_mlp_num_shards,
            "sequence_chunk_size": self.sequence_chunk_size,
        }
        return {name: value for name, value in keywords.items() if value is not None}

    def describe(self) -> str:
        """Return the preset and every lever that is on, in one line."""
        on = [text for name, text in self._on() if name not in self.set_by_preset]
        by_preset = [text for name, text in self._on() if name in self.set_by_preset]
        source = f"{self.memory}: {', '.join(by_preset)}" if by_preset else self.memory
        return "; ".join([source, *([", ".join(on)] if on else [])])

    def _on(self) -> list[tuple[str, str]]:
        """Return (name, text) of the levers that are on, and of those that a preset has switched off."""
        chunked = self.sequence_chunk_size is not None
        every = f" of every {self.every_n_layers} layers" if self.every_n_layers > 1 else ""
        checkpoints = f"activation checkpointing{every}" if self.activation_checkpointing else "no checkpointing"
        levers = [
            ("activation_checkpointing", not chunked, checkpoints),
            ("sequence_chunk_size", chunked, f"layers over {self.sequence_chunk_size or 0:,} tokens a rank at a time"),
            ("activation_offloading", self.activation_offloading, "activations on the host"),
            ("selective", self.selective is False, "attention computed again"),
            ("selective", self.selective is True, "attention's output kept"),
            ("tiled_mlp", self.tiled_mlp_num_shards == 0, "MLP in tiles"),
            ("tiled_mlp", bool(self.tiled_mlp_num_shards), f"MLP in {self.tiled_mlp_num_shards} tiles"),
            ("heads_k_stride", self.heads_k_stride is not None, f"{self.heads_k_stride} key/value heads at a time"),
            ("offload_optimizer_device", self.offload_optimizer_device != NONE, self._place("optimizer")),
            ("offload_param_device", self.offload_param_device != NONE, self._place("param")),
            (
                "communication_data_type",
                self.communication_data_type != "auto",
                f"gradients reduced in {self.communication_data_type}",
            ),
            ("small_buckets", self.small_buckets, "small buckets"),
        ]
        return [(name, text) for name, is_on, text in levers if is_on]

    def _place(self, kind: str) -> str:
        device, path = getattr(self, f"offload_{kind}_device"), getattr(self, f"offload_{kind}_nvme_path")
        what = "optimizer states" if kind == "optimizer" else "parameters"
        return f"{what} in {path}" if device == NVME else f"{what} on the host"


def asked_levers(settings: Mapping[str, Any], explicit: Set[str]) -> dict[str, Any]:
    """Return the levers that the user set: flags by their names, --activation_checkpointing_kwargs by its keys.

    Args:
        settings: every flag's value.
        explicit: flags that the user set.

    Raises:
        ValueError: if --activation_checkpointing_kwargs is not a JSON object, or one of its levers has a wrong value.
    """
    asked = {name: settings[name] for name in OWN_FLAGS if name in explicit and settings[name] is not None}
    for name in ("activation_checkpointing", "activation_checkpointing_kwargs"):
        older = name.replace("activation", "gradient")
        given = next((settings[n] for n in (name, older) if n in explicit and settings[n] is not None), None)
        if given is not None and name == "activation_checkpointing":
            asked[name] = given
        elif given is not None:
            asked |= _of_checkpoints(given)
    if "activation_offloading" in explicit:
        asked["activation_offloading"] = settings["activation_offloading"]
    return asked


def _of_checkpoints(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the levers in --activation_checkpointing_kwargs; `checkpoint_kwargs` has what is left for torch."""
    flag = f"--activation_checkpointing_kwargs {given}"
    try:
        kwargs = json.loads(given) if isinstance(given, str) else dict(given)
    except ValueError as error:
        raise ValueError(f"{flag} is no JSON object: {error}. Example: '{{\"every_n_layers\": 2}}'.") from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"{flag} is no JSON object. Example: '{{\"every_n_layers\": 2}}'.")
    every = kwargs.get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError(f"{flag}: every_n_layers {every!r} is no whole number of at least 1.")
    for name in ("offload", "selective"):
        if not isinstance(kwargs.get(name, False), bool):
            raise ValueError(f"{flag}: {name} {kwargs[name]!r} is neither true nor false.")
    levers = {name: kwargs.pop(name) for name in ("every_n_layers", "selective") if name in kwargs}
    if "offload" in kwargs:
        levers["activation_offloading"] = kwargs.pop("offload")
    return levers | ({"checkpoint_kwargs": kwargs} if kwargs else {})


def prefers_ulysses(memory: str, asked: Mapping[str, Any]) -> bool:
    """Whether the sequence-chunked step, which no ring supports, is asked for."""
    by_preset = memory == "longest" and asked.get("activation_checkpointing") is not False and not _whole_layers(asked)
    return by_preset or asked.get("sequence_chunk_size") is not None


def resolve_levers(memory: str, asked: Mapping[str, Any], place: RunTraits, *, checkpoints_by_default: bool) -> Levers:
    """Resolve every lever.

    Args:
        memory: a name of PRESETS.
        asked: what the user or a profile set, by flag, as `asked_levers` returns it.
        checkpoints_by_default: whether activations are checkpointed if neither sets it.

    Raises:
        ValueError: for a lever that the run does not support, with its value, the limit and the remedy.
    """
    _check_asked(asked, place)
    preset = _possible(memory, asked, place)
    values = {**preset, **asked}
    chunk = values.get("sequence_chunk_size")
    levers = Levers(
        memory=memory,
        set_by_preset=tuple(preset),
        activation_checkpointing=bool(values.get("activation_checkpointing", checkpoints_by_default or chunk)),
        every_n_layers=values.get("every_n_layers", 1),
        activation_offloading=bool(values.get("activation_offloading")),
        selective=values.get("selective"),
        checkpoint_kwargs=values.get("checkpoint_kwargs", {}),
        tiled_mlp_num_shards=_num_shards(values),
        heads_k_stride=values.get("heads_k_stride"),
        sequence_chunk_size=chunk,
        offload_optimizer_device=values.get("offload_optimizer_device", NONE),
        offload_param_device=values.get("offload_param_device", NONE),
        offload_optimizer_nvme_path=values.get("offload_optimizer_nvme_path"),
        offload_param_nvme_path=values.get("offload_param_nvme_path"),
        communication_data_type=values.get("communication_data_type", "auto"),
        small_buckets=bool(values.get("small_buckets")),
    )
    _check_together(levers, place)
    return levers


def _possible(memory: str, asked: Mapping[str, Any], place: RunTraits) -> dict[str, Any]:
    """Return what the preset sets in this run and nobody else has set.

    `longest` sets the sequence-chunked step if the run supports it, which holds no whole layer and offloads what it
    keeps; else the levers that make whole layers smaller.
    """
    preset = dict(PRESETS[memory])
    if memory != "longest":
        return {name: value for name, value in preset.items() if name not in asked and not _needs(asked)}
    never_whole = ("activation_offloading", "tiled_mlp", "heads_k_stride")
    chunks = place.can_chunk and asked.get("activation_checkpointing") is not False and not _whole_layers(asked)
    left_out = {*never_whole} if chunks or "sequence_chunk_size" in asked else {"sequence_chunk_size"}
    if asked.get("activation_checkpointing") is False:
        left_out |= {"selective"}
    if place.engine == "fsdp1" or "tiled_mlp_num_shards" in asked:
        left_out.add("tiled_mlp")
    if place.engine != "deepspeed":
        left_out |= {"offload_optimizer_device", "small_buckets"}
    if place.engine != "fsdp2":
        left_out.add("offload_param_device")  # ZeRO-3's takes much time and frees little memory
    chunk = max(1, min(CHUNK_TOKENS, math.ceil(place.local_tokens / FEWEST_CHUNKS)))
    preset["sequence_chunk_size"] = chunk
    return {name: value for name, value in preset.items() if name not in left_out and name not in asked}


def _whole_layers(asked: Mapping[str, Any]) -> bool:
    """Whether a lever is asked for that only a step with whole layers has."""
    return bool({"tiled_mlp", "tiled_mlp_num_shards", "heads_k_stride"} & asked.keys()) or (
        asked.get("every_n_layers", 1) > 1
    )


def _needs(asked: Mapping[str, Any]) -> bool:
    """Whether a lever is asked for that needs activation checkpointing."""
    return asked.get("sequence_chunk_size") is not None or asked.get("every_n_layers", 1) > 1


def _num_shards(values: Mapping[str, Any]) -> int | None:
    if values.get("tiled_mlp") is False:
        return None
    return values.get("tiled_mlp_num_shards", 0 if values.get("tiled_mlp") else None)


def _check_asked(asked: Mapping[str, Any], place: RunTraits) -> None:
    """Raise ValueError for a lever that, by itself, the run does not support."""
    for name in ("tiled_mlp_num_shards", "heads_k_stride", "sequence_chunk_size"):
        if asked.get(name, 1) < 1:
            raise ValueError(f"--{name} {asked[name]} is below 1. Leave it out, or use at least 1.")
    if asked.get("tiled_mlp") is False and "tiled_mlp_num_shards" in asked:
        raise ValueError(
            f"--tiled_mlp_num_shards {asked['tiled_mlp_num_shards']} contradicts --tiled_mlp False. Leave out one."
        )
    if "sequence_chunk_size" in asked and place.has_linear_attention:
        raise ValueError(
            f"--sequence_chunk_size {asked['sequence_chunk_size']}: this model's linear attention carries a state "
            "through all tokens, which is not cut into chunks. Leave it out."
        )
    on_fsdp1 = [n for n in ("sequence_chunk_size", "tiled_mlp", "tiled_mlp_num_shards") if asked.get(n)]
    if on_fsdp1 and place.engine == "fsdp1":
        raise ValueError(
            f"--{on_fsdp1[0]} {asked[on_fsdp1[0]]}: the engine is fsdp1, whose flattened weights it is not compared "
            "with. Set fsdp_version: 2 (--config_file configs/fsdp2.yaml), or leave it out."
        )
    if asked.get("communication_data_type") == "bf16" and not place.bf16:
        raise ValueError(
            "--communication_data_type bf16 rounds fp32 gradients to three digits, and this run trains in fp32. "
            "Add --bf16 True, or leave it out."
        )
    if "communication_data_type" in asked and place.engine not in ("deepspeed", "fsdp2"):
        raise ValueError(
            f"--communication_data_type {asked['communication_data_type']}: the engine is {place.engine}, which has "
            "no choice of it. Leave it out, or use --engine fsdp2 or deepspeed."
        )


def _check_together(levers: Levers, place: RunTraits) -> None:
    chunk = levers.sequence_chunk_size
    if chunk is not None and not levers.activation_checkpointing:
        raise ValueError(
            f"--sequence_chunk_size {chunk} computes every layer again in the backward pass, and activation "
            "checkpointing is off. Leave out one of the two."
        )
    acting_on_layers = {
        "every_n_layers": levers.every_n_layers > 1,
        "--tiled_mlp": levers.tiled_mlp_num_shards is not None,
        "--heads_k_stride": levers.heads_k_stride is not None,
        "--activation_offloading": levers.activation_offloading,
    }
    if chunk is not None and any(acting_on_layers.values()):
        other = next(name for name, acts in acting_on_layers.items() if acts)
        raise ValueError(
            f"--sequence_chunk_size {chunk} leaves no whole layer that {other} could act on; what waits is in host "
            "memory already. Leave out one of the two."
        )
    if not levers.activation_checkpointing and (levers.every_n_layers > 1 or levers.selective is not None):
        raise ValueError(
            f"--activation_checkpointing_kwargs sets {'every_n_layers' if levers.every_n_layers > 1 else 'selective'}, "
            "and activation checkpointing is off. Add --activation_checkpointing True, or leave it out."
        )
    _check_offload(levers, place)


def _check_offload(levers: Levers, place: RunTraits) -> None:
    """Raise ValueError if the engine cannot put optimizer states or parameters where they are asked for."""
    for kind in ("optimizer", "param"):
        flag, path_flag = f"--offload_{kind}_device", f"--offload_{kind}_nvme_path"
        device, path = getattr(levers, f"offload_{kind}_device"), getattr(levers, f"offload_{kind}_nvme_path")
        if device == NVME and path is None:
            raise ValueError(f"{flag} nvme needs a folder: add {path_flag} DIR on a local SSD.")
        if device != NVME and path is not None:
            raise ValueError(
                f"{path_flag} {path} goes with {flag} nvme, and that is {device}. Add it, or leave both out."
            )
        if device == NONE:
            continue
        if place.engine not in ("deepspeed", "fsdp2"):
            raise ValueError(
                f"{flag} {device} is DeepSpeed's or FSDP2's, and the engine is {place.engine}. Use --engine deepspeed."
            )
        if place.engine == "fsdp2" and kind == "optimizer":
            raise ValueError(
                f"{flag} {device}: FSDP2 keeps optimizer states where the parameters are. Use --offload_param_device "
                "cpu, which moves both, or --engine deepspeed."
            )
        if place.engine == "fsdp2" and device == NVME:
            raise ValueError(f"{flag} nvme is DeepSpeed ZeRO-3's. Use --engine deepspeed, or {flag} cpu.")
        needs = 3 if kind == "param" or device == NVME else 1
        if place.engine == "deepspeed" and (place.zero_stage or 0) < needs:
            raise ValueError(
                f"{flag} {device} needs ZeRO-{needs}, and this is ZeRO-{place.zero_stage}. Raise the stage."
            )
