"""Sequence-parallel fine-tuning of language models: exact, or refused, never silently wrong."""

from longctx.untrusted.working_directory import leave_out_of_imports

leave_out_of_imports()  # before the first import that a file of the working directory could stand for

from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from longctx.parallel import parallelize

__version__ = "0.1.0"
__all__ = ["parallelize"]


def __getattr__(name: str) -> Any:
    # Importing longctx stays cheap; torch and transformers load when they are needed.
    if name == "parallelize":
        from longctx.parallel import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
