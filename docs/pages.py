"""Pages that are made when the site is built, each from the one place where its facts stand.

The start page is README.md, and the changelog and CONTRIBUTING.md are pages; flags are listed from the parser and from
the tables of what is supported, profiles from the first lines of configs/*.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
REPOSITORY = PurePosixPath()
LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages by the file that they are."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    made: dict[str, Callable[[], str]] = {"reference/flags.md": flags_page, "reference/profiles.md": profiles_page}
    for name, source in COPIED.items():
        files.append(File.generated(config, name, content=relinked((ROOT / source).read_text(encoding="utf-8"))))
    for image in sorted(outer_images()):
        files.append(File.generated(config, image, abs_src_path=str(ROOT / image)))
    for name, page in made.items():
        files.append(File.generated(config, name, content=page()))
    return files


def outer_images() -> set[str]:
    """Images of pages that lie outside of docs/, by their paths in the repository."""
    pages = [*COPIED.values(), *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    found = (
        _normal(PurePosixPath(page).parent / image)
        for page in pages
        for image in IMAGE.findall((ROOT / page).read_text(encoding="utf-8"))
    )
    return {path for path in found if not path.startswith("docs/")}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of the documents that lie in docs/ and leave it name files of the repository."""
    return relinked(markdown, PurePosixPath("docs", page.file.src_uri).parent) if page.file.abs_src_path else markdown


def relinked(markdown: str, folder: PurePosixPath = REPOSITORY) -> str:
    """Links to pages and images as the site has them; other files of the repository are named, not linked.

    Args:
        folder: of the text in the repository.
    """
    page_of = {source: name for name, source in COPIED.items()}

    def link(found: re.Match[str]) -> str:
        label, (path, hash_, part) = found[1], found[2].partition("#")
        target = PurePosixPath(_normal(folder / path))
        if str(target) in page_of:
            site = PurePosixPath(page_of[str(target)])
        elif target.parts[:1] == ("docs",):
            site = target.relative_to("docs")
        elif found[0].startswith("!"):
            site = PurePosixPath(target)
        else:
            return label if "`" in label or str(target) in label else f"{label} (`{target}`)"
        up = len(folder.parts) - 1 if folder.parts else 0
        return f"{'!' * found[0].startswith('!')}[{label}]({'../' * up}{site}{hash_}{part})"

    return LINK.sub(link, markdown)


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def flags_page() -> str:
    """Every flag of `longctx train`, by what it does."""
    from longctx import supported
    from longctx.flags import SequenceArguments

    lines = [
        "# Flags",
        "",
        "Of `longctx train` and, as far as they act on one step, `longctx verify`. Dashes may stand",
    ]
    lines += [
        "for underscores, `--config run.yaml` sets any of them, and the command line wins over it. `longctx plan`"
    ]
    lines += ["and `longctx bench` have their own, which `--help` lists.", "", "## Our own", ""]
    rows = []
    for f in fields(SequenceArguments):
        choices = re.findall(r"['\"](\w+)['\"]", str(f.type))
        default = "" if f.default is None else f"`{f.default}`"
        rows.append([f"`--{f.name}`", " ".join(f"`{c}`" for c in choices), default, f.metadata["help"]])
    lines += _table(["flag", "values", "default", "meaning"], rows)
    lines += [
        "",
        "## Of TRL and transformers",
        "",
        "They have their own names, meanings and defaults, but for what the",
    ]
    lines += ["start-up text names. These act:", ""]
    acting = [
        [group, " ".join(f"`--{name}`" for name in names.split())] for group, names in supported._ACTING_GROUPS.items()
    ]
    lines += _table(["", "flags"], acting)
    lines += ["", "These act together with another:", ""]
    with_others: dict[str, list[str]] = {}
    for name, (switch, values) in supported.ACTS_WITH.items():
        chosen = "" if values == (True,) else f" {' or '.join(values)}"
        with_others.setdefault(f"`--{switch}`{chosen}", []).append(f"`--{name}`")
    lines += _table(["with", "flags"], [[switch, " ".join(names)] for switch, names in with_others.items()])
    lines += ["", "Of these the values named are built, any other is refused by name:", ""]
    built = [
        [
            f"`--{name}`",
            " ".join(f"`{v}`" for v in allowed if v not in (None, "", [])) or "unset",
            supported.REASONS.get(name, ""),
        ]
        for name, allowed in supported.NOT_BUILT.items()
    ]
    lines += _table(["flag", "built", "why not others"], built)
    lines += ["", "These would shard a second time, and are refused:", ""]
    lines += _table(["flag", "instead"], [[f"`--{name}`", way] for name, way in supported.GIVEN_ELSEWHERE.items()])
    lines += ["", "These change nothing, and setting one earns a note:", ""]
    idle = [[why, " ".join(f"`--{n}`" for n in names.split())] for why, names in supported._IDLE_GROUPS.items()]
    return "\n".join([*lines, *_table(["why", "flags"], idle), ""])


def profiles_page() -> str:
    """The profiles of configs/, each with the comment on top of it, which has its launch command."""
    lines = [
        "# Profiles",
        "",
        "Accelerate profiles in `configs/`: `accelerate launch --config_file configs/NAME.yaml`, or by",
    ]
    lines += [
        "name, also where longctx is installed without its repository: `longctx train --accelerate_config NAME`.",
        "",
    ]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        lines += [f"## {path.stem}", "", "```yaml", *path.read_text(encoding="utf-8").splitlines(), "```", ""]
    lines += ["# Run files", "", "Flags for `--config`; paths are the repository's.", ""]
    for path in sorted((ROOT / "configs" / "run").glob("*.yaml")):
        lines += [f"## run/{path.stem}", "", "```yaml", *path.read_text(encoding="utf-8").splitlines(), "```", ""]
    return "\n".join(lines)


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *escaped]]
