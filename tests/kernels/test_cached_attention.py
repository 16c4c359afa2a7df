"""Attention over a cache as a Hopper kernel: against the reference on a GPU, its source compiled everywhere."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.gpu_table import takes
from taktline_kernels.ops.dispatch import REGISTRY
from torch import Tensor

cached_attention = pytest.importorskip("taktline_kernels.cuda.cached_attention")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
SETTINGS = [
    {"wide": 1, "keys": 80},
    {"wide": 1, "keys": 64},
    {"wide": 0, "keys": 64},
    {"wide": 0, "keys": 48},
    {"wide": 0, "keys": 64, "split": 2},
    {"wide": 0, "keys": 64, "split": 8},
]


@pytest.mark.parametrize(("wide", "keys", "split", "eight"), [(1, 80, 1, 1), (0, 64, 4, 0)])
def test_the_source_compiles_for_hopper_on_any_machine(wide: int, keys: int, split: int, eight: int) -> None:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    defines = (("EIGHT", eight), ("KN", keys), ("SPLIT", split), ("STAGES", 2), ("WIDE", wide))
    assert nvrtc.compile_source("cached_attention.cu", defines, cached_attention.prologue(keys))[:4] == b"\x7fELF"


def case(rows: list[int], tokens: int, extra: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries inside the rows of a fused projection, caches with NaN behind the last row's end, lengths."""
    room, batch = max(rows) + extra + 3, len(rows)
    store = torch.full((2, batch * room + 128, 256), float("nan"), device="cuda").bfloat16()
    store[:, : batch * room] = torch.randn(2, batch * room, 256, device="cuda").bfloat16()
    keys, values = (part[: batch * room].view(batch, room, 256) for part in store)
    projected = torch.randn(batch, tokens, 2560, device="cuda").bfloat16()
    projected[:, 3, :256] *= 6  # one query with a sharp distribution
    query = projected[:, :, :2048].view(batch, tokens, 8, 256)
    return query, keys, values, torch.tensor(rows, dtype=torch.int32, device="cuda")


def covered(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the selector would take a rule that names the kernel."""
    gpu = importlib.import_module("taktline_kernels.gpu")
    return takes("attention_cached", "hopper", gpu.attention_shape(q, keys, values), q.dtype)


def plain(q: Tensor, keys: Tensor, values: Tensor, ends: Tensor) -> Tensor:
    """fp32 attention of every row over its first `ends` keys."""
    k, v = keys.float()[:, :, None], values.float()[:, :, None]
    return REGISTRY["attention_prefix"].reference(q.float(), k, v, ends)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("config", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("rows", "tokens", "extra", "alone"),
    [([100, 31, 88], 50, 50, False), ([100, 31, 88], 51, 51, True), ([7], 9, 0, False), ([769, 500], 769, 0, False)],
)
def test_attention(config: dict[str, int], rows: list[int], tokens: int, extra: int, alone: bool) -> None:
    torch.manual_seed(tokens)
    q, keys, values, lengths = case(rows, tokens, extra)
    expected = plain(q, keys, values, lengths + extra)
    if alone:
        expected[:, :1] = plain(q[:, :1], keys, values, lengths + 1)
    call = {"config": config, "first_alone": alone}
    assert covered(q, keys, values)
    actual = cached_attention.attention_cached(q, keys, values, lengths, extra, **call)
    error = (actual.float() - expected).norm() / expected.norm()
    assert float(error) < 5e-3
    assert float((actual.float() - expected).abs().max()) < 0.05
    assert torch.equal(actual, cached_attention.attention_cached(q, keys, values, lengths, extra, **call))
    # A row is the same to the bit beside others, or alone in its batch.
    last = tuple(tensor[-1:] for tensor in (q, keys, values, lengths))
    assert torch.equal(actual[-1:], cached_attention.attention_cached(*last, extra, **call))
    if config.get("split", 1) > 1:
        return
    scales = torch.empty(len(rows) * tokens, 1, device="cuda")
    eight = cached_attention.attention_cached(q, keys, values, lengths, extra, scales=scales, **call)
    restored = eight.float().flatten(2) * scales.view(len(rows), tokens, 1)
    assert float((restored - expected.flatten(2)).norm() / expected.norm()) < 4e-2
    assert float((scales.view(-1) * 448 / expected.abs().amax(dim=(2, 3)).view(-1) - 1).abs().max()) < 2e-2


@pytest.mark.gpu
@needs_hopper
def test_what_it_is_not_written_for() -> None:
    q, keys, values, lengths = case([20, 20], 50, 50)
    assert not covered(q[:, :, :4], keys, values)
    assert not covered(q[:, :40], keys, values)
    assert not covered(q, keys[:, :60], values[:, :60])
    with pytest.raises(ValueError, match="one tile"):
        cached_attention.attention_cached(q, keys, values, lengths, 50, config={"wide": 1, "split": 2})
