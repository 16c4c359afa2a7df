"""`taktline kernels tune`: candidates measured and refused, winners that hold in their phase, and their table."""

from __future__ import annotations

import json
import random
import statistics
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_kernels import selector as selector_module
from taktline_kernels.ops.dispatch import REGISTRY, register
from taktline_kernels.selector import Choice, KernelSelector, Rule, parse_table
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.adapter import Phase
from taktline_worker.commands.kernels import app
from taktline_worker.models.pi.synthetic import conventions
from taktline_worker.profiling import tuning
from taktline_worker.profiling.kernels import Recorded, record, selecting_by
from taktline_worker.profiling.subject import RANDOM_POLICIES
from taktline_worker.profiling.tuning import Candidate, Group, Tuned, Tuner
from taktline_worker.profiling.tuning_plan import planned
from taktline_worker.profiling.tuning_run import measured_on
from taktline_worker.profiling.tuning_table import merged, text_of
from typer.testing import CliRunner

CPU = torch.device("cpu")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An operation with five accelerated versions, of which two are any good."""
    module = types.ModuleType("probe_kernels")
    monkeypatch.setitem(sys.modules, "probe_kernels", module)

    def version(shift: float) -> Callable[..., torch.Tensor]:
        return lambda x, config: x * 2 + shift

    def broken(x: torch.Tensor, config: Any) -> torch.Tensor:
        raise RuntimeError("made for other shapes")

    for name, function in {"fast": version(0), "slow": version(1e-7), "wrong": version(1.0), "broken": broken}.items():
        setattr(module, name, function)
    names = ("fast", "slow", "wrong", "broken")
    versions = {name: f"probe_kernels:{name}" for name in names} | {"absent": "no_such_module:x"}
    op = register("probe", lambda x: x * 2, versions)
    yield lambda x: op.run({"m": x.shape[0], "k": 3}, x, x)
    del REGISTRY["probe"]


class Subject:
    """Three calls of the probe, of two shapes."""

    def __init__(self, probe: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.probe = probe

    def phases(self, batch: int) -> list[Phase]:
        def run() -> None:
            for rows in (2, 5, 5):
                self.probe(torch.arange(3.0 * rows).view(rows, 3))

        return [Phase("only", run, 1.0, 1.0)]


class Clock:
    """Knows what each kernel takes by the choice that is forced while it is asked.

    Args:
        us: of a kernel by itself.
        ms: of the phase with it, by kernel; what is not named takes 1.
    """

    def __init__(self, us: Mapping[str, float], ms: Mapping[str, float] | None = None) -> None:
        self.us, self.ms, self.tried = us, ms or {}, 0

    def _forced(self) -> str:
        forced = selector_module.default_selector()
        assert isinstance(forced, tuning._Forced)
        return forced._choice.kernel

    def alone(self, call: Callable[[], Any], best_us: float | None) -> float:
        call()
        return self.us[self._forced()]

    def turns(self, calls: Sequence[Callable[[], Any]]) -> list[list[float]]:
        self.tried += 1
        times = []
        for call in calls:
            seen: list[str] = []
            watched = tuning._Forced.choose

            def choose(self: Any, *args: Any, seen: list[str] = seen, watched: Any = watched) -> Any:
                seen.append(self._choice.kernel)
                return watched(self, *args)

            tuning._Forced.choose = choose  # type: ignore[method-assign]
            try:
                call()
            finally:
                tuning._Forced.choose = watched  # type: ignore[method-assign]
            base = self.ms.get(seen[0], 1.0)
            times.append([base + drift for drift in (0.0, 0.3, 0.1, 0.2, 0.15)])  # the GPU's heat, the same for all
        return times


def tuned(probe: Any, clock: Clock) -> list[Tuned]:
    subject = Subject(probe)
    calls = record(subject, 1)  # type: ignore[arg-type]
    tuner = Tuner(KernelSelector(), clock)
    phases = {phase.name: phase.run for phase in subject.phases(1)}
    return list(tuner.measure(Group(phases, calls)))


def test_candidates_are_measured_and_bad_ones_refused(probe: Any) -> None:
    clock = Clock({"torch": 9.0, "fast": 3.0, "slow": 5.0}, {"torch": 2.0, "fast": 1.0, "slow": 1.4})
    results = tuned(probe, clock)
    assert [(one.call.shape["m"], one.call.calls) for one in results] == [(2, 1), (5, 2)]
    for result in results:
        assert [each.kernel for each in result.candidates[:3]] == ["fast", "slow", "torch"]
        refused = {each.kernel: each.reason for each in result.candidates if each.us is None}
        assert set(refused) == {"wrong", "broken", "absent"}
        assert "away" in refused["wrong"]
        assert "made for other shapes" in refused["broken"]
        assert "cannot be loaded" in refused["absent"]
        assert [(trial.label, trial.phase) for trial in result.trials] == [("fast", "only"), ("slow", "only")]
        assert "3.00 us alone, slow 5.00, torch 9.00; only 1.150 ms with fast, 2.150 before" in result.figures
        assert result.call.again is None, "what it holds is as large as the request"


def test_the_phase_decides_between_the_fastest(probe: Any) -> None:
    """Alone `fast` is ahead, inside its phase `slow`: kernels overlap there, and weights come from memory."""
    clock = Clock({"torch": 9.0, "fast": 3.0, "slow": 5.0}, {"torch": 2.0, "fast": 1.9, "slow": 1.4})
    assert [one.best.kernel for one in tuned(probe, clock)] == ["slow", "slow"]


def test_what_runs_now_stays_where_the_phase_gains_nothing(probe: Any) -> None:
    clock = Clock({"torch": 9.0, "fast": 3.0, "slow": 5.0}, {"torch": 2.0, "fast": 2.0, "slow": 2.1})
    results = tuned(probe, clock)
    assert [one.best.kernel for one in results] == ["torch", "torch"]
    assert "with fast" in results[0].figures


def test_what_runs_now_stays_unless_another_is_clearly_faster(probe: Any) -> None:
    clock = Clock({"torch": 3.0, "fast": 2.98, "slow": 5.0}, {"torch": 2.0, "fast": 1.0})
    assert [one.best.kernel for one in tuned(probe, clock)] == ["torch", "torch"]
    assert clock.tried == 0, "a phase is not measured for noise"


def test_a_gain_must_be_beyond_the_noise_of_its_turns() -> None:
    before = [10.0, 10.4, 9.8, 10.1, 10.3, 9.9, 10.2]
    assert tuning.gained(before, [one - 0.2 for one in before]) == pytest.approx(0.2)
    assert tuning.gained(before, [one + 0.2 for one in before]) == 0.0
    assert tuning.gained(before, before) == 0.0
    # Slow turns that both had side by side, but for one: the medians are the other way round.
    both = [1.0, 1.1, 1.2, 2.0, 2.1, 2.2, 2.3]
    shifted = [0.9, 1.0, 2.1, 2.15, 2.0, 2.1, 2.2]
    assert statistics.median(shifted) > statistics.median(both)
    assert tuning.gained(both, shifted) == 0.0
    assert tuning.gained(before, [one - 0.2 for one in before[:-1]] + [before[-1] + 0.01]) == 0.0, "one turn lost"
    noisy = [one + shift for one, shift in zip(before, (0.5, -0.6, 0.4, -0.3, -0.5, 0.6, -0.2), strict=True)]
    assert statistics.median(old - new for old, new in zip(before, noisy, strict=True)) > 0
    assert tuning.gained(before, noisy) == 0.0
    # Alike but for one turn, which lost: their deviation says nothing of the noise.
    lost = [one - shift for one, shift in zip(before, (0.2, 0.21, 0.19, 0.2, 0.2, -0.1, 0.2), strict=True)]
    assert tuning.gained(before, lost) == 0.0


@pytest.mark.parametrize(("turns", "most"), [(7, 0.02), (9, 0.01)])
def test_noise_alone_seldom_passes_for_a_gain(turns: int, most: float) -> None:
    drawn, passed, cases = random.Random(0), 0, 2000
    for _ in range(cases):
        now, *finalists = ([drawn.gauss(10.0, 0.1) for _ in range(turns)] for _ in range(4))
        passed += any(tuning.gained(now, each) > 0.0 for each in finalists)
    assert passed < most * cases


def test_as_many_turns_as_a_gain_needs() -> None:
    done = CliRunner().invoke(app, ["tune", "random:pi05", "--runs", "6"])
    assert done.exit_code == 2
    assert "7" in done.output


def test_every_candidate_finds_the_same_arguments() -> None:
    """An operation that adds onto its argument would else run on what the last candidate left."""
    stream = torch.ones(3)

    def add(onto: torch.Tensor, other: torch.Tensor) -> None:
        onto.add_(other)

    import functools

    again = functools.partial(add, stream, torch.ones(3))
    kept = tuning._Kept(again)
    first = kept.results(again)
    second = kept.results(again)
    assert [one.tolist() for one in first] == [one.tolist() for one in second] == [[2.0] * 3, [1.0] * 3]


def test_some_operations_alone(probe: Any) -> None:
    calls = record(Subject(probe), 1)  # type: ignore[arg-type]
    assert tuning.named(calls, []) == tuning.named(calls, ["probe"]) == calls
    with pytest.raises(TaktlineError, match="no operation 'prob'") as caught:
        tuning.named(calls, ["probe", "prob"])
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "probe" in caught.value.next_step


def test_the_table_makes_the_selector_choose_the_winners(
    probe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole way of a GPU without a table: measured, written, read back, and the reason says where from."""
    clock = Clock({"torch": 9.0, "fast": 3.0, "slow": 5.0}, {"torch": 2.0})
    text = text_of(merged(tuned(probe, clock), ()), "NVIDIA H123", ["the probe"])
    assert tomllib.loads(text)["gpu"] == "NVIDIA H123"
    assert tomllib.loads(text)["measured_on"] == ["the probe"]
    rules = parse_table(text)
    assert [dict(rule.bounds) for rule in rules] == [
        {"m": (2, 2), "k": (3, 3)},
        {"m": (5, 5), "k": (3, 3)},
        {"m": (2, 5), "k": (3, 3)},
    ]
    path = tmp_path / "h123.toml"
    path.write_text(text)
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
    for rows, kernel in ((2, "fast"), (5, "fast"), (4, "fast"), (77, "torch")):
        choice = KernelSelector().choose("probe", {"m": rows, "k": 3}, torch.float32, torch.device("cuda", 0))
        assert choice.kernel == kernel, "the reference where nothing was measured"
        assert str(path) in choice.reason
        assert ("3.00 us alone" in choice.reason) == (kernel == "fast")


