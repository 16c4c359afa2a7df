"""MiniCPM-RobotManip in plain PyTorch: `transformers`' backbone, the action head as it is described, a row at a time.

The peer that `benchmarks/engine_minicpm.py` measures against, and the oracle of the head in the tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow
from taktline_worker.models.minicpm_robot.config import HEAD, MiniCpmArchitecture
from torch import Tensor
from torch.nn import functional


def published_config(a: MiniCpmArchitecture, image_token: int) -> dict[str, Any]:
    """The backbone's configuration in the form of `transformers`."""
    v, t = a.vision, a.text
    kinds = ["full_attention" if index in t.full else "linear_attention" for index in range(t.layers)]
    rope = {"rope_type": "default", "rope_theta": t.theta, "partial_rotary_factor": t.rotary / t.head_dim}
    return {
        "text_config": {
            "model_type": "qwen3_5_text",
            "vocab_size": t.vocabulary,
            "hidden_size": t.width,
            "intermediate_size": t.mlp,
            "num_hidden_layers": t.layers,
            "num_attention_heads": t.heads,
            "num_key_value_heads": t.kv_heads,
            "head_dim": t.head_dim,
            "linear_key_head_dim": t.delta_key,
            "linear_value_head_dim": t.delta_value,
            "linear_num_key_heads": t.delta_heads,
            "linear_num_value_heads": t.delta_heads,
            "layer_types": kinds,
            "rope_parameters": rope,
        },
        "vision_config": {
            "hidden_size": v.width,
            "intermediate_size": v.mlp,
            "num_hidden_layers": v.depth,
            "num_attention_heads": v.heads,
            "image_size": round(v.positions**0.5) * v.patch,
            "patch_size": v.patch,
        },
        "insert_layer_id": v.insert,
        "image_token_id": image_token,
    }


