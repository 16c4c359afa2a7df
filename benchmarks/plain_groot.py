"""GR00T N1.7 stated plainly: the backbone of `transformers`, and the action head in ordinary PyTorch, step by step.

The peer of benchmarks/engine_groot.py, and a second statement of the head for the tests. All rows have one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from taktline_worker.models.groot.batch import GrootRow
from taktline_worker.models.groot.config import HEAD, HEAD_NORM_EPS, TAIL_NORM_EPS, TIME_CHANNELS, GrootArchitecture
from torch import Tensor
from torch.nn import functional

BACKBONE = "backbone.model.model."


def backbone(tensors: Mapping[str, Tensor], a: GrootArchitecture, stated: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """`transformers`' model with these weights, of which the layers that are kept.

    Args:
        tensors: by stored name.
        stated: `text_config` and `vision_config` in Qwen3-VL's form.
    """
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config=dict(stated["text_config"]) | {"num_hidden_layers": a.text.layers},
        vision_config=stated["vision_config"],
        image_token_id=a.text.image_token,
    )
    device = next(iter(tensors.values())).device
    with torch.device(device):
        model = transformers.Qwen3VLModel(config).eval().to(dtype)
    own = {k.removeprefix(BACKBONE): v for k, v in tensors.items() if k.startswith(BACKBONE)}
    model.load_state_dict(own, strict=False)  # the final norm, which nothing here reads, may be absent
    return model


def published_config(a: GrootArchitecture) -> dict[str, Any]:
    """The two config sections of an architecture."""
    t, v = a.text, a.vision
    return {
        "text_config": {
            "hidden_size": t.width,
            "num_attention_heads": t.heads,
            "num_key_value_heads": t.kv_heads,
            "head_dim": t.head_dim,
            "intermediate_size": t.mlp,
            "vocab_size": t.vocabulary,
            "rms_norm_eps": t.norm_eps,
            "rope_theta": t.theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": t.theta, "mrope_section": list(t.sections)},
        },
        "vision_config": {
            "depth": v.depth,
            "hidden_size": v.width,
            "num_heads": v.heads,
            "intermediate_size": v.mlp,
            "out_hidden_size": t.width,
            "patch_size": v.patch,
            "temporal_patch_size": v.temporal,
            "spatial_merge_size": v.merge,
            "num_position_embeddings": v.positions,
            "deepstack_visual_indexes": list(v.deepstack),
        },
    }


class PlainHead:
    """The action head for one embodiment."""

    def __init__(
        self, tensors: Mapping[str, Tensor], a: GrootArchitecture, embodiment: int, dtype: torch.dtype
    ) -> None:
        self._a = a
        self._slot = embodiment
        self._w = {k.removeprefix(HEAD): v.to(dtype) for k, v in tensors.items() if k.startswith(HEAD)}
        stems = (f"model.transformer_blocks.{index}." for index in range(a.head.layers))
        self._blocks = [{k.removeprefix(s): v for k, v in self._w.items() if k.startswith(s)} for s in stems]
        self.block = _block
        """What computes one block; compiled, one compilation serves all of a kind, as its weights are arguments."""

    def __call__(self, features: Tensor, is_image: Tensor, state: Tensor, noise: Tensor) -> Tensor:
        """Actions (B, H, action width).

        Args:
            features: (B, S, width), the backbone's last layer before its final norm.
            is_image: bool (B, S).
            state: (B, state width), normalised.
            noise: (B, H, action width).
        """
        h = self._a.head
        seen = self._refine(features)
        masks = {True: ~is_image[:, None, None], False: is_image[:, None, None], None: None}
        token = self._own(functional.relu(self._own(state[:, None], "state_encoder.layer1")), "state_encoder.layer2")
        x = noise
        for step in range(h.solver_steps):
            time = int(h.time_buckets * step / h.solver_steps)
            x = x + self._velocity(x, time, token, seen, masks) / h.solver_steps
        return x

    def _velocity(self, x: Tensor, time: int, token: Tensor, seen: Tensor, masks: Mapping[bool | None, Any]) -> Tensor:
        h = self._a.head
        encoded = self._own(x, "action_encoder.W1")
        wave = self._wave(time, h.width // 2, h.width // 2).expand(*encoded.shape[:2], -1)
        encoded = functional.silu(self._own(torch.cat((encoded, wave), dim=-1), "action_encoder.W2"))
        encoded = self._own(encoded, "action_encoder.W3")
        if h.position_embedding:
            encoded = encoded + self._w["position_embedding.weight"][: h.horizon]
        out = torch.cat((token, encoded), dim=1)
        embedded = self._wave(time, TIME_CHANNELS // 2, TIME_CHANNELS // 2 - 1, cosine_first=True)
        stem = "model.timestep_encoder.timestep_embedder.linear_"
        embedded = self._linear(functional.silu(self._linear(embedded, f"{stem}1")), f"{stem}2")
        active = functional.silu(embedded)
        for index, own in enumerate(self._blocks):
            if h.interleaved and index % 2:
                out = self.block(own, out, active, None, h.heads, None)
            else:
                to_text = index % (2 * h.text_every) == 0 if h.text_every else None
                out = self.block(own, out, active, seen, h.heads, masks[to_text])
        shift, scale = self._linear(active, "model.proj_out_1").chunk(2)
        out = functional.layer_norm(out, out.shape[-1:], eps=TAIL_NORM_EPS) * (1 + scale) + shift
        out = self._linear(out, "model.proj_out_2")[:, 1:]
        return self._own(functional.relu(self._own(out, "action_decoder.layer1")), "action_decoder.layer2")

    def _refine(self, x: Tensor) -> Tensor:
        h = self._a.head
        if h.vl_norm:
            x = self._norm(x, "vlln")
        for index in range(h.vl_layers):
            prefix = f"vl_self_attention.transformer_blocks.{index}"
            n = self._norm(x, f"{prefix}.norm1")
            x = x + self._attend(f"{prefix}.attn1", n, n, h.vl_heads)
            x = x + self._feed_forward(f"{prefix}.ff", self._norm(x, f"{prefix}.norm3"))
        return x

    def _attend(self, prefix: str, x: Tensor, memory: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            self._linear(source, f"{prefix}.to_{name}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for name, source in (("q", x), ("k", memory), ("v", memory))
        )
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self._linear(out.transpose(1, 2).flatten(2), f"{prefix}.to_out.0")

    def _feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        return self._linear(
            functional.gelu(self._linear(x, f"{prefix}.net.0.proj"), approximate="tanh"), f"{prefix}.net.2"
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._w[f"{name}.weight"], self._w[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._w[f"{name}.weight"], self._w[f"{name}.bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias, HEAD_NORM_EPS)

    def _own(self, x: Tensor, name: str) -> Tensor:
        """The embodiment's own layer; its matrices are stored (in, out)."""
        return x @ self._w[f"{name}.W"][self._slot] + self._w[f"{name}.b"][self._slot]

    def _wave(self, time: int, half: int, denominator: int, *, cosine_first: bool = False) -> Tensor:
        like = self._w["model.proj_out_2.weight"]
        frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float64) / denominator)
        parts = [(time * frequencies).sin(), (time * frequencies).cos()]
        return torch.cat(parts[::-1] if cosine_first else parts).to(like)


