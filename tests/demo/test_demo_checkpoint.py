"""The shipped checkpoint: LeRobot's layout, size, card and tokenizer, and its agreement with the worker's engine."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from safetensors import safe_open
from taktline_demo.arm import CAMERAS, COLOURS
from taktline_demo.environment import ReachEnvironment
from taktline_demo.evaluation import evaluate
from taktline_demo.jpeg import encode_jpeg
from taktline_demo.policy.architecture import Architecture
from taktline_demo.policy.checkpoint import lerobot_name
from taktline_demo.policy.inference import DirectPolicy
from taktline_demo.policy.network import DemoPolicy
from taktline_demo.policy.prompt import discretise, prompt_text
from taktline_demo.task import CONTROL_PERIOD_S, HORIZON, INSTRUCTIONS
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_worker.models.pi.adapter import load
from taktline_worker.observation import EncodedImage, RobotInput
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "demo" / "checkpoint"


@pytest.fixture(scope="module")
def direct():
    return DirectPolicy(FOLDER)


@pytest.fixture(scope="module")
def adapter():
    model = ModelConfig(family="pi05", path=str(FOLDER), revision="test")
    return load(EngineConfig(policy="demo", model=model, engine=EngineOptions(device="cpu", precision="fp32")))


def read_json(name):
    return json.loads((FOLDER / name).read_text())


def observe(seed, goal=None):
    environment = ReachEnvironment()
    environment.reset(seed, goal)
    images = {name: encode_jpeg(frame) for name, frame in environment.frames().items()}
    environment.close()
    return images, environment.state(), environment.instruction


def test_folder_is_complete_and_small():
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json", "taktline.json", "README.md"):
        assert (FOLDER / name).is_file(), name
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 12_000_000


def test_weights_have_lerobot_s_names():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    wanted = {lerobot_name(name) for name in DemoPolicy(Architecture()).state_dict()}
    heads = {
        "model.paligemma_with_expert.paligemma.lm_head.weight",
        "model.paligemma_with_expert.gemma_expert.lm_head.weight",
    }
    assert stored == wanted | heads
    assert all(name.startswith("model.") for name in stored)


def test_processors_point_at_their_statistics():
    for file, step in (
        ("policy_preprocessor.json", "normalizer_processor"),
        ("policy_postprocessor.json", "unnormalizer_processor"),
    ):
        steps = {entry["registry_name"]: entry for entry in read_json(file)["steps"]}
        with safe_open(FOLDER / steps[step]["state_file"], "np") as statistics:
            assert statistics.get_slice("action.q99").get_shape() == [4]
            assert statistics.get_slice("observation.state.q01").get_shape() == [4]
            assert np.all(statistics.get_tensor("action.q99") > statistics.get_tensor("action.q01"))
    config = read_json("config.json")
    assert config["type"] == "pi05"
    assert config["chunk_size"] == HORIZON
    assert config["normalization_mapping"] == {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
    cameras = [name for name in config["input_features"] if name.startswith("observation.images.")]
    assert cameras == [f"observation.images.{name}" for name in CAMERAS]
    assert read_json("taktline.json")["control_period_ms"] == 1000 * CONTROL_PERIOD_S


def test_card_states_where_the_policy_comes_from():
    card = (FOLDER / "README.md").read_text()
    for word in ("seed", "commit", "success", "untrained", "taktline-demo train", "2800 episodes"):
        assert word in card, word


def test_card_s_figures_are_those_of_the_evaluation():
    card = (FOLDER / "README.md").read_text()
    for evaluation in read_json("evaluation.json"):
        for goal, result in evaluation["goals"].items():
            runs = [run for run in evaluation["runs"] if run["goal"] == goal]
            assert len(runs) == result["episodes"] >= 50
            assert sum(run["reached"] == goal for run in runs) == result["successes"]
            assert f"| {evaluation['policy']} | {goal} | {result['episodes']} | {result['successes']} |" in card


def test_no_prompt_has_an_unknown_token_and_both_files_agree():
    model = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / "tokenizer" / "tokenizer.model"))
    fast = Tokenizer.from_file(str(FOLDER / "tokenizer" / "tokenizer.json"))
    assert (model.pad_id(), model.eos_id(), model.bos_id(), model.unk_id()) == (0, 1, 2, 3)
    assert len(model.encode("\n")) == 1
    rng = np.random.default_rng(0)
    prompts = [
        prompt_text(template.format(colour), rng.integers(-1, 256, 4))
        for template in INSTRUCTIONS
        for colour in COLOURS
        for _ in range(25)
    ]
    prompts += ["", "  two  blanks ", "Würfel ✓ 512\n\n", "reach_the_red_block"]
    for prompt in prompts:
        ids = model.encode(prompt)
        assert model.unk_id() not in ids
        assert model.decode(ids) == prompt
        assert fast.encode(prompt, add_special_tokens=False).ids == ids
    assert max(len(model.encode(prompt)) for prompt in prompts) < Architecture().prompt_tokens


def test_state_bins_follow_the_convention():
    assert discretise(np.array([-1.5, -1.0, 0.0, 1.0, 7.0])).tolist() == [-1, 0, 128, 255, 255]
    assert prompt_text(" reach_the\nred block ", np.array([1, -1])) == (
        "Task: reach the red block, State: 1 -1;\nAction: "
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_worker_computes_the_actions_that_the_training_code_computes(direct, adapter, seed):
    images, state, instruction = observe(seed)
    with ThreadPoolExecutor(2) as pool:
        frames = {name: EncodedImage("jpeg", data) for name, data in images.items()}
        row = adapter.begin(RobotInput(frames, state, instruction, seed), pool).result()
        (served,) = adapter.finish([row], adapter.run([row], 1))
    ours = direct.act(images, state, instruction, seed)
    assert served.shape == ours.shape == (HORIZON, 4)
    assert np.abs(served - ours).max() <= 1e-5 * np.abs(ours).max()


def test_it_goes_to_the_block_that_the_words_name(direct):
    result = evaluate("shipped", direct.act, range(500, 504))
    assert result.successes() >= 11  # of 12: the card's rate leaves room for one
    assert {episode.reached for episode in result.episodes} >= set(COLOURS)


def test_it_needs_its_cameras(direct):
    black = encode_jpeg(np.zeros((84, 84, 3), np.uint8))

    def blind(images, state, instruction, seed):
        return direct.act(dict.fromkeys(images, black), state, instruction, seed)

    assert evaluate("blind", blind, range(500, 501)).successes() <= 1


def test_untrained_weights_do_not_reach():
    untrained = DirectPolicy(FOLDER, random_weights_seed=0)
    assert evaluate("untrained", untrained.act, range(500, 501)).successes() == 0
