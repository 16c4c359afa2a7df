"""What a worker refuses at start, each with a code, the reason and a next step."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, QuantisationOptions
from taktline_worker.checkpoint import file_sha256
from taktline_worker.models.pi import byte_expert
from taktline_worker.models.pi.adapter import load
from taktline_worker.models.registry import load_adapter

NORMALIZER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALIZER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


@pytest.fixture
def policy(folders: Any, tmp_path: Path) -> Path:
    path: Path = folders.lerobot(tmp_path / "policy", "pi05")
    return path


def _refusal(config: Any, code: ErrorCode, *words: str) -> TaktlineError:
    with pytest.raises(TaktlineError) as caught:
        load(config)
    error = caught.value
    assert error.code is code
    assert error.next_step
    for word in words:
        assert word in f"{error.message} {error.next_step}"
    return error


def _edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_an_untouched_folder_loads(policy: Path, config_of: Any) -> None:
    digest = file_sha256(policy / "model.safetensors")
    assert load(config_of(policy, sha256={"model.safetensors": digest.upper()})).description.action_dim == 7


def test_quantised_weights_that_nothing_can_read(policy: Path, config_of: Any) -> None:
    stored = QuantisationOptions(expert="int8", max_batch=2)
    invalid = ErrorCode.CONFIG_INVALID
    _refusal(config_of(policy, precision="bf16", quantisation=stored), invalid, "runs on a cpu", "fp8_error.py")
    _refusal(config_of(policy, precision="fp32", quantisation=stored), invalid, "precision is fp32", "bf16 or fp8")
    cuda = torch.device("cuda")
    with pytest.raises(TaktlineError, match="no bucket of 4, 8 is as small as its maxBatch 2"):
        byte_expert.check(stored, "bf16", (4, 8), cuda)
    byte_expert.check(stored, "bf16", (2, 8), cuda)
    byte_expert.check(None, "fp32", (4,), torch.device("cpu"))


def test_fp8_weights_need_a_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = QuantisationOptions(expert="fp8")
    for capability in ((8, 0), (8, 6)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.raises(TaktlineError, match="this GPU has no FP8") as caught:
            byte_expert.check(stored, "bf16", (1,), torch.device("cuda"))
        assert "int8" in caught.value.next_step
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    byte_expert.check(stored, "bf16", (1,), torch.device("cuda"))


@pytest.mark.parametrize("family", ["gr00t-n1.7", "vjepa2-ac", "cosmos3-nano", "minicpm-robot"])
def test_quantised_weights_of_other_families(family: str) -> None:
    config = EngineConfig(
        policy="p",
        model=ModelConfig(family=family, path="/nowhere", revision=""),
        engine=EngineOptions(quantisation=QuantisationOptions(expert="fp8")),
    )
    with pytest.raises(TaktlineError, match=f"family {family} keeps its weights as engine.precision says") as caught:
        load_adapter(config)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "pi05" in caught.value.next_step


def test_wrong_digest(policy: Path, config_of: Any) -> None:
    _refusal(config_of(policy, sha256={"model.safetensors": "0" * 64}), ErrorCode.CHECKPOINT_INVALID, "sha256", "0000")


@pytest.mark.parametrize("name", ["absent.bin", "../outside"])
def test_digest_of_a_file_that_is_not_in_the_folder(policy: Path, config_of: Any, name: str) -> None:
    (policy.parent / "outside").write_bytes(b"x")
    _refusal(config_of(policy, sha256={name: "0" * 64}), ErrorCode.CHECKPOINT_INVALID, name)


def test_weights_that_git_lfs_has_not_fetched(policy: Path, config_of: Any) -> None:
    """Whoever clones a repository of the hub without git-lfs has a text of three lines for each large file."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 7764176\n"
    (policy / "model.safetensors").write_text(pointer)
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "git-lfs", f"`git lfs pull` in {policy}")


