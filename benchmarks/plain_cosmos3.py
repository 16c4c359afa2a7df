"""A Cosmos3 policy stated plainly: ordinary PyTorch and scaled_dot_product_attention, one branch after the other.

The peer of benchmarks/engine_cosmos3.py, and a second statement of the model for the tests. Texts run once a request,
as published engines have it; nothing is fused, tabulated or left out. A batch's prompts are of one length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from taktline_worker.models.cosmos3.config import Cosmos3Architecture
from taktline_worker.models.cosmos3.request import RequestSettings
from torch import Tensor
from torch.nn import functional


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(B, N, heads, d) turned by (N, d) angles, the halves of a head against each other."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class PlainCosmos3:
    """One policy for one embodiment.

    Args:
        tensors: by stored name.
        compiled: every layer through torch.compile.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        a: Cosmos3Architecture,
        settings: RequestSettings,
        dtype: torch.dtype,
        *,
        compiled: bool = False,
    ) -> None:
        self.a, self.settings, self.dtype = a, settings, dtype
        self.w = {name: tensor.to(dtype) for name, tensor in tensors}
        self.compiled = compiled
        self._layer_call = torch.compile(self._layer) if compiled else self._layer
        self.device = self.w["embed_tokens.weight"].device

    @torch.inference_mode()
    def __call__(
        self, clean: Tensor, state: Tensor | None, video: Tensor, actions: Tensor, prompts: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Actions (B, actions, raw_dims).

        Args:
            clean: (B, 48, 1, h, w), the observed frame's latent.
            state: (B, raw_dims), or None.
            video: fp32 (B, 48, t - 1, h, w), noise; `actions` fp32 (B, actions, raw_dims) likewise.
            prompts: token ids (B, L), conditional and unconditional.
        """
        s = self.settings
        texts = [self._text(prompt) for prompt in prompts]
        levels = [s.shift * u / (1 + (s.shift - 1) * u) for u in (0.999 * (1 - i / s.steps) for i in range(s.steps))]
        levels.append(0.0)
        x = [video, actions]
        history: list[tuple[list[Tensor], list[Tensor]]] = []
        for index in range(s.steps):
            time = int(1000 * levels[index])
            velocity = self._branch(texts[0], clean, state, x, time)
            inside = s.interval is None or s.interval[0] < time < s.interval[1]
            if s.guidance != 1.0 and inside:
                other = self._branch(texts[1], clean, state, x, time)
                velocity = [u + s.guidance * (c - u) for c, u in zip(velocity, other, strict=True)]
            data = [value - levels[index] * v for value, v in zip(x, velocity, strict=True)]
            x = [self._corrected(levels, index, part, history, value, data) for part, value in enumerate(x)]
            history.append((x, data))
            x = [self._predicted(levels, index, part, history) for part in range(2)]
        return x[1]

    def _ratio(self, levels: list[float], index: int) -> float:
        level = levels[index]
        return math.log(1 - level) - math.log(level)

    def _corrected(self, levels, index, part, history, value, data):  # type: ignore[no-untyped-def]
        if index == 0:
            return value
        order = min(2, index, len(levels) - index)
        start, before = history[-1][0][part], history[-1][1][part]
        h = self._ratio(levels, index) - self._ratio(levels, index - 1)
        b = math.expm1(-h)
        x = levels[index] / levels[index - 1] * start - (1 - levels[index]) * b * before
        if order == 1:
            return x - (1 - levels[index]) * b * 0.5 * (data[part] - before)
        r = (self._ratio(levels, index - 2) - self._ratio(levels, index - 1)) / h
        phi = b / -h - 1
        sums = torch.tensor([phi / b, (phi / -h - 0.5) * 2 / b], dtype=torch.float64)
        rho = torch.linalg.solve(torch.tensor([[1.0, 1.0], [r, 1.0]], dtype=torch.float64), sums).tolist()
        slope = (history[-2][1][part] - before) / r
        return x - (1 - levels[index]) * b * (rho[0] * slope + rho[1] * (data[part] - before))

    def _predicted(self, levels, index, part, history):  # type: ignore[no-untyped-def]
        x, data = history[-1][0][part], history[-1][1][part]
        if levels[index + 1] == 0.0:
            return data
        h = self._ratio(levels, index + 1) - self._ratio(levels, index)
        b, alpha = math.expm1(-h), 1 - levels[index + 1]
        following = levels[index + 1] / levels[index] * x - alpha * b * data
        if min(2, index + 1, len(levels) - 1 - index) == 1:
            return following
        r = (self._ratio(levels, index - 1) - self._ratio(levels, index)) / h
        return following - alpha * b * 0.5 * (history[-2][1][part] - data) / r

    def _branch(self, text, clean: Tensor, state: Tensor | None, x: list[Tensor], time: int) -> list[Tensor]:  # type: ignore[no-untyped-def]
        a, s = self.a, self.settings
        t, height, width = s.latent_grid
        rows, columns = -(-height // 2), -(-width // 2)
        latents = torch.cat((clean.float(), x[0]), dim=2).to(self.dtype)
        latents = functional.pad(latents, (0, width % 2, 0, height % 2))
        patches = latents.view(len(latents), 48, t, rows, 2, columns, 2).permute(0, 2, 3, 5, 4, 6, 1).flatten(4)
        tokens = self._linear(patches.flatten(1, 3), "proj_in")
        embedded = self._time(time)
        frame = rows * columns
        tokens = torch.cat((tokens[:, :frame], tokens[:, frame:] + embedded), dim=1)
        noised = functional.pad(x[1], (0, a.action_width - s.raw_dims)).to(self.dtype)
        acts = self._own(noised, "action_proj_in", a.action_width) + self.w["action_modality_embed"] + embedded
        if state is not None:
            row = functional.pad(state[:, None], (0, a.action_width - s.raw_dims)).to(self.dtype)
            known = self._own(row, "action_proj_in", a.action_width) + self.w["action_modality_embed"]
            acts = torch.cat((known, acts), dim=1)
        h = torch.cat((tokens, acts), dim=1)
        cos, sin = self._angles(self._positions(text[0]))
        for index in range(a.layers):
            h = self._layer_call(h, self._names(index), cos, sin, text[1][index], text[2][index])
        h = self._norm(h, self.w["norm_moe_gen.weight"])
        out = self._linear(h[:, frame : t * frame], "proj_out").view(len(h), t - 1, rows, columns, 2, 2, 48)
        out = out.permute(0, 6, 1, 2, 4, 3, 5).reshape(len(h), 48, t - 1, 2 * rows, 2 * columns)
        moved = self._own(h[:, -s.actions :], "action_proj_out", a.width)[..., : s.raw_dims]
        return [out[..., :height, :width].float(), moved.float()]

    def _names(self, index: int) -> dict[str, Tensor]:
        prefix = f"layers.{index}."
        return {k.removeprefix(prefix): v for k, v in self.w.items() if k.startswith(prefix)}

    def _layer(self, h, w, cos, sin, keys, values):  # type: ignore[no-untyped-def]
        n = self._norm(h, w["input_layernorm_moe_gen.weight"])
        q, k, v = (
            functional.linear(n, w[f"self_attn.add_{name}_proj.weight"]).unflatten(-1, (-1, self.a.head_dim))
            for name in "qkv"
        )
        q = rotated(self._norm(q, w["self_attn.norm_added_q.weight"]), cos, sin)
        k = rotated(self._norm(k, w["self_attn.norm_added_k.weight"]), cos, sin)
        out = self._attend(q, torch.cat((keys, k), dim=1), torch.cat((values, v), dim=1))
        h = h + functional.linear(out, w["self_attn.to_add_out.weight"])
        return h + self._mlp(self._norm(h, w["post_attention_layernorm_moe_gen.weight"]), w, "mlp_moe_gen")

    def _text(self, tokens: Tensor) -> tuple[int, list[Tensor], list[Tensor]]:
        a = self.a
        h = functional.embedding(tokens, self.w["embed_tokens.weight"])
        length = tokens.shape[1]
        cos, sin = self._angles(torch.arange(length, device=self.device).float()[:, None].expand(-1, 3))
        keys, values = [], []
        for index in range(a.layers):
            w = self._names(index)
            n = self._norm(h, w["input_layernorm.weight"])
            q, k, v = (
                functional.linear(n, w[f"self_attn.to_{name}.weight"]).unflatten(-1, (-1, a.head_dim)) for name in "qkv"
            )
            if a.text_norms:
                q, k = self._norm(q, w["self_attn.norm_q.weight"]), self._norm(k, w["self_attn.norm_k.weight"])
            shared = self._norm(k, w["self_attn.k_norm_und_for_gen.weight"]) if a.text_norm_for_video else k
            keys.append(rotated(shared, cos, sin))
            values.append(v)
            out = self._attend(rotated(q, cos, sin), rotated(k, cos, sin), v, causal=True)
            h = h + functional.linear(out, w["self_attn.to_out.weight"])
            h = h + self._mlp(self._norm(h, w["post_attention_layernorm.weight"]), w, "mlp")
        return length, keys, values

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def _mlp(self, x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
        up = functional.linear(x, w[f"{name}.up_proj.weight"])
        if self.a.gated:
            hidden = functional.silu(functional.linear(x, w[f"{name}.gate_proj.weight"])) * up
        else:
            hidden = functional.relu(up).square()
        return functional.linear(hidden, w[f"{name}.down_proj.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.a.norm_eps)
        return (normed * weight.float()).to(x.dtype) if self.a.fp32_scale else normed.to(x.dtype) * weight

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def _own(self, x: Tensor, name: str, inputs: int) -> Tensor:
        """The embodiment's projection, whose matrix is stored flat (in, out)."""
        domain = self.settings.domain
        return x @ self.w[f"{name}.fc.weight"][domain].view(inputs, -1) + self.w[f"{name}.bias.weight"][domain]

    def _time(self, time: int) -> Tensor:
        frequencies = torch.exp(-math.log(10_000.0) * torch.arange(128, device=self.device) / 128)
        angles = time * self.a.time_scale * frequencies
        wave = torch.cat((angles.cos(), angles.sin())).to(self.dtype)
        return self._linear(functional.silu(self._linear(wave, "time_embedder.linear_1")), "time_embedder.linear_2")

    def _positions(self, length: int) -> Tensor:
        a, s = self.a, self.settings
        t, height, width = s.latent_grid
        origin = length + a.margin
        times = torch.arange(t).float() / (s.fps / 4) * (a.base_fps / 4) + origin
        grid = torch.meshgrid(
            times, torch.arange(float(-(-height // 2))), torch.arange(float(-(-width // 2))), indexing="ij"
        )
        video = torch.stack([axis.flatten() for axis in grid], dim=1)
        first = 0 if s.state_row else 1
        moves = torch.zeros(s.action_rows, 3)
        moves[:, 0] = (torch.arange(s.action_rows).float() + first) / s.fps * (a.base_fps / 4) + origin
        return torch.cat((video, moves)).to(self.device)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        a = self.a
        frequencies = 1.0 / a.theta ** (torch.arange(0, a.head_dim, 2, device=self.device).float() / a.head_dim)
        angles = positions[:, :1] * frequencies
        for axis in (1, 2):
            own = slice(axis, 3 * a.sections[axis], 3)
            angles[:, own] = positions[:, axis : axis + 1] * frequencies[own]
        angles = torch.cat((angles, angles), dim=1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)
