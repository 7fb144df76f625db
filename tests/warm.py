"""What ranks of tests need first, for the process that they are forked from: imported once, and not by every rank."""

import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import peft  # noqa: F401
import pytest  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import longctx.parallel
import longctx.report.page
import longctx.run
import longctx.settings.resolve
import longctx.training.trainer
import longctx.verify.parity  # noqa: F401

get_checkpoint_conversion_mapping("qwen3")  # a thousand regular expressions, kept for all models
