"""What a π0 or π0.5 checkpoint is: its architecture, read from tensor shapes, and its input and output conventions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from taktline_protocol.deployment import EngineConfig

from taktline_worker.checkpoint import refuse
from taktline_worker.engine_options import config_error
from taktline_worker.models.pi.normalise import Normaliser
from taktline_worker.rtc import Schedule

Family = Literal["pi0", "pi05"]
Layout = Literal["lerobot", "openpi"]
Prompt = Literal["text_newline", "text_then_newline", "state"]
Resize = Literal["bilinear", "bilinear_legacy", "pil"]

# Facts of the published models that no tensor shape tells.
RMS_EPS = 1e-6
LAYER_NORM_EPS = 1e-6
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_VISION_HEADS = {1152: 16}  # SigLIP So400m, the only published tower


@dataclass(frozen=True, slots=True)
class PiArchitecture:
    """Every dimension of the network. Both language towers have one key/value head and the same depth and head size."""

    family: Family
    vision_layers: int
    vision_width: int
    vision_heads: int
    vision_mlp: int
    image_size: int
    patch_size: int
    depth: int
    heads: int
    head_dim: int
    prefix_width: int
    prefix_mlp: int
    expert_width: int
    expert_mlp: int
    vocabulary: int
    action_width: int
    """Padded action (and π0 state) width of the network, 32 in every published model."""

    @property
    def tokens_per_image(self) -> int:
        """Patches of one camera."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def parameters(self) -> int:
        """Parameters that inference reads; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in expected_shapes(self).values())


@dataclass(frozen=True, slots=True)
class ArchitectureHints:
    """What the checkpoint's sidecar states about the network; each value given is checked against the shapes."""

    vision_heads: int | None = None
    head_dim: int | None = None
    heads: int | None = None


@dataclass(frozen=True, slots=True)
class CameraSlot:
    """One camera of the checkpoint.

    Attributes:
        key: the checkpoint's own name of the camera.
        names: names under which robots may send it, the preferred one first; empty = never sent (always masked).
        required: whether an observation without it is refused; an optional one is masked when absent.
    """

    key: str
    names: tuple[str, ...]
    required: bool


@dataclass(frozen=True, slots=True)
class PiConventions:
    """Everything around the network: cameras, state, prompt, normalisation, actions and the solver's times.

    Attributes:
        prompt: `state` = π0.5 with digitised state; `text_newline` = LeRobot π0, one string that ends in a newline;
            `text_then_newline` = openpi, cleaned text and newline tokenised apart.
        prompt_tokens: token budget of the prompt, BOS included.
        state_prompt_width: zero-pad the normalised state to this width before digitising it (LeRobot up to v0.4.4);
            0 keeps its own length.
        relative_mask: action dimensions that are offsets from the raw state; empty = all absolute.
        adapt_to_pi: ALOHA joint signs and gripper linkage between robot and model space.
        resize: `bilinear` = LeRobot; `bilinear_legacy` = LeRobot up to v0.4.4 (letterbox bands at -3); `pil` = openpi.
        accumulate_time: openpi adds -1/N in fp32 at each step; LeRobot computes 1 - i/N in double.
        control_period_s: time between two action rows; 0 = not known from the checkpoint.
        rtc_max_delay: π0.5: the largest delay of a training with real-time chunking; 0 = trained without.
        rtc_schedule, rtc_max_guidance_weight: the checkpoint's own guidance settings; None and 0 = not stated.
    """

    layout: Layout
    slots: tuple[CameraSlot, ...]
    state_dim: int
    action_dim: int
    state_normaliser: Normaliser
    action_normaliser: Normaliser
    prompt: Prompt
    prompt_tokens: int
    resize: Resize
    horizon: int
    solver_steps: int
    state_prompt_width: int = 0
    truncate_prompt: bool = False
    relative_mask: tuple[bool, ...] = ()
    adapt_to_pi: bool = False
    min_period: float = 0.004
    max_period: float = 4.0
    accumulate_time: bool = False
    control_period_s: float = 0.0
    rtc_max_delay: int = 0
    rtc_schedule: Schedule | None = None
    rtc_max_guidance_weight: float = 0.0

    @property
    def prompt_slots(self) -> tuple[int, ...]:
        """Prompt slots that graphs are captured for, the budget last: a row pays for those of its graph.

        A digit is a token, so a prompt with the state of one arm has some 50 tokens, with that of two some 70; a task
        without it mostly fits 16. What each costs: benchmarks/NOTES.md.
        """
        usual = (64, 128) if self.prompt == "state" else (16, 48)
        return (*(slots for slots in usual if slots < self.prompt_tokens), self.prompt_tokens)


