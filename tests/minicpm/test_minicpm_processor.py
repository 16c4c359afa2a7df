"""Observations to rows as the official processor makes them, and everything that is refused before the network runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import ParallelOptions, RtcOptions
from taktline_worker.inspection import inspect
from taktline_worker.models.minicpm_robot.adapter import MiniCpmAdapter, load
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor


@pytest.fixture(scope="module")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.served(tmp_path_factory.mktemp("served") / "manip")


@pytest.fixture(scope="module")
def adapter(kit: Any, served: Path) -> MiniCpmAdapter:
    return load(kit.config(served))


def test_patches_are_those_of_the_official_processor(kit: Any, adapter: MiniCpmAdapter, pool: Any) -> None:
    """The reference program makes frames square with Pillow, then runs the official image processor."""
    given = kit.observe()
    row = adapter.begin(given, pool).result()
    official = MiniCPMV4_6ImageProcessorPil(scale_resolution=112, patch_size=14)
    frames = []
    for name in ("agentview", "wrist"):
        image = given.images[name]
        frame = Image.fromarray(np.frombuffer(image.data, np.uint8).reshape(image.shape))
        frames.append(np.asarray(frame.resize((112, 112))))
    found = official(frames, return_tensors="pt", input_data_format="channels_last")
    assert found["target_sizes"].tolist() == [[8, 8]] * 2
    strips = found["pixel_values"].view(3, 14, 2 * 64, 14).permute(2, 0, 1, 3).reshape(2, 64, -1)
    torch.testing.assert_close(row.patches, strips, atol=1e-6, rtol=0)


def test_prompt_is_that_of_the_official_processor(kit: Any, adapter: MiniCpmAdapter, served: Path, pool: Any) -> None:
    """Each image by the official replacement, its number before it, inside the checkpoint's own template."""
    import tokenizers

    names = SimpleNamespace(image_token="<|image_pad|>", image_start_token="<image>", image_end_token="</image>")
    names.slice_mode = True
    inputs = {
        "grids": [[0, 0]],
        "num_patches_per_image": [1],
        "target_sizes": torch.tensor([[8, 8]]),
    }
    image = MiniCPMV4_6Processor.replace_image_token(names, inputs, 0, image_token_divisor=16)
    assert image == "<image>" + "<|image_pad|>" * 4 + "</image>"
    images = "".join(f"<image_id>{index}</image_id>{image}" for index in range(2))
    text = f"<|im_start|>user\n{images}Put the red block into the box.<|im_end|>\n<|im_start|>assistant\n"
    expected = tokenizers.Tokenizer.from_file(str(served / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    row = adapter.begin(kit.observe(), pool).result()
    assert row.tokens.tolist() == expected
    assert row.embodiment == 3


def test_state_and_actions_are_the_embodiments_own_channels(kit: Any, adapter: MiniCpmAdapter, pool: Any) -> None:
    row = adapter.begin(kit.observe(), pool).result()
    assert row.state.tolist() == pytest.approx([0, 0, 0.5, 0.25, -0.4, 0.04, 0, 0, 0, 0, 0, 0])
    outputs = adapter.run([row], 1)
    assert outputs.shape == (1, 6, 10)
    (chunk,) = adapter.finish([row], outputs)
    assert isinstance(chunk, np.ndarray)
    assert chunk.dtype == np.float32
    np.testing.assert_array_equal(chunk, outputs[0][:, [1, 2, 7, 8, 9]].numpy())
    d = adapter.description
    assert (d.state_dim, d.action_dim, d.horizon, d.control_period_s) == (4, 5, 6, 0.05)


def test_the_seed_fixes_the_noise_as_the_reference_program_draws_it(
    kit: Any, adapter: MiniCpmAdapter, pool: Any
) -> None:
    first, again, other = (adapter.begin(kit.observe(seed=seed), pool).result() for seed in (7, 7, 8))
    torch.manual_seed(7)
    assert torch.equal(first.noise, torch.randn(1, 6, 10)[0])
    assert torch.equal(first.noise, again.noise)
    assert not torch.equal(first.noise, other.noise)


def test_full_width_where_no_channels_are_named(kit: Any, tmp_path: Path) -> None:
    path = kit.served(tmp_path / "all", state_channels=None, action_channels=None)
    adapter = load(kit.config(path, action_horizon=4))
    assert (adapter.description.state_dim, adapter.description.action_dim, adapter.description.horizon) == (12, 10, 4)
    row = adapter.largest_row()
    (chunk,) = adapter.finish([row], adapter.run([row], 1))
    assert isinstance(chunk, np.ndarray)
    assert chunk.shape == (4, 10)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"state": np.zeros(12)}, ErrorCode.STATE_INVALID),
        ({"state": np.array([0.0, np.nan, 0.0, 0.0])}, ErrorCode.STATE_INVALID),
        ({"instruction": "  "}, ErrorCode.INSTRUCTION_INVALID),
        ({"instruction": "x" * 5000}, ErrorCode.INSTRUCTION_INVALID),
        ({"instruction": "x" * 1100}, ErrorCode.INSTRUCTION_INVALID),
        ({"instruction": "pick <|image_pad|> up"}, ErrorCode.INSTRUCTION_INVALID),
        ({"instruction": "pick </image> up"}, ErrorCode.INSTRUCTION_INVALID),
    ],
)
def test_observations_that_do_not_fit_are_refused(
    kit: Any, adapter: MiniCpmAdapter, pool: Any, changes: dict[str, Any], code: ErrorCode
) -> None:
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(kit.observe(**changes), pool).result()
    assert caught.value.code is code
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("images", "code"),
    [
        (("agentview",), ErrorCode.CAMERA_MISSING),
        (("agentview", "wrist", "third"), ErrorCode.CAMERA_UNKNOWN),
    ],
)
def test_too_few_and_too_many_images_are_refused(
    kit: Any, adapter: MiniCpmAdapter, pool: Any, images: tuple[str, ...], code: ErrorCode
) -> None:
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(kit.observe(images=dict.fromkeys(images, kit.raw())), pool)
    assert caught.value.code is code


