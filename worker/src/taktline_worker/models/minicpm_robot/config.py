"""What a MiniCPM-RobotManip checkpoint is: its dimensions, from config.json and tensor shapes, each checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from taktline_worker.checkpoint import refuse
from taktline_worker.shapes import Shapes, count_layers, linear, norm, shown

MODEL_TYPE = "minicpm_vla"
CONFIG_FILE = "config.json"
HEAD = "action_head."
EMBEDDING = "language_model.embed_tokens.weight"
"""The one name that tells under which prefix the backbone is stored."""

VISION_EPS = 1e-6
BLOCK_EPS = 1e-5
TAIL_EPS = 1e-6
TIME_CHANNELS = 256
BUCKETS = 1000
SOLVER_STEPS = 4


class Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`architecture` of taktline.json: what no tensor shape tells, where config.json does not state it.

    Attributes:
        action_horizon: rows of a chunk; the published 30.
        head_heads: heads of the diffusion transformer; unset takes width / 64.
        vision_heads: heads of the vision tower; unset takes config.json's, or width / 72.
        insert_layer: vision block after which windows of four patches become one.
        image_size: side of the square frame that the network reads, in pixels.
    """

    action_horizon: int | None = None
    head_heads: int | None = None
    vision_heads: int | None = None
    insert_layer: int | None = None
    image_size: int | None = None


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower; after block `insert` each 2 x 2 window becomes one token, and at its end once more."""

    width: int
    depth: int
    heads: int
    mlp: int
    window_mlp: int
    patch: int
    positions: int
    insert: int
    image_size: int

    @property
    def grid(self) -> int:
        """Patches a side."""
        return self.image_size // self.patch

    @property
    def image_tokens(self) -> int:
        """Text tokens of one image."""
        return (self.grid // 4) ** 2


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The hybrid text stack. `full` lists the layers with softmax attention; the others are gated delta nets."""

    width: int
    layers: int
    full: tuple[int, ...]
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    theta: float
    mlp: int
    delta_heads: int
    delta_key: int
    delta_value: int
    taps: int
    eps: float

    @property
    def delta_widths(self) -> tuple[int, int, int]:
        """Channels of query, key and value of a delta net."""
        return self.delta_heads * self.delta_key, self.delta_heads * self.delta_key, self.delta_heads * self.delta_value


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The action head: even blocks attend to the backbone, odd ones to the action tokens themselves."""

    width: int
    layers: int
    heads: int
    future: int
    positions: int
    embodiments: int
    state_width: int
    action_width: int
    hidden: int
    decoder: int
    horizon: int


@dataclass(frozen=True, slots=True)
class MiniCpmArchitecture:
    """All dimensions of one checkpoint; `prefix` is what the backbone's names begin with."""

    prefix: str
    vision: VisionConfig
    text: TextConfig
    head: HeadConfig


_HORIZON = 30
_IMAGE_SIZE = 448
_INSERT_LAYER = 6
_HEAD_WIDTH = 64
_VISION_HEAD_WIDTH = 72
_HORIZON_FIELDS = ("action_horizon", "horizon", "chunk_size", "action_chunk_size", "num_action_steps")


def read_architecture(config: Mapping[str, Any], stated: Stated, shapes: Shapes) -> MiniCpmArchitecture:
    """The architecture that the tensors have; config.json and `stated` give what no shape tells, `stated` first.

    Raises:
        TaktlineError: CHECKPOINT_INVALID.
    """
    try:
        found = _architecture(config, stated, shapes)
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError, StopIteration) as error:
        raise refuse(
            f"config.json and the tensors do not describe a MiniCPM-RobotManip model: {type(error).__name__} {error}",
            "use the whole checkpoint folder as published, config.json included; what no shape tells of a model of"
            " another size is stated as architecture in taktline.json (docs/minicpm.md)",
        ) from error
    _check(found, shapes)
    return found