def read_architecture(
    family: Family, shapes: Mapping[str, tuple[int, ...]], hints: ArchitectureHints
) -> PiArchitecture:
    """The architecture that canonical tensor `shapes` describe, every one of them checked.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where a tensor is missing, superfluous or of the wrong shape, where a hint
            contradicts the shapes, or where the vision heads are neither published nor hinted.
    """
    try:
        patch = shapes["vision.embeddings.patch_embedding.weight"]
        tokens = shapes["vision.embeddings.position_embedding.weight"][0]
        key_rows, prefix_width = shapes["prefix.layers.0.self_attn.k_proj.weight"]
        query_rows = shapes["prefix.layers.0.self_attn.q_proj.weight"][0]
        expert_mlp, expert_width = shapes["expert.layers.0.mlp.gate_proj.weight"]
        architecture = PiArchitecture(
            family=family,
            vision_layers=_count(shapes, "vision.encoder.layers."),
            vision_width=patch[0],
            vision_heads=_vision_heads(patch[0], hints),
            vision_mlp=shapes["vision.encoder.layers.0.mlp.fc1.weight"][0],
            image_size=math.isqrt(tokens) * patch[2],
            patch_size=patch[2],
            depth=_count(shapes, "prefix.layers."),
            heads=query_rows // key_rows,
            head_dim=key_rows,
            prefix_width=prefix_width,
            prefix_mlp=shapes["prefix.layers.0.mlp.gate_proj.weight"][0],
            expert_width=expert_width,
            expert_mlp=expert_mlp,
            vocabulary=_embedding_shape(shapes)[0],
            action_width=shapes["action_in_proj.weight"][1],
        )
    except (KeyError, IndexError, ValueError) as error:
        raise refuse(f"a tensor is missing or misshapen: {error}", "use a complete π0 or π0.5 checkpoint") from error
    for name, stated, actual in (
        ("vision_heads", hints.vision_heads, architecture.vision_heads),
        ("head_dim", hints.head_dim, architecture.head_dim),
        ("heads", hints.heads, architecture.heads),
    ):
        if stated is not None and stated != actual:
            raise refuse(f"taktline.json states {name} = {stated}, the tensors have {actual}", "correct taktline.json")
    _check_shapes(architecture, shapes)
    return architecture


def expected_shapes(architecture: PiArchitecture) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that inference reads."""
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {
        "vision.embeddings.patch_embedding.weight": (a.vision_width, 3, a.patch_size, a.patch_size),
        "vision.embeddings.patch_embedding.bias": (a.vision_width,),
        "vision.embeddings.position_embedding.weight": (a.tokens_per_image, a.vision_width),
        "projector.weight": (a.prefix_width, a.vision_width),
        "projector.bias": (a.prefix_width,),
        "prefix.norm.weight": (a.prefix_width,),
        "prefix.embed_tokens.weight": (a.vocabulary, a.prefix_width),
        "action_in_proj.weight": (a.expert_width, a.action_width),
        "action_in_proj.bias": (a.expert_width,),
        "action_out_proj.weight": (a.action_width, a.expert_width),
        "action_out_proj.bias": (a.action_width,),
    }
    block_norms = (f"vision.encoder.layers.{i}.layer_norm{j}" for i in range(a.vision_layers) for j in (1, 2))
    for name in ("vision.post_layernorm", *block_norms):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (a.vision_width,)
    for i in range(a.vision_layers):
        for name, rows, columns in (
            *((f"self_attn.{part}_proj", a.vision_width, a.vision_width) for part in ("q", "k", "v", "out")),
            ("mlp.fc1", a.vision_mlp, a.vision_width),
            ("mlp.fc2", a.vision_width, a.vision_mlp),
        ):
            shapes[f"vision.encoder.layers.{i}.{name}.weight"] = (rows, columns)
            shapes[f"vision.encoder.layers.{i}.{name}.bias"] = (rows,)
    for tower, width, mlp in (("prefix", a.prefix_width, a.prefix_mlp), ("expert", a.expert_width, a.expert_mlp)):
        for i in range(a.depth):
            base = f"{tower}.layers.{i}"
            shapes[f"{base}.self_attn.q_proj.weight"] = (a.heads * a.head_dim, width)
            shapes[f"{base}.self_attn.k_proj.weight"] = (a.head_dim, width)
            shapes[f"{base}.self_attn.v_proj.weight"] = (a.head_dim, width)
            shapes[f"{base}.self_attn.o_proj.weight"] = (width, a.heads * a.head_dim)
            shapes[f"{base}.mlp.gate_proj.weight"] = shapes[f"{base}.mlp.up_proj.weight"] = (mlp, width)
            shapes[f"{base}.mlp.down_proj.weight"] = (width, mlp)
    shapes.update(_norm_shapes(a))
    heads: tuple[tuple[str, int, int], ...]
    if a.family == "pi05":
        heads = (("time_mlp_in", a.expert_width, a.expert_width), ("time_mlp_out", a.expert_width, a.expert_width))
    else:
        heads = (
            ("state_proj", a.expert_width, a.action_width),
            ("action_time_mlp_in", a.expert_width, 2 * a.expert_width),
            ("action_time_mlp_out", a.expert_width, a.expert_width),
        )
    for name, rows, columns in heads:
        shapes[f"{name}.weight"] = (rows, columns)
        shapes[f"{name}.bias"] = (rows,)
    return shapes


def expert_norms(depth: int) -> list[str]:
    """Canonical names of the expert's norms in the order of the AdaRMS tables: two a layer, then the final one."""
    return [
        *(f"expert.layers.{i}.{name}" for i in range(depth) for name in _LAYER_NORMS),
        "expert.norm",
    ]


