"""What a sweep tries: backends on numbers of devices, what they are resolved to, and how long they are predicted to go.

Nothing here starts a process or reads weights; what cannot be is refused here, with longctx.train's own reason.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from longctx.forecast.cost import cost, reach
from longctx.forecast.memory import device_moments
from longctx.forecast.shape import RunShape
from longctx.launch.accelerate import find_config
from longctx.machine.here import Machine
from longctx.model.allow_list import num_heads
from longctx.model.load import load_config
from longctx.settings.flags import SFT
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.settings.run import Run
from longctx.settings.schema import Method

LONGCTX: Final = "longctx"
TRL: Final = "trl"
ONE_DEVICE = "one device"
NOMINAL_LENGTH = 1 << 16
"""Of the rows that a combination is resolved for, before one is known."""
LONGEST_GUESS = 1 << 40
FLAGS = "--packing True --per_device_train_batch_size 1 --save_strategy no --report_to none --disable_tqdm True"
_DROPPED = ("PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""Of a profile's environment: degrees are the sweep's."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A backend on a number of devices."""

    backend: str
    """A name of `benchmarks.pictures.BACKEND_LOOKS`."""
    devices: int
    stack: Literal["longctx", "trl"] = LONGCTX
    flags: tuple[str, ...] = ()
    """Of longctx.train; of TRL's, those of the most similar run of ours."""
    environment: Mapping[str, str] = field(default_factory=dict)
    degrees: Mapping[str, int] | None = None
    """TRL's."""
    run: Run | None = None
    """None where it is refused."""
    refused: str = ""
    """Why it cannot be."""

    @property
    def sp(self) -> int:
        return 0 if self.run is None else self.run.dims.sp

    @property
    def dp(self) -> int:
        """Rows that are trained on at a time."""
        return 0 if self.run is None else self.run.dims.dp

    @property
    def multiple(self) -> int:
        """Tokens that rows are padded to a multiple of."""
        assert self.run is not None, "not refused"
        return self.run.dims.multiple

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def describe(self) -> dict[str, Any]:
        """For its line in results.jsonl."""
        if self.run is None:
            return {"error": self.refused}
        dims, shape, bf16 = self.run.dims, self.shape, self.run.settings["bf16"]
        engine = f"ZeRO-{self.run.zero_stage}" if self.run.zero_stage else self.run.engine
        return {
            "sp": dims.sp,
            "ring": dims.ring,
            "ulysses": dims.ulysses,
            "dp": dims.dp,
            "engine": engine,
            "memory_options": self.run.memory_options.describe() if self.stack == LONGCTX else "",
            "parameters": shape.model.num_parameters,
            "dtype": f"{'bf16' if bf16 else 'fp32'}, weights {'fp32' if shape.weight_bytes == 4 else 'bf16'}",
        }

    @cached_property
    def shape(self) -> RunShape:
        assert self.run is not None, "not refused"
        return self.run.shape

    def predicted_peak(self, length: int) -> float:
        """Bytes that tensors take of a device, where rows have `length` tokens; of TRL's, what ours would take."""
        moments = device_moments(self.shape, self.padded(length), is_cpu=True)
        return float(max(sum(sizes.values()) for sizes in moments.values()))

    def predicted_seconds(self, length: int, documents: Sequence[int], machine: Machine) -> float | None:
        """Return the seconds of an optimizer step on rows of these documents; None where the speeds are not known."""
        if not machine.is_known:
            return None
        return cost(self.shape, replace(machine, per_node=self.devices), length, documents).step_seconds

    def predicted_length(self, machine: Machine, beside: float = 0.0) -> int:
        """The longest row that fits.

        Args:
            beside: bytes that a measured peak has more than the predicted one.
        """
        if machine.is_cpu:  # what is traced is what tensors take
            return self.longest_within(machine.device_bytes - beside)
        return reach(self.shape, replace(machine, per_node=self.devices), beside_device=beside).length

    def longest_within(self, device_bytes: float) -> int:
        """The longest row of which tensors take no more than these bytes of a device."""
        return max(0, bisect_right(range(LONGEST_GUESS), device_bytes, key=self.predicted_peak) - 1)


