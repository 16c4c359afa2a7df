"""What a GR00T N1.7 checkpoint is: its dimensions, read from config.json and tensor shapes, each checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taktline_worker.checkpoint import refuse
from taktline_worker.shapes import Shapes, count_layers, linear, norm, shown

MODEL_TYPE = "Gr00tN1d7"
CONFIG_FILE = "config.json"
BACKBONE_FILE = "backbone_config.json"
"""Fields of the backbone in Qwen3-VL's own form; needed only for one that is not the published one."""

VISUAL = "backbone.model.model.visual."
TEXT = "backbone.model.model.language_model."
HEAD = "action_head."
DROPPED = ("backbone.model.lm_head.weight", f"{TEXT}norm.weight")
"""Stored and never used: features are taken before the final norm."""

VISION_NORM_EPS = 1e-6
HEAD_NORM_EPS = 1e-5
TAIL_NORM_EPS = 1e-6
TIME_CHANNELS = 256
VISION_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower. `deepstack` lists the blocks whose features also enter the text stack."""

    depth: int
    width: int
    heads: int
    mlp: int
    patch: int
    temporal: int
    merge: int
    positions: int
    deepstack: tuple[int, ...]

    @property
    def patch_values(self) -> int:
        """Numbers of one flattened patch."""
        return 3 * self.temporal * self.patch**2


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The text layers that are kept. `sections` are the rotary frequencies of the time, row and column axes."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    theta: float
    sections: tuple[int, int, int]
    norm_eps: float
    image_token: int


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The action head: vision-language refinement and the diffusion transformer.

    Attributes:
        text_every: of the cross-attention blocks, each text_every-th attends to the text, the others to the images;
            0 = all attend to both.
    """

    vl_norm: bool
    vl_layers: int
    vl_heads: int
    layers: int
    heads: int
    width: int
    hidden: int
    state_width: int
    action_width: int
    horizon: int
    positions: int
    position_embedding: bool
    embodiments: int
    text_every: int
    interleaved: bool
    solver_steps: int
    time_buckets: int
    rtc_rate: float


@dataclass(frozen=True, slots=True)
class GrootArchitecture:
    """All dimensions of one checkpoint."""

    vision: VisionConfig
    text: TextConfig
    head: HeadConfig


# What no tensor shape tells of the published backbone (Cosmos-Reason2-2B, the layout of Qwen3-VL-2B).
_PUBLISHED_VISION = {"num_heads": 16, "spatial_merge_size": 2, "deepstack_visual_indexes": [5, 11, 17]}
_PUBLISHED_TEXT = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5_000_000, "mrope_section": [24, 20, 20]}}
_PUBLISHED_IMAGE_TOKEN = 151655
_PUBLISHED_VISION_WIDTH = 1024
# The released config.json does not hold it; robots send it with each request there.
_PUBLISHED_RTC_RATE = 6.0


def read_architecture(
    config: Mapping[str, Any], backbone: Mapping[str, Any] | None, shapes: Shapes
) -> GrootArchitecture:
    """The architecture that config.json states and the tensors have.

    config.json decides; code defaults of any training repository are not consulted. A field that it lacks is a refusal.

    Args:
        config: config.json.
        backbone: backbone_config.json, or None for the published backbone.
        shapes: stored tensor name -> shape.

    Raises:
        TaktlineError: CHECKPOINT_INVALID.
    """
    try:
        architecture = _architecture(config, backbone, shapes)
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
        raise refuse(
            f"config.json and the tensors do not describe a GR00T N1.7 model: {type(error).__name__} {error}",
            "use the whole checkpoint folder as published, config.json included",
        ) from error
    _check(shapes, expected_shapes(architecture))
    return architecture


