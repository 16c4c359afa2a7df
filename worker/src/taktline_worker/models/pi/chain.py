"""The expert's kernel chain for one row, where this GPU and a policy's dimensions have one."""

from __future__ import annotations

import logging

import torch
from taktline_kernels.cuda import expert
from taktline_kernels.cuda.expert import ExpertChain

from taktline_worker.models.pi.config import RMS_EPS, PiArchitecture
from taktline_worker.models.pi.weights import AdaptiveNorms, PiWeights

logger = logging.getLogger(__name__)


def make_chain(
    weights: PiWeights, norms: AdaptiveNorms, architecture: PiArchitecture, horizon: int, max_keys: int
) -> tuple[ExpertChain | None, str]:
    """The chain, or None and the reason; arguments as `fused.fuse` has them, gates and ups interleaved."""
    a, heads = architecture, weights.heads
    tokens = horizon + int(heads.state_weight is not None)
    published = (a.expert_width, a.expert_mlp, a.heads, a.head_dim, a.action_width)
    reason = ""
    if published != (expert.WIDTH, expert.HIDDEN, expert.HEADS, expert.HEAD_DIM, expert.ACTION):
        reason = "it is written for the published dimensions"
    elif torch.cuda.get_device_capability(weights.embedding.device)[0] != 9:
        reason = "it is written for Hopper GPUs"
    elif tokens > expert.MAX_ROWS or max_keys > expert.MAX_KEYS:
        reason = f"it holds {expert.MAX_ROWS} suffix tokens and {expert.MAX_KEYS} keys"
    if reason:
        logger.warning("the expert's kernel chain is not used: %s", reason)
        return None, reason
    layers = [
        expert.ExpertLayer(layer.qkv_weight, layer.out_weight, layer.gate_up_weight, layer.down_weight)
        for layer in weights.expert
    ]
    projections = expert.Projections(
        heads.in_weight,
        heads.in_bias,
        heads.out_weight,
        heads.out_bias,
        heads.time_out_weight,
        heads.time_out_bias,
        heads.state_weight,
        heads.state_bias,
    )
    try:
        chain = ExpertChain(
            layers,
            norms.scale,
            norms.shift,
            norms.gate,
            projections,
            max_keys=max_keys,
            eps=RMS_EPS,
            steady=weights.adaptive is None,
        )
    except RuntimeError as error:
        reason = f"it cannot be compiled or loaded here: {error}"
        logger.warning("the expert's kernel chain is not used: %s", reason)
        return None, reason
    return chain, ""
