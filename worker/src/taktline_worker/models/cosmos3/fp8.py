"""Cosmos3 with FP8 (e4m3) products in the tower of video and actions: a scale a token, a scale an output channel.

Attention multiplies in FP8 as well, where the GPU's table has kernels for it: queries, keys and values with a scale a
layer, which their norms and weights bound.
Everything else is as in bf16: the text tower (its keys and values are made once an instruction), residuals, patch,
action and time projections, and the solver.
"""

from __future__ import annotations

from dataclasses import replace

from taktline_kernels.fp8_heads import head_multipliers
from taktline_kernels.fp8_rows import quantise_weight
from taktline_kernels.ops.fp8_attention import attends_in_fp8
from taktline_kernels.ops.fp8_products import fuses_swiglu_fp8

from taktline_worker.fp8_layers import CAPABILITY, Fp8Linear, check_device, functions, quantised
from taktline_worker.models.cosmos3.weights import Cosmos3Weights, Fp8GatedLinear, GatedLinear, Linear, TowerLayer

__all__ = ["CAPABILITY", "Fp8Linear", "check_device", "functions", "quantise"]


def quantise(weights: Cosmos3Weights) -> Cosmos3Weights:
    """The same with the matrices of the tower of video and actions in FP8, layer by layer."""
    return replace(weights, joint=tuple(_quantised(layer) for layer in weights.joint))


def _quantised(layer: TowerLayer) -> TowerLayer:
    made = quantised(layer, "qkv", "out", "down")
    up = layer.up
    if isinstance(up, GatedLinear) and fuses_swiglu_fp8(up.weight.shape[0] // 2, up.weight.shape[1], up.weight.device):
        made = replace(made, up=Fp8GatedLinear(quantise_weight(up.weight)))
    else:  # the activation is behind the product
        made = quantised(replace(made, up=up.plain() if isinstance(up, GatedLinear) else up), "up")
    if not isinstance(made.qkv, Fp8Linear) or layer.q_norm is None or layer.k_norm is None:
        return made
    assert isinstance(layer.qkv, Linear)
    assert isinstance(layer.out, Linear)
    width, queries = len(layer.q_norm), layer.out.weight.shape[1]
    values = (layer.qkv.weight.shape[0] - queries) // 2
    if not attends_in_fp8(queries // width, values // width, width, layer.qkv.weight.device):
        return made
    v_weight = layer.qkv.weight[-values:]
    return replace(made, multipliers=head_multipliers(layer.q_norm, layer.k_norm, v_weight, 1.0 + layer.norm1))