def _architecture(config: Mapping[str, Any], stated: Stated, shapes: Shapes) -> MiniCpmArchitecture:
    if config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ValueError(f"model_type is {config['model_type']!r}, this family reads {MODEL_TYPE!r}")
    prefix = next(name for name in shapes if name.endswith(EMBEDDING)).removesuffix(EMBEDDING)
    tower, text = f"{prefix}vision_tower.", f"{prefix}language_model."
    return MiniCpmArchitecture(
        prefix=prefix,
        vision=_vision(config, stated, shapes, tower),
        text=_text(held(config, "text_config", {}), shapes, text),
        head=_head(config, stated, shapes),
    )


def held(config: Mapping[str, Any], name: str, absent: Any) -> Any:
    """A field of the backbone's configuration: at the top, or under the name that the backbone has there."""
    for holder in (config, *(config.get(key) for key in ("vlm_config", "vlm", "backbone_config", "backbone"))):
        if isinstance(holder, Mapping) and name in holder:
            return holder[name]
    return absent


def _vision(config: Mapping[str, Any], stated: Stated, shapes: Shapes, tower: str) -> VisionConfig:
    own = held(config, "vision_config", {})
    width, _, patch, _ = shapes[f"{tower}embeddings.patch_embedding.weight"]
    insert = held(config, "insert_layer_id", _INSERT_LAYER) if stated.insert_layer is None else stated.insert_layer
    heads = stated.vision_heads or own.get("num_attention_heads") or width // _VISION_HEAD_WIDTH
    size = stated.image_size or _IMAGE_SIZE
    if not heads:
        raise ValueError(f"a vision tower of width {width} is not the published one, and nothing states its heads")
    if width % heads or size % (4 * patch):
        raise ValueError(f"{heads} vision heads of width {width}, or frames of {size} px in patches of {patch}")
    depth = count_layers(shapes, f"{tower}encoder.layers.")
    if not 0 <= insert < depth:
        raise ValueError(f"insert_layer_id is {insert}, the vision tower has {depth} blocks")
    return VisionConfig(
        width=width,
        depth=depth,
        heads=heads,
        mlp=shapes[f"{tower}encoder.layers.0.mlp.fc1.weight"][0],
        window_mlp=shapes[f"{tower}vit_merger.linear_1.weight"][0],
        patch=patch,
        positions=shapes[f"{tower}embeddings.position_embedding.weight"][0],
        insert=insert,
        image_size=size,
    )


def _text(own: Mapping[str, Any], shapes: Shapes, text: str) -> TextConfig:
    layers = count_layers(shapes, f"{text}layers.")
    full = tuple(i for i in range(layers) if f"{text}layers.{i}.self_attn.q_proj.weight" in shapes)
    linear_layer = next(i for i in range(layers) if i not in full)
    delta = f"{text}layers.{linear_layer}.linear_attn."
    attention = f"{text}layers.{full[0]}.self_attn."
    rope = own.get("rope_parameters") or {}
    head_dim = shapes[f"{attention}q_norm.weight"][0]
    (delta_heads,), (delta_value,) = shapes[f"{delta}A_log"], shapes[f"{delta}norm.weight"]
    channels, _, taps = shapes[f"{delta}conv1d.weight"]
    delta_key = (channels - delta_heads * delta_value) // (2 * delta_heads)
    vocabulary, width = shapes[f"{text}embed_tokens.weight"]
    return TextConfig(
        width=width,
        layers=layers,
        full=full,
        vocabulary=vocabulary,
        heads=shapes[f"{attention}q_proj.weight"][0] // (2 * head_dim),
        kv_heads=shapes[f"{attention}k_proj.weight"][0] // head_dim,
        head_dim=head_dim,
        rotary=int(head_dim * float(rope.get("partial_rotary_factor", 0.25))),
        theta=float(rope.get("rope_theta", 1e7)),
        mlp=shapes[f"{text}layers.0.mlp.gate_proj.weight"][0],
        delta_heads=delta_heads,
        delta_key=delta_key,
        delta_value=delta_value,
        taps=taps,
        eps=float(own.get("rms_norm_eps", 1e-6)),
    )


