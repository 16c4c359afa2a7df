"""The demo policy's network in plain PyTorch: SigLIP-like vision, a Gemma prefix and a Gemma action expert with AdaRMS.

Shapes: B rows, C cameras, S prefix slots, P prompt tokens, H actions, W width, h query heads of size d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from taktline_demo.policy.architecture import Architecture

_EPS = 1e-6
_ROPE_THETA = 10_000.0


class VisionBlock(nn.Module):
    """A pre-norm transformer block with biases."""

    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.layer_norm1 = nn.LayerNorm(width, eps=_EPS)
        self.layer_norm2 = nn.LayerNorm(width, eps=_EPS)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, mlp), nn.Linear(mlp, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, W) -> (N, T, W)."""
        hidden = self.layer_norm1(x)
        query, key, value = (_heads(layer(hidden), self.heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out_proj(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.fc1(self.layer_norm2(x)), approximate="tanh")
        return x + torch.as_tensor(self.fc2(hidden))


class VisionTower(nn.Module):
    """Patches to features; no class token, no pooling."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, a.vision_width, a.patch_size, a.patch_size)
        self.position_embedding = nn.Embedding(a.tokens_per_image, a.vision_width)
        self.layers = nn.ModuleList(
            VisionBlock(a.vision_width, a.vision_heads, a.vision_mlp) for _ in range(a.vision_layers)
        )
        self.post_layernorm = nn.LayerNorm(a.vision_width, eps=_EPS)

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, size, size) in [-1, 1] -> (N, T, W)."""
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2) + self.position_embedding.weight
        for layer in self.layers:
            x = layer(x)
        features: Tensor = self.post_layernorm(x)
        return features


class RmsNorm(nn.Module):
    """Gemma's norm: the stored weight w multiplies by 1 + w."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., W) -> (..., W)."""
        return _rms(x) * (1.0 + self.weight)


class AdaptiveRmsNorm(nn.Module):
    """π0.5's norm of the expert: scale, shift and gate come from the solver time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)
        nn.init.normal_(self.dense.weight, std=0.01)
        nn.init.zeros_(self.dense.bias)
        with torch.no_grad():
            self.dense.bias[2 * width :] = 1.0  # open gates: the residual branches learn from the first step

    def forward(self, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, W) and cond (B, W) -> the modulated x and the gate (B, 1, W) of the branch that follows."""
        scale, shift, gate = self.dense(cond)[:, None].chunk(3, dim=-1)
        return _rms(x) * (1.0 + scale) + shift, gate


class Projections(nn.Module):
    """The matrices of one Gemma block."""

    def __init__(self, width: int, mlp: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, head_dim, bias=False)
        self.v_proj = nn.Linear(width, head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(width, mlp, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(mlp, width, bias=False)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, W) -> query (B, h, L, d), key and value (B, 1, L, d); query and key after RoPE."""
        query, key = _rotate(_heads(self.q_proj(x), self.heads), rope), _rotate(self.k_proj(x)[:, None], rope)
        return query, key, self.v_proj(x)[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention over keys (B, 1, L, d) where mask (B, 1, 1, L) is true, projected back to (B, H, W)."""
        shape = (-1, self.heads, -1, -1)
        attended = functional.scaled_dot_product_attention(query, key.expand(shape), value.expand(shape), mask)
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected

    def mlp(self, x: Tensor) -> Tensor:
        """GeGLU, (B, L, W) -> (B, L, W)."""
        output: Tensor = self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return output


class PrefixBlock(nn.Module):
    """One block of the prefix tower."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.projections = Projections(a.prefix_width, a.prefix_mlp, a.heads, a.head_dim)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(a.prefix_width), RmsNorm(a.prefix_width)


class ExpertBlock(nn.Module):
    """One block of the action expert."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.projections = Projections(a.expert_width, a.expert_mlp, a.heads, a.head_dim)
        self.input_layernorm = AdaptiveRmsNorm(a.expert_width)
        self.post_attention_layernorm = AdaptiveRmsNorm(a.expert_width)


@dataclass(frozen=True)
class Prefix:
    """What the expert reads of an observation: a key and value a layer, each (B, 1, S, d), and the mask (B, S)."""

    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor

    def repeat(self, times: int) -> Prefix:
        """The prefix of every row, `times` rows in a row."""
        return Prefix(
            [key.repeat_interleave(times, 0) for key in self.keys],
            [value.repeat_interleave(times, 0) for value in self.values],
            self.mask.repeat_interleave(times, 0),
        )


class DemoPolicy(nn.Module):
    """π0.5: `encode` an observation once, then ask for the `velocity` at every solver step."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.vision = VisionTower(a)
        self.projector = nn.Linear(a.vision_width, a.prefix_width)
        self.embed_tokens = nn.Embedding(a.vocabulary, a.prefix_width)
        nn.init.normal_(self.embed_tokens.weight, std=a.prefix_width**-0.5)
        self.prefix = nn.ModuleList(PrefixBlock(a) for _ in range(a.depth))
        self.prefix_norm = RmsNorm(a.prefix_width)
        self.expert = nn.ModuleList(ExpertBlock(a) for _ in range(a.depth))
        self.expert_norm = AdaptiveRmsNorm(a.expert_width)
        self.action_in_proj = nn.Linear(a.action_width, a.expert_width)
        self.action_out_proj = nn.Linear(a.expert_width, a.action_width)
        self.time_mlp_in, self.time_mlp_out = (nn.Linear(a.expert_width, a.expert_width) for _ in range(2))

    def encode(self, pixels: Tensor, tokens: Tensor, token_mask: Tensor) -> Prefix:
        """Images (B, C, 3, size, size) in [-1, 1], token ids and mask (B, P) -> the prefix."""
        batch = pixels.shape[0]
        images = self.projector(self.vision(pixels.flatten(0, 1))).unflatten(0, (batch, -1)).flatten(1, 2)
        text = self.embed_tokens(tokens) * math.sqrt(self.architecture.prefix_width)
        x = torch.cat([images, text.to(images.dtype)], dim=1)
        mask = torch.cat([torch.ones(images.shape[:2], dtype=torch.bool, device=x.device), token_mask], dim=1)
        rope = _rope(mask.cumsum(1) - 1, self.architecture.head_dim)
        keys, values = [], []
        for index, block in enumerate(self.prefix):
            assert isinstance(block, PrefixBlock)
            query, key, value = block.projections.qkv(block.input_layernorm(x), rope)
            keys.append(key)
            values.append(value)
            if index + 1 < len(self.prefix):  # nothing reads what the last layer would go on to compute
                x = x + block.projections.attend(query, key, value, mask[:, None, None])
                x = x + block.projections.mlp(block.post_attention_layernorm(x))
        return Prefix(keys, values, mask)

    def velocity(self, prefix: Prefix, noisy: Tensor, times: Tensor) -> Tensor:
        """Noisy actions (B, H, action width) at solver times (B,) -> the velocity noise - actions, same shape, fp32."""
        a = self.architecture
        with torch.autocast(times.device.type, enabled=False):  # half precision would blur the fast sinusoids
            cond = _time_embedding(times, a)
            cond = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(cond))))
        x = self.action_in_proj(noisy)
        valid = prefix.mask.sum(1, keepdim=True)
        rope = _rope(valid + torch.arange(noisy.shape[1], device=x.device), a.head_dim)
        seen = torch.cat([prefix.mask, torch.ones_like(noisy[..., 0], dtype=torch.bool)], dim=1)[:, None, None]
        for block, prefix_key, prefix_value in zip(self.expert, prefix.keys, prefix.values, strict=True):
            assert isinstance(block, ExpertBlock)
            hidden, gate = block.input_layernorm(x, cond)
            query, key, value = block.projections.qkv(hidden, rope)
            key, value = torch.cat([prefix_key, key], dim=2), torch.cat([prefix_value, value], dim=2)
            x = x + gate * block.projections.attend(query, key, value, seen)
            hidden, gate = block.post_attention_layernorm(x, cond)
            x = x + gate * block.projections.mlp(hidden)
        hidden, _ = self.expert_norm(x, cond)
        velocity: Tensor = self.action_out_proj(hidden)
        return velocity.float()

    def sample(self, prefix: Prefix, noise: Tensor) -> Tensor:
        """Euler steps from noise (B, H, action width) at t = 1 to normalised actions at t = 0."""
        steps = self.architecture.solver_steps
        x = noise
        for index in range(steps):
            times = torch.full((x.shape[0],), 1.0 - index / steps, device=x.device)
            x = x - self.velocity(prefix, x, times) / steps
        return x


def flow_matching_loss(policy: DemoPolicy, prefix: Prefix, actions: Tensor, times: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error of the velocity at x_t = t * noise + (1 - t) * actions; the target is noise - actions.

    Args:
        actions: normalised, padded with zeros, (B, H, action width).
        times: (B,) in (0, 1].
        noise: like `actions`.

    The padding counts a twentieth of the robot's own dimensions: it must stay in place, not be accurate.
    """
    t = times[:, None, None]
    error = (policy.velocity(prefix, t * noise + (1 - t) * actions, times) - (noise - actions)) ** 2
    used = policy.architecture.action_dim
    return error[..., :used].mean() + 0.05 * error[..., used:].mean()


def _rms(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)).to(x.dtype)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def _rope(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[:, None, :, None].float() * _ROPE_THETA**-exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def _time_embedding(times: Tensor, a: Architecture) -> Tensor:
    fraction = torch.linspace(0.0, 1.0, a.expert_width // 2, dtype=torch.float64, device=times.device)
    period = a.min_period * (a.max_period / a.min_period) ** fraction
    angle = (2.0 * math.pi / period) * times.double()[:, None]
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()
