"""How a file is damaged."""

from __future__ import annotations

import json
import random
from typing import Any


def damage(data: bytes, draw: random.Random) -> bytes:
    """A few changes to a file's contents."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        in_json = _change_json if data[:1] in (b"{", b"[") else _flip
        data = draw.choice((_flip, _cut, _splice, _insert, _insert, *[in_json] * 5))(data, draw)
    return data


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 10)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randint(0, len(data))]


def _splice(data: bytes, draw: random.Random) -> bytes:
    """A part left out, doubled, or moved."""
    start, stop = sorted(draw.randint(0, len(data)) for _ in range(2))
    at = draw.randint(0, len(data))
    part = data[start:stop]
    return draw.choice((data[:start] + data[stop:], data[:at] + part + data[at:], data[:stop] + part + data[stop:]))


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randint(0, len(data))
    return data[:at] + draw.choice(_STUMBLING_BLOCKS) + data[at + draw.choice((0, 0, 1, 8)) :]


_STUMBLING_BLOCKS = [
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\r\n",
    b"\n\n",
    b"\xff" * 8,
    b"\x00" * 64,
    b"\xff\xff\xff\x7f",
    b'"',
    b"}",
    b"]",
    b"[",
    b"\\ud800",
    b"\\u0000",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-1",
    b"9" * 30,
    b"9" * 5000,
    b"[" * 100_000,
    b'{"a":' * 10_000,
    b"null",
    b"true",
    b"{{",
    b"{%",
    b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    b"{{ 'a' * 99999999999 }}",
    b"{{ ''.__class__.__mro__ }}",
    b"!!python/object/apply:os.getpid []",
    b"&a [*a, *a]",
    b"../../x",
]


def _change_json(data: bytes, draw: random.Random) -> bytes:
    """In JSON, or in one of its lines, another value, key or nesting somewhere; other data as it is."""
    lines = data.split(b"\n")
    number = draw.randrange(len(lines))
    for at, source in ((None, data), (number, lines[number])):
        try:
            document = json.loads(source)
        except (ValueError, RecursionError):
            continue
        text = json.dumps(_changed(document, draw), ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        if draw.random() < 0.1:
            text = text.replace(b'":', b'":' + b" " * 10, 1)
        return text if at is None else b"\n".join([*lines[:at], text, *lines[at + 1 :]])
    return data


def _changed(node: Any, draw: random.Random) -> Any:
    """Return the JSON value with one change somewhere inside it."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        key = draw.choice(sorted(node))
        change = draw.random()
        if change < 0.1:
            return {name: value for name, value in node.items() if name != key}
        if change < 0.2:
            return {draw.choice(_NAMES) if name == key else name: value for name, value in node.items()}
        if change < 0.3:
            return node | {draw.choice(_NAMES): _value(draw)}
        return node | {key: _changed(node[key], draw)}
    if isinstance(node, list) and node and draw.random() < 0.9:
        at = draw.randrange(len(node))
        return [*node[:at], *draw.choice(([], [_changed(node[at], draw)], [node[at]] * 2)), *node[at + 1 :]]
    return _value(draw)


_NAMES = [
    "",
    "text",
    "messages",
    "input_ids",
    "labels",
    "position_ids",
    "attention_mask",
    "auto_map",
    "\ud800",
    "_type",
]


def _value(draw: random.Random) -> Any:
    return draw.choice(
        [
            None,
            True,
            0,
            -1,
            1,
            -100,
            300,
            2**31,
            -(2**63),
            10**30,
            10**400,
            0.5,
            -1e300,
            float("nan"),
            float("inf"),
            "",
            "x",
            "\ud800",
            "\x00",
            "../../x",
            "/dev/zero",
            "x" * 10_000,
            [],
            {},
            [[]],
            [1, "a", None],
            {"": 0},
            json.loads("[" * 500 + "]" * 500),
        ]
    )
