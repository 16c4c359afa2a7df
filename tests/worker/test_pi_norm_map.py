"""LeRobot's normalisation step as its own code reads it: what it would leave as it is is never normalised here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.models.pi.adapter import load

Step = dict[str, Any]
KEYS = "normalize_observation_keys"


@pytest.fixture
def policy(folders: Any, tmp_path: Path) -> Path:
    path: Path = folders.lerobot(tmp_path / "policy", "pi05")
    return path


def _edit(policy: Path, change: Callable[[Step], Any]) -> None:
    """Changes the settings of the normalisation before the network."""
    path = policy / "policy_preprocessor.json"
    content = json.loads(path.read_text())
    (step,) = (step for step in content["steps"] if step["registry_name"] == "normalizer_processor")
    change(step["config"])
    path.write_text(json.dumps(content))


def _refusal(config: Any) -> str:
    with pytest.raises(TaktlineError) as caught:
        load(config)
    assert caught.value.code is ErrorCode.CHECKPOINT_INVALID
    assert caught.value.next_step
    return caught.value.message


def test_a_kind_that_norm_map_leaves_out_is_not_normalised(policy: Path, config_of: Any) -> None:
    _edit(policy, lambda step: step["norm_map"].pop("STATE"))
    message = _refusal(config_of(policy))  # config.json says otherwise
    assert "QUANTILES" in message
    assert "IDENTITY" in message
    config = json.loads((policy / "config.json").read_text())
    del config["normalization_mapping"]["STATE"]
    (policy / "config.json").write_text(json.dumps(config))
    conventions = load(config_of(policy)).processor.conventions
    assert conventions.state_normaliser.mode == "IDENTITY"
    assert conventions.action_normaliser.mode == "QUANTILES"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda step: step["features"].pop("observation.state"), "features"),
        (lambda step: step.update(features=None), "features"),
        (lambda step: step["features"]["observation.state"].update(type="ENV"), "ENV"),
        (lambda step: step.update({KEYS: ["observation.images.base_0_rgb"]}), KEYS),
        (lambda step: step.update({KEYS: []}), KEYS),
        (lambda step: step.pop("norm_map"), "norm_map"),
    ],
    ids=["not described", "nothing described", "of another kind", "other keys", "no keys", "no norm_map"],
)
def test_a_state_that_would_be_left_as_it_is_is_refused(policy: Path, config_of: Any, change: Any, word: str) -> None:
    _edit(policy, change)
    message = _refusal(config_of(policy))
    assert "normalizer_processor" in message
    assert word in message


def test_a_state_among_the_keys_is_normalised(policy: Path, config_of: Any) -> None:
    _edit(policy, lambda step: step.update({KEYS: ["observation.state"]}))
    assert load(config_of(policy)).processor.conventions.state_normaliser.mode == "QUANTILES"


def test_a_state_left_as_it_is_on_purpose(policy: Path, config_of: Any) -> None:
    """With IDENTITY it does not matter what else the step says of it."""
    _edit(policy, lambda step: (step["norm_map"].update(STATE="IDENTITY"), step["features"].pop("observation.state")))
    config = json.loads((policy / "config.json").read_text())
    config["normalization_mapping"]["STATE"] = "IDENTITY"
    (policy / "config.json").write_text(json.dumps(config))
    assert load(config_of(policy)).processor.conventions.state_normaliser.mode == "IDENTITY"
