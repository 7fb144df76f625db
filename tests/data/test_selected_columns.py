"""Selected columns in an entry of `datasets`, for files whose records have more columns."""

from __future__ import annotations

import pytest

from longctx.data import DataError, load_records
from longctx.model.tiny import tiny_tokenizer
from longctx.settings.data import Source
from longctx.settings.launcher import read_profile
from longctx.settings.read import parse_flags
from longctx.settings.resolve import resolve
from longctx.training.dataset import prepare_data_set
from tests.jsonl import write_lines

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize("streaming", ["False", "True"])
def test_selected_columns_decide_the_kind_of_json_records(streaming, tmp_path, monkeypatch):
    """Other columns are neither read nor checked. A later read without a selection does not use the cached result."""
    monkeypatch.setattr("longctx.settings.resolve.device_count", lambda: 0)
    tokenizer, path = tiny_tokenizer(), tmp_path / "both.jsonl"
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    record = {"prompt": "p", "completion": "c", "text": "t", "label": True}
    write_lines(path, (record | {"messages": chat, "number": n} for n in range(4)))

    def first(*columns):
        flags = ["--model_name_or_path", "tiny", "--max_length", "64", "--dataset_streaming", streaming]
        run = resolve(parse_flags([*flags, "--max_steps", "1", "--dataset_name", str(path)]), read_profile({}), {})
        settings = {**run.settings, "datasets": [Source(path=str(path), columns=[*columns])]}
        data = prepare_data_set(settings, tokenizer, run.model_config)
        documents = data.rows.source if streaming == "True" else data.documents
        return tokenizer.decode(next(iter(documents))["input_ids"])

    assert first("text") == f"t{tokenizer.eos_token}"
    assert first("prompt", "completion") == f"pc{tokenizer.eos_token}"
    assert first("messages") == tokenizer.apply_chat_template(chat, tokenize=False)
    with pytest.raises(DataError, match=f"{path}.*no column 'texts' to select; there are completion, label"):
        first("texts")
    with pytest.raises(DataError, match="label"):
        load_records(str(path))
