"""Forecasts of a run's memory and time: in closed form, traced on fake tensors, simulated, or from measured speeds."""