def _block(
    own: Mapping[str, Tensor], x: Tensor, active: Tensor, memory: Tensor | None, heads: int, mask: Tensor | None
) -> Tensor:
    """One block of the diffusion transformer with weights `own` over x (B, 1 + H, width).

    Args:
        active: (width,), silu of the time's embedding.
        memory: (B, S, features) that it attends to under `mask`; None for its own tokens.
    """

    def linear(y: Tensor, name: str) -> Tensor:
        return functional.linear(y, own[f"{name}.weight"], own[f"{name}.bias"])

    scale, shift = linear(active, "norm1.linear").chunk(2)
    n = functional.layer_norm(x, x.shape[-1:], eps=HEAD_NORM_EPS) * (1 + scale) + shift
    source = n if memory is None else memory
    q, k, v = (
        linear(y, f"attn1.to_{name}").unflatten(-1, (heads, -1)).transpose(1, 2)
        for name, y in (("q", n), ("k", source), ("v", source))
    )
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    x = x + linear(attended.transpose(1, 2).flatten(2), "attn1.to_out.0")
    n = functional.layer_norm(x, x.shape[-1:], eps=HEAD_NORM_EPS)
    return x + linear(functional.gelu(linear(n, "ff.net.0.proj"), approximate="tanh"), "ff.net.2")


class PlainGroot:
    """Backbone and head; `compiled` puts every block of both through torch.compile."""

    def __init__(self, model: Any, head: PlainHead, image_token: int, *, compiled: bool = False) -> None:
        self._model, self._head, self._token = model, head, image_token
        self._kept: list[Tensor] = []
        if compiled:
            head.block = torch.compile(head.block)
            for block in (*model.visual.blocks, *model.language_model.layers):
                block.forward = torch.compile(block.forward)
        model.language_model.layers[-1].register_forward_hook(self._keep)

    def _keep(self, module: Any, given: Any, out: Any) -> None:
        self._kept.append(out[0] if isinstance(out, tuple) else out)

    @torch.inference_mode()
    def __call__(self, rows: list[GrootRow]) -> Tensor:
        """Actions (B, H, action width) of rows of one length."""
        return self.prepared(rows)()

    @torch.inference_mode()
    def prepared(self, rows: list[GrootRow]) -> Any:
        """What runs these rows, their inputs on the device."""
        like = next(self._model.parameters())
        ids = torch.stack([torch.from_numpy(row.tokens) for row in rows]).to(like.device)
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.cat([one for row in rows for one in row.patches]).to(like),
            "image_grid_thw": torch.tensor([[1, *grid] for row in rows for grid in row.grids], device=like.device),
            "mm_token_type_ids": (ids == self._token).int(),
        }
        state, noise = (torch.stack([getattr(row, name) for row in rows]).to(like) for name in ("state", "noise"))
        is_image = ids == self._token

        @torch.inference_mode()
        def call() -> Tensor:
            self._kept.clear()
            self._model(**inputs, use_cache=False)
            return self._head(self._kept[0], is_image, state, noise)

        return call
