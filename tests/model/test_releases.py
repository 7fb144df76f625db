"""Which model types need a later transformers than the oldest supported one."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version
from transformers import CONFIG_MAPPING

from longctx.model.allow_list import ADDED_IN, CAUSAL_MODELS, MULTIMODAL_MODELS
from tests.model.test_models import FAMILIES


def test_types_are_left_out_only_before_the_release_that_added_them():
    """So that all are compared with the newest release."""
    types = {*CAUSAL_MODELS, *MULTIMODAL_MODELS}
    assert types >= ADDED_IN.keys()
    installed = Version(version("transformers"))
    later = {name for name, release in ADDED_IN.items() if installed.release < Version(release).release}
    assert {name for name in types if name not in CONFIG_MAPPING} == later
    assert {name for name in CAUSAL_MODELS if name not in later} == {model_type for model_type, _ in FAMILIES.values()}