def _norm_shapes(a: PiArchitecture) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(a.depth):
        for name in _LAYER_NORMS:
            shapes[f"prefix.layers.{i}.{name}.weight"] = (a.prefix_width,)
    for name in expert_norms(a.depth):
        if a.family == "pi05":
            shapes[f"{name}.dense.weight"] = (3 * a.expert_width, a.expert_width)
            shapes[f"{name}.dense.bias"] = (3 * a.expert_width,)
        else:
            shapes[f"{name}.weight"] = (a.expert_width,)
    return shapes


def _check_shapes(architecture: PiArchitecture, shapes: Mapping[str, tuple[int, ...]]) -> None:
    a = architecture
    if (
        a.tokens_per_image * a.patch_size**2 != a.image_size**2
        or math.isqrt(a.tokens_per_image) ** 2 != shapes["vision.embeddings.position_embedding.weight"][0]
    ):
        raise refuse("the position table does not describe a square image", "use a complete checkpoint")
    if a.vision_width % a.vision_heads or a.head_dim % 2:
        raise refuse(
            f"{a.vision_heads} vision heads do not divide width {a.vision_width}, or head size {a.head_dim} is odd",
            "correct architecture.vision_heads in taktline.json",
        )
    expected = expected_shapes(a)
    given = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    given["prefix.embed_tokens.weight"] = _embedding_shape(shapes)
    missing = sorted(expected.keys() - given.keys())
    extra = sorted(given.keys() - expected.keys())
    wrong = sorted(name for name in expected.keys() & given.keys() if expected[name] != tuple(given[name]))
    if missing or extra:
        raise refuse(
            f"{len(missing)} tensors are missing ({', '.join(missing[:3])}) and {len(extra)} are superfluous "
            f"({', '.join(extra[:3])})",
            "use a complete π0 or π0.5 checkpoint",
        )
    if wrong:
        name = wrong[0]
        raise refuse(
            f"{name} has shape {tuple(given[name])}, the other tensors imply {expected[name]}",
            "the files of two checkpoints are mixed: fetch the folder again",
        )


def _embedding_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    for name in ("prefix.embed_tokens.weight", "lm_head.weight"):
        if name in shapes:
            return tuple(shapes[name])
    raise KeyError("neither embed_tokens nor lm_head is stored")


def _count(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    found = {int(match.group(1)) for match in map(pattern.match, shapes) if match}
    if not found or found != set(range(max(found) + 1)):
        raise ValueError(f"layers under {prefix} are {sorted(found)}")
    return len(found)


def _vision_heads(width: int, hints: ArchitectureHints) -> int:
    heads = hints.vision_heads or _VISION_HEADS.get(width)
    if heads is None:
        raise refuse(
            f"the vision tower is {width} wide, which is no published tower, so its head count is unknown",
            'state it in taktline.json: {"architecture": {"vision_heads": N}}',
        )
    return heads


def resolve(conventions: PiConventions, config: EngineConfig) -> PiConventions:
    """The checkpoint's conventions with the engine's overrides.

    Raises:
        TaktlineError: CONFIG_INVALID for overrides out of range, or where nothing states the control period.
    """
    engine = config.engine
    horizon = engine.action_horizon or conventions.horizon
    steps = engine.solver_steps or conventions.solver_steps
    period = conventions.control_period_s if engine.control_period_ms is None else engine.control_period_ms / 1000.0
    if not 1 <= horizon <= 1024 or not 1 <= steps <= 1000:
        raise config_error(f"action horizon {horizon} or solver steps {steps} are out of range", "correct spec.engine")
    for fewer in engine.cheaper_steps:
        if fewer >= steps or steps % fewer:
            raise config_error(
                f"cheaper_steps has {fewer}, which is no proper divisor of the {steps} solver steps",
                f"choose from {', '.join(str(n) for n in range(steps - 1, 0, -1) if steps % n == 0) or 'nothing'}",
            )
    for shorter in engine.shorter_horizons:
        if shorter >= horizon:
            raise config_error(
                f"shorter_horizons has {shorter}, which is not below the {horizon} actions of a chunk",
                "list fewer actions, and no fewer than robots execute of each chunk" if horizon > 1 else "leave it out",
            )
    if not period > 0 or period > 60:
        raise config_error(
            f"the control period is {period * 1000} ms" if period else "nothing states the control period",
            "set spec.engine.controlPeriodMs to the time between two actions of the robot",
        )
    return replace(conventions, horizon=horizon, solver_steps=steps, control_period_s=period)
