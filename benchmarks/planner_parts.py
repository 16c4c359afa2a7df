"""Milliseconds of each operation of a planner's block alone, in the forms that its tables choose between."""

from __future__ import annotations

from collections.abc import Callable

import torch
from engine import event_times, say
from taktline_kernels.ops import frame_products as products
from taktline_kernels.ops import frames as ops
from taktline_kernels.ops.frame_products import Weights
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from torch import Tensor


def parts(world: VJepa2World) -> dict[str, float]:
    """Milliseconds of each operation of a block, second frame, and of products in other forms."""
    a, m = world.architecture, world.micro_batch
    rows, width, mlp = m * a.frame_tokens, a.width, a.mlp
    device = world.device

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    x, hidden, wide = rand(rows, width), rand(rows, mlp), rand(rows, 3 * width)
    frames = rand(2, rows, 3 * width)
    stream = torch.randn(rows, width, device=device)
    kept = ops.split(stream)
    weight = {
        name: rand(n, k) / k**0.5
        for name, n, k in (("qkv", 3 * width, width), ("out", width, width), ("fc1", mlp, width), ("fc2", width, mlp))
    }
    bias, vector = torch.randn(mlp, device=device).bfloat16(), torch.randn(width, device=device)
    cos = torch.randn(a.frame_tokens, a.head_dim, device=device)
    angles = torch.randn(2, 2, a.tokens, a.head_dim, device=device)
    turned = Weights.of(weight["qkv"], torch.randn(3 * width, device=device)).in_pairs()
    active = Weights.quantised(weight["fc1"], torch.randn(mlp, device=device), 0.05).in_fours()
    eight = Weights.quantised(weight["qkv"], torch.randn(3 * width, device=device), 0.05).in_pairs()
    quantised = {name: ops.quantise_rows(value) for name, value in weight.items()}
    x8, hidden8 = ops.quantise_rows(x), ops.quantise_rows(hidden)
    fp32 = torch.float32

    def scaled(inputs: tuple[Tensor, Tensor], name: str) -> Callable[[], object]:
        values, scales = quantised[name]
        return lambda: torch._scaled_mm(
            inputs[0], values.t(), inputs[1], scales.t().contiguous(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def summed(inputs: tuple[Tensor, Tensor], name: str) -> Callable[[], object]:
        values, scales = quantised[name]
        onto = torch.zeros(rows, width, device=device, dtype=torch.bfloat16)
        return lambda: products.frame_sum_product(*inputs, values, scales.t().contiguous(), onto)

    calls: dict[str, Callable[[], object]] = {
        "qkv": lambda: torch.mm(x, weight["qkv"].t()),
        "out": lambda: torch.mm(x, weight["out"].t()),
        "fc1": lambda: torch.mm(x, weight["fc1"].t()),
        "fc2": lambda: torch.mm(hidden, weight["fc2"].t()),
        "fc1 gelu epilogue": lambda: torch._addmm_activation(bias, x, weight["fc1"].t(), use_gelu=True),
        "out onto fp32": lambda: torch.addmm(stream, x, weight["out"].t(), out_dtype=fp32),
        "fc2 onto fp32": lambda: torch.addmm(stream, hidden, weight["fc2"].t(), out_dtype=fp32),
        "qkv fp8": scaled(x8, "qkv"),
        "fc1 fp8": scaled(x8, "fc1"),
        "fc2 fp8": scaled(hidden8, "fc2"),
        "norm and keep": lambda: ops.frame_norm(kept, (x, x), vector, vector, vector, 1e-6, torch.bfloat16, keep=kept),
        "norm and add": lambda: ops.frame_norm(kept, (x,), vector, vector, vector, 1e-6, torch.bfloat16),
        "norm fp8": lambda: ops.frame_norm(x, (), vector, None, None, 1e-6, ops.FP8, unit=0.05),
        "norm": lambda: ops.frame_norm(stream, (), vector, vector, vector, 1e-6, torch.bfloat16),
        "rotate": lambda: ops.frame_rotate(wide, cos, cos, m),
        "gelu fp8": lambda: ops.frame_gelu(hidden, bias, ops.FP8),
        "qkv turned": lambda: products.frame_turned_product(x, turned, angles[1], m, wide),
        "qkv turned fp8": lambda: products.frame_turned_product(x8[0], eight, angles[1], m, wide),
        "fc1 and gelu fp8": lambda: products.frame_gelu_product(x8[0], active, 0.05),
        "out onto bf16, fp8": summed(x8, "out"),
        "fc2 onto bf16, fp8": summed(hidden8, "fc2"),
        "attention, 1 frame": lambda: ops.frame_attention(frames[:1], m, a.heads),
        "attention, 2 frames": lambda: ops.frame_attention(frames, m, a.heads),
    }
    from taktline_kernels.triton_impl import frame_attention
    from taktline_kernels.triton_impl import frames as kernels

    for block_m, block_n, warps, stages in (
        (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 4, 2),
        (256, 64, 8, 2), (256, 64, 8, 3), (64, 64, 4, 3),
    ):  # fmt: skip
        config = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        calls[f"attention {block_m}x{block_n}, {warps} warps, {stages} stages"] = (
            lambda config=config: frame_attention.attention(frames, m, a.heads, None, config)  # type: ignore[misc]
        )
    for together, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4)):
        config = {"rows": together, "num_warps": warps}
        calls[f"norm and add, {together} rows, {warps} warps"] = lambda config=config: kernels.norm(  # type: ignore[misc]
            kept, (x, x), vector, vector, vector, 1e-6, torch.bfloat16, kept, 1.0, config
        )
    for warps in (2, 4, 8):
        config = {"num_warps": warps}
        calls[f"rotate, {warps} warps"] = (
            lambda config=config: kernels.rotate(wide, cos, cos, m, config)  # type: ignore[misc]
        )
        calls[f"gelu fp8, {warps} warps"] = lambda config=config: kernels.gelu(hidden, bias, ops.FP8, config)  # type: ignore[misc]
    found = {}
    for name, call in calls.items():
        try:
            times = event_times(call, 3, 15)
        except Exception as error:  # a form that this version of PyTorch lacks is a line of the table, not the end
            say(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        found[name] = times[len(times) // 2]
        say(f"{name:<40} {1000 * found[name]:9.1f} us")
    return found