def backbone(tensors: dict[str, Tensor], a: MiniCpmArchitecture, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The official backbone with these weights, on their device."""
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6Model

    device = next(iter(tensors.values())).device
    with torch.device("meta"):
        model = MiniCPMV4_6Model(MiniCPMV4_6Config(**config))
    own = {name.removeprefix(a.prefix): value for name, value in tensors.items() if name.startswith(a.prefix)}
    model.to_empty(device=device)
    model.load_state_dict({name: value.to(dtype) for name, value in own.items()}, strict=True, assign=True)
    # Tables that are no weights were made on no device: again, here.
    rotary = model.language_model.rotary_emb
    inverse, _ = rotary.compute_default_rope_parameters(rotary.config, device)
    rotary.inv_freq, rotary.original_inv_freq = inverse, inverse.clone()
    return model.eval()


def packed(patches: Tensor) -> Tensor:
    """Patches (N, P, 3 * p * p) as the official tower takes them: side by side in a strip (1, 3, p, N * P * p)."""
    side = round((patches.shape[-1] // 3) ** 0.5)
    return patches.view(-1, 3, side, side).permute(1, 2, 0, 3).reshape(1, 3, side, -1)


def head_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The action head's own names."""
    return {name.removeprefix(HEAD): value for name, value in tensors.items() if name.startswith(HEAD)}


def _linear(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ tensors[f"{name}.weight"].t() + tensors[f"{name}.bias"]


def _attention(tensors: dict[str, Tensor], heads: int, x: Tensor, memory: Tensor) -> Tensor:
    """Softmax attention of x (n, width) to memory (m, width)."""
    q, k, v = (
        _linear(tensors, f"attn1.to_{part}", given) for part, given in zip("qkv", (x, memory, memory), strict=True)
    )
    q, k, v = (y.view(len(y), heads, -1).transpose(0, 1) for y in (q, k, v))
    weights = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1)
    return _linear(tensors, "attn1.to_out.0", (weights @ v).transpose(0, 1).reshape(len(x), -1))


def block(tensors: dict[str, Tensor], heads: int, h: Tensor, time: Tensor, features: Tensor | None) -> Tensor:
    """One block of the head's transformer over tokens h (n, width); without features it attends to itself.

    A function of its tensors, so that torch.compile has one code for all blocks of a kind.
    """
    width = h.shape[1]
    scale, shift = _linear(tensors, "norm1.linear", functional.silu(time)).chunk(2)
    n = functional.layer_norm(h, (width,), eps=1e-5) * (1 + scale) + shift
    h = h + _attention(tensors, heads, n, n if features is None else features)
    n = functional.layer_norm(h, (width,), eps=1e-5)
    n = functional.gelu(_linear(tensors, "ff.net.0.proj", n), approximate="tanh")
    return h + _linear(tensors, "ff.net.2", n)


class PlainHead:
    """The action head written down from its description, step by step and for one row.

    Args:
        tensors: the head's own, by their published names.
    """

    def __init__(self, tensors: dict[str, Tensor], heads: int, horizon: int) -> None:
        self.t, self.heads, self.horizon = tensors, heads, horizon
        self.block = block
        layers = len([name for name in tensors if name.endswith("norm1.linear.weight")])
        prefixes = [f"model.transformer_blocks.{index}." for index in range(layers)]
        self._blocks = [
            {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            for prefix in prefixes
        ]

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A layer by its name."""
        return _linear(self.t, name, x)

    def bank(self, name: str, slot: int, x: Tensor) -> Tensor:
        """A layer of one embodiment."""
        return x @ self.t[f"{name}.W"][slot] + self.t[f"{name}.b"][slot]

    def predict(self, features: Tensor, state: Tensor, x: Tensor, bucket: int, slot: int) -> Tensor:
        """The clean actions that are expected behind the noisy x (H, action width) at one time bucket."""
        width = self.t["future_tokens.weight"].shape[1]
        waves = [bucket * 10_000.0 ** (-i / 127) for i in range(128)]
        time = x.new_tensor([math.cos(a) for a in waves] + [math.sin(a) for a in waves])
        embedder = "model.timestep_encoder.timestep_embedder"
        time = self.linear(f"{embedder}.linear_2", functional.silu(self.linear(f"{embedder}.linear_1", time)))
        angles = [bucket * 10_000.0 ** (-i / (width // 2)) for i in range(width // 2)]
        tau = x.new_tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        a = self.bank("action_encoder.W1", slot, torch.cat((x, state.expand(len(x), -1)), dim=1))
        a = functional.silu(self.bank("action_encoder.W2", slot, torch.cat((a, tau.expand(len(x), -1)), dim=1)))
        a = self.bank("action_encoder.W3", slot, a) + self.t["position_embedding.weight"][: len(x)]
        h = self.transform(torch.cat((self.t["future_tokens.weight"], a)), time, features)
        h = self.bank("action_decoder.layer2", slot, functional.relu(self.bank("action_decoder.layer1", slot, h)))
        return h[-self.horizon :]

    def transform(self, h: Tensor, time: Tensor, features: Tensor) -> Tensor:
        """The transformer's blocks and its last layers over tokens (n, width)."""
        width = h.shape[1]
        for index, tensors in enumerate(self._blocks):
            h = self.block(tensors, self.heads, h, time, None if index % 2 else features)
        shift, scale = self.linear("model.proj_out_1", functional.silu(time)).chunk(2)
        h = functional.layer_norm(h, (width,), eps=1e-6) * (1 + scale) + shift
        return self.linear("model.proj_out_2", h)

    def actions(self, features: Tensor, row: MiniCpmRow) -> list[tuple[Tensor, Tensor]]:
        """(input, prediction) of the four steps; the last prediction is the answer."""
        found, predicted = [], torch.zeros_like(row.noise)
        for share, bucket in ((1.0, 999), (0.75, 750), (0.5, 500), (0.25, 250)):
            x = share * row.noise + (1 - share) * predicted
            predicted = self.predict(features, row.state, x, bucket, row.embodiment)
            found.append((x, predicted))
        return found


class PlainMiniCpm:
    """Backbone and head, one row at a time.

    `compiled` puts every block through torch.compile, once for all of a kind and a shape. The delta rule stays out of
    it: flash-linear-attention keeps itself out, and the loop that `transformers` has instead would unroll for minutes.
    """

    def __init__(self, model: Any, head: PlainHead, *, compiled: bool = False) -> None:
        self._model, self._head = model, head
        if compiled:
            from transformers.models.qwen3_5 import modeling_qwen3_5 as text

            text.torch_chunk_gated_delta_rule = torch.compiler.disable(text.torch_chunk_gated_delta_rule)
            for one in (*model.vision_tower.encoder.layers, *model.language_model.layers):
                one.forward = torch.compile(one.forward, dynamic=False)
            head.block = torch.compile(block, dynamic=False)

    @torch.inference_mode()
    def __call__(self, row: MiniCpmRow) -> Tensor:
        """Actions (H, action width) of a row whose tensors lie on the model's device, tokens apart."""
        device, dtype = self._model.device, self._model.dtype
        side = round(row.patches.shape[1] ** 0.5)
        features = self._model(
            input_ids=torch.from_numpy(row.tokens)[None].to(device),
            pixel_values=packed(row.patches.to(device, dtype)),
            target_sizes=torch.tensor([[side, side]] * len(row.patches), dtype=torch.int32),
            use_cache=False,
        ).last_hidden_state[0]
        return self._head.actions(features.float(), row)[-1][1]
