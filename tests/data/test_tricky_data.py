"""Text that is easily read wrong: surrogates, numbers, repeated keys, encodings, line ends, what is compressed.

Every file gives the same documents, or the same error with the place in the file, whether it is loaded or streamed.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

from longctx.data import DataError, load_records, record_place, stream_records, tokenize_records, tokenize_stream
from tests.data.tables import table_bytes
from tests.data.test_data_fuzz import FORMATS, TOKENIZER, documents_in, write
from tests.few import few

pytestmark = pytest.mark.usefixtures("own_cache")


def chat(value: str) -> str:
    """A conversation with a value that its template does not read."""
    return f'{{"messages": [{{"role": "user", "content": "a", "more": {value}}}]}}\n'


FINE = '{"text": "fine"}\n'
IDS = '{"input_ids": [1]}\n{"input_ids": [1, %s]}\n'
LABELS = '{"input_ids": [1], "labels": [1]}\n{"input_ids": [1, 2], "labels": [1, %s]}\n'
HALF = "is half a surrogate pair"
ENDLESS = ":2: 'messages' holds NaN or an infinite number"
CHAT = "<|im_start|>user\na<|im_end|>"
BINARY = "(: NUL byte at offset|:1: not UTF-8)"
MARK = "\ufeff"
DEEP = {depth: "[" * depth + r'"\ud83d\ude00"' + "]" * depth for depth in (99, 100, 970, 100_000)}
TOO_DEEP = "lists and objects are nested more than 100 deep, the limit"
TRICKY: dict[str, tuple[str, str | bytes, str | list[str]]] = {
    "a surrogate pair": (".jsonl", FINE + r'{"text": "\ud83d\ude00"}', ["fine", "\U0001f600"]),
    "a surrogate pair, its halves exchanged": (".jsonl", FINE + r'{"text": "\ude00\ud83d"}', rf":2: .*\\ude00 {HALF}"),
    "half a surrogate pair in a key": (".jsonl", FINE + r'{"text": "a", "\ud83d": 1}', rf":2: .*\\ud83d {HALF}"),
    "half a surrogate pair in a chat": (".jsonl", chat("1") + chat(r'"\uD83D"'), rf":2: .*\\ud83d {HALF}"),
    "half a surrogate pair in an array": (".json", f'[{FINE}, {{"text": "\\udc00"}}]', rf", record 1 .*\\udc00 {HALF}"),
    "a surrogate in UTF-8": (".txt", b"a\xed\xb0\x80", r":1: not UTF-8 \(byte 0xed at offset 1\)"),
    "NaN in a chat": (".jsonl", chat("1") + chat("NaN"), ENDLESS),
    "1e400 in a chat": (".jsonl", chat("1") + chat('[{"a": -1e400}]'), ENDLESS),
    "numbers in a column that is not read": (".jsonl", FINE + '{"text": "a", "n": [NaN, 1e400]}', ["fine", "a"]),
    "another type in a column that is not read": (
        ".jsonl",
        '{"text": "a", "n": 1}\n{"text": "b", "n": "x"}',
        ["a", "b"],
    ),
    "a date as a text": (".jsonl", FINE + '{"text": "2020-01-01T00:00:00"}', ["fine", "2020-01-01T00:00:00"]),
    "a NUL as a text": (".jsonl", FINE + r'{"text": "\u0000"}', ["fine", "\0"]),
    "an array over lines": (".json", f"\n [\n  {FINE},\n  {FINE}]\n", ["fine", "fine"]),
    "an array that is cut off": (".json", f"[{FINE}, {FINE}", ".*malformed JSON"),
    "a number of more than 64 bits": (".jsonl", chat(f"{2**63}") + chat(f"[{-(2**63) - 1}]"), [CHAT, CHAT]),
    "a number of 5,000 digits": (".jsonl", FINE + f'{{"text": "a", "n": {"9" * 5000}}}', ":2: malformed JSON"),
    "a key twice": (".jsonl", FINE + '{"text": "a", "text": "a"}', ":2: .*the key 'text' stands twice"),
    "a key twice, once escaped": (".jsonl", FINE + r'{"text": "a", "te\u0078t": "b"}', ":2: .*'text' stands twice"),
    "a key twice in a chat": (".jsonl", chat("1") + chat('{"x": 1, "x": 1}'), ":2: .*the key 'x' stands twice"),
    "a key twice in an array": (".json", '[{"text": "a", "x": {"y": 1, "y": 2}}]', ", record 0 .*'y' stands twice"),
    "UTF-16": (".jsonl", FINE.encode("utf-16"), r":1: not UTF-8 \(byte 0xff at column 1\)"),
    "UTF-16 without a mark": (".jsonl", FINE.encode("utf-16-be"), ":1: malformed JSON"),
    "UTF-16 array": (".json", f"[{FINE}]".encode("utf-16"), r":1: not UTF-8 \(byte 0xff at column 1\)"),
    "UTF-16 text": (".txt", "a b".encode("utf-16"), BINARY),
    "a mark at the start": (".jsonl", MARK + FINE + FINE, ["fine", "fine"]),
    "two marks at the start": (".jsonl", MARK * 2 + FINE, ":1: malformed JSON .*BOM"),
    "a mark before a line": (".jsonl", FINE + MARK + FINE, ":2: malformed JSON .*BOM"),
    "a mark within a line": (".jsonl", FINE + f'{{"text":{MARK} "a"}}', ":2: malformed JSON"),
    "a mark within an array": (".json", f"[{FINE},{MARK}{FINE}]", r", record 1 .counted from 0.: malformed JSON .*BOM"),
    "a mark within a text": (".jsonl", FINE + f'{{"text": "a{MARK}b"}}', ["fine", f"a{MARK}b"]),
    "marks in a text file": (".txt", f"{MARK}a{MARK}b", [f"a{MARK}b"]),
    "lines that end with CR": (".jsonl", FINE.replace("\n", "\r") * 2, ":1: malformed JSON .Extra data"),
    "CR within a text": (".jsonl", FINE + '{"text": "a\rb"}', ":2: malformed JSON .Invalid control character"),
    "lines of CR alone": (".jsonl", f"\r{FINE}\r\r\n{FINE}", ["fine", "fine"]),
    "CR in a text file": (".txt", b"a\rb\r\nc\n", ["a\rb\r\nc\n"]),
    "empty and blank lines": (".jsonl", f"\n \n\t\r\n{FINE}\n\n \x0b\x0c \n{FINE} \n", ["fine", "fine"]),
    "a line of a no-break space": (".jsonl", FINE + "\u00a0\n" + FINE, ":2: malformed JSON"),
    "other line ends of Unicode": (".jsonl", '{"text": "a\u2028b\u0085c"}\n' + FINE, ["a\u2028b\u0085c", "fine"]),
}

TRICKY |= {
    f"{value} in {lines}": (".jsonl", lines % value, f":2: '{name}' holds {said}; expected a flat list of integers")
    for name, lines, value, said in (
        *(("input_ids", IDS, n, n) for n in (2**31, 2**63, -(2**63), 2**64 + 1, "NaN", "true")),
        ("input_ids", IDS, "1e400", "Infinity"),
        *(("labels", LABELS, n, n) for n in (2**64 - 100, "false")),
    )
}
TRICKY |= {
    f"lists {depth} deep{how}": (suffix, text % nested, ["a", "a"] if depth == 99 else f"{place} {TOO_DEEP}")
    for how, suffix, text, place in (
        ("", ".jsonl", '{"text": "a"}\n{"text": "a", "x": %s}', ":2:"),
        (" in an array", ".json", '[{"text": "a"}, {"text": "a", "x": %s}]', ", record 1 .counted from 0.:"),
    )
    for depth, nested in DEEP.items()
}


def packed(codec: str, suffix: str = "") -> bytes:
    """Lines of JSON, or a table of texts, compressed."""
    texts = [f"{number * 2654435761:x}" * 40 for number in range(50)]
    if not suffix:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        return gzip.compress(lines, mtime=0) if codec == "gzip" else pa.compress(lines, codec, asbytes=True)
    table = pa.table({"text": texts})
    if suffix == ".parquet":
        return table_bytes(table, suffix, None, compression=codec, use_dictionary=False, write_statistics=False)
    return table_bytes(table, suffix, None, options=pa.ipc.IpcWriteOptions(compression=codec))


def spoilt(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(8) + data[len(data) // 2 + 8 :]


COMPRESSED = {(".parquet", "gzip"), (".parquet", "zstd"), (".arrow", "zstd")}
TRICKY |= {
    f"{codec} in {suffix}, {how}": (suffix, change(packed(codec, suffix)), r"(: |, record 0 .*: )not (a )?readable")
    for suffix, codec in sorted(COMPRESSED)
    for how, change in {"cut": lambda data: data[: len(data) // 2], "spoilt": spoilt}.items()
}
TRICKY |= {
    f"{codec} named {suffix}{', cut' * is_cut}": (suffix, packed(codec)[: 30 if is_cut else None], said)
    for codec, own in {"gzip": ".gz", "zstd": ".zst"}.items()
    for suffix, said in {f".jsonl{own}": f": unknown format '{own}'", ".jsonl": ":1: not UTF-8", ".txt": BINARY}.items()
    for is_cut in (False, True)
}

TEXT = pa.table({"text": ["a", "b"]})
KEPT_FEATURES = {
    "a list": ["text"],
    "a string": "text",
    "of a number": {"text": 5},
    "of an unknown type": {"text": {"_type": "Nope"}},
    "of unknown values": {"text": {"dtype": "nonsense", "_type": "Value"}},
}
DAMAGED = {
    f"features: {name}": TEXT.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    for name, features in KEPT_FEATURES.items()
} | {
    "features that are no JSON": TEXT.replace_schema_metadata({"huggingface": "{"}),
    "features that are no UTF-8": TEXT.replace_schema_metadata({"huggingface": b"\xff"}),
    "features of lists in lists": TEXT.replace_schema_metadata({"huggingface": "[" * 2000}),
    "two columns of one name": pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]),
    "two other columns of one name": pa.Table.from_arrays([pa.array(["a"])] * 3, names=["text", "x", "x"]),
    "list views": pa.table({"input_ids": pa.array([[1, 2]], pa.list_view(pa.int32()))}),
    "large list views": pa.table({"input_ids": pa.array([[1, 2]], pa.large_list_view(pa.int32()))}),
    "list views beside text": TEXT.append_column("x", pa.array([[1], [2]], pa.list_view(pa.int32()))),
}
TRICKY |= {
    f"{name} in {suffix}": (
        suffix,
        table_bytes(table, suffix),
        rf": not a readable {suffix.rpartition('.')[2]} file \(",
    )
    for name, table in DAMAGED.items()
    for suffix in FORMATS
}
KINDS_OF_TEXT = [pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
TRICKY |= {
    f"{kind} in {suffix}": (suffix, table_bytes(TEXT.cast(pa.schema({"text": kind})), suffix), ["a", "b"])
    for kind in KINDS_OF_TEXT
    for suffix in FORMATS
}


def streamed_from(path: Path) -> list[str] | str:
    """As `documents_in`, of a stream."""
    try:
        records = stream_records(str(path))
        documents = tokenize_stream(records, TOKENIZER, place=lambda number: record_place(number, str(path)))
        return [TOKENIZER.decode(document["input_ids"][:-1]) for document in documents]
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", TRICKY)
def test_it_is_read_right_or_named(tmp_path, name):
    suffix, data, expected = TRICKY[name]
    path = write(tmp_path, suffix, data if isinstance(data, bytes) else data.encode())
    for found in (documents_in(path), streamed_from(path)):
        if isinstance(expected, list):
            assert found == expected
        else:
            assert re.match(re.escape(str(path)) + expected, str(found)), found


@pytest.mark.parametrize("number", few(["3.141592653589793", str(2**70), "-0.0", "1e22", "1E-30", "null"], 2))
def test_templates_see_what_is_written(tmp_path, number):
    """To the last digit, whether records are cached or streamed, and no key that only another record has."""
    template = "{% for m in messages %}{{ m }}{% endfor %}"
    first, second = '{"role": "user", "content": "a"}', f'{{"role": "user", "content": "b", "x": [{number}]}}'
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"messages": [{message}]}}\n' for message in (first, second)))
    for documents in (
        tokenize_records(load_records(str(path)), TOKENIZER, chat_template=template),
        tokenize_stream(stream_records(str(path)), TOKENIZER, chat_template=template),
    ):
        texts = [TOKENIZER.decode(document["input_ids"]) for document in documents]
        assert texts == [repr(json.loads(message)) for message in (first, second)]