def test_explain_uses_the_table_that_is_named_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in a process in which the shipped one has decided the same calls before."""
    from taktline_kernels.selector import default_selector
    from taktline_worker.commands import kernels as command

    gpu, path = torch.device("cuda", 0), tmp_path / "own.toml"
    path.write_text(text_of([Rule("probe", "fast", measured="3.00 us alone")], "NVIDIA H200", []))

    class OnAGpu:
        def phases(self, batch: int) -> list[Phase]:
            def run() -> None:
                for op in ("probe", "other"):
                    default_selector().choose(op, {"m": batch}, torch.float32, gpu)

            return [Phase("only", run, 1.0, 1.0)]

    monkeypatch.setattr(command, "open_profile", lambda *args: OnAGpu())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def explained() -> list[str]:
        done = CliRunner().invoke(app, ["explain", "policy", "--json"], catch_exceptions=False)
        return [entry["reason"] for entry in json.loads(done.stdout)]

    with selecting_by(KernelSelector()):
        assert explained() == ["no rule of table h200 covers it"] * 2
        monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
        assert explained() == [f"table {path}: 3.00 us alone", f"no rule of table {path} covers it"]


def result(
    best: str, *others: str, op: str = "probe", refused: Sequence[str] = (), us: float = 1.0, **shape: int
) -> Tuned:
    """A measured call; the candidates take 1 us, 2 us, ... in their order, the last of them runs now."""
    now = (best, *others)[-1]
    call = Recorded(op, shape, torch.bfloat16, CPU, Choice(now, "now"))
    good = [Candidate(name, {}, us + place) for place, name in enumerate((best, *others))]
    return Tuned(call, (*good, *(Candidate(name, {}, None, "no") for name in refused)))


def test_rules_that_hold_stay_and_get_figures() -> None:
    base = [
        Rule("probe", "a", "bfloat16", {"m": (1, 64)}, measured="by hand"),
        Rule("probe", "b", measured="by hand"),
        Rule("other", "c", measured="by hand"),
    ]
    rules = merged([result("a", "b", m=8), result("a", "b", m=16), result("b", "a", m=100)], base)
    assert [(rule.op, rule.kernel, dict(rule.bounds)) for rule in rules] == [
        ("probe", "a", {"m": (1, 64)}),
        ("probe", "b", {}),
        ("other", "c", {}),
    ]
    assert "m=8: 1.00 us" in rules[0].measured
    assert "m=16: 1.00 us" in rules[0].measured
    assert "m=100" in rules[1].measured
    assert rules[2].measured == "by hand", "not measured in this run"
    whole = merged([result("a", m=8)], [*base, Rule("probe", "c", "float32")], complete=True)
    assert [(rule.op, rule.kernel) for rule in whole] == [("probe", "a"), ("probe", "b"), ("other", "c")]
    assert whole[1].measured == "for shapes that no measured call has"
    before = Rule("probe", "z", "bfloat16", {"m": (99, 99)}, measured="m=99: 3.00 us alone, a 4.00")
    assert before in merged([result("a", m=8)], [before, *base], complete=True), "measured by a run before"


def test_a_new_winner_goes_before_the_rule_that_it_beats() -> None:
    base = [Rule("probe", "a", "bfloat16", {"m": (1, 64)}), Rule("probe", "b")]
    rules = merged([result("a", m=8), result("b", "a", m=16)], base)
    assert [(rule.kernel, dict(rule.bounds)) for rule in rules] == [
        ("b", {"m": (16, 16)}),
        ("a", {"m": (1, 64)}),
        ("b", {}),
    ]
    pinned = merged([result("b", "a", m=8)], [Rule("probe", "a", "bfloat16", {"m": (8, 8)}), Rule("probe", "b")])
    assert [(rule.kernel, dict(rule.bounds)) for rule in pinned] == [("b", {"m": (8, 8)}), ("b", {})]
    assert "m=8" in pinned[0].measured


def test_a_rule_with_free_dimensions_stays_for_the_shapes_that_nobody_measured() -> None:
    wide = Rule("probe", "a", "bfloat16", {"m": (1, 1)}, measured="50 shapes")
    assert merged([result("b", "a", m=1, n=64)], [wide])[:2] == [
        Rule("probe", "b", "bfloat16", {"m": (1, 1), "n": (64, 64)}, {}, "m=1 n=64: 1.00 us alone, a 2.00"),
        wide,
    ]
    any_dtype = Rule("probe", "a", "", {"m": (1, 1)})
    assert merged([result("b", "a", m=1)], [any_dtype])[1] == any_dtype


def test_strings_and_settings_of_a_table_are_toml() -> None:
    rule = Rule(
        "probe", "a", "bfloat16", {"m": (1, 2)}, {"wide": True, "block": 4}, 'faster than "b" \\ by 2 \u00b5s\n'
    )
    text = text_of([rule], 'NVIDIA "H123"', ['"one"'])
    assert parse_table(text) == (replace(rule, config={"wide": 1, "block": 4}),)
    assert (tomllib.loads(text)["gpu"], tomllib.loads(text)["measured_on"]) == ('NVIDIA "H123"', ['"one"'])


def test_rows_between_get_what_ran_at_both_ends() -> None:
    """And nothing else: what a kernel takes hangs on the other dimensions and on the dtype."""
    ends = [result("fast", "torch", m=2, k=8), result("slow", "fast", "torch", m=64, k=8)]
    alone = result("fast", "torch", m=2, k=9)
    rules = merged([*ends, alone], ())
    assert [(rule.kernel, dict(rule.bounds)) for rule in rules[3:]] == [("fast", {"k": (8, 8), "m": (2, 64)})]
    assert rules[3].dtype == "bfloat16"
    rules = merged([result("fast", "torch", m=2), result("torch", refused=["fast"], m=64)], ())
    assert rules[-1].kernel == "torch", "fast is not written for both"
    base = [Rule("probe", "torch")]
    assert merged(ends, base)[-1] == base[0], "a table that has a rule for other shapes keeps it"


def test_an_algorithm_is_for_its_shape_only() -> None:
    calls = [Recorded("product", {"m": m}, torch.bfloat16, CPU, Choice("cublas", "now")) for m in (8, 9)]
    best = Candidate("cublaslt", {"algorithm": 3}, 1.0)
    rules = merged([Tuned(call, (best, Candidate("cublas", {}, 2.0))) for call in calls], ())
    assert [dict(rule.bounds) for rule in rules] == [{"m": (8, 8)}, {"m": (9, 9)}]


def test_rows_of_a_plan_do_not_decide_its_kernel() -> None:
    """A plan is the same to the bit on one GPU and on several, which have fewer rows each."""
    few = result("cuda", "triton", op="frame_norm", rows=100, width=8)
    many = result("triton", "cuda", op="frame_norm", us=50.0, rows=9000, width=8)
    other = result("cuda", "triton", op="frame_norm", rows=100, width=16)
    rules = merged([few, many, other], [Rule("frame_norm", "torch")])
    found = {rule.bounds["width"][0]: (rule.kernel, rule.bounds["rows"]) for rule in rules if rule.bounds}
    assert found[8] == ("triton", (100, 10_000_000))
    assert found[16][0] == "cuda"


def test_fewer_rows_of_a_plan_than_usual_have_a_rule_too() -> None:
    results = [result("cuda", "triton", op="frame_norm", rows=rows, width=8) for rows in (512, 64)]
    (rule, base) = merged(results, [Rule("frame_norm", "triton")])
    assert (rule.kernel, rule.bounds["rows"], base.kernel) == ("cuda", (64, 10_000_000), "triton")
    assert "rows=64" in rule.measured
    assert "rows=512" in rule.measured


@pytest.mark.parametrize("refused", [["triton"], []])
def test_a_plan_gets_no_kernel_that_was_refused_for_some_of_its_rows(
    refused: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    few = result("triton", op="frame_norm", rows=256, width=8)
    many = result("cuda", op="frame_norm", refused=refused, rows=512, width=8)
    other = result("cuda", "triton", op="frame_norm", rows=256, width=16)
    base = [Rule("frame_norm", "torch")]
    rules = merged([few, many, other], base)
    assert [(rule.kernel, rule.bounds.get("width")) for rule in rules] == [("cuda", (16, 16)), ("torch", None)]
    assert "no rule for frame_norm rows=256 width=8" in caplog.text


def test_settings_come_from_tables_and_the_grid() -> None:
    call = Recorded(
        "attention_cached",
        {"batch": 1, "rows": 400, "cache": 819},
        torch.bfloat16,
        CPU,
        Choice("triton", "now", {"block_m": 64, "block_n": 64, "splits": 13, "num_warps": 4, "num_stages": 2}),
    )
    own = [Rule("attention_cached", "triton", config={"block_m": 32})]
    found = Tuner(KernelSelector(), Clock({}), own).candidates(call)
    assert found[0].runs(call.choice)
    assert len(found) == len({each.label for each in found}) >= 40
    named = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 2, "tma": 1}
    assert any(each.kernel == "triton" and each.config == named for each in found)
    assert any(each.config == {"block_m": 32} for each in found)
    known = Tuner(KernelSelector(), Clock({}), own, grids=False).candidates(call)
    assert len(known) < len(found) / 2
    product = Recorded("product", {"m": 1, "n": 8, "k": 8}, torch.bfloat16, CPU, Choice("cublas", "now"))
    labels = [each.label for each in Tuner(KernelSelector(), Clock({}), grids=False).candidates(product)]
    assert {f"cublaslt algorithm={number}" for number in range(8)} <= set(labels)


def test_the_shipped_tables_are_measured_on_every_policy() -> None:
    requests = list(planned("shipped"))
    policies = {request.policy.removeprefix("random:") for request in requests}
    assert policies == {name for name in RANDOM_POLICIES if not name.endswith("-paper")}
    assert {request.policy for request in planned("shipped:planner")} == {"random:vjepa2-ac"}
    slots = {request.prompt_tokens for request in planned("shipped:pi05") if request.views == 3}
    assert slots >= set(conventions(3, 50, 10).prompt_slots), "all prompt slots that graphs are captured for"
    with pytest.raises(TaktlineError, match="not measured on 'pi06'") as caught:
        list(planned("shipped:pi06"))
    assert "pi05" in caught.value.next_step


def test_a_run_carries_on_what_its_table_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text_of([Rule("probe", "a")], "NVIDIA H123", ["one thing", "another"]))
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
    assert measured_on(str(path)) == ["one thing", "another"]
    monkeypatch.delenv("TAKTLINE_KERNEL_TABLE")
    assert any(subject.startswith("pi05 bf16, batch 1") for subject in measured_on("h200"))
    assert measured_on("NVIDIA H123") == [], "a GPU without a table"


@pytest.mark.gpu
def test_tuning_on_a_gpu(folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    folder = folders.lerobot(tmp_path / "policy", "pi05")
    path = tmp_path / "table.toml"
    done = CliRunner().invoke(
        app,
        [
            *("tune", str(folder), "--batches", "1", "--runs", "7", "--precision", "fp32", "--out", str(path)),
            *("--ops", "layer_norm,geglu", "--complete"),  # all of them compile for a minute and a half
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    assert tomllib.loads(path.read_text())["measured_on"][-1].startswith("pi05 fp32, batch 1, ")
    rules = [rule for rule in parse_table(path.read_text()) if rule.op in ("layer_norm", "geglu")]
    assert {rule.op for rule in rules if "us alone" in rule.measured} == {"layer_norm", "geglu"}
    assert all(rule.kernel in ("torch", "triton") for rule in rules)
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(path))
    explained = CliRunner().invoke(app, ["explain", str(folder), "--precision", "fp32", "--json"])
    assert str(path) in explained.output, "the engine uses it, and says where a choice comes from"
