"""The planner stated plainly, as the official code runs it: the whole prefix at every step, under a mask.

Candidates are one batch, context and goal are repeated for each of them, nothing is cached. Poses are integrated on the
device, which the official code does on the CPU, one candidate at a time (0.17 s a step for 800): a favour to the peer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from taktline_worker.models.vjepa2_ac import poses, rope
from taktline_worker.models.vjepa2_ac.config import VJepa2Architecture
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, mlp), nn.Linear(mlp, width)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Tokens (b, n, width) -> (b, n, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k = rope.rotate(q, cos, sin).transpose(1, 2), rope.rotate(k, cos, sin).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class PlainPredictor(nn.Module):
    """The predictor with the official interface: all frames, actions and poses so far -> the next frame's latents."""

    def __init__(self, a: VJepa2Architecture, tensors: Mapping[str, Tensor], horizon: int) -> None:
        super().__init__()
        device = tensors["predictor_embed.weight"].device
        with torch.device(device):
            self.embed, self.out = nn.Linear(a.encoder_width, a.width), nn.Linear(a.width, a.encoder_width)
            self.action, self.state = nn.Linear(7, a.width), nn.Linear(7, a.width)
            self.blocks = nn.ModuleList(_Block(a.width, a.heads, a.mlp) for _ in range(a.depth))
            self.norm = nn.LayerNorm(a.width, eps=1e-6)
        named = {
            "predictor_embed": self.embed,
            "predictor_proj": self.out,
            "action_encoder": self.action,
            "state_encoder": self.state,
            "predictor_norm": self.norm,
        }
        for index, block in enumerate(self.blocks):
            prefix = f"predictor_blocks.{index}"
            named |= {
                f"{prefix}.norm1": block.norm1,
                f"{prefix}.norm2": block.norm2,
                f"{prefix}.attn.qkv": block.qkv,
                f"{prefix}.attn.proj": block.proj,
                f"{prefix}.mlp.fc1": block.fc1,
                f"{prefix}.mlp.fc2": block.fc2,
            }
        self._named = named
        with torch.no_grad():
            for name, module in named.items():
                module.weight.copy_(tensors[f"{name}.weight"])
                module.bias.copy_(tensors[f"{name}.bias"])
        self.tokens = a.tokens + 2
        positions = torch.cat([rope.frame_positions(a.grid, frame, 2) for frame in range(horizon)])
        cos, sin = rope.tables(positions, a.head_dim)
        self.cos, self.sin = cos.to(device), sin.to(device)
        frame = torch.arange(horizon * self.tokens, device=device) // self.tokens
        self.mask = frame[:, None] >= frame[None, :]

    def tensors(self) -> dict[str, Tensor]:
        """Its weights under the names that they were given by."""
        found = {}
        for name, module in self._named.items():
            found |= {f"{name}.weight": module.weight.detach(), f"{name}.bias": module.bias.detach()}
        return found

    def forward(self, latents: Tensor, actions: Tensor, states: Tensor) -> Tensor:
        """(b, t, T, D), (b, t, 7), (b, t, 7) -> (b, T, D), before the planner's layer norm."""
        frames = latents.shape[1]
        x = torch.cat(
            (self.action(actions)[:, :, None], self.state(states)[:, :, None], self.embed(latents)), dim=2
        ).flatten(1, 2)
        count = frames * self.tokens
        mask, cos, sin = self.mask[:count, :count], self.cos[:count], self.sin[:count]
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return self.out(self.norm(x[:, -self.tokens + 2 :]))


@torch.inference_mode()
def score(model: PlainPredictor, latent: Tensor, goal: Tensor, pose: Tensor, actions: Tensor) -> Tensor:
    """Energies (candidates,) of actions (candidates, horizon, 7), all candidates at once."""
    count, horizon, _ = actions.shape
    latents = latent.expand(count, 1, *latent.shape)
    states = pose.expand(count, 1, 7)
    width = (latent.shape[-1],)
    for step in range(horizon):
        predicted = functional.layer_norm(model(latents, actions[:, : step + 1], states).float(), width, eps=1e-5)
        latents = torch.cat((latents, predicted[:, None]), dim=1)
        states = torch.cat((states, poses.integrate(states[:, -1], actions[:, step])[:, None]), dim=1)
    return (latents[:, -1] - goal).abs().flatten(1).mean(dim=1)
