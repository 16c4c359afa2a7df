"""The adapter: raw frames, pose and seed in, the official plan out; budgets by an injected clock; bad input refused."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.adapter import PlannedChunk
from taktline_worker.models.vjepa2_ac.adapter import VJepa2Adapter, load
from taktline_worker.observation import EncodedImage, RobotInput, SearchInput
from taktline_worker.planning.round_times import REFUSALS
from taktline_worker.planning.search import Problem, search
from taktline_worker.planning.timely import Taken
from taktline_worker.planning.world import Scene


@pytest.fixture(scope="module")
def adapter(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> VJepa2Adapter:
    return load(kit.config(kit.folder(tmp_path_factory.mktemp("adapter") / "planner"), {"max_horizon": 3}))


def answer(adapter: VJepa2Adapter, pool: Any, *observations: RobotInput) -> list[PlannedChunk | TaktlineError]:
    rows = [adapter.begin(observation, pool).result() for observation in observations]
    return adapter.finish(rows, adapter.run(rows, len(rows)))


def plan(adapter: VJepa2Adapter, pool: Any, observation: RobotInput) -> PlannedChunk:
    (found,) = answer(adapter, pool, observation)
    assert isinstance(found, PlannedChunk)
    return found


def test_a_raw_request_with_a_seed_gets_the_official_plan(golden: Path, kit: Any, adapter: Any, pool: Any) -> None:
    case = load_file(golden / "full" / "cem_main.safetensors")
    found = plan(adapter, pool, kit.observe(seed=30))
    np.testing.assert_allclose(found.actions, case["returned_action"].numpy(), atol=1e-6)
    lowest = case["energies"].min(dim=1).values.numpy()
    np.testing.assert_allclose(found.energies[:, 0], lowest, atol=2e-6)
    assert found.actions.dtype == found.energies.dtype == found.predicted_states.dtype == np.float32
    assert found.stopped == "rounds"
    start = kit.inputs("full")["pose"].numpy()
    np.testing.assert_allclose(found.predicted_states[0, :3], start[:3] + found.actions[0, :3], atol=1e-6)


def test_a_goal_replaced_in_an_episode_is_the_one_that_is_searched_for(kit: Any, adapter: Any, pool: Any) -> None:
    first = kit.observe()
    other = kit.observe(images=dict(first.images) | {"goal": kit.raw(seed=3)})
    plans = [plan(adapter, pool, observation) for observation in (first, other, first)]
    assert not np.array_equal(plans[0].actions, plans[1].actions)
    assert np.array_equal(plans[0].actions, plans[2].actions)  # nothing of a plan outlives it


def test_batch_neighbours_change_nothing(kit: Any, adapter: Any, pool: Any) -> None:
    small = kit.observe(seed=4, search=SearchInput(candidates=24, rounds=2, elites=4, horizon=1))
    together = answer(adapter, pool, small, kit.observe())
    for found, observation in zip(together, (small, kit.observe()), strict=True):
        alone = plan(adapter, pool, observation)
        assert isinstance(found, PlannedChunk)
        assert np.array_equal(found.actions, alone.actions)
        assert np.array_equal(found.energies, alone.energies)
    assert isinstance(together[0], PlannedChunk)
    assert (together[0].actions.shape, together[0].energies.shape) == ((1, 7), (2, 2))


def test_requests_change_the_search_within_limits(kit: Any, adapter: Any, pool: Any) -> None:
    wide = plan(adapter, pool, kit.observe(search=SearchInput(candidates=80, rounds=1, elites=80, horizon=3)))
    assert (wide.actions.shape, wide.energies.shape, wide.predicted_states.shape) == ((3, 7), (1, 2), (3, 7))


def test_a_plan_begins_where_the_actions_under_way_lead(kit: Any, adapter: VJepa2Adapter, pool: Any) -> None:
    under_way = np.array([[0.03, -0.02, 0.01, 0, 0, 0, 0.2]])
    later = plan(adapter, pool, kit.observe(search=SearchInput(pending=under_way)))
    row = adapter.begin(kit.observe(), pool).result()
    latent, goal = adapter.world.encode(row.pixels)
    start = adapter.world.predict(Scene(latent, goal, row.pose), torch.from_numpy(under_way).float())
    expected = search(adapter.world, [Problem(start, row.settings, row.seed)])[0]
    assert np.array_equal(later.actions, expected.actions.numpy())
    assert not np.array_equal(later.actions, plan(adapter, pool, kit.observe()).actions)
    landing = row.pose[:3].numpy() + under_way[0, :3] + later.actions[0, :3]
    assert np.allclose(later.predicted_states[0, :3], landing, atol=1e-6)


def test_fp8_is_served_and_is_not_bf16(kit: Any, tmp_path: Path, pool: Any) -> None:
    folder = kit.folder(tmp_path / "planner")
    plans = {
        precision: plan(load(kit.config(folder, precision=precision)), pool, kit.observe())
        for precision in ("bf16", "fp8")
    }
    assert np.isfinite(plans["fp8"].actions).all()
    assert not np.array_equal(plans["fp8"].energies, plans["bf16"].energies)
    assert np.allclose(plans["fp8"].energies, plans["bf16"].energies, rtol=0.02)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_fp8_is_refused_by_a_gpu_that_does_not_multiply_it(
    kit: Any, tmp_path: Path, monkeypatch: Any, capability: tuple[int, int]
) -> None:
    adapter_module = "taktline_worker.models.vjepa2_ac.adapter"
    monkeypatch.setattr(f"{adapter_module}.choose_device", lambda stated: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    folder = kit.folder(tmp_path / "planner")
    with pytest.raises(TaktlineError, match="fp8, which needs a Hopper GPU") as caught:
        load(kit.config(folder, precision="fp8", device="cuda", sha256={"checkpoint.pt": "0" * 64}))
    assert caught.value.code == ErrorCode.CONFIG_INVALID  # and before the digests, which may take minutes
    assert "bf16" in caught.value.next_step


def test_what_is_predicted_is_what_a_rollout_scores(kit: Any, adapter: VJepa2Adapter, pool: Any) -> None:
    world = adapter.world
    latent, goal = world.encode(adapter.begin(kit.observe(), pool).result().pixels)
    scene = Scene(latent, goal, torch.from_numpy(kit.observe().state).float())
    actions = 0.02 * torch.ones(2, 7)
    energies = torch.empty(world.micro_batch)
    world.score(world.prepare(scene), actions.expand(world.micro_batch, -1, -1), energies)
    found = world.predict(scene, actions)
    assert float((found.latent - goal).abs().mean()) == pytest.approx(float(energies[0]), rel=1e-5)
    assert torch.equal(found.pose, world.poses(scene, actions)[-1])


def test_a_warm_start_begins_at_the_previous_plan(kit: Any, adapter: Any, pool: Any) -> None:
    cold = plan(adapter, pool, kit.observe(search=SearchInput(rounds=1)))
    warm = plan(adapter, pool, kit.observe(search=SearchInput(rounds=1, previous=cold.actions.astype(np.float64))))
    assert not np.array_equal(cold.actions, warm.actions)


def test_no_seed_draws_fresh_noise(kit: Any, adapter: Any, pool: Any) -> None:
    rows = [adapter.begin(kit.observe(seed=None), pool).result() for _ in range(2)]
    assert rows[0].seed != rows[1].seed


class Clock:
    """Each reading is half a second after the one before."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