def _architecture(config: Mapping[str, Any], backbone: Mapping[str, Any] | None, shapes: Shapes) -> GrootArchitecture:
    stated = config.get("model_type", config.get("architectures", [MODEL_TYPE])[0])
    if stated != MODEL_TYPE:
        raise ValueError(f"model_type is {stated!r}, this family reads {MODEL_TYPE!r}")
    if config["backbone_model_type"] != "qwen":
        raise ValueError(f"the backbone is {config['backbone_model_type']!r}, this family reads 'qwen'")
    width, _, temporal, patch, _ = shapes[f"{VISUAL}patch_embed.proj.weight"]
    if backbone is None and width != _PUBLISHED_VISION_WIDTH:
        raise ValueError(f"a vision tower of width {width} is not the published one; {BACKBONE_FILE} must describe it")
    vision = (backbone or {}).get("vision_config", _PUBLISHED_VISION)
    text = (backbone or {}).get("text_config", _PUBLISHED_TEXT)
    rope = text.get("rope_parameters") or text["rope_scaling"] | {"rope_theta": text["rope_theta"]}
    q_norm = shapes[f"{TEXT}layers.0.self_attn.q_norm.weight"][0]
    diffusion, refinement = config["diffusion_model_cfg"], config.get("vl_self_attention_cfg") or {}
    if diffusion["norm_type"] != "ada_norm" or diffusion["positional_embeddings"] is not None:
        raise ValueError("the diffusion transformer has another norm or positions than N1.7's")
    layers = count_layers(shapes, f"{TEXT}layers.")
    if layers < config["select_layer"]:
        raise ValueError(f"select_layer is {config['select_layer']}, the file has {layers} text layers")
    return GrootArchitecture(
        vision=VisionConfig(
            depth=count_layers(shapes, f"{VISUAL}blocks."),
            width=width,
            heads=vision["num_heads"],
            mlp=shapes[f"{VISUAL}blocks.0.mlp.linear_fc1.weight"][0],
            patch=patch,
            temporal=temporal,
            merge=vision["spatial_merge_size"],
            positions=shapes[f"{VISUAL}pos_embed.weight"][0],
            deepstack=tuple(vision["deepstack_visual_indexes"]),
        ),
        text=TextConfig(
            layers=config["select_layer"],
            width=shapes[f"{TEXT}embed_tokens.weight"][1],
            heads=shapes[f"{TEXT}layers.0.self_attn.q_proj.weight"][0] // q_norm,
            kv_heads=shapes[f"{TEXT}layers.0.self_attn.k_proj.weight"][0] // q_norm,
            head_dim=q_norm,
            mlp=shapes[f"{TEXT}layers.0.mlp.gate_proj.weight"][0],
            vocabulary=shapes[f"{TEXT}embed_tokens.weight"][0],
            theta=float(rope["rope_theta"]),
            sections=tuple(rope["mrope_section"]),
            norm_eps=text["rms_norm_eps"],
            image_token=(backbone or {}).get("image_token_id", _PUBLISHED_IMAGE_TOKEN),
        ),
        head=HeadConfig(
            vl_norm=config["use_vlln"],
            vl_layers=refinement.get("num_layers", 0) if config.get("use_vl_self_attention", True) else 0,
            vl_heads=refinement.get("num_attention_heads", 1),
            layers=diffusion["num_layers"],
            heads=diffusion["num_attention_heads"],
            width=config["input_embedding_dim"],
            hidden=config["hidden_size"],
            state_width=config["max_state_dim"] * config.get("state_history_length", 1),
            action_width=config["max_action_dim"],
            horizon=config["action_horizon"],
            positions=config["max_seq_len"],
            position_embedding=config["add_pos_embed"],
            embodiments=config["max_num_embodiments"],
            text_every=config["attend_text_every_n_blocks"] if config["use_alternate_vl_dit"] else 0,
            interleaved=diffusion["interleave_self_attention"],
            solver_steps=config["num_inference_timesteps"],
            time_buckets=config["num_timestep_buckets"],
            rtc_rate=float(config.get("rtc_ramp_rate", _PUBLISHED_RTC_RATE)),
        ),
    )


