"""What a Cosmos3 policy checkpoint is: dimensions of its transformer, read from its configuration and its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taktline_worker.checkpoint import TensorFiles, read_json, refuse
from taktline_worker.models.cosmos3.request import LATENT_CHANNELS
from taktline_worker.shapes import Shapes, count_layers, linear, shown

TRANSFORMER_FOLDER = "transformer"
CONFIG_FILE = "config.json"
METADATA_FILE = "checkpoint.json"
"""Only policy checkpoints carry it."""
STEM = "diffusion_pytorch_model"
CLASS_NAME = "Cosmos3OmniTransformer"

PATCH = 2
"""Latent cells along each side of a token."""
TIME_CHANNELS = 256
PATCH_VALUES = PATCH * PATCH * LATENT_CHANNELS
TRAIN_STEPS = 1000
DROPPED = ("norm.weight", "lm_head.weight")
"""Stored and never used: of the text only keys and values are read."""
DROPPED_PREFIXES = ("audio_",)
"""Sound, which no policy makes."""


@dataclass(frozen=True, slots=True)
class Cosmos3Architecture:
    """All dimensions of the two towers, which have the same.

    Attributes:
        gated: SwiGLU; else squared ReLU without a gate.
        text_norms: whether the text tower normalises its queries and keys.
        text_norm_for_video: whether keys of the text get a norm of their own where video and actions read them.
        fp32_scale: whether the training applies a norm's weight before the rounding to the dtype of the rows; here it
            is always so.
        sections: rotary frequencies of the time, row and column axes.
        margin: positions between the last text token and the first frame.
        time_scale: of the integer time before the sinusoids.
        base_fps: frames a second whose latent frames are as far apart as text tokens are, times four.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    gated: bool
    text_norms: bool
    text_norm_for_video: bool
    fp32_scale: bool
    norm_eps: float
    theta: float
    sections: tuple[int, int, int]
    margin: int
    time_scale: float
    base_fps: float
    action_width: int
    domains: int

    @property
    def edge(self) -> bool:
        """Whether this is the Edge kind of the model (Nemotron text backbone)."""
        return not self.gated


def open_transformer(folder: Path) -> tuple[Cosmos3Architecture, TensorFiles]:
    """The architecture and the tensors of a published policy folder.

    Raises:
        TaktlineError: CHECKPOINT_INVALID for a folder that is no policy, is quantised, or does not fit together.
    """
    where = folder / TRANSFORMER_FOLDER
    config = read_json(where / CONFIG_FILE)
    refuse_quantised(config, where)
    files = TensorFiles(where, STEM)
    architecture = read_architecture(config, files.shapes)
    if not (folder / METADATA_FILE).is_file():
        raise refuse(
            f"{folder} holds no {METADATA_FILE}: this is the base model, which was not trained as a policy",
            "use the Policy-DROID checkpoint as published, checkpoint.json included",
        )
    return architecture, files


def refuse_quantised(config: Mapping[str, Any], where: Path) -> None:
    """Raises CHECKPOINT_INVALID where the weights are stored quantised, as one revision of the base model has them."""
    if "quantization_config" in config:
        method = dict(config["quantization_config"] or {}).get("quant_method", "an unnamed method")
        raise refuse(
            f"{where / CONFIG_FILE} says that the weights are quantised by {method}",
            "use the revision that holds bf16 weights; set engine.precision to quantise while loading",
        )


def read_architecture(config: Mapping[str, Any], shapes: Shapes) -> Cosmos3Architecture:
    """The architecture that transformer/config.json states and the tensors have.

    What tensors show (gate, norms of the text) is taken from them, because some published exports do not state it;
    where both say it, they must agree.

    Raises:
        TaktlineError: CHECKPOINT_INVALID.
    """
    if config.get("_class_name", CLASS_NAME) != CLASS_NAME:
        raise refuse(
            f"transformer/config.json is of a {config['_class_name']}, not a {CLASS_NAME}",
            "set the family that this checkpoint is of, or use a Cosmos3 policy",
        )
    _refuse_base(config, shapes)
    try:
        found = _architecture(config, shapes)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise refuse(
            f"transformer/config.json and the tensors do not describe a Cosmos3 model: {type(error).__name__} {error}",
            "use the whole checkpoint folder as published, transformer/config.json included",
        ) from error
    _check_stated(config, found)
    _check_shapes(shapes, expected_shapes(found))
    return found


def _refuse_base(config: Mapping[str, Any], shapes: Shapes) -> None:
    if not config.get("action_gen", "action_proj_in.fc.weight" in shapes) or "action_proj_in.fc.weight" not in shapes:
        raise refuse(
            "the transformer has no action projections: this is a base model, not a policy",
            "use a Policy-DROID checkpoint",
        )


