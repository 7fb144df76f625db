"""What several files of tests of data start from."""

from __future__ import annotations

import datasets
import pytest

from longctx.model.tiny import tiny_tokenizer


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Each test has its own cache of `datasets`, and never waits for the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()
