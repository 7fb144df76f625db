"""What a launcher exported: accelerate's profile, DeepSpeed's file, and the processes it started.

Keys that are neither read nor known to change no result are refused by name. longctx carries out the profile's parallel
degrees itself, so the variables that would make accelerate shard are taken out of the environment, and DeepSpeed's
engine sees its file without optimizer and scheduler. Only the standard library is needed: a profile is refused before
torch is imported.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from longctx.launch.accelerate import default_config_file
from longctx.settings import profile_keys as keys
from longctx.settings.schema import TRUE
from longctx.untrusted.files import check_file


class Asked(NamedTuple):
    """A value that a profile asks for."""

    value: Any
    """As the file has it: text where it comes from the environment. The flag's kind converts and checks it."""
    key: str
    """Where it stands, for messages: `gradient_clipping`, or `bf16.enabled in deepspeed_config_file ds.json`. With its
    value there where that is another: `mixed_precision bf16`."""


BACKEND_OF = {"cp": "ring", "sp": "ulysses"}
"""The backend that each of accelerate's degrees selects. The records in longctx.attention.backends say the same."""

FLAG_FIRST = frozenset({"lr_scheduler_type"})
"""Flags of `Launcher.values` for which a flag that the user gave is kept, as a note of the profile says."""

PROFILE_FIRST = frozenset({"activation_checkpointing", "activation_offloading"})
"""Flags of `Launcher.values` that act whatever the user gave: the trainer checkpoints in FSDP's place."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher's processes, and what its profile asks for."""

    world_size: int | None
    """Processes of the run; None if no launcher (accelerate, torchrun, deepspeed, srun) connected any."""
    local_world_size: int | None
    """Those on this machine; None if the launcher does not say."""
    by_accelerate: bool
    """Whether that launcher was `accelerate launch`."""
    only_one_started: bool
    """Whether num_processes asks for several and accelerate, without a GPU, started this one alone."""
    engine: str | None
    """deepspeed, fsdp2 or fsdp1; None for plain or single-device launches."""
    zero_stage: int | None
    """0 to 3; None where no profile of DeepSpeed's is used."""
    dp_shard: int | None
    """Processes over which the profile shards weights; None if it leaves that open."""
    values: Mapping[str, Asked]
    """What the profile asks for, by flag. Keys that are absent or `auto` leave their flags to the user."""
    layer_classes: tuple[str, ...]
    """Names of the model's classes that the profile wraps, to be compared with the model's own."""
    train_batch_size: Asked | None
    """Sequences per step, from a deepspeed_config_file."""
    notes: tuple[str, ...]
    """What was translated, for the user."""

    @property
    def launched(self) -> bool:
        """Whether a launcher has set this process's rank and world size."""
        return self.world_size is not None


_HANDLED_HERE = ("PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG", "FSDP_ACTIVATION_CHECKPOINTING")
"""Variables that begin so are taken out: longctx does what they ask for."""

MOST_CHARACTERS = 64_000
"""Of a deepspeed_config_file, which a variable passes on in base64. Linux limits it to 128 KiB."""

_TAKEN = "LONGCTX_TAKEN_FROM_LAUNCHER"
"""Variable with what was taken out of the environment, for processes that start from it."""


