"""π0 and π0.5 as the official PyTorch code states them, written plainly: the oracle (fp32) and the peer (bf16).

Nothing here is fused, tabulated or skipped: three projections a layer, the time MLP and all AdaRMS layers (π0: the
state's token too) at every step, all 18 prefix layers whole, padded prompt slots masked. Attention is
`scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from taktline_worker.models.pi.config import PiArchitecture
from torch import Tensor
from torch.nn import functional

Tensors = Mapping[str, Tensor]


def official_dtypes(tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors in openpi's bf16 mode (or all fp32): norms, AdaRMS, patches, positions and heads stay fp32."""
    cast: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tower = name.startswith(("vision.", "projector.", "prefix.", "expert."))
        keep = name.startswith(("vision.embeddings.", "expert.norm", "prefix.norm")) or (
            "norm" in name and not name.startswith("vision.")
        )
        cast[name] = tensor.to(dtype if tower and not keep else torch.float32)
    return cast


def vision_layer(w: Tensors, base: str, x: Tensor, heads: int) -> Tensor:
    """One SigLIP block."""
    width = x.shape[-1]
    h = functional.layer_norm(x, (width,), w[f"{base}.layer_norm1.weight"], w[f"{base}.layer_norm1.bias"], 1e-6)
    q, k, v = (
        functional.linear(h, w[f"{base}.self_attn.{p}_proj.weight"], w[f"{base}.self_attn.{p}_proj.bias"])
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
        for p in "qkv"
    )
    h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + functional.linear(h, w[f"{base}.self_attn.out_proj.weight"], w[f"{base}.self_attn.out_proj.bias"])
    h = functional.layer_norm(x, (width,), w[f"{base}.layer_norm2.weight"], w[f"{base}.layer_norm2.bias"], 1e-6)
    h = functional.gelu(
        functional.linear(h, w[f"{base}.mlp.fc1.weight"], w[f"{base}.mlp.fc1.bias"]), approximate="tanh"
    )
    return x + functional.linear(h, w[f"{base}.mlp.fc2.weight"], w[f"{base}.mlp.fc2.bias"])