def combinations(
    model: str,
    *,
    gpus: Sequence[int],
    backends: Sequence[str],
    memory: str,
    profile: str | None,
    data: Path,
) -> Iterator[Combination]:
    """In the order of devices, then of backends; one device is one combination, whatever the backends.

    Args:
        data: of some rows, as the flags of longctx.train name them.

    Raises:
        ValueError: for a model or a profile that is none.
    """
    heads = num_heads(load_config(model))[0]
    base = [*FLAGS.split(), "--model_name_or_path", model, "--dataset_name", str(data), "--memory", memory]
    for devices in gpus:
        environment = profile_environment(profile, devices)
        if devices == 1:
            # Of one device's states, DeepSpeed alone can keep some on the host.
            engine = ["--engine", "deepspeed"] if memory == "longest" and not environment else []
            yield resolved_for(ONE_DEVICE, 1, [*base, *engine], environment)
            continue
        for backend in backends:
            if backend != TRL:
                yield _spread(backend, devices, base, environment)
                continue
            for name, degree in (("ring", "cp_size"), ("ulysses", "sp_size")):
                yield _of_trl(name, degree, devices, base, heads)


def _spread(backend: str, devices: int, flags: Sequence[str], environment: Mapping[str, str]) -> Combination:
    """With the largest sp that the backend permits."""
    refused = []
    for sp in (n for n in range(devices, 1, -1) if devices % n == 0):
        degrees = ["--sp", str(sp), "--sp_backend", backend]
        combination = resolved_for(backend, devices, [*flags, *degrees], environment)
        if combination.run is not None:
            return combination
        refused.append(combination)
    return refused[0]


def _of_trl(backend: str, degree: str, devices: int, flags: Sequence[str], heads: int) -> Combination:
    """TRL's own sequence parallelism, with sp as large as heads permit."""
    sp = devices if backend == "ring" else max(n for n in range(1, devices + 1) if devices % n == heads % n == 0)
    if sp == 1:
        refused = f"sp_size of {devices} devices has to divide the {heads} heads, and no divisor above 1 does"
        return Combination(backend=f"TRL {backend}", devices=devices, refused=refused)
    ours = resolved_for(backend, devices, [*flags, "--sp", str(sp), "--sp_backend", backend], {})
    degrees = {degree: sp} | ({"dp_shard_size": devices // sp} if sp < devices else {})
    return replace(ours, backend=f"TRL {backend}", stack=TRL, degrees=degrees)


def resolved_for(
    backend: str,
    devices: int,
    flags: Sequence[str],
    environment: Mapping[str, str],
    length: int = NOMINAL_LENGTH,
    method: Method = SFT,
) -> Combination:
    env = {**os.environ, **environment, "RANK": "0", "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices)}
    run, refused = None, ""
    try:
        run = resolve(parse_flags([*flags, "--max_length", str(length)], method), read_profile(env), env)
        if run.backend.name not in (backend, "local"):  # hybrid whose heads or devices leave a ring
            ranks = f"{run.dims.ring} ring × {run.dims.ulysses} Ulysses ranks"
            refused = f"on {devices} devices it is {ranks}, which is {run.backend.name}"
    except ValueError as error:
        refused = str(error)
    return Combination(
        backend=backend,
        devices=devices,
        flags=tuple(flags),
        environment=environment,
        run=None if refused else run,
        refused=refused,
    )


def profile_environment(profile: str | None, devices: int) -> dict[str, str]:
    """What `accelerate launch --config_file PROFILE --num_processes N` makes of its profile, but for the degrees.

    One device shards nothing, so that of FSDP it takes nothing.

    Raises:
        ValueError: for a profile that there is not, or that accelerate cannot read.
    """
    if profile is None:
        return {}
    path = find_config("accelerate_config", profile)
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    asked = ["--config_file", str(path), "--num_processes", str(devices), "--num_machines", "1", "-m", "longctx.train"]
    try:
        args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(asked))
        args.main_process_port = 0  # any: ranks are told of theirs
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as its launcher does
            _, env = prepare_deepspeed_cmd_env(args)
        elif args.use_fsdp or args.multi_gpu:
            env = prepare_multi_gpu_env(args)
        else:
            _, env = prepare_simple_launcher_cmd_env(args)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"--accelerate_config {profile} is no profile that accelerate can read: {error}") from error
    added = {name: value for name, value in env.items() if os.environ.get(name) != value}
    kept = {n: v for n, v in added.items() if n.startswith(("ACCELERATE_", "FSDP_")) and not n.startswith(_DROPPED)}
    return {} if devices == 1 and "ACCELERATE_USE_FSDP" in kept else kept
