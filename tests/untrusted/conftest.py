"""What tests of untrusted input share: a model to do harm to, and a cache of their own."""

from __future__ import annotations

import shutil

import datasets
import pytest


@pytest.fixture
def folder(saved_model, tmp_path):
    """A copy of a model, to do harm to."""
    return shutil.copytree(saved_model, tmp_path / "model")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