@pytest.fixture
def timed(adapter: VJepa2Adapter) -> VJepa2Adapter:
    """The same world under a clock that counts readings; nothing measured yet."""
    return VJepa2Adapter(adapter.world, adapter.processor, "fp32", 0.25, clock=Clock())


def test_a_budget_ends_the_search_with_the_best_plan_so_far(kit: Any, adapter: Any, timed: Any, pool: Any) -> None:
    """Readings: 0.5 at the start; 1, 1.5 | 2, 2.5 around rounds, so the third would end after 2.9."""
    found = plan(timed, pool, kit.observe(search=SearchInput(budget_ms=2400.0)))
    assert (found.stopped, len(found.energies)) == ("budget", 2)
    whole = plan(adapter, pool, kit.observe(search=SearchInput(rounds=2)))
    assert np.array_equal(found.actions, whole.actions)


def test_anytime_makes_the_hand_off_deadline_the_budget(kit: Any, timed: Any, pool: Any) -> None:
    late = dataclasses.replace(kit.observe(search=SearchInput(anytime=True)), expires_at=2.9)
    assert plan(timed, pool, late).stopped == "budget"
    # Without it a deadline does not change a plan.
    assert plan(timed, pool, dataclasses.replace(kit.observe(), expires_at=0.1)).stopped == "rounds"


