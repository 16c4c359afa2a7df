"""What `taktline checkpoint inspect` says of a Cosmos3 folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from taktline_protocol.deployment import EngineConfig, ModelConfig

from taktline_worker.checkpoint import TensorFiles, file_sha256, read_json
from taktline_worker.models.cosmos3.adapter import Opened, open_folder
from taktline_worker.models.cosmos3.composition import VIEWS
from taktline_worker.models.cosmos3.config import (
    CLASS_NAME,
    CONFIG_FILE,
    TRANSFORMER_FOLDER,
    expected_shapes,
    parameters,
)
from taktline_worker.models.cosmos3.runner import is_guided
from taktline_worker.models.cosmos3.solver import make_schedule
from taktline_worker.models.cosmos3.vae_config import VAE_FOLDER, VAE_STEM, encoder_shapes, read_vae_config


def recognises(path: Path) -> bool:
    """Whether the folder is in the layout that Cosmos3 is published in."""
    config = path / TRANSFORMER_FOLDER / CONFIG_FILE
    return config.is_file() and read_json(config).get("_class_name", CLASS_NAME) == CLASS_NAME


def describe(path: Path, statistics: str, read_weights: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Report fields, and (finding, next step) notes.

    Args:
        statistics: not used: these policies normalise nothing.
        read_weights: look for NaN in every tensor that is read.

    Raises:
        TaktlineError: the first reason for which a worker would refuse the folder.
    """
    del statistics
    opened = open_folder(
        EngineConfig(policy="inspected", model=ModelConfig(family="cosmos3", path=str(path), revision=""))
    )
    vae_files = TensorFiles(path / VAE_FOLDER, VAE_STEM)
    vae = read_vae_config(read_json(path / VAE_FOLDER / CONFIG_FILE), vae_files.shapes)
    expected, of_vae = expected_shapes(opened.architecture), encoder_shapes(vae)
    serving = opened.serving
    fields: dict[str, Any] = {
        "family": opened.family,
        "layout": "diffusers",
        "description": opened.sidecar.description,
        "parameters": parameters(expected) + parameters(of_vae),
        "bytes": sum(file.stat().st_size for file in (*opened.files.paths, *vae_files.paths)),
        "dtypes": dict(Counter(str(dtype).removeprefix("torch.") for dtype in opened.files.dtypes.values())),
        "cameras": VIEWS,
        "state_dim": serving.embodiment.dims if serving.settings.state_row else 0,
        "action_dim": serving.settings.raw_dims,
        "horizon": serving.rows,
        "solver_steps": serving.settings.steps,
        "control_period_ms": serving.control_period_s * 1000.0,
        "facts": _facts(opened),
    }
    notes = []
    if opened.scheduler:
        notes.append((opened.scheduler, "nothing to do: the official policy server does not use that file either"))
    stored = (*opened.files.paths, *vae_files.paths)
    if read_weights:
        fields["sha256"] = {str(file.relative_to(path)): file_sha256(file) for file in stored}
        for files, names in ((opened.files, expected), (vae_files, of_vae)):
            for _ in files.read({name: name for name in names}):
                pass  # reading checks every tensor
    return fields, notes


def _facts(opened: Opened) -> dict[str, str]:
    a, serving, s = opened.architecture, opened.serving, opened.serving.settings
    schedule = make_schedule(s.steps, s.shift)
    guided = [step.time for step in schedule if is_guided(s, step.time)]
    frames, rows, columns = s.latent_grid
    return {
        "towers": f"2 of {a.layers} layers, width {a.width}, {a.heads} heads and {a.kv_heads} key heads of"
        f" {a.head_dim}",
        "MLP": f"{'SwiGLU' if a.gated else 'squared ReLU'}, {a.mlp} columns",
        "text": f"vocabulary {a.vocabulary:,}, rotary base {a.theta:g}, query and key norms"
        f" {'on' if a.text_norms else 'off'}, prompts as {serving.prompt}",
        "video": f"{s.frames} frames, {s.encoded_frames} encoded; latents of {frames} x {rows} x {columns}",
        "actions": f"{s.actions} of {s.raw_dims} numbers{' behind a row with the state' if s.state_row else ''}, at"
        f" {s.fps:g} Hz",
        "embodiment": f"{serving.embodiment.name}, domain {s.domain} of {a.domains}: {serving.embodiment.meaning}",
        "solver": f"UniPC, shift {s.shift:g}, times {', '.join(str(step.time) for step in schedule)}",
        "guidance": f"{s.guidance:g} at {'times ' + ', '.join(map(str, guided)) if guided else 'no time'}",
        "tokenizer": f"{opened.tokenizer.pieces:,} pieces",
    }