def rms(x: Tensor) -> Tensor:
    """x / rms(x), fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


def norm(w: Tensors, name: str, x: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """RMSNorm, or AdaRMS with its gate where the layer is adaptive."""
    if cond is None:
        return (rms(x) * (1.0 + w[f"{name}.weight"].float())).to(x.dtype), None
    scale, shift, gate = functional.linear(cond, w[f"{name}.dense.weight"], w[f"{name}.dense.bias"]).chunk(3, dim=-1)
    return (rms(x) * (1 + scale[:, None]) + shift[:, None]).to(x.dtype), gate[:, None].to(x.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on (batch, heads, tokens, d): fp32 frequencies, cos and sin in the dtype of x, as the official code."""
    d = x.shape[-1]
    inverse = 1.0 / 10000.0 ** (torch.arange(0, d, 2, device=x.device).float() / d)
    angle = positions[:, None, :, None].float() * inverse
    cos, sin = angle.cos().repeat(1, 1, 1, 2).to(x.dtype), angle.sin().repeat(1, 1, 1, 2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def gemma_layer(
    w: Tensors,
    base: str,
    x: Tensor,
    positions: Tensor,
    mask: Tensor,
    past: tuple[Tensor, Tensor] | None,
    cond: Tensor | None,
    heads: int,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """One Gemma block; returns the stream and the rotated key and the value of its own tokens."""
    h, gate = norm(w, f"{base}.input_layernorm", x, cond)
    q, k, v = (functional.linear(h, w[f"{base}.self_attn.{p}_proj.weight"]) for p in "qkv")
    q = rotate(q.unflatten(-1, (heads, -1)).transpose(1, 2), positions)
    k, v = rotate(k[:, None], positions), v[:, None]
    keys, values = (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((past[1], v), 2))
    h = functional.scaled_dot_product_attention(
        q, keys.expand(-1, heads, -1, -1), values.expand(-1, heads, -1, -1), mask
    )
    h = functional.linear(h.transpose(1, 2).flatten(2), w[f"{base}.self_attn.o_proj.weight"])
    x = x + (h if gate is None else h * gate)
    h, gate = norm(w, f"{base}.post_attention_layernorm", x, cond)
    h = functional.gelu(
        functional.linear(h, w[f"{base}.mlp.gate_proj.weight"]), approximate="tanh"
    ) * functional.linear(h, w[f"{base}.mlp.up_proj.weight"])
    h = functional.linear(h, w[f"{base}.mlp.down_proj.weight"])
    return x + (h if gate is None else h * gate), (k, v)


class PlainPi:
    """The whole policy network over canonical tensors.

    Args:
        tensors: canonical name -> tensor, in the dtypes of `official_dtypes`.
        architecture: dimensions.
        steps: solver steps.
        compile_layers: run the three block functions through torch.compile.
    """

    def __init__(
        self, tensors: Tensors, architecture: PiArchitecture, steps: int, compile_layers: bool = False
    ) -> None:
        self.a, self.steps = architecture, steps
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            parts = name.split(".layers.")
            if len(parts) == 2:
                index, rest = parts[1].split(".", 1)
                self._parts.setdefault(f"{parts[0]}.{index}", {})["l." + rest] = tensor
            else:
                self._parts.setdefault("", {})[name] = tensor
        self._vision_layer: Callable[..., Tensor] = vision_layer
        self._gemma_layer: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]] = gemma_layer
        if compile_layers:
            self._vision_layer = torch.compile(vision_layer, dynamic=False)
            self._gemma_layer = torch.compile(gemma_layer, dynamic=False)

    def vision(self, pixels: Tensor) -> Tensor:
        """(B, V, 3, size, size) fp32 -> (B, V * tokens, prefix width)."""
        w, batch = self._parts[""], pixels.shape[0]
        flat = pixels.flatten(0, 1)
        x = functional.conv2d(
            flat,
            w["vision.embeddings.patch_embedding.weight"],
            w["vision.embeddings.patch_embedding.bias"],
            stride=self.a.patch_size,
        )
        x = x.flatten(2).transpose(1, 2) + w["vision.embeddings.position_embedding.weight"]
        x = x.to(w["projector.weight"].dtype)
        for i in range(self.a.vision_layers):
            x = self._vision_layer(self._parts[f"vision.encoder.{i}"], "l", x, self.a.vision_heads)
        x = functional.layer_norm(
            x, x.shape[-1:], w["vision.post_layernorm.weight"], w["vision.post_layernorm.bias"], 1e-6
        )
        return functional.linear(x, w["projector.weight"], w["projector.bias"]).reshape(batch, -1, self.a.prefix_width)

    def prefix(self, image_tokens: Tensor, ids: Tensor, valid: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of all layers, and the mask of the whole prefix."""
        w = self._parts[""]
        text = functional.embedding(ids, w["prefix.embed_tokens.weight"]) * math.sqrt(self.a.prefix_width)
        x = torch.cat((image_tokens, text), dim=1)
        mask = torch.cat((valid.new_ones(image_tokens.shape[:2]), valid), dim=1)
        positions = mask.long().cumsum(1) - 1
        cache = []
        for i in range(self.a.depth):
            x, kv = self._gemma_layer(
                self._parts[f"prefix.{i}"], "l", x, positions, mask[:, None, None, :], None, None, self.a.heads
            )
            cache.append(kv)
        return cache, mask

    def velocity(
        self, x_t: Tensor, t: float, cache: list[tuple[Tensor, Tensor]], mask: Tensor, state: Tensor | None
    ) -> Tensor:
        """One evaluation of the flow field, fp32 (B, H, action width)."""
        w, batch, horizon = self._parts[""], x_t.shape[0], x_t.shape[1]
        half = self.a.expert_width // 2
        fraction = torch.linspace(0, 1, half, dtype=torch.float64, device=x_t.device)
        angle = 2 * math.pi * t / (0.004 * (4.0 / 0.004) ** fraction)
        time = torch.cat((angle.sin(), angle.cos())).float().expand(batch, -1)
        actions = functional.linear(x_t, w["action_in_proj.weight"], w["action_in_proj.bias"])
        cond: Tensor | None = None
        if state is None:
            cond, suffix = time, actions
            for name in ("time_mlp_in", "time_mlp_out"):
                cond = functional.silu(functional.linear(cond, w[f"{name}.weight"], w[f"{name}.bias"]))
        else:
            both = torch.cat((actions, time[:, None].expand(-1, horizon, -1)), dim=-1)
            both = functional.linear(both, w["action_time_mlp_in.weight"], w["action_time_mlp_in.bias"])
            both = functional.linear(
                functional.silu(both), w["action_time_mlp_out.weight"], w["action_time_mlp_out.bias"]
            )
            token = functional.linear(state, w["state_proj.weight"], w["state_proj.bias"])
            suffix = torch.cat((token[:, None], both), dim=1)
        x, own = suffix.to(cache[0][0].dtype), suffix.shape[1]
        positions = mask.sum(1, keepdim=True) + torch.arange(own, device=x_t.device)
        among = mask.new_ones(1 if state is None else own, own)
        if state is not None:
            among[0, 1:] = False  # the state sees no action
        whole = torch.cat((mask[:, None].expand(-1, len(among), -1), among.expand(batch, -1, -1)), dim=2)[:, None]
        for i in range(self.a.depth):
            x, _ = self._gemma_layer(self._parts[f"expert.{i}"], "l", x, positions, whole, cache[i], cond, self.a.heads)
        x, _ = norm(w, "expert.norm", x, cond)
        return functional.linear(x[:, -horizon:].float(), w["action_out_proj.weight"], w["action_out_proj.bias"])

    def __call__(
        self, pixels: Tensor, ids: Tensor, valid: Tensor, noise: Tensor, state: Tensor | None = None
    ) -> Tensor:
        """Actions, fp32 (B, H, action width).

        Args:
            pixels: (B, V, 3, size, size) fp32 in [-1, 1].
            ids: (B, L) int64.
            valid: (B, L) bool.
            noise: (B, H, action width) fp32.
            state: (B, action width) fp32 of π0, which π0.5 has in its prompt.
        """
        cache, mask = self.prefix(self.vision(pixels), ids, valid)
        x = noise
        for step in range(self.steps):
            x = x + (-1.0 / self.steps) * self.velocity(x, 1.0 + step * (-1.0 / self.steps), cache, mask, state)
        return x
