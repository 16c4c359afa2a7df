"""Kernels compiled and engines' set-up rehearsed for GPUs that are not here, in processes that interpret no kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

from taktline_worker.profiling.rehearsal import POLICIES

_REHEARSED = """
import json, sys
from dataclasses import asdict
from taktline_worker.profiling import rehearsal

policy, arch, table = sys.argv[1:]
found = []
for precision in rehearsal.precisions(policy, arch, "" if table else "bf16"):
    one = rehearsal.rehearse(policy, arch, precision=precision, table=table, compiled=False)
    found.append(asdict(one) | {"without_rule": one.without_rule if table else []})
json.dump(found, sys.stdout)
"""

_EXPLAINED = """
import json, sys
from taktline_kernels import gpu
from taktline_worker.profiling import kernels
from taktline_worker.profiling.rehearsal import explained
from taktline_worker.profiling.subject import Request

kernels._gpu_functions = lambda: kernels._public_functions(gpu)  # as with a GPU
found = {"once": {}}
for name, arch, table in (("h200", "sm_90", "h200"), ("h100", "sm_90", ""), ("a40", "sm_86", "")):
    calls = explained(Request("random:pi05", (1,), "cuda", "bf16", layers=2), arch, table)
    found["once"][name] = sorted({call.name for call in calls if call.again is None})
    found[name] = {call.name: [call.choice.kernel, dict(call.choice.config), call.choice.reason] for call in calls}
json.dump([found], sys.stdout)
"""

_COMPILED = """
import json, sys
from dataclasses import asdict
import torch
from taktline_kernels import ahead
from taktline_kernels.selector import KernelSelector, Rule
from taktline_kernels.triton_impl import activations, attention, delta, fp8, gates, heads
from torch._subclasses.fake_tensor import FakeTensorMode

mode, arch = FakeTensorMode(), sys.argv[1]
with ahead.recording(arch) as ledger, mode:
    def made(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="cuda")

    fp32 = torch.float32
    q, rates, heads_of = made(1, 160, 16, 128), made(1, 160, 16), made(16, dtype=fp32)
    for _ in range(2):
        delta.gated_delta_rule(q, q, q, rates, rates, heads_of, heads_of, config={})
    delta.conv_silu_split(made(1, 160, 8192)[..., :6144], made(6144, 4), (2048, 2048, 2048), config={})
    gates.rms_norm_silu_gate(q, made(128, dtype=fp32), q, 1e-6, config={"num_warps": 1})
    activations.swiglu(made(2, 2 * 6144), {})
    cos = made(160, 64, dtype=fp32)
    heads.norm_rotate(made(160, 32 * 128), made(128), made(128), cos, cos, 16, 8, 1e-6, {})
    fp8.quantise_rows(made(2, 2 * 9216), fp8.SWIGLU)
    cache, lengths = made(1, 1018, 256), made(1, dtype=torch.int32)
    attention.attention_cached(made(1, 50, 8, 256), cache, cache, lengths, 50, config={"block_m": 128, "num_warps": 8})
    attention.attention_cached(made(1, 50, 8, 256), cache, cache, lengths, 50, config={"block_n": 32})
    if arch == "sm_90":
        attention.attention_cached(made(1, 50, 8, 256), cache, cache, lengths, 50, config={"tma": 1}, bounded=False)