@pytest.mark.parametrize("damage", ["truncated", "appended", "header", "length", "empty"])
def test_corrupt_weights(policy: Path, config_of: Any, damage: str) -> None:
    path = policy / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-1000],
            "appended": data + b"\0" * 16,
            "header": data[:8] + b"\xff" * 64 + data[72:],
            "length": struct.pack("<Q", 2**60) + data[8:],
            "empty": b"",
        }[damage]
    )
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(policy: Path, config_of: Any, value: float) -> None:
    name = "model.action_out_proj.weight"
    _edit_tensors(policy / "model.safetensors", lambda t: t[name].view(-1)[3].fill_(value))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, name, "NaN")


def test_missing_tensor(policy: Path, config_of: Any) -> None:
    _edit_tensors(policy / "model.safetensors", lambda t: t.pop("model.action_out_proj.bias"))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "action_out_proj.bias")


def test_tensor_of_another_model(policy: Path, config_of: Any) -> None:
    name = "model.proprio_history_proj.weight"
    _edit_tensors(policy / "model.safetensors", lambda t: t.update({name: torch.zeros(4, 4)}))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, name)


def test_misshapen_tensor(policy: Path, config_of: Any) -> None:
    name = "model.time_mlp_out.weight"
    _edit_tensors(policy / "model.safetensors", lambda t: t.update({name: torch.zeros(32, 30)}))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "time_mlp_out.weight", "(32, 30)", "(32, 32)")


def test_one_tensor_under_two_names(policy: Path, config_of: Any) -> None:
    name = "action_out_proj.bias"
    _edit_tensors(policy / "model.safetensors", lambda t: t.update({name: torch.zeros(32)}))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, name)


def test_family_of_the_config_contradicts_the_tensors(policy: Path, config_of: Any) -> None:
    _refusal(config_of(policy, "pi0"), ErrorCode.CONFIG_INVALID, "pi05", "model.family")
    _edit(policy / "config.json", lambda c: c.update(type="pi0"))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "'pi0'")


def test_unknown_family(policy: Path, config_of: Any) -> None:
    with pytest.raises(TaktlineError) as caught:
        load_adapter(config_of(policy, "pi9"))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "pi05" in caught.value.next_step


def test_unknown_vision_heads_are_not_guessed(policy: Path, config_of: Any) -> None:
    (policy / "taktline.json").write_text('{"control_period_ms": 50}')
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "vision_heads")


@pytest.mark.parametrize(
    "stated", [{"vision_heads": 2, "head_dim": 32}, {"vision_heads": 2, "heads": 4}, {"vision_heads": 5}]
)
def test_stated_architecture_contradicts_the_tensors(
    folders: Any, tmp_path: Path, config_of: Any, stated: dict[str, int]
) -> None:
    path = folders.lerobot(tmp_path / "other", "pi05", architecture=stated)
    _refusal(config_of(path), ErrorCode.CHECKPOINT_INVALID, "taktline.json")


def test_unknown_field_in_taktline_json(folders: Any, tmp_path: Path, config_of: Any) -> None:
    path = folders.lerobot(tmp_path / "other", "pi05", visoin_heads=2)
    _refusal(config_of(path), ErrorCode.CONFIG_INVALID, "visoin_heads")


def test_openpi_field_in_a_lerobot_folder(folders: Any, tmp_path: Path, config_of: Any) -> None:
    path = folders.lerobot(tmp_path / "other", "pi05", preset="pi05_droid")
    _refusal(config_of(path), ErrorCode.CONFIG_INVALID, "preset")


@pytest.mark.parametrize("name", [NORMALIZER, UNNORMALIZER])
def test_missing_statistics_file(policy: Path, config_of: Any, name: str) -> None:
    (policy / name).unlink()
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, name, "statistics")


def test_corrupt_statistics_file(policy: Path, config_of: Any) -> None:
    (policy / NORMALIZER).write_bytes(b"not safetensors")
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, NORMALIZER)


def test_statistics_without_the_needed_quantile(policy: Path, config_of: Any) -> None:
    _edit_tensors(policy / UNNORMALIZER, lambda t: t.pop("action.q99"))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "q99", "action")