def _head(config: Mapping[str, Any], stated: Stated, shapes: Shapes) -> HeadConfig:
    embodiments, joint, width = shapes[f"{HEAD}action_encoder.W1.W"]
    action = shapes[f"{HEAD}action_decoder.layer2.W"][2]
    heads = stated.head_heads or width // _HEAD_WIDTH
    horizon = stated.action_horizon or next((config[f] for f in _HORIZON_FIELDS if f in config), _HORIZON)
    positions = shapes[f"{HEAD}position_embedding.weight"][0]
    if not heads:
        raise ValueError(f"an action head of width {width} is not the published one, and nothing states its heads")
    if width % heads or not 1 <= horizon <= positions:
        raise ValueError(f"{heads} heads of width {width}, or {horizon} actions in {positions} positions")
    return HeadConfig(
        width=width,
        layers=count_layers(shapes, f"{HEAD}model.transformer_blocks."),
        heads=heads,
        future=shapes[f"{HEAD}future_tokens.weight"][0],
        positions=positions,
        embodiments=embodiments,
        state_width=joint - action,
        action_width=action,
        hidden=shapes[f"{HEAD}model.proj_out_2.weight"][0],
        decoder=shapes[f"{HEAD}action_decoder.layer1.W"][2],
        horizon=horizon,
    )


