"""GR00T with FP8 (e4m3) products in the backbone: a scale a token, a scale an output channel.

Everything else is as in bf16: patches and mergers, attention, norms and residuals, the refinement, and the action head,
whose few rows are bound by other things than arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

from taktline_worker.fp8_layers import quantised
from taktline_worker.models.groot.weights import GrootWeights


def quantise(weights: GrootWeights) -> GrootWeights:
    """The same with the matrices of vision blocks and text layers in FP8, from bf16."""
    vision, text = weights.vision, weights.text
    blocks = tuple(quantised(block, "qkv", "out", "fc1", "fc2") for block in vision.blocks)
    layers = tuple(quantised(layer, "qkv", "out", "gate_up", "down") for layer in text.layers)
    return replace(weights, vision=replace(vision, blocks=blocks), text=replace(text, layers=layers))
