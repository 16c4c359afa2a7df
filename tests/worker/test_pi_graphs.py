"""The captured GPU runner of π0 and π0.5: official values, equal replays, no influence of neighbours, no allocation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from taktline_protocol.deployment import QuantisationOptions
from taktline_worker.models.pi.rtc import RtcRow
from taktline_worker.models.pi.runner import PiRow, collate
from taktline_worker.models.pi.weights import BF16_VISION, on_device
from taktline_worker.rtc import RtcPlan, RtcSettings, prefix_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def graph_runner(network: Any, folder: Path, horizon: int, buckets: list[tuple[int, int, int]], **options: Any) -> Any:
    """The captured runner of a golden folder, and its architecture."""
    from taktline_worker.models.pi.graphs import Bucket, GraphRunner

    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    eager, architecture = network.load(folder / "model.safetensors", heads, BF16_VISION)
    weights = on_device(eager.weights, torch.device("cuda"))
    runner = GraphRunner(weights, architecture, horizon, [Bucket(*bucket) for bucket in buckets], **options)
    runner.capture()
    return runner, architecture


@pytest.fixture(scope="module")
def captured(golden: Any, network: Any) -> tuple[Any, list[PiRow], dict[str, torch.Tensor], int]:
    folder = golden / "pi05_tiny" / "full_real_heads"
    case = load_file(folder / "case_b1.safetensors")
    runner, architecture = graph_runner(network, folder, 50, [(1, 2, 64), (4, 3, 64)])
    return runner, network.rows(case, architecture), case, architecture.tokens_per_image


@pytest.fixture(scope="module")
def padded(golden: Any, network: Any) -> Any:
    """The same policy with room for the longest prompts, so that a row's own prompt is a part of its slots."""
    return graph_runner(network, golden / "pi05_tiny" / "full_real_heads", 50, [(1, 3, 200), (3, 3, 200)])[0]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("slots", [64, 200])
def test_golden_actions(captured: Any, padded: Any, distance: Any, count: int, slots: int) -> None:
    """One row, or three of which the others have other pixels and noise; and slots for 64 words or for 200."""
    runner, rows, case, tokens = captured
    runner = runner if slots == 64 else padded
    others = [dataclasses.replace(rows[0], noise=-rows[0].noise, pixels=-rows[0].pixels)] * (count - 1)
    actions = runner.run(collate([*others, rows[0]], tokens))[-1:]
    official = distance(case["actions_bf16_rope_fp32"], case["actions"])
    ours = distance(actions, case["actions"])
    print(f"bf16 error of {count} rows, {slots} slots: engine {ours:.3e}, official {official:.3e}")
    assert 1e-5 < ours <= 1.25 * official
    assert float(torch.nn.functional.cosine_similarity(actions.flatten(1), case["actions"].flatten(1)).min()) >= 0.999


def test_a_row_is_the_same_within_rounding_in_every_bucket(captured: Any, padded: Any, distance: Any) -> None:
    """Other kernels serve other shapes; none may differ by more than bf16 does, and no padding may be seen."""
    runner, rows, case, tokens = captured
    official = distance(case["actions_bf16_rope_fp32"], case["actions"])
    found = {
        f"{count} rows, {slots} slots": one.run(collate([rows[0]] * count, tokens))[-1:]
        for slots, one in ((64, runner), (200, padded))
        for count in (1, 3)
    }
    first = found["1 rows, 64 slots"]
    for name, actions in found.items():
        print(f"{name}: {distance(actions, first):.3e} from one row")
        # Two roundings of the same numbers, each within 1.25 times the official distance from fp32.
        assert distance(actions, first) <= 2**0.5 * 1.25 * official, name
    short = [dataclasses.replace(rows[0], tokens=rows[0].tokens[:5]), rows[0]]
    mixed = padded.run(collate(short, tokens))
    assert torch.equal(mixed[1], found["3 rows, 200 slots"][0]), "a shorter prompt beside it changes nothing"
    alone = runner.run(collate(short[:1], tokens))
    assert distance(mixed[0], alone[0]) <= 2**0.5 * 1.25 * official


