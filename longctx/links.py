"""Symbolic links in folders that may be anybody's: what they lead to must not be taken for the folder's own."""

from __future__ import annotations

from pathlib import Path


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder leads, through a link, to a file outside it.

    The hub's cache is made of links: what is in the `blobs` of one of its repositories counts as inside.
    """
    target = path.resolve()
    is_blob = target.parent.name == "blobs" and target.parent.parent.name.startswith(("models--", "datasets--"))
    return not is_blob and not target.is_relative_to(folder.resolve())
