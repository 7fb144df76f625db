"""The HTML of a run's page: its frame, and the elements in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from longctx.report.svg import Series


def escaped(text: str) -> str:
    """Return the text as HTML shows it."""
    return escape(str(text).replace("\x00", "\ufffd"))


def tile(name: str, value: str) -> str:
    return f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>"


def figure(name: str, chart: str, legend: Sequence[Series] = (), note: str = "") -> str:
    keys = "".join(f'<li><i class="{series.look}"></i>{escaped(series.name)}</li>' for series in legend)
    below = (f"<ul class=legend>{keys}</ul>" if keys else "") + (f"<p>{escaped(note)}</p>" if note else "")
    return f"<figure><figcaption>{escaped(name)}</figcaption>{chart}{below}</figure>\n"


def folded(name: str, value: str, inner: str) -> str:
    """Return a figure that is shown on demand, under a line that says as much."""
    return f"<details class=flat><summary>{escaped(name)}: {escaped(value)} in all steps</summary>{inner}</details>\n"


def words(command: Sequence[str]) -> str:
    """Return words as a shell reads them. Lines break between words, and not within `--flag`."""
    return " ".join(f"<span>{escaped(shlex.quote(word))}</span>" for word in command)


def table(rows: Iterable[tuple[str, Any]]) -> str:
    body = "".join(f'<tr><th scope="row">{escaped(n)}</th><td>{escaped(str(v).strip())}</td></tr>' for n, v in rows)
    return f"<table><tbody>{body}</tbody></table>" if body else "<p>none</p>"


def bullet_list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>" if items else "<p>none</p>"


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{name} – longctx run</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{name}</h1><p class="{state}">{ended}</p><p class="when">Written {written} by longctx.</p></header>
<main>
<dl class="tiles">{tiles}</dl>
<section aria-label="Results">{results}</section>
<section class="charts" aria-label="Charts">
{charts}</section>
<details><summary>Numbers</summary><div class="wide" tabindex="0">{numbers}</div></details>
<section><h2>Run</h2><div class="wide" tabindex="0">{description}</div></section>
<section><h2>Command</h2><pre tabindex="0">{command}</pre></section>
<section class="columns">
<div><h2>Packing</h2><div class="wide" tabindex="0">{packing}</div></div>
<div><h2>Versions</h2><div class="wide" tabindex="0">{versions}</div></div>
<div><h2>Checkpoints</h2>{checkpoints}</div>
</section>
<section><h2>Flags that were set</h2><div class="wide" tabindex="0">{given}</div></section>
<details><summary>All flags</summary><div class="wide" tabindex="0">{settings}</div></details>
</main>
</body>
</html>
"""
