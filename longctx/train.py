"""Train: `accelerate launch -m longctx.train --sp 4`, or `python -m longctx.train`, or torchrun."""

from __future__ import annotations

import os
import sys

USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Run one training; returns the exit code. Input that cannot be trained on exactly ends with one clear line."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    arguments = sys.argv[1:] if arguments is None else arguments
    from longctx.launch.terminal import quieten, refuse

    quieten()
    from longctx.config import resolve
    from longctx.flags import parse_flags
    from longctx.launch.processes import relaunch, spawn, who_starts
    from longctx.launch.profile import read_profile

    try:
        flags = parse_flags(arguments)
        profile = read_profile()
        if flags.accelerate_config is not None:
            relaunch(flags, profile)
        run = resolve(flags, profile, os.environ)
    except ValueError as error:
        refuse(error)
        return USAGE_ERROR
    if run.settings["dry_run"]:
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(f"longctx: {line}" for line in run.describe()), flush=True)
        return 0
    if run.must_spawn:
        print(f"longctx: {who_starts(profile, run.dims.world_size)}", flush=True)
        return spawn(run.dims.world_size, arguments)

    from longctx.rows import RefusedTogether
    from longctx.run import finish, fit, prepare

    try:
        prepared = prepare(run)
    except RefusedTogether as error:
        if error.is_mine:
            refuse(error)
        finish()  # only now, since a launcher stops all processes once one has left
        return USAGE_ERROR
    except ValueError as error:
        refuse(error)
        return USAGE_ERROR
    fit(prepared)
    finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