def test_a_corrupt_image_is_its_own_rows_error(kit: Any, adapter: MiniCpmAdapter, pool: Any) -> None:
    broken = replace(kit.raw(), data=b"abc")
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(kit.observe(images={"agentview": broken, "wrist": kit.raw()}), pool).result()
    assert caught.value.code is ErrorCode.IMAGE_CORRUPT


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"statistics": "5"}, "embodiment 5 is none of the checkpoint's 5"),
        ({"statistics": "libero"}, "embodiments by number"),
        ({"cameras": {"front": "agentview"}}, "map one robot camera to each"),
        ({"precision": "fp8"}, "needs a Hopper GPU"),
        ({"parallel": ParallelOptions(tp=2)}, "fits one GPU"),
        ({"rtc": RtcOptions(mode="guided")}, "takes no tail"),
        ({"solver_steps": 8}, "trained for 4"),
        ({"action_horizon": 7}, "the checkpoint has 6"),
    ],
)
def test_deployments_that_cannot_work_are_refused(kit: Any, served: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TaktlineError, match=says) as caught:
        load(kit.config(served, **changes))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize(
    ("sidecar", "says"),
    [
        ({"cameras": []}, "name 1 to 8"),
        ({"control_period_ms": None}, "control period is not stated"),
        ({"action_channels": [[7, 17]]}, "do not overlap"),
        ({"state_channels": [[0, 2], [1, 3]]}, "do not overlap"),
        ({"camera": ["front"]}, "does not fit"),
    ],
)
def test_sidecars_that_do_not_fit_are_refused(kit: Any, tmp_path: Path, sidecar: dict[str, Any], says: str) -> None:
    with pytest.raises(TaktlineError, match=says) as caught:
        load(kit.config(kit.served(tmp_path / "x", **sidecar)))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def changed(kit: Any, tmp_path: Path, name: str) -> Path:
    """A folder with one thing wrong."""
    tensors = kit.checkpoint()
    if name == "unknown tensor":
        tensors["vlm.model.extra.weight"] = torch.zeros(2)
    elif name == "absent tensor":
        del tensors["action_head.action_encoder.W2.b"]
    elif name == "misshapen tensor":
        tensors["action_head.model.proj_out_2.bias"] = torch.zeros(7)
    elif name == "not finite":
        tensors["vlm.model.language_model.norm.weight"][3] = float("nan")
    path: Path = kit.served(tmp_path / "x", tensors)
    if name == "another model":
        (path / "config.json").write_text(json.dumps({"model_type": "minicpm_robottrack"}))
    elif name == "another tokenizer":
        kit.tokenizer(path, image_id=501)
    elif name == "no template":
        (path / "chat_template.jinja").unlink()
    elif name == "no symbols":
        (path / "tokenizer_config.json").write_text("{}")
    elif name == "no tokenizer":
        (path / "tokenizer.json").unlink()
    return path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unknown tensor", "unknown vlm.model.extra.weight"),
        ("absent tensor", "lacks action_head.action_encoder.W2.b"),
        ("misshapen tensor", "proj_out_2.bias"),
        ("not finite", "NaN or infinity"),
        ("another model", "minicpm_robottrack"),
        ("another tokenizer", "as 501"),
        ("no template", "no chat template"),
        ("no symbols", "do not give image_end_token"),
        ("no tokenizer", "tokenizer.json does not exist"),
    ],
)
def test_checkpoints_that_are_not_whole_are_refused(kit: Any, tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(TaktlineError, match=says) as caught:
        load(kit.config(changed(kit, tmp_path, name)))
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID


@pytest.mark.parametrize("prefix", ["vlm.", "vlm.model."])
def test_both_layouts_of_names_and_a_stored_output_projection_are_read(kit: Any, tmp_path: Path, prefix: str) -> None:
    tensors = kit.checkpoint(prefix) | {"vlm.lm_head.weight": torch.zeros(512, 48)}
    adapter = load(kit.config(kit.served(tmp_path / "x", tensors)))
    assert adapter.description.family == "minicpm-robot"


def test_inspect_names_what_a_worker_would_serve(kit: Any, served: Path, tmp_path: Path) -> None:
    report = inspect(served)
    assert report.usable
    assert report.family == "minicpm-robot"
    assert report.cameras == ("agentview", "wrist")
    assert (report.state_dim, report.action_dim, report.horizon, report.solver_steps) == (4, 5, 6, 4)
    assert report.parameters == sum(value.numel() for value in kit.checkpoint().values())
    assert "5 embodiments" in report.facts["action head"]
    broken = inspect(changed(kit, tmp_path, "unknown tensor"))
    assert not broken.usable
    assert broken.problems[0].code == "checkpoint_invalid"