def test_batches_launched_behind_one_another_give_what_they_give_alone(captured: Any) -> None:
    runner, rows, _, tokens = captured
    generator = torch.Generator().manual_seed(11)
    batches = [
        collate(
            [dataclasses.replace(rows[0], noise=torch.randn(rows[0].noise.shape, generator=generator))] * size, tokens
        )
        for size in (1, 4, 2, 1, 4, 3)
    ]
    alone = [runner.run(batch).clone() for batch in batches]
    running = [runner.launch(batch) for batch in batches]
    for expected, batch in zip(alone, running, strict=True):
        assert torch.equal(batch.wait(), expected)
        assert 0.0 < batch.seconds < 10.0


def test_the_first_step_beside_the_prefix_answers_as_after_it(captured: Any) -> None:
    runner, rows, _, tokens = captured
    batches = [collate(rows * size, tokens) for size in (1, 3)]
    found = [runner.run(batch).clone() for batch in batches]
    beside, graphs, runner.beside = runner.beside, dict(runner.captured), None
    try:
        runner.capture()
        for batch, expected in zip(batches, found, strict=True):
            assert torch.equal(runner.run(batch), expected)
    finally:
        runner.beside = beside
        runner.captured.update(graphs)


@pytest.mark.parametrize("name", ["case_b1", "case_b3", "case_b3_mixed"])
def test_golden_actions_of_pi0(golden: Any, network: Any, distance: Any, name: str) -> None:
    """Rows of different lengths and cameras; the state token goes through the first step only."""
    folder = golden / "pi0_tiny" / "full"
    case = load_file(folder / f"{name}.safetensors")
    rows = len(case["tokens"])
    runner, architecture = graph_runner(network, folder, 12, [(rows, 3, 24)])
    actions = runner.run(collate(network.rows(case, architecture), architecture.tokens_per_image))
    official = distance(case["actions_bf16_rope_fp32"], case["actions"])
    ours = distance(actions, case["actions"])
    print(f"bf16 error: engine {ours:.3e}, official {official:.3e}")
    assert 1e-5 < ours <= 1.25 * official
    assert float(torch.nn.functional.cosine_similarity(actions.flatten(1), case["actions"].flatten(1)).min()) >= 0.999


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_an_expert_stored_in_bytes(golden: Any, network: Any, distance: Any, captured: Any, number_format: Any) -> None:
    """The buckets that read it move the actions as the CPU's statement says; larger ones are bf16, bit by bit."""
    _, rows, case, tokens = captured
    folder = golden / "pi05_tiny" / "full_real_heads"
    stored = QuantisationOptions(expert=number_format, max_batch=2)
    runner, _ = graph_runner(network, folder, 50, [(1, 3, 64), (2, 3, 64), (4, 3, 64)], quantisation=stored)
    actions = runner.run(collate(rows, tokens))
    error = distance(actions, case["actions"])
    print(f"{number_format} expert: error {error:.3e}")
    assert 1e-3 < error < 4e-2
    loud = [rows[0], dataclasses.replace(rows[0], noise=rows[0].noise * 3, pixels=-rows[0].pixels)]
    assert torch.equal(runner.run(collate(loud, tokens))[0], runner.run(collate([rows[0]] * 2, tokens))[0])
    plain, _ = graph_runner(network, folder, 50, [(4, 3, 64)])
    four = collate([rows[0]] * 4, tokens)
    assert torch.equal(runner.run(four), plain.run(four))
    from taktline_kernels.selector import default_selector

    told = {text: choice.reason for op, text, _, choice in default_selector().explain() if op == "expert"}
    assert any("bytes=1" in text and "engine.quantisation" in reason for text, reason in told.items())


def test_fp8_towers(golden: Any, network: Any, distance: Any, captured: Any) -> None:
    """FP8 moves the actions by more than bf16 and by little; replays and neighbours behave as in bf16."""
    _, rows, case, tokens = captured
    folder = golden / "pi05_tiny" / "full_real_heads"
    runner, _ = graph_runner(network, folder, 50, [(1, 3, 64), (3, 3, 64)], precision="fp8")
    actions = runner.run(collate(rows, tokens))
    error = distance(actions, case["actions"])
    print(f"fp8 error: {error:.3e}, bf16 {distance(captured[0].run(collate(rows, tokens)), case['actions']):.3e}")
    assert 1e-3 < error < 5e-2
    loud = [rows[0], dataclasses.replace(rows[0], noise=rows[0].noise * 3, pixels=-rows[0].pixels)]
    assert torch.equal(runner.run(collate([rows[0]] * 2, tokens))[0], runner.run(collate(loud, tokens))[0])