def expected_shapes(a: GrootArchitecture) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor that inference reads."""
    return _vision_shapes(a) | _text_shapes(a.text) | _head_shapes(a)


def _vision_shapes(a: GrootArchitecture) -> dict[str, tuple[int, ...]]:
    v, merged = a.vision, a.vision.width * a.vision.merge**2
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (v.width, 3, v.temporal, v.patch, v.patch),
        "patch_embed.proj.bias": (v.width,),
        "pos_embed.weight": (v.positions, v.width),
    }
    for index in range(v.depth):
        prefix = f"blocks.{index}"
        shapes |= norm(f"{prefix}.norm1", v.width) | norm(f"{prefix}.norm2", v.width)
        shapes |= linear(f"{prefix}.attn.qkv", 3 * v.width, v.width) | linear(f"{prefix}.attn.proj", v.width, v.width)
        shapes |= linear(f"{prefix}.mlp.linear_fc1", v.mlp, v.width)
        shapes |= linear(f"{prefix}.mlp.linear_fc2", v.width, v.mlp)
    mergers = {"merger": v.width} | {f"deepstack_merger_list.{i}": merged for i in range(len(v.deepstack))}
    for name, normed in mergers.items():
        shapes |= norm(f"{name}.norm", normed)
        shapes |= linear(f"{name}.linear_fc1", merged, merged) | linear(f"{name}.linear_fc2", a.text.width, merged)
    return {f"{VISUAL}{name}": shape for name, shape in shapes.items()}


def _text_shapes(t: TextConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (t.vocabulary, t.width)}
    for index in range(t.layers):
        prefix = f"layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (t.width,),
            f"{prefix}.post_attention_layernorm.weight": (t.width,),
            f"{prefix}.self_attn.q_proj.weight": (t.heads * t.head_dim, t.width),
            f"{prefix}.self_attn.k_proj.weight": (t.kv_heads * t.head_dim, t.width),
            f"{prefix}.self_attn.v_proj.weight": (t.kv_heads * t.head_dim, t.width),
            f"{prefix}.self_attn.o_proj.weight": (t.width, t.heads * t.head_dim),
            f"{prefix}.self_attn.q_norm.weight": (t.head_dim,),
            f"{prefix}.self_attn.k_norm.weight": (t.head_dim,),
            f"{prefix}.mlp.gate_proj.weight": (t.mlp, t.width),
            f"{prefix}.mlp.up_proj.weight": (t.mlp, t.width),
            f"{prefix}.mlp.down_proj.weight": (t.width, t.mlp),
        }
    return {f"{TEXT}{name}": shape for name, shape in shapes.items()}


def _head_shapes(a: GrootArchitecture) -> dict[str, tuple[int, ...]]:
    h, vl = a.head, a.text.width
    shapes: dict[str, tuple[int, ...]] = {}
    if h.vl_norm:
        shapes |= norm("vlln", vl)
    for index in range(h.vl_layers):
        prefix = f"vl_self_attention.transformer_blocks.{index}"
        shapes |= norm(f"{prefix}.norm1", vl) | norm(f"{prefix}.norm3", vl)
        shapes |= _attention(f"{prefix}.attn1", vl, vl) | _feed_forward(f"{prefix}.ff", vl)
    for index in range(h.layers):
        prefix = f"model.transformer_blocks.{index}"
        memory = h.width if h.interleaved and index % 2 else vl
        shapes |= linear(f"{prefix}.norm1.linear", 2 * h.width, h.width)
        shapes |= _attention(f"{prefix}.attn1", h.width, memory) | _feed_forward(f"{prefix}.ff", h.width)
    time = "model.timestep_encoder.timestep_embedder"
    shapes |= linear(f"{time}.linear_1", h.width, TIME_CHANNELS) | linear(f"{time}.linear_2", h.width, h.width)
    shapes |= linear("model.proj_out_1", 2 * h.width, h.width) | linear("model.proj_out_2", h.hidden, h.width)
    if h.position_embedding:
        shapes["position_embedding.weight"] = (h.positions, h.width)
    for name, rows, columns in (
        ("state_encoder.layer1", h.state_width, h.hidden),
        ("state_encoder.layer2", h.hidden, h.width),
        ("action_encoder.W1", h.action_width, h.width),
        ("action_encoder.W2", 2 * h.width, h.width),
        ("action_encoder.W3", h.width, h.width),
        ("action_decoder.layer1", h.hidden, h.hidden),
        ("action_decoder.layer2", h.hidden, h.action_width),
    ):
        shapes |= {f"{name}.W": (h.embodiments, rows, columns), f"{name}.b": (h.embodiments, columns)}
    return {f"{HEAD}{name}": shape for name, shape in shapes.items()}


def _attention(name: str, width: int, memory: int) -> dict[str, tuple[int, ...]]:
    return (
        linear(f"{name}.to_q", width, width)
        | linear(f"{name}.to_k", width, memory)
        | linear(f"{name}.to_v", width, memory)
        | linear(f"{name}.to_out.0", width, width)
    )


def _feed_forward(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return linear(f"{name}.net.0.proj", 4 * width, width) | linear(f"{name}.net.2", width, 4 * width)


def _check(shapes: Shapes, expected: Shapes) -> None:
    kept = {name for name in shapes if name not in DROPPED and not _is_cut_layer(name, expected)}
    missing, unknown = sorted(expected.keys() - kept), sorted(kept - expected.keys())
    if missing or unknown:
        raise refuse(
            f"the checkpoint lacks {shown(missing)} and has the unknown {shown(unknown)}",
            "use all files of one GR00T N1.7 checkpoint with its own config.json",
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise refuse(
                f"tensor {name!r} has shape {tuple(shapes[name])}, config.json makes it {shape}"
                f" ({math.prod(shape)} numbers)",
                "use config.json and tensors of one training run",
            )


def _is_cut_layer(name: str, expected: Shapes) -> bool:
    """Whether `name` belongs to a text layer above select_layer, which some files still hold."""
    if not name.startswith(f"{TEXT}layers."):
        return False
    index = name.removeprefix(f"{TEXT}layers.").split(".")[0]
    return f"{TEXT}layers.{index}.input_layernorm.weight" not in expected
