"""Measurements of the operator: rollouts under load, scaling over a day of shifts."""
