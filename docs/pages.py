"""Pages that are made when the site is built, each from the one place where its facts stand.

The start page is README.md, and the changelog and CONTRIBUTING.md are pages; flags are listed from their table, and
profiles from the first lines of configs/*.yaml.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longctx.settings.schema import UNSET, Flag

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?:|#)([^)\s#]+)([^)\s]*)\)")
CODE = re.compile(r"`[^`\n]+`")
COPIED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages by the file that they are."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    made: dict[str, Callable[[], str]] = {FLAGS: flags_page, "reference/profiles.md": profiles_page}
    for name, source in COPIED.items():
        files.append(File.generated(config, name, content=text_of(source)))
    for path in sorted(results()):
        if path.endswith(".md"):
            files.append(File.generated(config, path, content=text_of(path)))
        else:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for name, page in made.items():
        files.append(File.generated(config, name, content=page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of the documents that lie in docs/ and leave it stay on the site."""
    return text_of(f"docs/{page.file.src_uri}") if page.file.abs_src_path else markdown


MATRIX, FLAGS = "benchmarks/results/support_matrix.md", "reference/flags.md"
WIDE = (MATRIX, "howto/small-gpus.md", "recipes.md", FLAGS, "reference/chats.md")
"""Pages whose tables take the width of the table of contents."""

FLAG = re.compile(r"(?<![\w-])--\w+")
INLINE_CODE = re.compile(r"<code>[^<]+</code>")
MATRIX_CELL = re.compile(r"<td([^>]*)>(exact|refused|GPU|numbers|compiled|trained)\b")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Mark flags and the cells of the support matrix for stylesheets/site.css, and give wide tables room."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    html = INLINE_CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
    if page.file.src_uri == FLAGS:
        return f'<div class="flags">{html}</div>'
    if page.file.src_uri != MATRIX:
        return html
    return MATRIX_CELL.sub(lambda cell: f'<td{cell[1]} class="cell-{cell[2].lower()}">{cell[2]}', html)


def results() -> set[str]:
    """Pages and pictures of benchmarks/results that documents link or show, by their paths in the repository."""
    documents = [*COPIED.values(), *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    found: set[str] = set()
    for document in documents:  # grows
        for _, target, _ in LINK.findall((ROOT / document).read_text(encoding="utf-8")):
            path = _target(document, target)
            if _is_result(path) and path not in found:
                found.add(path)
                documents += [path] * path.endswith(".md")
    return found


def text_of(document: str) -> str:
    """A document of the repository, its links to pages and pictures as the site has them; other files are named."""
    folder = posixpath.dirname(_site_path(document) or document)

    def link(found: re.Match[str]) -> str:
        label, target, part = found.groups()
        path = _target(document, target)
        site = _site_path(path)
        if site is not None:
            return f"{'!' * found[0].startswith('!')}[{label}]({posixpath.relpath(site, folder or '.')}{part})"
        return label if "`" in label or path in label else f"{label} (`{path}`)"

    text = LINK.sub(link, (ROOT / document).read_text(encoding="utf-8"))
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), text)  # in a table, where GitHub wants the backslash


def _site_path(path: str) -> str | None:
    """Where the site has a file of the repository."""
    for name, source in COPIED.items():
        if path == source:
            return name
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if _is_result(path) else None


def _is_result(path: str) -> bool:
    return path.startswith("benchmarks/results/") and path.endswith((".md", ".png", ".svg"))


def _target(document: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def flags_page() -> str:
    """Every flag of `longctx train` and `longctx dpo`, by group."""
    from longctx.settings.dpo import DPO
    from longctx.settings.flags import SFT

    lines = [
        "# Flags",
        "",
        "These are the flags of `longctx train`. The last table has those that `longctx dpo` adds or changes. `longctx",
        "verify` takes the flags of `longctx train`, and uses those that affect a single step. `longctx plan` and",
        "`longctx bench` have flags of their own, which their `--help` lists.",
        "",
        "Dashes may stand for underscores, and `--no_FLAG` for the value false. `--config run.yaml` sets any flag, and",
        "the command line overrides it. Flags have the names, meanings and defaults of TRL and transformers, except",
        "those marked ✦, which longctx adds. Where a default differs from TRL's, the table gives both. Values that are",
        "not listed are refused.",
        "",
    ]
    of_dpo = [flag for name, flag in DPO.flags.items() if flag is not SFT.flags.get(name)]
    groups: dict[str, list[Flag]] = {}
    for flag in SFT.flags.values():
        groups.setdefault(flag.group, []).append(flag)
    for title, flags in (groups | {"Flags of longctx dpo": of_dpo}).items():
        rows = ([f"`--{flag.name}`{' ✦' * flag.own}", *_facts_of(flag)] for flag in flags)
        lines += [f"## {title}", "", *_table(["flag", "values", "default", "meaning"], rows), ""]
    return "\n".join(lines)


def _facts_of(flag: Flag) -> list[str]:
    """Return values, default and meaning of a flag for the table."""
    from longctx.attention.backends import BACKENDS

    if flag.idle or flag.instead:
        return ["", "", _marked(f"No effect {flag.idle}." if flag.idle else f"Refused: {flag.instead}.")]
    default = flag.default_is or _code(flag.unset)
    if flag.ours is not UNSET:
        default += f" (TRL: {_code(flag.default) or 'unset'})"
    switch, *needed = flag.needs or ("",)
    meaning = (
        flag.help or "Only this value is accepted.",
        f"It takes effect with --{switch} {' or '.join(map(str, needed))}." * bool(switch),
        f"Other values are refused: {flag.reason}." * bool(flag.reason),
        f"Other names: {', '.join(f'--{alias}' for alias in flag.aliases)}." * bool(flag.aliases),
    )
    choices = ("auto", *BACKENDS.spread) if flag.name == "sp_backend" else flag.choices or flag.values
    values = "unset" if choices == flag.values and None in choices else " ".join(f"`{value}`" for value in choices)
    return [values or f"{flag.kind.name} {flag.limits}".strip(), default, _marked(" ".join(filter(None, meaning)))]


def _code(default: object) -> str:
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return "" if shown in (None, "") else f"`{shown}`"


def _marked(text: str) -> str:
    return FLAG.sub(r"`\g<0>`", text)


def profiles_page() -> str:
    """The profiles of configs/, each with the comment on top of it, which has its launch command."""
    lines = [
        "# Profiles",
        "",
        "To use an Accelerate profile of `configs/`, run `accelerate launch --config_file configs/NAME.yaml`.",
        "`longctx train --accelerate_config NAME` works too, also where longctx is installed without its repository.",
        "",
    ]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        lines += [f"## {path.stem}", "", "```yaml", *path.read_text(encoding="utf-8").splitlines(), "```", ""]
    lines += ["# Run files", "", "These files set flags for `--config`. Paths are relative to the repository.", ""]
    for path in sorted((ROOT / "configs" / "run").glob("*.yaml")):
        lines += [f"## run/{path.stem}", "", "```yaml", *path.read_text(encoding="utf-8").splitlines(), "```", ""]
    return "\n".join(lines)


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *escaped]]