def test_statistics_without_the_feature(policy: Path, config_of: Any) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("observation.state.")]:
            del tensors[name]

    _edit_tensors(policy / NORMALIZER, drop)
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "observation.state")


def test_no_statistics_is_a_choice_that_must_be_stated(folders: Any, tmp_path: Path, config_of: Any) -> None:
    path = folders.lerobot(tmp_path / "base", "pi05", allow_missing_statistics=True)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        _edit(path / name, lambda c: [step.pop("state_file", None) for step in c["steps"]])
    assert load(config_of(path)).processor.conventions.action_normaliser.mode == "IDENTITY"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: t.update({"action.q01": torch.zeros(6), "action.q99": torch.ones(6)}), "(6,)"),
        (lambda t: t["action.q01"][2].fill_(float("nan")), "NaN"),
        (lambda t: t.update({"action.q01": t["action.q99"], "action.q99": t["action.q01"].clone()}), "spread"),
    ],
)
def test_statistics_that_cannot_be_right(policy: Path, config_of: Any, change: Any, word: str) -> None:
    _edit_tensors(policy / UNNORMALIZER, change)
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, word)


def test_normalisation_modes_that_contradict_each_other(policy: Path, config_of: Any) -> None:
    _edit(policy / "config.json", lambda c: c["normalization_mapping"].update(STATE="MEAN_STD"))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "MEAN_STD", "QUANTILES")


def test_unknown_normalisation_mode(policy: Path, config_of: Any) -> None:
    _edit(policy / "config.json", lambda c: c["normalization_mapping"].update(STATE="MAGIC"))
    _edit(policy / "policy_preprocessor.json", lambda c: c["steps"][3]["config"]["norm_map"].update(STATE="MAGIC"))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "MAGIC")


def test_norm_map_is_obeyed(policy: Path, config_of: Any) -> None:
    """The same statistics files hold every mode's numbers; the map decides which are used."""
    _edit(policy / "config.json", lambda c: c["normalization_mapping"].update(STATE="MEAN_STD", ACTION="MIN_MAX"))
    for name, index in (("policy_preprocessor.json", 3), ("policy_postprocessor.json", 0)):
        _edit(
            policy / name,
            lambda c, i=index: c["steps"][i]["config"]["norm_map"].update(STATE="MEAN_STD", ACTION="MIN_MAX"),
        )
    conventions = load(config_of(policy)).processor.conventions
    statistics = load_file(policy / NORMALIZER)
    assert conventions.state_normaliser.low.tolist() == statistics["observation.state.mean"].tolist()
    assert conventions.state_normaliser.high.tolist() == statistics["observation.state.std"].tolist()
    assert conventions.action_normaliser.high.tolist() == statistics["action.max"].tolist()


@pytest.mark.parametrize("name", ["policy_preprocessor.json", "policy_postprocessor.json", "config.json"])
def test_missing_or_broken_json(policy: Path, config_of: Any, name: str) -> None:
    (policy / name).write_text("{")
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, name)
    (policy / name).unlink()
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, name)


@pytest.mark.parametrize(
    "change",
    [
        {"use_visual_memory": True},
        {"use_proprioceptive_memory": True},
        {"rtc_training_max_delay": 99},
        {"rtc_training_max_delay": -1},
        {"rtc_config": {"prefix_attention_schedule": "CUBIC"}},
        {"use_peft": True},
        {"history_of_the_future": 4},
        {"n_obs_steps": 2},
        {"image_resolution": [224, 224]},
        {"max_action_dim": 48},
        {"tokenizer_max_length": 100},
        {"use_relative_actions": True},
    ],
)
def test_config_fields_that_would_change_inference(policy: Path, config_of: Any, change: dict[str, Any]) -> None:
    _edit(policy / "config.json", lambda c: c.update(change))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, next(iter(change)).split("_")[0])


def test_fields_that_do_not_matter_are_ignored(folders: Any, tmp_path: Path, config_of: Any) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05", ignore_config_fields=["lucky_number"])
    _edit(path / "config.json", lambda c: c.update(optimizer_new=1, compile_flag=True, lucky_number=7, future=False))
    load(config_of(path))