def expected_shapes(a: MiniCpmArchitecture) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor of the checkpoint."""
    return (
        {f"{a.prefix}vision_tower.{name}": shape for name, shape in _vision_shapes(a.vision).items()}
        | {f"{a.prefix}merger.mlp.0.{name}": shape for name, shape in _merger_shapes(a).items()}
        | {f"{a.prefix}language_model.{name}": shape for name, shape in _text_shapes(a.text).items()}
        | {f"{HEAD}{name}": shape for name, shape in _head_shapes(a).items()}
    )


def _vision_shapes(v: VisionConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (v.width, 3, v.patch, v.patch),
        "embeddings.patch_embedding.bias": (v.width,),
        "embeddings.position_embedding.weight": (v.positions, v.width),
    }
    for index in range(v.depth):
        prefix = f"encoder.layers.{index}"
        shapes |= norm(f"{prefix}.layer_norm1", v.width) | norm(f"{prefix}.layer_norm2", v.width)
        shapes |= _attention(f"{prefix}.self_attn", v.width)
        shapes |= linear(f"{prefix}.mlp.fc1", v.mlp, v.width) | linear(f"{prefix}.mlp.fc2", v.width, v.mlp)
    shapes |= _attention("vit_merger.self_attn", v.width) | norm("vit_merger.layer_norm1", v.width)
    shapes |= norm("vit_merger.pre_norm", 4 * v.width) | norm("post_layernorm", v.width)
    shapes |= linear("vit_merger.linear_1", v.window_mlp, 4 * v.width)
    return shapes | linear("vit_merger.linear_2", v.width, v.window_mlp)


def _attention(name: str, width: int) -> dict[str, tuple[int, ...]]:
    parts = (linear(f"{name}.{part}", width, width) for part in ("q_proj", "k_proj", "v_proj", "out_proj"))
    return {key: shape for part in parts for key, shape in part.items()}


def _merger_shapes(a: MiniCpmArchitecture) -> dict[str, tuple[int, ...]]:
    four = 4 * a.vision.width
    return norm("pre_norm", four) | linear("linear_1", four, four) | linear("linear_2", a.text.width, four)


def _text_shapes(t: TextConfig) -> dict[str, tuple[int, ...]]:
    query, key, value = t.delta_widths
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (t.vocabulary, t.width), "norm.weight": (t.width,)}
    for index in range(t.layers):
        prefix = f"layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (t.width,),
            f"{prefix}.post_attention_layernorm.weight": (t.width,),
            f"{prefix}.mlp.gate_proj.weight": (t.mlp, t.width),
            f"{prefix}.mlp.up_proj.weight": (t.mlp, t.width),
            f"{prefix}.mlp.down_proj.weight": (t.width, t.mlp),
        }
        if index in t.full:
            shapes |= {
                f"{prefix}.self_attn.q_proj.weight": (2 * t.heads * t.head_dim, t.width),
                f"{prefix}.self_attn.k_proj.weight": (t.kv_heads * t.head_dim, t.width),
                f"{prefix}.self_attn.v_proj.weight": (t.kv_heads * t.head_dim, t.width),
                f"{prefix}.self_attn.o_proj.weight": (t.width, t.heads * t.head_dim),
                f"{prefix}.self_attn.q_norm.weight": (t.head_dim,),
                f"{prefix}.self_attn.k_norm.weight": (t.head_dim,),
            }
        else:
            shapes |= {
                f"{prefix}.linear_attn.in_proj_qkv.weight": (query + key + value, t.width),
                f"{prefix}.linear_attn.in_proj_z.weight": (value, t.width),
                f"{prefix}.linear_attn.in_proj_a.weight": (t.delta_heads, t.width),
                f"{prefix}.linear_attn.in_proj_b.weight": (t.delta_heads, t.width),
                f"{prefix}.linear_attn.conv1d.weight": (query + key + value, 1, t.taps),
                f"{prefix}.linear_attn.A_log": (t.delta_heads,),
                f"{prefix}.linear_attn.dt_bias": (t.delta_heads,),
                f"{prefix}.linear_attn.norm.weight": (t.delta_value,),
                f"{prefix}.linear_attn.out_proj.weight": (t.width, value),
            }
    return shapes


def _head_shapes(a: MiniCpmArchitecture) -> dict[str, tuple[int, ...]]:
    h, w = a.head, a.head.width
    shapes: dict[str, tuple[int, ...]] = {
        "future_tokens.weight": (h.future, w),
        "position_embedding.weight": (h.positions, w),
        **linear("model.timestep_encoder.timestep_embedder.linear_1", w, TIME_CHANNELS),
        **linear("model.timestep_encoder.timestep_embedder.linear_2", w, w),
        **linear("model.proj_out_1", 2 * w, w),
        **linear("model.proj_out_2", h.hidden, w),
    }
    banks = {
        "action_encoder.W1": (h.action_width + h.state_width, w),
        "action_encoder.W2": (2 * w, w),
        "action_encoder.W3": (w, w),
        "action_decoder.layer1": (h.hidden, h.decoder),
        "action_decoder.layer2": (h.decoder, h.action_width),
    }
    for name, (rows, columns) in banks.items():
        shapes |= {f"{name}.W": (h.embodiments, rows, columns), f"{name}.b": (h.embodiments, columns)}
    for index in range(h.layers):
        prefix = f"model.transformer_blocks.{index}"
        memory = w if index % 2 else a.text.width
        shapes |= linear(f"{prefix}.norm1.linear", 2 * w, w) | linear(f"{prefix}.attn1.to_q", w, w)
        shapes |= linear(f"{prefix}.attn1.to_k", w, memory) | linear(f"{prefix}.attn1.to_v", w, memory)
        shapes |= linear(f"{prefix}.attn1.to_out.0", w, w)
        shapes |= linear(f"{prefix}.ff.net.0.proj", 4 * w, w) | linear(f"{prefix}.ff.net.2", w, 4 * w)
    return shapes


def _check(a: MiniCpmArchitecture, shapes: Shapes) -> None:
    expected = expected_shapes(a)
    # The output projection is the embedding again; some exports store it twice.
    kept = {name for name in shapes if not name.endswith("lm_head.weight")}
    missing, unknown = sorted(expected.keys() - kept), sorted(kept - expected.keys())
    if missing or unknown:
        raise refuse(
            f"the checkpoint lacks {shown(missing)} and has the unknown {shown(unknown)}",
            "use all files of one MiniCPM-RobotManip checkpoint with its own config.json",
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise refuse(
                f"tensor {name!r} has shape {tuple(shapes[name])}, the others make it {shape}",
                "use the tensors of one training run",
            )
