"""`longctx export`: one Transformers folder of a run, a checkpoint, an adapter or a trained text part."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Never

from longctx.launch.terminal import INTERRUPTED, end_refused, quieten
from longctx.upstream.deepspeed_internals import stay_on_cpu


def main(arguments: list[str] | None = None) -> int:
    """Export, print what was done, and return the exit code. Nothing is left of an export that does not end."""
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        import torch
        from transformers.utils import logging

        if not torch.cuda.is_available():
            stay_on_cpu()
        from longctx.run.exported import export

        quieten()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        print(export(options.folder, options.output_dir, options.model_name_or_path, options.model_revision))
    except KeyboardInterrupt:
        print("\nlongctx: interrupted. Nothing is exported.", file=sys.stderr)
        return INTERRUPTED
    except (ImportError, ValueError, OSError, RuntimeError) as error:  # also where peft is not installed
        folder, message = str(options.folder), str(error)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # while it is written
            message = f"{options.output_dir} cannot be written: {error.strerror}. Make room, or name another folder."
        message = message.replace(f"--model_name_or_path {folder}", folder)
        return end_refused(ValueError(message if len(message) <= 2000 else f"{message[:2000]}…"))
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _end(number: int, frame: object) -> Never:
    """End as at Ctrl-C, so that the part that was written is removed."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx export",
        description="Make one folder that transformers and vLLM load. An adapter is merged into its base model, and a "
        "trained text part is put into its multimodal model. Weights are written in the dtype of config.json, one "
        "tensor at a time.",
    )
    parser.add_argument("folder", type=Path, help="A run's --output_dir, one of its checkpoints, or an adapter.")
    parser.add_argument("--output_dir", type=Path, required=True, help="The new folder.")
    parser.add_argument(
        "--model_name_or_path",
        help="The base of an adapter, if it is not where the adapter says, or the multimodal model of a text part.",
    )
    parser.add_argument("--model_revision", help="The branch, tag or commit of --model_name_or_path on the hub.")
    return parser