json.dump([asdict(one) for one in ledger.kernels.values()], sys.stdout)
"""


def started(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,  # before pytest's own
        check=False,
    )


def run(program: str, *arguments: str) -> list[dict[str, object]]:
    done = started(program, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


_LAUNCHED: dict[tuple[str, str], set[str]] = {
    ("minicpm-robot", "bf16"): {"_chunk_kernel", "_state_kernel", "_gate_kernel", "product.cu:product"},
    ("gr00t-n1.7", "bf16"): {"_norm_rotate_kernel", "_gated_kernel"},
    ("pi05", "bf16"): {"expert.cu:product", "geglu.cu:geglu_product"},
    ("cosmos3-nano", "fp8"): {"_rows_kernel", "fp8_attention.cu:attend", "geglu.cu:geglu_product"},
    ("vjepa2-ac", "fp8"): {"_norm_kernel"},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_engine_can_be_captured_on_a_gpu(policy: str) -> None:
    """Nothing that a stream capture refuses, every operation under a rule, and the kernels that are written for it."""
    found: Any = captured(policy, "sm_90", "h200")
    launched = {one["precision"]: {kernel["name"] for kernel in one["kernels"]} for one in found}
    assert launched.keys() == {"bf16", "fp8"}
    for (name, precision), kernels in _LAUNCHED.items():
        assert name != policy or kernels <= launched[precision]
    # Left to PyTorch until somebody has measured the alternatives, or to two operations that have kernels of their own.
    of_two = {"linear_add_layer_norm", "linear_add_rms_norm", "linear_silu_gate", "frame_gelu_product"}
    assert {op for one in found for op in one["without_rule"]} <= {"attention_suffix", "linear"} | of_two


def test_the_engines_that_are_captured_are_known() -> None:
    assert {name for name, _ in _LAUNCHED} <= set(POLICIES)


def test_a_smaller_gpu_takes_keys_in_smaller_parts() -> None:
    """Its blocks have less shared memory."""
    (found,) = captured("pi05", "sm_86", "")
    small = [kernel["settings"] for kernel in found["kernels"] if kernel["name"] == "_cached_kernel"]
    assert {settings["BLOCK_N"] for settings in small} == {32}


def captured(policy: str, arch: str, table: str) -> Any:
    """What was found; each policy in a process of its own, which ends well before a test must."""
    found: Any = run(_REHEARSED, policy, arch, table)
    for one in found:
        assert one["graphs"], policy
        assert not one["findings"], (policy, one["precision"], one["findings"])
        assert not [kernel for kernel in one["kernels"] if kernel["error"]]
    return found


def test_what_a_gpu_would_run_is_explained_on_any_machine() -> None:
    """With the kernels that exist on a GPU only, by the decision that the engine itself gets there."""
    found: Any = run(_EXPLAINED)[0]
    h200, h100, a40 = found["h200"], found["h100"], found["a40"]
    assert found["once"] == {name: ["expert", "patches"] for name in ("h200", "h100", "a40")}, (
        "all others can be replayed"
    )
    assert {"attention_cached", "rope_cache", "assemble", "linear_geglu", "patches", "stream_layer_norm"} <= h200.keys()
    assert h200["linear_geglu"][0] == "hopper"
    assert "table h200: " in h200["linear_geglu"][2]
    assert "us alone" in h200["linear_geglu"][2]
    assert h200["expert"][0] == h100["expert"][0] == "chain", "it depends on the architecture"
    assert a40["expert"][0] == "products"
    assert "action_head" in a40.keys() - h100.keys(), "the chain has its own steps"
    for name, choices in (("sm_90", h100), ("sm_86", a40)):
        assert choices["rms_norm"] == ["torch", {}, f"no table for {name}"]
        for op in ("attention_cached", "linear_geglu", "product"):
            assert choices[op][0] in ("triton", "cublas")
            assert f"no table for {name}" in choices[op][2]
    assert (a40["attention_cached"][1], h100["attention_cached"][1]) == ({"block_n": 32}, {})


def test_kernels_compile_for_hopper() -> None:
    found = run(_COMPILED, "sm_90")
    by_name = {str(one["name"]): one for one in reversed(found)}
    assert by_name["_chunk_kernel"]["launches"] == 2
    for one in found:
        assert not one["error"], one
        assert 0 < one["registers"] <= 255  # type: ignore[operator]
        assert one["stack_bytes"] == 0, one
    assert by_name["_cached_kernel"]["shared_bytes"] > 100 << 10  # type: ignore[operator]


def test_what_an_architecture_cannot_run_is_said() -> None:
    """sm_86 has no e4m3 conversion, and blocks of 99 KB."""
    refused = {(str(one["name"]), str(one["error"])) for one in run(_COMPILED, "sm_86") if one["error"]}
    assert {name for name, _ in refused} == {"_cached_kernel", "_rows_kernel"}
    reasons = dict(refused)
    assert len(reasons) == len(refused)
    assert "shared memory" in reasons["_cached_kernel"]
    assert "fp8e4nv" in reasons["_rows_kernel"]


def test_the_command_lists_kernels_and_what_has_no_rule() -> None:
    command = "from taktline_worker.commands.kernels import app; app()"
    done = started(command, "check", "minicpm-robot", "--precision", "bf16", "--batches", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "minicpm-robot bf16 on sm_90: 2 graphs" in done.stdout
    assert "_state_kernel" in done.stdout
    assert "KIND=2" in done.stdout
    assert "linear: the torch reference runs" in done.stdout
    refused = started(command, "check", "pi05", "--arch", "sm_86", "--precision", "fp8")
    assert refused.returncode != 0
    assert "pi05 has no fp8 on sm_86" in refused.stderr