def _architecture(config: Mapping[str, Any], shapes: Shapes) -> Cosmos3Architecture:
    vocabulary, width = shapes["embed_tokens.weight"]
    head_dim = int(config["head_dim"])
    gated = "layers.0.mlp.gate_proj.weight" in shapes
    scaling = config.get("rope_scaling") or {}
    time, rows, columns = config.get("rope_axes_dim") or scaling["mrope_section"]
    domains, values = shapes["action_proj_in.fc.weight"]
    return Cosmos3Architecture(
        layers=count_layers(shapes, "layers."),
        width=width,
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=head_dim,
        mlp=shapes["layers.0.mlp.up_proj.weight"][0],
        vocabulary=vocabulary,
        gated=gated,
        text_norms="layers.0.self_attn.norm_q.weight" in shapes,
        text_norm_for_video="layers.0.self_attn.k_norm_und_for_gen.weight" in shapes,
        fp32_scale=not gated,
        norm_eps=float(config["rms_norm_eps"]),
        theta=float(config["rope_theta"] if "rope_theta" in config else scaling["rope_theta"]),
        sections=(int(time), int(rows), int(columns)),
        margin=int(config["unified_3d_mrope_temporal_modality_margin"]),
        time_scale=float(config.get("timestep_scale", 1.0 / TRAIN_STEPS)),
        base_fps=float(config.get("base_fps", 24.0)),
        action_width=values // width,
        domains=domains,
    )


def _check_stated(config: Mapping[str, Any], a: Cosmos3Architecture) -> None:
    """Refuses a configuration that contradicts the tensors, or asks for what this engine does not do."""
    wanted: dict[str, tuple[Any, Any]] = {
        "hidden_size": (a.width, a.width),
        "num_hidden_layers": (a.layers, a.layers),
        "intermediate_size": (a.mlp, a.mlp),
        "vocab_size": (a.vocabulary, a.vocabulary),
        "hidden_act": ("silu" if a.gated else "relu2", None),
        "qk_norm_for_text": (a.text_norms, None),
        "use_und_k_norm_for_gen": (a.text_norm_for_video, None),
        "action_dim": (a.action_width, None),
        "num_embodiment_domains": (a.domains, None),
        "latent_patch_size": (PATCH, None),
        "latent_channel": (LATENT_CHANNELS, None),
        "patch_latent_dim": (PATCH_VALUES, None),
        "attention_bias": (False, None),
        "enable_fps_modulation": (True, None),
        "unified_3d_mrope_reset_spatial_ids": (True, None),
    }
    for name, (value, default) in wanted.items():
        stated = config.get(name, default)
        if stated is not None and stated != value:
            raise refuse(
                f"transformer/config.json has {name} = {stated!r}; the tensors and this engine have {value!r}",
                "use the configuration and the tensors of one checkpoint",
            )
    if a.heads % a.kv_heads or a.head_dim % 2 or sum(a.sections) != a.head_dim // 2:
        raise refuse(
            f"{a.heads} heads, {a.kv_heads} key heads, width {a.head_dim} and rotary sections {a.sections}"
            " do not fit together",
            "use transformer/config.json as published",
        )


def expected_shapes(a: Cosmos3Architecture) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor that inference reads."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (a.vocabulary, a.width),
        "norm_moe_gen.weight": (a.width,),
        **linear("proj_in", a.width, PATCH_VALUES),
        **linear("proj_out", PATCH_VALUES, a.width),
        **linear("time_embedder.linear_1", a.width, TIME_CHANNELS),
        **linear("time_embedder.linear_2", a.width, a.width),
        "action_proj_in.fc.weight": (a.domains, a.action_width * a.width),
        "action_proj_in.bias.weight": (a.domains, a.width),
        "action_proj_out.fc.weight": (a.domains, a.width * a.action_width),
        "action_proj_out.bias.weight": (a.domains, a.action_width),
        "action_modality_embed": (a.width,),
    }
    for index in range(a.layers):
        layer = f"layers.{index}."
        for names, mlp, suffix, norms in (
            (("to_q", "to_k", "to_v", "to_out"), "mlp", "", ("norm_q", "norm_k") if a.text_norms else ()),
            (
                ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
                "mlp_moe_gen",
                "_moe_gen",
                ("norm_added_q", "norm_added_k"),
            ),
        ):
            shapes = ((q, a.width), (kv, a.width), (kv, a.width), (a.width, q))
            found |= {f"{layer}self_attn.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}
            found |= {f"{layer}self_attn.{name}.weight": (a.head_dim,) for name in norms}
            found |= {
                f"{layer}{name}{suffix}.weight": (a.width,) for name in ("input_layernorm", "post_attention_layernorm")
            }
            found |= {
                f"{layer}{mlp}.{name}.weight": (a.mlp, a.width)
                for name in (("gate_proj", "up_proj") if a.gated else ("up_proj",))
            }
            found[f"{layer}{mlp}.down_proj.weight"] = (a.width, a.mlp)
        if a.text_norm_for_video:
            found[f"{layer}self_attn.k_norm_und_for_gen.weight"] = (a.head_dim,)
    return found


def _check_shapes(shapes: Shapes, expected: Shapes) -> None:
    missing = [name for name in expected if name not in shapes]
    unknown = [
        name
        for name in shapes
        if name not in expected and name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    ]
    if missing or unknown:
        raise refuse(
            f"the transformer lacks {shown(missing)} and has beside what it needs {shown(unknown)}",
            "use all files of one published checkpoint; native exports must be converted to the diffusers layout",
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise refuse(
                f"tensor {name!r} has shape {shapes[name]}, expected {shape}",
                "use the configuration and the tensors of one checkpoint",
            )


def parameters(shapes: Shapes) -> int:
    """Numbers in the tensors of `shapes`."""
    return sum(math.prod(shape) for shape in shapes.values())