def read_profile(env: MutableMapping[str, str] | None = None) -> Launcher:
    """Read the launcher's environment, and take out what accelerate and DeepSpeed must not act on.

    A process that starts from this environment reads the same, and so does a second call.

    Raises:
        ValueError: for a key that would change the result unseen, for values that cannot be carried out, if a file
            cannot be read, or if the launcher started processes without connecting them.
    """
    env = os.environ if env is None else env
    for name, (before, after) in json.loads(env.pop(_TAKEN, "{}")).items():
        if env.get(name) == after:  # else another launcher has set it since
            env[name] = before
    _check_connected(env)
    _check_variables(env)
    if "LOCAL_SIZE" in env:  # DeepSpeed's launcher
        env.setdefault("LOCAL_WORLD_SIZE", env["LOCAL_SIZE"])
    profile = _Profile(env)
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    changes: dict[str, str | None] = {name: None for name in env if name.startswith(_HANDLED_HERE)}
    if file not in ("", "none"):
        seen = profile.read_deepspeed(_json_of(file), f"deepspeed_config_file {file}")
        # As text: a file of ours would have to outlive every process that reads it.
        changes["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = base64.urlsafe_b64encode(json.dumps(seen).encode()).decode()
    if changes:
        env[_TAKEN] = json.dumps({name: (env[name], after) for name, after in changes.items()})
    for name, after in changes.items():
        if after is None:
            del env[name]
        else:
            env[name] = after
    is_launched = _is_launched(env)
    _whole(env["RANK"] if is_launched else None, "RANK", least=0)
    by_accelerate = "ACCELERATE_MIXED_PRECISION" in env
    return Launcher(
        world_size=_whole(env["WORLD_SIZE"], "WORLD_SIZE") if is_launched else None,
        local_world_size=_whole(env.get("LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE") if is_launched else None,
        by_accelerate=by_accelerate,
        only_one_started=by_accelerate and not is_launched and "MASTER_ADDR" in env,
        engine=_engine(env),
        zero_stage=profile.zero_stage,
        dp_shard=profile.dp_shard,
        values=profile.values,
        layer_classes=tuple(profile.layer_classes),
        train_batch_size=profile.train_batch_size,
        notes=tuple(profile.notes),
    )


class _Profile:
    """What accelerate's config asks for, and the file that it names."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.values: dict[str, Asked] = {}
        self.notes: list[str] = []
        self.train_batch_size: Asked | None = None
        stage = env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2" if _engine(env) == "deepspeed" else None)  # its default
        self.zero_stage = _whole(stage, "zero_stage", least=0, most=3)
        self.dp_shard = self._read_degrees(env)
        self.ask("bf16", env.get("ACCELERATE_MIXED_PRECISION", "").lower() == "bf16" or None, "mixed_precision bf16")
        self.ask("use_cpu", _is_on(env, "ACCELERATE_USE_CPU") or None, "use_cpu")
        for key in ("gradient_clipping", "gradient_accumulation_steps"):
            self.ask(keys.READ[key], env.get(f"ACCELERATE_{key.upper()}"), key)
        names = env.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "")
        if _is_on(env, "ACCELERATE_USE_FSDP"):
            self._read_fsdp(env)
            if env.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "TRANSFORMER_BASED_WRAP":
                names = env.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
        else:
            for flag in (name for name in keys.READ.values() if name.startswith("offload_")):
                self.ask(flag, env.get(f"ACCELERATE_DEEPSPEED_{flag.upper()}"), flag)
        self.layer_classes = [name for name in names.replace(" ", "").split(",") if name not in ("", "None")]
        for variable, (default, why) in keys.SAID.items():
            if env.get(variable, default).lower() not in (default, "none"):
                self.notes.append(f"{variable.lower()} {env[variable]} changes nothing: {why}")

    def ask(self, flag: str, value: Any, key: str) -> None:
        """Keep what a key asks for. `auto` and a device that is `none` leave it to the flag."""
        if value is None or str(value).lower() in ("auto", "none", ""):
            return
        first = self.values.setdefault(flag, Asked(value, key))
        if str(first.value).lower() != str(value).lower():
            raise ValueError(f"{first.key} is {first.value}, and {key} is {value}. Leave one of them out.")

    def _read_degrees(self, env: Mapping[str, str]) -> int | None:
        size = {}
        for name in ("cp", "sp", "tp", "dp_replicate", "dp_shard"):
            key = f"parallelism_config_{name}_size"
            size[name] = _whole(env.get(key.upper()), key) or 1
        if size["tp"] > 1:
            raise ValueError(
                f"parallelism_config_tp_size {size['tp']} in {profile_name()}: longctx does not support tensor "
                "parallelism. Set it to 1: --sp spreads the sequence and FSDP2 or ZeRO-3 the weights (torchtitan or "
                "Megatron-LM have tensor parallelism)."
            )
        if size["cp"] > 1 and size["sp"] > 1:
            raise ValueError(
                f"parallelism_config_cp_size {size['cp']} and parallelism_config_sp_size {size['sp']} in "
                f"{profile_name()}: set one of them to 1. Both at once are --sp_backend hybrid."
            )
        for name, backend in BACKEND_OF.items():
            if size[name] > 1:
                self.ask("sp", size[name], f"parallelism_config_{name}_size")
                self.ask("sp_backend", backend, f"parallelism_config_{name}_size {size[name]}")
        if size["dp_replicate"] > 1:
            self.ask("dp_replicate", size["dp_replicate"], "parallelism_config_dp_replicate_size")
        return size["dp_shard"] if size["dp_shard"] > 1 else None

    def _read_fsdp(self, env: Mapping[str, str]) -> None:
        if _is_on(env, "FSDP_OFFLOAD_PARAMS"):
            self.ask("offload_param_device", "cpu", "fsdp_offload_params true")
        if _is_on(env, "FSDP_ACTIVATION_CHECKPOINTING"):
            self.ask("activation_checkpointing", True, "fsdp_activation_checkpointing")
        if _is_on(env, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
            self.ask("activation_offloading", True, "fsdp_activation_checkpointing_offload")
            if "activation_checkpointing" not in self.values:
                raise ValueError(
                    f"fsdp_activation_checkpointing_offload True in {profile_name()} needs "
                    "fsdp_activation_checkpointing: true. Set both, or neither."
                )

    def read_deepspeed(self, config: dict[str, Any], file: str) -> dict[str, Any]:
        """Read a deepspeed_config_file, and return the configuration that the engine is to see.

        Args:
            file: its name for messages.
        """
        leaves = dict(_leaves(config))
        for path, value in leaves.items():
            _check_key(path, value, leaves, file)
        for path, flag in keys.READ.items():
            value = leaves.get(path)
            is_bf16 = flag == "communication_data_type" and value == "bfp16"  # another name of DeepSpeed's
            self.ask(flag, "bf16" if is_bf16 else value, f"{path} in {file}")
        if (batch := leaves.get("train_batch_size")) not in ("auto", None):
            self.train_batch_size = Asked(batch, f"train_batch_size in {file}")
        if (stage := leaves.get("zero_optimization.stage")) != "auto":
            self.zero_stage = _whole(stage, f"zero_optimization.stage in {file}", least=0, most=3)
        if self.zero_stage is None:
            raise ValueError(f"zero_optimization.stage is not in {file}. Set it to 1, 2 or 3.")
        if any(path.startswith("optimizer.") for path in leaves):
            self._read_optimizer(leaves, file)
        if any(path.startswith("scheduler.") for path in leaves):
            self._read_scheduler(leaves, file)
        kept = {name: value for name, value in config.items() if name not in ("optimizer", "scheduler")}
        seen = _without_defaults(kept)
        seen.setdefault("zero_optimization", {})["stage"] = self.zero_stage
        # transformers fills these in from the flags, which hold what the file asks for
        seen |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        seen |= {"gradient_clipping": "auto", "train_batch_size": "auto" if batch is None else batch}
        if "bf16" in seen:
            seen["bf16"]["enabled"] = "auto"
        return seen

    def _read_optimizer(self, leaves: Mapping[str, Any], file: str) -> None:
        name = str(leaves.get("optimizer.type", "AdamW"))
        if name.lower() not in ("adamw", "adam"):
            raise ValueError(f"optimizer.type {name} in {file} is not supported. {keys.REMEDIES['optimizer']}")
        if (betas := leaves.get("optimizer.params.betas")) not in ("auto", None):
            if not isinstance(betas, list) or len(betas) != 2:
                raise ValueError(f"optimizer.params.betas {betas} in {file}: expected two numbers or auto. Correct it.")
            for number, beta in enumerate(betas, start=1):
                self.ask(f"adam_beta{number}", beta, f"optimizer.params.betas in {file}")
        self.notes.append(f"optimizer {name} of {file} is left to --optim (AdamW, unless given): DeepSpeed builds none")

    def _read_scheduler(self, leaves: Mapping[str, Any], file: str) -> None:
        name = str(leaves.get("scheduler.type"))
        if name not in keys.SCHEDULERS:
            raise ValueError(f"scheduler.type {name} in {file} is not supported. {keys.REMEDIES['scheduler']}")
        translated, with_auto = keys.SCHEDULERS[name]
        for key in with_auto.split():
            if f"scheduler.params.{key}" not in leaves:
                raise ValueError(
                    f"scheduler.params.{key} is not in {file}, and DeepSpeed's default for it makes another schedule. "
                    f"Set it to auto, or leave the section out and use --lr_scheduler_type {translated}."
                )
        self.ask("lr_scheduler_type", translated, f"scheduler.type {name} in {file}")
        self.notes.append(
            f"scheduler {name} of {file} is --lr_scheduler_type {translated}, unless that flag is given; the warm-up "
            "is linear, where DeepSpeed's default is logarithmic"
        )


def profile_name() -> str:
    """Return the profile's name for messages, with the default config file if there is one."""
    path = default_config_file()
    return "accelerate's config" + (f" (--config_file, or {path} where none was given)" if path else "")


def _check_key(path: str, value: Any, leaves: Mapping[str, Any], file: str) -> None:
    """Check that a key of a deepspeed_config_file is read, or changes no result."""
    section, _, rest = path.partition(".")
    if section in keys.SWITCHED:
        enabled = leaves.get(f"{section}.enabled", value if path == section and value != {} else None)
        if enabled in (False, None) or (section == "fp16" and enabled == "auto"):
            return
        path, value = f"{section}.enabled", enabled
    is_schedule = section == "scheduler" and rest in keys.SCHEDULE_KEYS and (rest == "type" or value == "auto")
    is_empty_section = value in ({}, None) and any(known.startswith(f"{path}.") for known in (*keys.READ, *keys.PASSED))
    if is_schedule or is_empty_section or path in keys.READ or not keys.PASSED.isdisjoint((path, f"{section}.")):
        return
    shown = f"{path} {json.dumps(value)[:60]} in {file}"
    if section == "fp16":
        raise ValueError(_unverified(shown))
    if path not in keys.ONLY:
        raise ValueError(f"{shown} is not supported. {_remedy(path)}")
    if value not in ("auto", keys.ONLY[path]):
        raise ValueError(f"{shown} is not supported, only {json.dumps(keys.ONLY[path])} is. {_remedy(path)}")


def _check_variables(env: Mapping[str, str]) -> None:
    """Check that every variable of accelerate's is read, changes no result, or asks for nothing."""
    kinds = [kind for kind in ("MEGATRON_LM", "SAGEMAKER") if _is_on(env, f"ACCELERATE_USE_{kind}")]
    if kinds or env.get("PJRT_DEVICE") == "TPU":
        raise ValueError(
            f"distributed_type {[*kinds, 'XLA'][0]} in {profile_name()} is not supported. "
            "Use a profile of configs/, such as --config_file configs/fsdp2.yaml."
        )
    if (precision := env.get("ACCELERATE_MIXED_PRECISION", "").lower()) in ("fp16", "fp8"):
        raise ValueError(_unverified(f"mixed_precision {precision} in {profile_name()}"))
    for name in sorted(name for name in env if name.startswith(keys.PREFIXES)):
        accepted = keys.VARIABLES[name].split() if name in keys.VARIABLES else keys.INERT
        has_no_effect = name == "FSDP_USE_ORIG_PARAMS" and _engine(env) != "fsdp1"
        if accepted and env[name].lower() not in accepted and not has_no_effect:
            key = name.removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower()
            raise ValueError(f"{key} {env[name]} in {profile_name()} ({name}) is not supported. {_remedy(name)}")
    file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    for key in filter(None, env.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")):
        if key not in keys.DEEPSPEED_FIELDS:
            raise ValueError(f"{key} under deepspeed_config in {profile_name()} is unknown to accelerate. Take it out.")
        if file not in ("", "none") and keys.DEEPSPEED_FIELDS[key]:
            raise ValueError(
                f"{key} in {profile_name()} cannot stand beside deepspeed_config_file {file}: accelerate wants it in "
                "that file. Set it there or by its flag, and take it out of the config."
            )


def _check_connected(env: Mapping[str, str]) -> None:
    """Check that accelerate or mpirun started no unconnected processes on the CPU, which would each train alone."""
    if _is_launched(env) or not _is_on(env, "ACCELERATE_USE_CPU"):
        return
    by_mpi = next((env[name] for name in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE") if name in env), "1")
    address = env.get("MASTER_ADDR", "localhost")
    if by_mpi != "1" or address not in ("localhost", "127.0.0.1", "::1"):
        started = f"mpirun started {by_mpi} processes" if by_mpi != "1" else f"main_process_ip is {address}"
        raise ValueError(
            f"{started}, and on the CPU accelerate does not connect processes: each would train alone. Run "
            "torchrun --nnodes N --nproc_per_node M --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m longctx.train … "
            "on each machine."
        )


def _json_of(file: str) -> dict[str, Any]:
    try:
        text = check_file(Path(file)).read_text(encoding="utf-8")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(text):,} characters, and at most {MOST_CHARACTERS:,} fit the environment")
        values = json.loads(text, object_pairs_hook=_each_once)
        if not isinstance(values, dict):
            raise ValueError(f"it is {str(values)[:60]!r}, expected an object")
        return values
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"deepspeed_config_file {file} cannot be read as JSON ({error}). Correct the path or the file."
        ) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(names := [name for name, _ in pairs]) > len(set(names)):
        raise ValueError(f"{max(names, key=names.count)} is there more than once")
    if dotted := next((name for name in names if "." in name), None):
        raise ValueError(f"{dotted} has a dot, and DeepSpeed's sections are objects")
    return dict(pairs)


def _leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `a.b.c` and its value for each value, also for empty objects."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _without_defaults(node: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return a copy without null, and without the `auto` that nobody fills in: DeepSpeed takes its defaults there."""
    copy = {
        n: _without_defaults(value, f"{above}{n}.") if isinstance(value, dict) else value for n, value in node.items()
    }
    filled = [name for name in copy if copy[name] != "auto" or f"{above}{name}" in keys.FILLED]
    return {name: copy[name] for name in filled if copy[name] is not None}


def _remedy(path: str) -> str:
    return keys.REMEDIES[max((start for start in keys.REMEDIES if path.startswith(start)), key=len)]


def _unverified(what: str) -> str:
    return f"{what} is not verified against the reference yet. {keys.REMEDIES['fp16']}"


def _is_launched(env: Mapping[str, str]) -> bool:
    return "RANK" in env and "WORLD_SIZE" in env


def _engine(env: Mapping[str, str]) -> str | None:
    if _is_on(env, "ACCELERATE_USE_DEEPSPEED"):
        return "deepspeed"
    if _is_on(env, "ACCELERATE_USE_FSDP"):
        return "fsdp2" if env.get("FSDP_VERSION", "1") == "2" else "fsdp1"
    return None


def _is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "false").lower() in TRUE


def _whole(value: Any, key: str, *, least: int = 1, most: int = sys.maxsize) -> int | None:
    """Return a whole number; None for None."""
    if value is None:
        return None
    if not str(value).isdecimal() or not least <= int(str(value)) <= most:
        limit = f"from {least} to {most}" if most < sys.maxsize else f"of at least {least}"
        raise ValueError(f"{key} is {value}, expected a whole number {limit}. Correct it.")
    return int(str(value))
