"""The reach task: seeds, the arm's geometry, the expert, and what counts as success."""

import numpy as np
import pytest
from taktline_demo.arm import COLOURS
from taktline_demo.environment import ReachEnvironment
from taktline_demo.expert import expert_chunk
from taktline_demo.kinematics import JOINT_HIGH, JOINT_LOW, joints_for_tip, tip_position
from taktline_demo.task import DWELL_STEPS, HORIZON, MAX_STEPS, REACH_RADIUS


def drive(environment, colour):
    """Follows the expert to the block `colour` until the episode ends."""
    while True:
        for command in expert_chunk(environment.state(), environment.target(colour))[:8]:
            outcome = environment.step(command)
            if outcome.done:
                return outcome


@pytest.mark.parametrize("seed", [0, 7, 123])
def test_equal_seeds_give_equal_episodes(seed):
    first, second = ReachEnvironment(), ReachEnvironment()
    for environment in (first, second):
        environment.reset(seed)
        for command in expert_chunk(environment.state(), environment.target(environment.goal)):
            environment.step(command)
    assert first.instruction == second.instruction
    assert np.array_equal(first.state(), second.state())
    assert all(np.array_equal(first.target(colour), second.target(colour)) for colour in COLOURS)


def test_different_seeds_give_different_layouts():
    environment = ReachEnvironment()
    targets = []
    for seed in range(5):
        environment.reset(seed)
        targets.append(tuple(environment.target("red")))
    assert len(set(targets)) == 5


def test_naming_another_goal_changes_nothing_else():
    environment = ReachEnvironment()
    seen = {}
    for goal in COLOURS:
        environment.reset(3, goal)
        assert environment.goal == goal
        assert goal in environment.instruction
        words = environment.instruction.replace(goal, "*")
        seen[goal] = (words, tuple(environment.state()), *(tuple(environment.target(c)) for c in COLOURS))
    assert len(set(seen.values())) == 1


def test_unknown_goal_is_refused():
    with pytest.raises(ValueError, match="purple"):
        ReachEnvironment().reset(0, "purple")


def test_blocks_are_within_reach_and_apart():
    environment = ReachEnvironment()
    for seed in range(50):
        environment.reset(seed)
        targets = [environment.target(colour) for colour in COLOURS]
        for target in targets:
            assert np.allclose(tip_position(joints_for_tip(target)), target, atol=1e-6)
        gaps = [np.linalg.norm(a - b) for i, a in enumerate(targets) for b in targets[:i]]
        assert min(gaps) > 2 * REACH_RADIUS


@pytest.mark.parametrize("goal", COLOURS)
def test_expert_reaches_the_named_block(goal):
    environment = ReachEnvironment()
    for seed in range(10):
        environment.reset(seed, goal)
        outcome = drive(environment, goal)
        assert outcome.success, (seed, outcome)
        assert outcome.steps < MAX_STEPS


def test_reaching_another_block_is_no_success():
    environment = ReachEnvironment()
    environment.reset(0, "red")
    outcome = drive(environment, "blue")
    assert outcome.done
    assert outcome.reached == "blue"
    assert not outcome.success


def test_passing_by_is_not_reaching():
    environment = ReachEnvironment()
    environment.reset(0, "red")
    pose = joints_for_tip(environment.target("red"))
    environment._data.qpos[:4] = pose
    for _ in range(DWELL_STEPS - 1):
        assert environment.step(pose).reached is None
    assert environment.step(pose).success


def test_standing_still_ends_without_success():
    environment = ReachEnvironment()
    environment.reset(0)
    start = environment.state()
    for _ in range(MAX_STEPS):
        outcome = environment.step(start)
    assert outcome.done
    assert outcome.reached is None


def test_kinematics_agree_with_the_simulator():
    environment = ReachEnvironment()
    for seed in range(20):
        environment.reset(seed)
        assert np.allclose(tip_position(environment.state()), environment.tip(), atol=1e-5)


def test_inverse_kinematics_stay_in_the_joint_limits():
    rng = np.random.default_rng(0)
    for tip in rng.uniform(-1.0, 1.0, (200, 3)):
        joints = joints_for_tip(tip)
        assert np.all(joints >= JOINT_LOW)
        assert np.all(joints <= JOINT_HIGH)


def test_expert_chunk_is_a_function_of_its_arguments():
    joints, target = joints_for_tip(np.array([0.25, 0.1, 0.2])), np.array([0.3, -0.1, 0.045])
    chunk = expert_chunk(joints, target)
    assert chunk.shape == (HORIZON, 4)
    assert chunk.dtype == np.float32
    assert np.array_equal(chunk, expert_chunk(joints, target))
    assert np.linalg.norm(tip_position(chunk[-1]) - target) < np.linalg.norm(tip_position(joints) - target)
