"""MiniCPM-Robot with FP8 (e4m3) products in the backbone: a scale a token, a scale an output channel.

Everything else is as in bf16: patches and mergers, attention, norms, convolutions, decay and the delta rule's state.
The action head stays in bf16.
"""

from __future__ import annotations

from dataclasses import replace

from taktline_worker.fp8_layers import quantised
from taktline_worker.models.minicpm_robot.weights import FullAttention, MiniCpmWeights, TextLayer


def quantise(weights: MiniCpmWeights) -> MiniCpmWeights:
    """The same with the matrices of vision blocks and text layers in FP8, from bf16."""
    vision, text = weights.vision, weights.text
    blocks = tuple(quantised(block, "qkv", "out", "fc1", "fc2") for block in vision.blocks)
    layers = tuple(_text_layer(layer) for layer in text.layers)
    return replace(weights, vision=replace(vision, blocks=blocks), text=replace(text, layers=layers))


def _text_layer(layer: TextLayer) -> TextLayer:
    if isinstance(layer.mixer, FullAttention):
        return replace(quantised(layer, "gate_up", "down"), mixer=quantised(layer.mixer, "qkv", "out"))
    return replace(quantised(layer, "gate_up", "down"), mixer=quantised(layer.mixer, "inputs", "out"))
