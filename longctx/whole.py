"""`longctx whole`: put a text part that was trained back into the multimodal model that it was taken from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shutil import copyfile

USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Save the whole model, and return the exit code."""
    options = _parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    try:
        _put_back(options.trained, options.model_name_or_path, options.output_dir, options.model_revision)
    except (ValueError, OSError) as error:
        print(f"longctx: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(f"The whole model is in {options.output_dir}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longctx whole",
        description="Put a text part that was trained back into the multimodal model that it was taken from. All other "
        "weights stay as they were. An adapter is merged into the text part.",
    )
    parser.add_argument("trained", type=Path, help="Folder of the trained model or adapter: the run's --output_dir.")
    parser.add_argument("--model_name_or_path", required=True, help="The multimodal model that the run started from.")
    parser.add_argument("--model_revision", help="Its branch, tag or commit on the hub.")
    parser.add_argument("--output_dir", type=Path, required=True, help="Folder for the whole model.")
    return parser


def _put_back(trained: Path, name: str, folder: Path, revision: str | None) -> None:
    from transformers.utils import cached_file

    from longctx.model.load import load_config, load_model, load_tokenizer, load_whole_config
    from longctx.model.multimodal import put_back

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--output_dir {folder} is not empty. Name a new folder.")
    whole_config = load_whole_config(name, revision=revision)
    if whole_config is None:
        raise ValueError(
            f"--model_name_or_path {name} is not a multimodal model whose text part is trained here. Name the model "
            "that the run started from."
        )
    if (trained / "adapter_config.json").exists():
        from peft import PeftModel

        config = load_config(str(trained) if (trained / "config.json").exists() else name, revision=revision)
        base = load_model(name, config, dtype="auto", revision=revision)
        text = PeftModel.from_pretrained(base, trained).merge_and_unload()
    else:
        text = load_model(str(trained), load_config(str(trained)), dtype="auto")
    put_back(text, name, whole_config, revision=revision).save_pretrained(folder)
    load_tokenizer(str(trained)).save_pretrained(folder)
    for file in _OF_IMAGES:
        if (
            path := cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        ) is not None:
            copyfile(path, folder / file)


_OF_IMAGES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files beside the weights that training leaves alone."""