def test_older_files_that_omit_fields_get_the_defaults(policy: Path, config_of: Any) -> None:
    omitted = ("normalization_mapping", "empty_cameras", "time_sampling_scale", "min_period", "num_inference_steps")
    _edit(policy / "config.json", lambda c: [c.pop(name) for name in omitted])
    conventions = load(config_of(policy)).processor.conventions
    assert (conventions.solver_steps, conventions.min_period) == (10, 0.004)


def test_unknown_processor_step(policy: Path, config_of: Any) -> None:
    _edit(policy / "policy_preprocessor.json", lambda c: c["steps"].append({"registry_name": "crop_processor"}))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "crop_processor")


def test_custom_processor_step(policy: Path, config_of: Any) -> None:
    _edit(policy / "policy_preprocessor.json", lambda c: c["steps"].append({"class": "my.Step", "config": {}}))
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "my.Step")


def test_missing_tokenizer(policy: Path, config_of: Any) -> None:
    shutil.rmtree(policy / "tokenizer")
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "tokenizer")


def test_hub_name_of_a_tokenizer_is_looked_up_locally(policy: Path, config_of: Any) -> None:
    _edit(
        policy / "policy_preprocessor.json",
        lambda c: c["steps"][5]["config"].update(tokenizer_name="google/paligemma-3b-pt-224"),
    )
    shutil.move(policy / "tokenizer" / "tokenizer.model", policy / "tokenizer.model")
    shutil.rmtree(policy / "tokenizer")
    load(config_of(policy))


def test_tokenizer_that_cannot_be_read(policy: Path, config_of: Any) -> None:
    (policy / "tokenizer" / "tokenizer.json").write_text("{}")
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "tokenizer.json")


@pytest.mark.parametrize(
    ("cameras", "word"),
    [
        ({"front": "base_1_rgb", "left": "left_wrist_0_rgb", "right": "right_wrist_0_rgb"}, "base_1_rgb"),
        ({"front": "base_0_rgb", "left": "left_wrist_0_rgb"}, "right_wrist_0_rgb"),
        ({"a": "base_0_rgb", "b": "base_0_rgb", "c": "left_wrist_0_rgb", "d": "right_wrist_0_rgb"}, "two names"),
    ],
)
def test_camera_mapping_that_does_not_fit(policy: Path, config_of: Any, cameras: dict[str, str], word: str) -> None:
    _refusal(config_of(policy, cameras=cameras), ErrorCode.CONFIG_INVALID, word)


def test_unknown_control_period(folders: Any, tmp_path: Path, config_of: Any) -> None:
    path = folders.lerobot(tmp_path / "policy", "pi05", control_period_ms=None)
    _refusal(config_of(path), ErrorCode.CONFIG_INVALID, "control period")
    assert load(config_of(path, control_period_ms=20.0)).description.control_period_s == 0.02


@pytest.mark.parametrize("change", [{"action_horizon": 5000}, {"solver_steps": 5000}, {"control_period_ms": -1.0}])
def test_overrides_out_of_range(policy: Path, config_of: Any, change: dict[str, Any]) -> None:
    _refusal(config_of(policy, **change), ErrorCode.CONFIG_INVALID)


def test_path_that_is_no_folder(tmp_path: Path, config_of: Any) -> None:
    _refusal(config_of(tmp_path / "nowhere"), ErrorCode.CONFIG_INVALID, "nowhere")


def test_folder_without_any_layout(policy: Path, config_of: Any) -> None:
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        (policy / name).unlink()
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "statistics")


def test_weights_split_over_two_files(policy: Path, config_of: Any) -> None:
    tensors = load_file(policy / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:40], "b.safetensors": names[40:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, policy / file)
    (policy / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (policy / "model.safetensors.index.json").write_text(json.dumps(index))
    load(config_of(policy))
    (policy / "b.safetensors").unlink()
    _refusal(config_of(policy), ErrorCode.CHECKPOINT_INVALID, "b.safetensors")
