"""Carry out a resolved run: `prepare` processes and data, `load` the weights, `fit` the model, `finish` together."""

from longctx.run.model import build_trainer, load
from longctx.run.preparation import PreparedRun, prepare, prepare_data
from longctx.run.processes import finish
from longctx.run.training import first_step_batches, fit

__all__ = ["PreparedRun", "build_trainer", "finish", "first_step_batches", "fit", "load", "prepare", "prepare_data"]
