"""Whole Cosmos3 folders: what a worker loads and answers, what inspection says, and every folder that is refused."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, ParallelOptions
from taktline_worker.checkpoint import TensorFiles
from taktline_worker.inspection import inspect
from taktline_worker.models.cosmos3.composition import VIEWS
from taktline_worker.models.registry import load_adapter
from taktline_worker.observation import EncodedImage, RobotInput
from taktline_worker.profiling.subject import Request, open_subject

from tests.cosmos3.tiny_policy import make_model, write_checkpoint
from tests.cosmos3.tokenizer_folders import VOCABULARY, save_tokenizer
from tests.cosmos3.vae_checkpoints import save_vae, tiny_vae

STATE = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, 0.25], dtype=np.float32)
BASE_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_karras_sigmas": True,
    "use_flow_sigmas": True,
    "sigma_min": 0.147,
    "sigma_max": 200.0,
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders as published: `nano` and `edge`."""
    folder = tmp_path_factory.mktemp("published")
    vae = tiny_vae()
    for kind in ("nano", "edge"):
        # One key head: attention over 3093 tokens is then fast on a CPU.
        model = make_model(
            kind, vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
        )
        write_checkpoint(model, folder / kind)
        save_vae(folder / kind, vae)
        save_tokenizer(folder / kind)
        (folder / kind / "scheduler").mkdir()
        write_scheduler(folder / kind, **BASE_SCHEDULER)
    return folder


@pytest.fixture
def nano(published, tmp_path):
    """A copy of the Nano folder that a test may spoil."""
    return shutil.copytree(published / "nano", tmp_path / "nano")


def write_scheduler(folder, **config):
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))


def change_config(folder, **changes):
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_tensors(folder, change):
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def config_of(folder, family="cosmos3-nano", **options):
    options = {"device": "cpu", "precision": "fp32"} | options
    return EngineConfig(
        policy="tiny", model=ModelConfig(family=family, path=str(folder), revision="1"), engine=EngineOptions(**options)
    )


def observation(seed=0):
    random = np.random.default_rng(seed)

    def image(height, width):
        return EncodedImage("raw", random.integers(0, 256, height * width * 3, np.uint8).tobytes(), (height, width, 3))

    images = dict(zip(VIEWS, (image(180, 320), image(180, 320), image(180, 320)), strict=True))
    return RobotInput(images=images, state=STATE, instruction="put the cup into the sink", seed=5)


@pytest.mark.parametrize("kind", ["nano", "edge"])
def test_a_published_folder_is_served(published, kind):
    adapter = load_adapter(config_of(published / kind, f"cosmos3-{kind}"))
    said = adapter.description
    assert (said.family, said.horizon, said.action_dim, said.state_dim) == (f"cosmos3-{kind}", 32, 8, 8)
    assert said.control_period_s == pytest.approx(1 / 15)
    guided = {"nano": (True, True, True, True), "edge": (True, False, False, False)}[kind]
    assert adapter.runner.guided == guided
    with ThreadPoolExecutor(1) as pool:
        row = adapter.begin(observation(), pool).result()
    outputs = adapter.run([row], 1)
    [actions] = adapter.finish([row], outputs)
    assert actions.shape == (32, 8)
    assert np.isfinite(actions).all()
    # The gripper is turned round on the way out, everything else is the network's own number.
    np.testing.assert_array_equal(actions[:, :7], outputs[0].outcome.actions[:, :7])
    np.testing.assert_array_equal(actions[:, 7], 1.0 - outputs[0].outcome.actions[:, 7].numpy())
    assert float(row.request.state[7]) == 0.75
    assert adapter.caches() == {"instruction": (0, 1), "empty_prompt": (0, 1)}
    assert adapter.largest_row().request.frames.shape == (3, 1, 544, 736)


def test_a_served_folder_by_phase(published, tmp_path):
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(config_of(published / "edge", "cosmos3-edge")))
    subject = open_subject(Request(str(path), (1,), device="cpu"))
    assert (subject.policy, subject.shape["passes"], subject.captured) == ("cosmos3-edge", 5, False)
    assert subject.shape["tokens"] == 3093
    encode, denoise = subject.phases(1)
    assert (encode.name, denoise.name) == ("encode", "denoise")
    assert encode.run().shape == (1, 48, 1, 34, 46)
    assert denoise.flops > encode.flops > 0
    with pytest.raises(TaktlineError, match="one picture"):
        open_subject(Request(str(path), (1,), device="cpu", views=1))


def test_inspection_says_what_will_be_served(published):
    nano, edge = inspect(published / "nano"), inspect(published / "edge", read_weights=False)
    assert nano.usable
    assert edge.usable
    assert (nano.family, edge.family) == ("cosmos3-nano", "cosmos3-edge")
    assert nano.facts["solver"] == "UniPC, shift 5, times 999, 937, 833, 624"
    assert nano.facts["guidance"] == "3 at times 999, 937, 833, 624"
    assert edge.facts["guidance"] == "3 at times 999"
    assert edge.facts["MLP"] == "squared ReLU, 96 columns"
    assert set(nano.sha256) == {f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "vae")}
    assert [problem.severity for problem in nano.problems] == ["note"]
    assert "Karras levels from 0.147 to 200.0" in nano.problems[0].message