def test_a_budget_too_short_for_one_round_is_refused_and_its_neighbour_served(kit: Any, timed: Any, pool: Any) -> None:
    plan(timed, pool, kit.observe())  # measures a round: 4 rounds between readings 0.5 s apart
    short = kit.observe(search=SearchInput(budget_ms=20.0))
    refused, served = answer(timed, pool, short, kit.observe())
    assert isinstance(refused, TaktlineError)
    assert refused.code is ErrorCode.DEADLINE_UNREACHABLE
    assert "20.0 ms" in refused.message
    assert isinstance(served, PlannedChunk)


class Late:
    """A search that was answered without its end: `wait` takes three readings of the clock, or does not come back."""

    busy = True

    def __init__(self, clock: Clock, inner: Any, taken: Taken | None) -> None:
        self.clock, self.inner, self.taken = clock, inner, taken

    def wait(self, ends: Any) -> Taken | None:
        for _ in range(3):
            self.clock()
        if self.taken is None:
            raise TaktlineError(ErrorCode.WORKER_UNAVAILABLE, "the plan before this one still runs", "send it again")
        self.busy = False
        return self.taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_late_plan_is_waited_for_before_images_are_encoded(
    kit: Any, timed: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(pixels: Any) -> Any:
        raise AssertionError("the device may be waiting for a rank")

    timed._search = Late(timed._clock, timed._search, None)
    monkeypatch.setattr(timed.world, "encode", encode)
    (refused,) = answer(timed, pool, kit.observe())
    assert isinstance(refused, TaktlineError)
    assert refused.code is ErrorCode.WORKER_UNAVAILABLE


def test_what_a_plan_waits_for_is_not_learned_and_the_late_plan_is(kit: Any, timed: Any, pool: Any) -> None:
    settings = timed.processor.settings
    other = VJepa2Adapter(timed.world, timed.processor, "fp32", 0.25, clock=Clock())
    plan(other, pool, kit.observe())
    searched_s = other.round_times.round_s(settings)
    timed._search = Late(timed._clock, timed._search, Taken([(settings, 2)], 20.0, 1))
    plan(timed, pool, kit.observe())
    # Ten seconds a round, then a quarter of the way to what this plan took without the wait.
    assert timed.round_times.round_s(settings) == pytest.approx(10.0 + 0.25 * (searched_s - 10.0))


def test_one_late_round_does_not_refuse_plans_for_ever(kit: Any, timed: Any, pool: Any) -> None:
    settings = timed.processor.settings
    timed.round_times.learn([(settings, 1)], 1.0)
    timed._search = Late(timed._clock, timed._search, Taken([(settings, 1)], 100.0, 1))
    asked = kit.observe(search=SearchInput(budget_ms=1500.0))
    answers = [answer(timed, pool, asked)[0] for _ in range(REFUSALS + 3)]
    # The first waits for longer than it has; the others would do, and at last one of them is tried.
    refused, served = answers[:REFUSALS], answers[REFUSALS:]
    assert all(isinstance(one, TaktlineError) for one in refused)
    assert {one.code for one in refused} == {ErrorCode.DEADLINE_UNREACHABLE}
    assert all(isinstance(one, PlannedChunk) for one in served)


def encoded(mode: str, kind: str, size: tuple[int, int] = (128, 128)) -> EncodedImage:
    stream = io.BytesIO()
    Image.new(mode, size, 90 if mode == "L" else None).save(stream, kind.upper())
    return EncodedImage(kind, stream.getvalue())


def with_goal(image: EncodedImage) -> Callable[[RobotInput], RobotInput]:
    return lambda good: dataclasses.replace(good, images=dict(good.images) | {"goal": image})


def with_state(state: Any) -> Callable[[RobotInput], RobotInput]:
    return lambda good: dataclasses.replace(good, state=np.asarray(state, dtype=np.float64))


def with_search(**changes: Any) -> Callable[[RobotInput], RobotInput]:
    return lambda good: dataclasses.replace(good, search=SearchInput(**changes))


NAN = float("nan")
BAD: dict[str, tuple[Callable[[RobotInput], RobotInput], ErrorCode]] = {
    "goal of another size": (with_goal(encoded("RGB", "png", (96, 128))), ErrorCode.GOAL_INVALID),
    "goal transposed": (with_goal(EncodedImage("raw", bytes(3 * 64 * 256), (64, 256, 3))), ErrorCode.GOAL_INVALID),
    "grey PNG goal": (with_goal(encoded("L", "png")), ErrorCode.GOAL_INVALID),
    "PNG goal with alpha": (with_goal(encoded("RGBA", "png")), ErrorCode.GOAL_INVALID),
    "grey JPEG goal": (with_goal(encoded("L", "jpeg")), ErrorCode.GOAL_INVALID),
    "raw goal of one channel": (
        with_goal(EncodedImage("raw", bytes(128 * 128), (128, 128, 1))),
        ErrorCode.GOAL_INVALID,
    ),
    "raw goal cut short": (with_goal(EncodedImage("raw", bytes(5), (128, 128, 3))), ErrorCode.IMAGE_CORRUPT),
    "raw goal without a shape": (with_goal(EncodedImage("raw", bytes(5))), ErrorCode.IMAGE_CORRUPT),
    "goal of no known encoding": (with_goal(EncodedImage("webp", b"RIFF")), ErrorCode.IMAGE_CORRUPT),
    "goal cut in its header": (with_goal(EncodedImage("png", b"\x89PNG\r\n\x1a\n")), ErrorCode.IMAGE_CORRUPT),
    "no goal": (
        lambda good: dataclasses.replace(good, images={"camera": good.images["camera"]}),
        ErrorCode.CAMERA_MISSING,
    ),
    "another camera": (
        lambda good: dataclasses.replace(good, images=dict(good.images) | {"wrist": good.images["goal"]}),
        ErrorCode.CAMERA_UNKNOWN,
    ),
    "no state": (with_state([]), ErrorCode.STATE_INVALID),
    "a state of six": (with_state([0.0] * 6), ErrorCode.STATE_INVALID),
    "NaN in the state": (with_state([0, 0, 0, NAN, 0, 0, 0]), ErrorCode.STATE_INVALID),
    "infinite state": (with_state([float("inf"), 0, 0, 0, 0, 0, 0]), ErrorCode.STATE_INVALID),
    "a state beyond float32": (with_state([1e39, 0, 0, 0, 0, 0, 0]), ErrorCode.STATE_INVALID),
    "a state that the network's sums cannot hold": (with_state([0, 0, 0, 0, 0, -3e38, 0]), ErrorCode.STATE_INVALID),
    "no candidates": (with_search(candidates=0), ErrorCode.SEARCH_INVALID),
    "too many candidates": (with_search(candidates=5000), ErrorCode.SEARCH_INVALID),
    "too many rounds": (with_search(rounds=101), ErrorCode.SEARCH_INVALID),
    "one elite": (with_search(elites=1), ErrorCode.SEARCH_INVALID),
    "more elites than candidates": (with_search(candidates=16, elites=17), ErrorCode.SEARCH_INVALID),
    "a horizon beyond the cache": (with_search(horizon=4), ErrorCode.SEARCH_INVALID),
    "previous plan of another width": (with_search(previous=np.zeros((2, 6))), ErrorCode.SEARCH_INVALID),
    "NaN in the previous plan": (with_search(previous=np.full((2, 7), NAN)), ErrorCode.SEARCH_INVALID),
    "actions under way of another width": (with_search(pending=np.zeros((1, 6))), ErrorCode.SEARCH_INVALID),
    "more actions under way than a rollout has": (with_search(pending=np.zeros((4, 7))), ErrorCode.SEARCH_INVALID),
    "no actions under way": (with_search(pending=np.zeros((0, 7))), ErrorCode.SEARCH_INVALID),
    "NaN in the actions under way": (with_search(pending=np.full((1, 7), NAN)), ErrorCode.SEARCH_INVALID),
    "actions under way beyond float32": (with_search(pending=np.full((1, 7), 1e300)), ErrorCode.SEARCH_INVALID),
    "a previous plan beyond float32": (with_search(previous=np.full((2, 7), -1e39)), ErrorCode.SEARCH_INVALID),
    "no budget": (with_search(budget_ms=0.0), ErrorCode.BUDGET_INVALID),
    "NaN budget": (with_search(budget_ms=NAN), ErrorCode.BUDGET_INVALID),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_its_reason(kit: Any, adapter: Any, pool: Any, name: str) -> None:
    change, code = BAD[name]
    with pytest.raises(TaktlineError) as caught:
        adapter.begin(change(kit.observe()), pool).result()
    assert caught.value.code is code
    assert caught.value.message
    assert caught.value.next_step


def test_cameras_can_be_named_by_the_robot(kit: Any, tmp_path: Path, adapter: Any, pool: Any) -> None:
    names = {"left": "camera", "target": "goal"}
    mapped = load(kit.config(kit.folder(tmp_path / "planner"), {"rounds": 1}, cameras=names))
    assert mapped.description.cameras == ("left", "target")
    good = kit.observe()
    renamed = kit.observe(images={"target": good.images["goal"], "left": good.images["camera"]})
    direct = plan(adapter, pool, kit.observe(search=SearchInput(rounds=1)))
    assert np.array_equal(plan(mapped, pool, renamed).actions, direct.actions)


def test_a_search_whose_energies_are_not_finite_is_an_error(kit: Any, adapter: Any, pool: Any) -> None:
    """A checkpoint that overflows on one observation must not move a robot."""
    rows = [adapter.begin(kit.observe(search=SearchInput(rounds=1)), pool).result()]
    (outcome,) = adapter.run(rows, 1)
    outcome.plan.energies[0, 0] = torch.nan
    (refused,) = adapter.finish(rows, [outcome])
    assert isinstance(refused, TaktlineError)
    assert refused.code is ErrorCode.WORKER_FAILED


def test_a_deployments_temperature_reaches_its_search(kit: Any, tmp_path: Path, pool: Any) -> None:
    folder, plans = kit.folder(tmp_path / "planner"), []
    for changes in ({}, {"temperature": 0.25}, {"temperature": 4.0}):
        one = load(kit.config(folder, {"optimiser": "mppi", "rounds": 1} | changes))
        plans.append(plan(one, pool, kit.observe()).actions)
    assert np.array_equal(plans[0], plans[1])
    assert not np.array_equal(plans[0], plans[2])
    with pytest.raises(TaktlineError, match="mppi keeps its standard deviation") as caught:
        load(kit.config(folder, {"optimiser": "mppi", "convergence": 0.1}))
    assert caught.value.code is ErrorCode.SEARCH_INVALID
