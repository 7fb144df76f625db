"""docs/models.md covers every model type of the installed transformers, and none is let through that is not exact."""

from __future__ import annotations

import sys
from importlib.metadata import version
from types import ModuleType

import pytest
from packaging.version import Version
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.models.auto import modeling_auto

from longctx.model.allow_list import ADDED_IN, CAUSAL_MODELS, MULTIMODAL_MODELS, UnsupportedModelError, check_model
from tests.model import types_page
from tests.model.test_models import FAMILIES
from tests.model.types_page import EXACT, PAGE, REFUSED, UNKNOWN, model_types, status


@pytest.fixture(scope="module")
def statuses():
    return {model_type: status(model_type) for model_type in model_types()}


def without_dropout(model_type):
    """Return transformers' default configuration of a type, as a flag would set its dropout; None if it has none."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:
        return None
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "_jitter_noise"))):
            setattr(config, name, 0.0)
    return config


def test_no_type_is_let_through_that_is_not_exact(statuses):
    assert {found.kind for found in statuses.values()} == {EXACT, REFUSED, UNKNOWN}
    let_through = []
    for model_type, found in statuses.items():
        if found.kind == EXACT or (config := without_dropout(model_type)) is None:
            continue
        try:
            check_model(config)
            let_through.append(model_type)
        except UnsupportedModelError:
            pass
    assert let_through == []


def test_what_the_page_calls_exact_is_what_is_compared(statuses):
    exact = {CONFIG_MAPPING[name]().model_type for name, found in statuses.items() if found.kind == EXACT}
    assert {name for name in CAUSAL_MODELS if name in CONFIG_MAPPING} <= exact | {"qwen3_5_moe_text", "qwen3_5_text"}
    assert all(found.detail for found in statuses.values() if found.kind != UNKNOWN)


def test_the_page_is_up_to_date(statuses, monkeypatch):
    """A newer transformers has other types: its page is written anew (`python -m tests.model.types_page`)."""
    written = PAGE.read_text(encoding="utf-8")
    if f"transformers {version('transformers')}." not in written:
        pytest.skip("the page was written with another release of transformers")
    monkeypatch.setattr(types_page, "status", statuses.__getitem__)
    assert written == types_page.page()


def test_a_type_that_a_later_release_adds_is_one_line_and_refused(monkeypatch):
    """Its layers may do anything, although its configuration looks like Llama's."""
    module = ModuleType("transformers.models.brand_new.configuration_brand_new")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    config_class = type("BrandNewConfig", (LlamaConfig,), {"model_type": "brand_new", "__module__": module.__name__})
    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "brand_new", config_class)
    monkeypatch.setitem(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "brand_new", "BrandNewForCausalLM")
    assert "brand_new" in model_types()
    assert status("brand_new") == (UNKNOWN, "")
    with pytest.raises(UnsupportedModelError, match=r"'brand_new' is refused: Its layers are not known to be exact"):
        check_model(config_class())


def test_types_are_left_out_only_before_the_release_that_added_them():
    """So that all are compared with the newest release."""
    types = {*CAUSAL_MODELS, *MULTIMODAL_MODELS}
    assert types >= ADDED_IN.keys()
    installed = Version(version("transformers"))
    later = {name for name, release in ADDED_IN.items() if installed.release < Version(release).release}
    assert {name for name in types if name not in CONFIG_MAPPING} == later
    assert {name for name in CAUSAL_MODELS if name not in later} == {model_type for model_type, _ in FAMILIES.values()}