def refused(folder, code=ErrorCode.CHECKPOINT_INVALID, **options):
    with pytest.raises(TaktlineError) as error:
        load_adapter(config_of(folder, **options))
    assert error.value.code is code
    assert error.value.next_step
    return error.value


def test_the_base_model_is_refused(nano):
    (nano / "checkpoint.json").unlink()
    assert "base model, which was not trained as a policy" in refused(nano).message


def test_a_model_without_actions_is_refused(nano):
    change_config(nano, action_gen=False)

    def drop(tensors):
        for name in [name for name in tensors if name.startswith("action_")]:
            del tensors[name]

    change_tensors(nano, drop)
    assert "no action projections" in refused(nano).message


def test_quantised_weights_are_refused(nano):
    change_config(nano, quantization_config={"quant_method": "modelopt"})
    assert "quantised by modelopt" in refused(nano).message


def test_weights_stored_in_fp8_are_refused(nano):
    def shrink(tensors):
        name = "layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    change_tensors(nano, shrink)
    error = refused(nano)
    assert "F8_E4M3" in error.message
    assert "layers.0.mlp.up_proj.weight" in error.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sigma_max": 80.0}, "Karras levels from 0.147 to 80.0"),
        ({"use_karras_sigmas": False, "flow_shift": 7.0}, "flow levels with shift 7"),
        ({"use_karras_sigmas": False, "use_flow_sigmas": False}, "diffusion, not flow"),
        ({"prediction_type": "epsilon"}, "prediction_type = 'epsilon'"),
        ({"_class_name": "EulerDiscreteScheduler"}, "EulerDiscreteScheduler"),
    ],
)
def test_a_scheduler_file_of_another_training_is_refused(nano, changes, said):
    write_scheduler(nano, **BASE_SCHEDULER | changes)
    assert said in refused(nano).message


def test_the_shift_of_another_training_can_be_stated(nano):
    write_scheduler(nano, **BASE_SCHEDULER | {"use_karras_sigmas": False, "flow_shift": 7.0})
    (nano / "taktline.json").write_text(json.dumps({"shift": 7.0}))
    report = inspect(nano, read_weights=False)
    assert report.usable
    assert report.facts["solver"].startswith("UniPC, shift 7, times 999, 954")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"qk_norm_for_text": False}, "qk_norm_for_text = False"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        ({"num_attention_heads": 8}, r"'layers.0.self_attn.to_q.weight' has shape (32, 64), expected (128, 64)"),
        ({"rms_norm_eps": ...}, "KeyError 'rms_norm_eps'"),
        ({"unified_3d_mrope_reset_spatial_ids": False}, "unified_3d_mrope_reset_spatial_ids"),
        ({"rope_axes_dim": [4, 2, 1]}, "do not fit together"),
        ({"_class_name": "WanTransformer3DModel"}, "WanTransformer3DModel"),
    ],
)
def test_a_configuration_that_does_not_fit_the_tensors_is_refused(nano, changes, said):
    change_config(nano, **changes)
    assert said in refused(nano).message


def test_missing_and_unknown_tensors_are_named(nano):
    def rename(tensors):
        tensors["layers.1.mlp.gate.weight"] = tensors.pop("layers.1.mlp.gate_proj.weight")

    change_tensors(nano, rename)
    message = refused(nano).message
    assert "lacks layers.1.mlp.gate_proj.weight" in message
    assert "layers.1.mlp.gate.weight" in message


def test_an_edge_export_without_its_newer_fields_is_recognised_by_its_tensors(published, tmp_path):
    folder = shutil.copytree(published / "edge", tmp_path / "edge")
    change_config(folder, hidden_act=..., qk_norm_for_text=..., use_und_k_norm_for_gen=...)
    assert inspect(folder, read_weights=False).family == "cosmos3-edge"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "fp8"),
        ({"parallel": ParallelOptions(search=2)}, "planners"),
        ({"family": "cosmos3-edge"}, "the checkpoint is cosmos3-nano"),
        ({"solver_steps": 0}, "solverSteps"),
    ],
)
def test_a_deployment_that_does_not_fit_is_refused(published, options, said):
    assert said in refused(published / "nano", ErrorCode.CONFIG_INVALID, **options).message


def test_a_part_without_tensors_is_named_and_not_taken_for_another_source(tmp_path):
    (tmp_path / "transformer").mkdir()
    with pytest.raises(TaktlineError) as caught:
        TensorFiles(tmp_path / "transformer", "diffusion_pytorch_model")
    assert "transformer holds no diffusion_pytorch_model.safetensors" in caught.value.message
    assert "belongs into transformer/" in caught.value.next_step
    assert "model.source" not in caught.value.next_step