@pytest.mark.parametrize("count", [1, 3])
def test_tails_are_followed_inside_the_graph(golden: Any, network: Any, distance: Any, count: int) -> None:
    """As the eager runner guides them in fp32; in one row the expert's chain does it, in more the Triton kernels."""
    folder = golden / "pi05_tiny" / "full_real_heads"
    case = load_file(folder / "case_b1.safetensors")
    runner, architecture = graph_runner(network, folder, 50, [(1, 3, 64), (4, 3, 64)], guidance=5.0)
    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    exact, _ = network.load(folder / "model.safetensors", heads)
    row = network.rows(case, architecture)[0]
    horizon, width = row.noise.shape
    weights = torch.from_numpy(prefix_weights(8, 40, horizon, "linear")).float()
    target = torch.randn(horizon, width, generator=torch.Generator().manual_seed(5))
    guided = dataclasses.replace(row, rtc=RtcRow(target, weights, RtcPlan(8, 40)))
    settings = RtcSettings("guided", schedule="linear", max_guidance_weight=5.0)
    tokens = architecture.tokens_per_image
    batch = collate([guided, *[row] * (count - 1)], tokens, rtc=settings)
    plain = runner.run(collate([row] * count, tokens))
    actions = runner.run(batch)
    assert distance(actions[0], exact.run(batch)[0]) < 0.02
    assert distance(actions[0], plain[0]) > 0.05
    assert torch.equal(actions[1:], plain[1:])
    assert torch.equal(runner.run(collate([row] * count, tokens)), plain), "no tail stays in the buffers"


def test_replays_are_bit_identical_and_neighbours_do_not_matter(captured: Any) -> None:
    runner, rows, _, tokens = captured
    quiet = [rows[0]] * 3
    loud = [rows[0], *(dataclasses.replace(row, noise=row.noise * 3, pixels=-row.pixels) for row in quiet[1:])]
    first, second = runner.run(collate(quiet, tokens)), runner.run(collate(loud, tokens))
    assert torch.equal(first, runner.run(collate(quiet, tokens)))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], second[1])


def test_large_frames_of_a_neighbour_do_not_matter(captured: Any) -> None:
    """Wherever a row's frames are resized, those of the rows before it have no say in it."""
    runner, rows, _, tokens = captured
    generator = torch.Generator().manual_seed(3)

    def seen(height: int, width: int) -> PiRow:
        frames = tuple(
            torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)
            for _ in range(len(rows[0].pixels))
        )
        return dataclasses.replace(rows[0], pixels=torch.empty(len(frames), 0), raw=frames)

    mine = seen(480, 640)
    quiet, *loud = (
        runner.run(collate([neighbour, neighbour, neighbour, mine], tokens))
        for neighbour in (seen(240, 320), seen(720, 1280), seen(1080, 1920), seen(1200, 1920))
    )
    for one in loud:
        assert torch.equal(one[3], quiet[3])
        assert not torch.equal(one[0], quiet[0])


def test_a_row_that_is_alone_is_launched_in_one_call_to_the_same_bits(captured: Any) -> None:
    from taktline_worker.models.pi.native_rows import NativeRows

    runner, rows, _, tokens = captured
    generator = torch.Generator().manual_seed(8)
    runner.shorten(NativeRows())

    def row(height: int, width: int, words: int) -> PiRow:
        frames = tuple(
            torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).pin_memory()
            for _ in range(len(rows[0].pixels))
        )
        noise = torch.randn(rows[0].noise.shape, generator=generator)
        return dataclasses.replace(
            rows[0], pixels=torch.empty(len(frames), 0), raw=frames, tokens=rows[0].tokens[:words], noise=noise
        )

    def short(one: PiRow) -> Any:
        draft = runner.single.draft(one)
        launched = runner.single.launch(one.raw, draft)
        if launched is not None:
            runner.single.look_ahead(draft)
        return launched

    sent = [row(480, 640, words) for words in (9, 4, 12, 9, 1, 12)]
    expected = [runner.run(collate([one], tokens)).clone() for one in sent]
    running = [short(one) for one in sent]
    for one, actions in zip(running, expected, strict=True):
        assert torch.equal(one.wait(), actions)
        assert 0.0 < one.seconds < 10.0
    other = row(240, 320, 9)
    assert short(other) is None, "the device does not know frames of this size"
    assert torch.equal(runner.run(collate([other], tokens)), runner.launch(collate([other], tokens)).wait())
    actions = runner.run(collate([other], tokens)).clone()
    assert torch.equal(short(other).wait(), actions)
    assert short(sent[0]) is None
    runner.run(collate(rows, tokens))
    assert short(other) is None, "what lies there are pixels"


