"""Brings a checkpoint to a node: fetched once, verified while it streams, published at one instant. Needs no torch."""