def test_nothing_is_allocated_after_capture(captured: Any) -> None:
    """Neither for pixels nor for frames of sizes not seen before: PyTorch's count of allocations stands still."""
    runner, rows, _, tokens = captured
    batch = collate(rows, tokens)
    generator = torch.Generator().manual_seed(3)

    def frames(height: int, width: int) -> Any:
        raw = tuple(
            torch.randint(0, 256, (height + i, width, 3), dtype=torch.uint8, generator=generator)
            for i in range(batch.pixels.shape[0])
        )
        return dataclasses.replace(batch, pixels=torch.empty(len(raw), 0), raw=raw)

    def allocations() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["reserved_bytes.all.allocated"]

    runner.run(batch)
    before = allocations()
    for given in (batch, frames(480, 640), frames(120, 90), batch):
        runner.run(given)
    assert allocations() == before


def test_a_batch_that_fits_no_bucket_is_refused(captured: Any) -> None:
    runner, rows, _, tokens = captured
    with pytest.raises(ValueError, match="no bucket"):
        runner.run(collate([rows[0]] * 5, tokens))


@pytest.mark.parametrize(("family", "precision"), [("pi05", "bf16"), ("pi0", "bf16"), ("pi05", "fp8")])
def test_a_folder_is_served_from_graphs(
    tmp_path: Path, folders: Any, config_of: Any, observations: Any, pool: Any, family: str, precision: str
) -> None:
    """The whole way on the GPU, raw frames included, close to the same folder in fp32 on the CPU."""
    from taktline_worker.models.pi import adapter
    from taktline_worker.models.pi.graphs import GraphRunner

    folder = folders.lerobot(tmp_path / "policy", family)
    answers = []
    for device, number_format in (("cpu", "fp32"), ("cuda", precision)):
        loaded = adapter.load(config_of(folder, family, device=device, precision=number_format))
        assert isinstance(loaded.runner, GraphRunner) is (device == "cuda")
        assert getattr(loaded.runner, "unnormalises", False) is (device == "cuda")
        rows = [loaded.begin(observations.make(family, seed=seed), pool).result() for seed in (1, 2, 3)]
        assert (rows[0].row.raw is not None) is (device == "cuda")
        answers.append([torch.from_numpy(chunk) for chunk in loaded.finish(rows, loaded.run(rows, 4))])
    for expected, actual in zip(*answers, strict=True):
        error = float((actual - expected).norm() / expected.norm())
        print(f"{family} {precision} against fp32: {error:.3e}")
        assert 1e-6 < error < (3e-2 if precision == "bf16" else 0.2)


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_a_shorter_chunk_has_graphs_of_its_own_and_is_that_of_a_policy_of_this_horizon(
    tmp_path: Path, folders: Any, config_of: Any, observations: Any, pool: Any, family: str
) -> None:
    from taktline_worker.adapter import Level
    from taktline_worker.models.pi import adapter

    folder = folders.lerobot(tmp_path / "policy", family)
    options = {"device": "cuda", "precision": "bf16", "buckets": (1, 4)}
    whole = adapter.load(config_of(folder, family, shorter_horizons=(4,), **options))
    own = adapter.load(config_of(folder, family, action_horizon=4, **options))
    answers = []
    for loaded in (whole.cheaper[Level(horizon=4)], own, whole):
        rows = [loaded.begin(observations.make(family, seed=seed), pool).result() for seed in (1, 2, 3)]
        answers.append(loaded.finish(rows, loaded.run(rows, 4)))
    for mine, theirs, full in zip(*answers, strict=True):
        assert mine.shape == (4, full.shape[1])
        np.testing.assert_array_equal(mine, theirs)
        assert not np.allclose(mine, full[:4], rtol=1e-2, atol=1e-3)
