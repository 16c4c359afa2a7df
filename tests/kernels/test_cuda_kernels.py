"""CUDA C++ kernels against the torch references, on a GPU; their host-side layouts everywhere."""

from __future__ import annotations

import importlib
import struct

import pytest
import torch
from taktline_kernels import ops
from taktline_kernels.guidance import Guidance
from taktline_kernels.ops.dispatch import REGISTRY
from torch.nn import functional

expert = pytest.importorskip("taktline_kernels.cuda.expert")
layout = pytest.importorskip("taktline_kernels.cuda.expert_layout")
calls = pytest.importorskip("taktline_kernels.cuda.expert_kernels")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


HOPPER_SHARED = 232_448
"""Bytes of shared memory that a block may have, beside those that CUDA keeps of each for itself."""
HOPPER_RESERVED = 1024


def section_bytes(binary: bytes, name: str) -> int:
    """The size that the section `name` of an ELF file says."""
    (headers,) = struct.unpack_from("<Q", binary, 0x28)
    each, count, names = struct.unpack_from("<HHH", binary, 0x3A)
    found = [struct.unpack_from("<IIQQQQ", binary, headers + index * each) for index in range(count)]
    start = found[names][4]
    sizes = {binary[start + at :].split(b"\0", 1)[0].decode(): size for at, _, _, _, _, size in found}
    return sizes[name]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("file", "defines"),
    [
        ("expert.cu", {"HEAD": 1}),
        ("expert.cu", {"HEAD": 2}),
        ("expert.cu", {"HEAD": 3}),
        ("expert.cu", {"N": 32, "KB": 1024, "SPLIT": 1, "EPILOGUE": 3, "PAUSE": 0}),
        ("expert.cu", {"KEYS": 128}),
        ("expert.cu", {"KEYS": 96}),
        ("expert.cu", {"KEYS": 80}),
        ("expert.cu", {"KEYS": 112}),
        ("expert.cu", {"KEYS": 128, "FACTORS": 32}),
        *(
            (
                "expert.cu",
                {"N": p.columns, "KB": p.depth, "SPLIT": p.split, "EPILOGUE": p.epilogue, "PAUSE": 4000, "PARTS": 16},
            )
            for p in (calls.QKV, calls.OUT, calls.GATE_UP, calls.DOWN)
        ),
        ("image_attention.cu", {"ROWS": 64}),
        ("image_attention.cu", {"ROWS": 128}),
    ],
    ids=str,
)
def test_the_sources_compile_for_hopper_on_any_machine(file: str, defines: dict[str, int]) -> None:
    """NVRTC comes with PyTorch and needs no GPU."""
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    assert nvrtc.compile_source(file, tuple(sorted(defines.items())))[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="error"):
        nvrtc.compile_source(file, tuple(sorted((defines | {"blockIdx": 0}).items())))


@pytest.mark.parametrize("tile", ["least", "most", 208])
@pytest.mark.parametrize("silu", [False, True])
def test_the_gated_product_compiles_for_hopper_and_fits_on_any_machine(
    tile: str | int, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """208 is the kernel table's largest tile; with the barriers, which are static, it fills what a block may have."""
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    geglu = importlib.import_module("taktline_kernels.cuda.geglu")
    columns = tile if isinstance(tile, int) else {"least": min, "most": max}[tile](geglu.TOKEN_TILES)
    monkeypatch.setattr(geglu, "CudaKernel", lambda file, entry, defines, **how: {"defines": defines, **how})
    how = geglu.product_kernel.__wrapped__(columns, silu, False)
    binary = nvrtc.compile_source("geglu.cu", tuple(sorted(how["defines"].items())), how["prologue"])
    assert binary[:4] == b"\x7fELF"
    static = section_bytes(binary, ".nv.shared.geglu_product") - HOPPER_RESERVED
    assert 0 < static + how["shared_bytes"] <= HOPPER_SHARED


def test_weight_image_is_what_the_kernel_multiplies() -> None:
    """Walks the image as the kernel's descriptors and fragments do, and gets the plain product."""
    n, k, columns, depth = 64, 1024, 32, 512
    generator = torch.Generator().manual_seed(0)
    weight, a = torch.randn(n, k, generator=generator), torch.randn(3, k, generator=generator)
    image = layout.weight_image(weight, columns, depth).view(n // columns, k // depth, depth // 64, columns, 8, 8)
    out = torch.zeros(3, n)
    logical = torch.arange(32)
    step, c = logical // 16, logical % 16
    actual = (c // 2 % 4) * 8 + step * 4 + (c // 8) * 2 + c % 2  # the column that a thread's fragment holds
    for tile in range(n // columns):
        for part in range(k // depth):
            for block in range(depth // 32):
                chunk, unit = block // 2, (block % 2) * 4 + logical // 8
                values = a[:, part * depth + block * 32 + actual]
                for row in range(columns):
                    w = image[tile, part, chunk, row, unit ^ (row % 8), logical % 8]
                    out[:, tile * columns + row] += values @ w
    assert relative(out, a @ weight.T) < 1e-6


def test_pairs_stand_in_one_group_of_sixteen() -> None:
    rows = torch.arange(2560)[:, None]
    paired = layout.pair_halves(rows)[:, 0].view(160, 2, 8)
    assert torch.equal(paired[:, 1], paired[:, 0] + 128)
    assert sorted(paired.flatten().tolist()) == list(range(2560))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tile", [None, 104, 200])
@pytest.mark.parametrize(("rows", "depth", "width"), [(300, 64, 128), (769, 2048, 1280), (1601, 1024, 4096)])
def test_linear_geglu(rows: int, depth: int, width: int, tile: int | None) -> None:
    from taktline_kernels import gpu
    from taktline_kernels.cuda.geglu import linear_geglu

    x = torch.randn(rows, depth, device="cuda").bfloat16()
    weight = (torch.randn(2 * width, depth, device="cuda") / depth**0.5).bfloat16()
    actual = linear_geglu(x, gpu.pack_gate_up(weight), tile=tile)
    assert relative(actual, REGISTRY["geglu"].reference(x.float() @ weight.float().T)) < 4e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("images", "heads"), [(1, 2), (3, 16)])
def test_attention_inside_images(images: int, heads: int, rows: int) -> None:
    from taktline_kernels.cuda.image_attention import attention_vision

    qkv = torch.randn(images, 256, 3, heads, 72, device="cuda").bfloat16()
    qkv[:, 7, 0] *= 8  # one query with a sharp distribution
    parts = qkv.unbind(2)
    expected = REGISTRY["attention_vision"].reference(*(part.float() for part in parts))
    actual = attention_vision(*parts, {"rows": rows})
    assert actual.dtype == torch.bfloat16
    assert relative(actual, expected) < 4e-3
    assert torch.equal(actual, attention_vision(*parts, {"rows": rows}))
    # Tensors that are no parts of one projection take PyTorch's way.
    assert relative(attention_vision(parts[0].contiguous(), parts[1], parts[2], {}), expected) < 4e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("bias", "gelu"), [(False, False), (True, False), (True, True)])
def test_library_products(bias: bool, gelu: bool) -> None:
    """Every algorithm that the library offers for a shape computes the same function."""
    from taktline_kernels.cuda import cublaslt

    x = torch.randn(3, 100, 1152, device="cuda").bfloat16()
    weight = (torch.randn(432, 1152, device="cuda") / 34).bfloat16()
    offset = torch.randn(432, device="cuda").bfloat16() if bias else None
    expected = functional.linear(x.float(), weight.float(), None if offset is None else offset.float())
    if gelu:
        expected = functional.gelu(expected, approximate="tanh")
    count = len(cublaslt.LtProduct(300, 432, 1152, bias, gelu, x.device).algorithms)
    assert count > 1
    for algorithm in range(count):
        assert relative(cublaslt.linear(x, weight, offset, gelu, algorithm), expected) < 4e-3
    by_rule = REGISTRY["linear"].load("cublaslt")
    activation = "gelu" if gelu else "none"
    assert relative(by_rule(x, weight, offset, activation, None, None, config={"algorithm": 1}), expected) < 4e-3
    with pytest.raises(ValueError, match="products with a bias"):
        by_rule(x, weight, offset, "relu", None, None, config={})


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_library_product_that_the_norm_adds(parts: int) -> None:
    from taktline_kernels.cuda import cublaslt

    x = torch.randn(3, 101, 1024, device="cuda").bfloat16()
    weight = (torch.randn(512, 1024, device="cuda") / 32).bfloat16()
    residual, norm = torch.randn(3, 101, 512, device="cuda").bfloat16(), torch.randn(512, device="cuda").bfloat16() / 8
    total = residual.float() + x.float() @ weight.float().T
    expected = REGISTRY["rms_norm"].reference(total.bfloat16(), norm, 1e-6)
    config = {"parts": parts, "algorithm": 0}
    arguments = (x, weight, residual, norm, 1e-6)
    stream, normed = cublaslt.linear_add_rms_norm(*arguments, config)
    assert (stream.dtype, normed.dtype, stream.shape) == (torch.bfloat16, torch.bfloat16, residual.shape)
    assert relative(stream, total) < 4e-3
    assert relative(normed, expected) < 6e-3
    assert torch.equal(cublaslt.linear_add_rms_norm(*arguments, config)[1], normed)
    # An index that the library does not offer is its own first choice.
    assert torch.equal(cublaslt.linear_add_rms_norm(*arguments, config | {"algorithm": 999})[1], normed)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_products(bias: bool) -> None:
    from taktline_kernels import gpu

    x = gpu.quantise_rows(torch.randn(300, 1152, device="cuda").bfloat16())
    weight = gpu.quantise_weight(torch.randn(432, 1152, device="cuda").bfloat16() / 34)
    offset = torch.randn(432, device="cuda").bfloat16() if bias else None
    expected = (x.values.float() * x.scales) @ (weight.values.float() * weight.scales).T
    expected = expected if offset is None else expected + offset.float()
    assert relative(gpu.linear_fp8(x, weight, offset), expected) < 4e-3


def test_a_quantised_weight_padded_with_zeros() -> None:
    from taktline_kernels import gpu

    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    weight[2] = 0
    plain, padded = gpu.quantise_weight(weight), gpu.quantise_weight(weight, rows=8, columns=16)
    assert torch.equal(padded.values[:5, :12].float(), plain.values.float())
    assert float(padded.values.float().abs().sum()) == float(plain.values.float().abs().sum())
    assert (padded.scales.shape, bool(padded.scales.isfinite().all())) == ((8, 1), True)
    error = (plain.values.float() * plain.scales - weight).abs()
    assert bool((error <= weight.abs() / 16 + weight.abs().amax(dim=1, keepdim=True) / 448 / 1024).all())


def test_timed_weight_is_the_fp32_product_with_its_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 1024, generator=generator)
    weight, bias = torch.randn(1024, 1024, generator=generator) / 32, torch.randn(1024, generator=generator)
    packed = layout.timed_weight(weight, bias)
    assert packed.dtype == torch.bfloat16
    large, small = (part.double() for part in layout.split_parts(x, 2))
    ones = torch.zeros(3, 1024, dtype=torch.float64)
    ones[:, :3] = 1
    out = torch.cat((large, large, small, ones), dim=1) @ packed.double().T
    exact = x.double() @ weight.double().T + bias.double()
    assert relative(out, exact) < 1e-5
    # The columns of ones, walked as the kernel's fragments lie.
    values = layout.timed_input(torch.device("cpu")).view(128, 4, 2, 8, 4, 8)
    columns = values.permute(1, 2, 3, 0, 4, 5).reshape(64, 4096)
    assert torch.equal(columns[:, 3072:3075], torch.ones(64, 3).bfloat16())
    assert float(columns.float().sum()) == 64 * 3


def test_the_norm_s_factor_can_come_after_the_first_layer_s_product() -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = (torch.randn(2560, 1024, generator=generator) / 32).bfloat16()
    scale, bias = (torch.randn(1024, generator=generator) * 0.3 for _ in range(2))
    weight = torch.randn(1024, 1024, generator=generator) / 32
    s = functional.silu(torch.randn(5, 1024, generator=generator))
    both, added = layout.start_weight(qkv, scale, weight, bias)
    assert (both.dtype, both.shape, added.dtype, added.shape) == (torch.float16, (3584, 1024), torch.float32, (3584,))
    found = s.double() @ both.double().T + added.double()
    x = s.double() @ weight.double().T + bias.double()
    assert relative(found[:, 2560:], x) < 5e-4
    factor = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6)
    normed = REGISTRY["rms_norm"].reference(x.float(), scale, 1e-6)
    assert relative(found[:, :2560] * factor, normed @ layout.pair_halves(qkv).float().T) < 5e-4


def test_a_norm_s_scale_can_lie_in_the_matrix() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(64, 1024, generator=generator) / 32).bfloat16()
    scale, x = torch.randn(1024, generator=generator) * 0.3, torch.randn(5, 1024, generator=generator)
    folded = layout.folded(weight, scale)
    assert (folded.dtype, folded.shape) == (torch.bfloat16, weight.shape)
    factor = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6)
    exact = REGISTRY["rms_norm"].reference(x, scale, 1e-6) @ weight.float().T
    assert 0 < relative((x @ folded.float().T) * factor, exact) < 3e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("state", [None, "steady", "timed"], ids=["pi05", "pi0", "pi0-modulated"])
@pytest.mark.parametrize(
    ("tokens", "length", "max_keys"),
    [
        *((50, 769, 820), (50, 968, 1019), (16, 5, 700), (63, 572, 636), (64, 572, 636)),
        *((1, 0, 300), (7, 40, 300), (8, 1, 300), (9, 95, 300), (17, 96, 300), (40, 97, 300), (56, 300, 400)),
    ],
)
def test_expert_chain_is_the_plain_expert(tokens: int, length: int, max_keys: int, state: str | None) -> None:
    """It is also no further from fp32 than 1.25 times the bf16 statement, as the policies' golden cases ask."""
    from taktline_kernels import gpu

    if state and tokens == layout.MAX_ROWS:
        pytest.skip("π0's state is one more token")

    torch.manual_seed(tokens + length)
    depth, steps = 2, 3

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()

    layers = [(matrix(2560, 1024), matrix(1024, 2048), matrix(8192, 1024), matrix(1024, 4096)) for _ in range(depth)]
    scale, shift, gate = (torch.randn(steps, 2 * depth + 1, 1024, device="cuda") * 0.3 for _ in range(3))
    if state == "steady":
        scale, shift = scale[:1].expand_as(scale), torch.zeros_like(shift)
    bias = torch.randn(steps, 1024, device="cuda") / 10
    heads = (torch.randn(1024, 32, device="cuda") / 6, bias if state else bias[0])
    heads += (torch.randn(32, 1024, device="cuda") / 32, torch.randn(32, device="cuda") / 10)
    timed = (torch.randn(1024, 1024, device="cuda") / 16, torch.randn(1024, device="cuda") / 10)
    timed += (torch.randn(1024, 32, device="cuda") / 6, torch.randn(1024, device="cuda") / 10)
    packed = [expert.ExpertLayer(q, o, gpu.pack_gate_up(g), d) for q, o, g, d in layers]
    projections = expert.Projections(*heads, *(timed if state else ()))
    chain = expert.ExpertChain(packed, scale, shift, gate, projections, max_keys=max_keys, steady=state == "steady")
    assert chain.starts == (state == "steady")
    keys, values = (torch.randn(depth, max_keys, 256, device="cuda").bfloat16() for _ in range(2))
    before, values_before = keys.clone(), values.clone()
    cos, sin = ops.rope_table(torch.arange(max_keys, device="cuda"), 256)
    noise = torch.randn(tokens, 32, device="cuda")
    robot = torch.randn(1, 32, device="cuda")

    def layer(i: int, step: int, x: torch.Tensor, past: list[torch.Tensor], start: int) -> tuple[torch.Tensor, ...]:
        """One layer over its own past keys and values (1, n, 1, 256); returns the stream, and its keys and values."""
        qkv, out, gate_up, down = (weight.to(x.dtype) for weight in layers[i])
        count, position = x.shape[0], torch.arange(start, start + x.shape[0], device="cuda")
        h = REGISTRY["ada_rms_norm"].reference(x, scale[step, 2 * i], shift[step, 2 * i], 1e-6)
        heads_of = (h @ qkv.T).view(1, count, 10, 256)
        turned = REGISTRY["rope"].reference(heads_of[:, :, :9], cos[position], sin[position])
        lengths = torch.tensor([past[0].shape[1]], dtype=torch.int32, device="cuda")
        attended = REGISTRY["attention_suffix"].reference(
            turned[:, :, :8], *past, lengths, turned[:, :, 8:], heads_of[:, :, 9:]
        )
        x = (x.float() + gate[step, 2 * i] * (attended.reshape(count, 2048) @ out.T).float()).to(x.dtype)
        h = REGISTRY["ada_rms_norm"].reference(x, scale[step, 2 * i + 1], shift[step, 2 * i + 1], 1e-6)
        update = REGISTRY["geglu"].reference(h @ gate_up.T) @ down.T
        x = (x.float() + gate[step, 2 * i + 1] * update.float()).to(x.dtype)
        return x, turned[:, :, 8:], heads_of[:, :, 9:]

    def plain(guidance: list[Guidance] | None = None, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """The actions after all steps, drawn to the guidance's target if there is one."""
        cache = [[t[i][None, :length, None].to(dtype) for t in (before, values_before)] for i in range(depth)]
        start = length
        if state:
            # The state token by itself, as the policy defines it, before the loop.
            x = functional.linear(robot, timed[2], timed[3]).to(dtype)
            for i in range(depth):
                x, *own = layer(i, 0, x, cache[i], length)
                cache[i] = [torch.cat((past, new), dim=1) for past, new in zip(cache[i], own, strict=True)]
            start += 1
        found = noise.clone()
        for step in range(steps):
            x = functional.linear(found, heads[0], bias[step] if state else bias[0])
            if state:
                x = functional.linear(functional.silu(x), timed[0], timed[1])
            x = x.to(dtype)
            for i in range(depth):
                x, *_ = layer(i, step, x, cache[i], start)
            h = REGISTRY["ada_rms_norm"].reference(x, scale[step, -1], shift[step, -1], 1e-6)
            velocity = h.float() @ heads[2].T + heads[3]
            if guidance is not None:
                velocity = guidance[step].apply(found, velocity)
            found = found - velocity / steps
        return found

    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    actions = noise.clone()
    chain.solve(actions, robot if state else None, lengths, keys, values, cos, sin)
    assert relative(actions, plain()) < 6e-3
    exact = plain(dtype=torch.float32)
    error, of_plain = relative(actions, exact), relative(plain(), exact)
    print(f"error: chain {error:.3e}, bf16 statement {of_plain:.3e}")
    assert error > 1e-5
    if tokens >= 16:  # of fewer numbers neither error is steady
        assert error <= 1.25 * of_plain
    assert torch.equal(keys[:, :length], before[:, :length])
    # Drawn to a target: rows without influence keep every bit where no row has any, the others follow the formula.
    influence = torch.zeros(tokens, device="cuda")
    drawn, target = noise.clone(), torch.randn(tokens, 32, device="cuda")
    guidance = [Guidance(target, influence, 1.0 - step / steps, 1.0) for step in range(steps)]
    chain.solve(drawn, robot if state else None, lengths, keys, values, cos, sin, guidance)
    assert torch.equal(drawn, actions)
    influence[: -(-tokens // 2)] = 1.0
    drawn = noise.clone()
    chain.solve(drawn, robot if state else None, lengths, keys, values, cos, sin, guidance)
    assert relative(drawn, plain(guidance)) < 6e-3
    assert relative(drawn, actions) > 0.1
    again = noise.clone()
    chain.solve(again, robot if state else None, lengths, keys, values, cos, sin)
    assert torch.equal(again, actions)
    # Beside other work, which it follows layer by layer, its windows are narrower.
    seen: list[int] = []
    beside = noise.clone()
    chain.solve(beside, robot if state else None, lengths, keys, values, cos, sin, before_layer=seen.append)
    assert seen == list(range(depth))
    assert relative(beside, plain()) < 6e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("first_alone", [False, True])
def test_attention_whose_keys_the_copy_engine_fetches(splits: int, first_alone: bool) -> None:
    """Rows of other lengths, a block past the last row's end, and NaN behind the caches, which nothing may see."""
    attention = importlib.import_module("taktline_kernels.triton_impl.attention")
    torch.manual_seed(splits)
    store = torch.full((2, 3 * 150 + 128, 256), float("nan"), device="cuda").bfloat16()
    store[:, : 3 * 150] = torch.randn(2, 3 * 150, 256, device="cuda").bfloat16()
    keys, values = (part[: 3 * 150].view(3, 150, 256) for part in store)
    q = torch.randn(3, 50, 8, 256, device="cuda").bfloat16()
    lengths = torch.tensor([100, 31, 88], dtype=torch.int32, device="cuda")
    config = {"block_m": 64, "block_n": 64, "splits": splits, "num_warps": 4, "num_stages": 2}
    plain = attention.attention_cached(q, keys, values, lengths, 50, config=config, first_alone=first_alone)
    fetched = attention.attention_cached(
        q, keys, values, lengths, 50, config=config | {"tma": 1}, bounded=False, first_alone=first_alone
    )
    assert relative(fetched.float(), plain.float()) < 1e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_hopper])])
def test_attention_of_a_long_suffix_in_two_parts(device: str) -> None:
    sdpa = importlib.import_module("taktline_kernels.cuda.sdpa")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(4)
    q, prefix_k, prefix_v, suffix_k, suffix_v = (
        torch.randn(2, tokens, heads, 64, generator=generator).to(device, dtype)
        for tokens, heads in ((150, 8), (64, 2), (64, 2), (150, 2), (150, 2))
    )
    for lengths in ([64, 64], [1, 37]):
        given = torch.tensor(lengths, dtype=torch.int32, device=device)
        args = (q, prefix_k, prefix_v, given, suffix_k, suffix_v)
        expected = REGISTRY["attention_suffix"].reference(*args)
        assert relative(sdpa.attention_suffix(*args, config={}), expected) < (1e-5 if device == "cpu" else 1e-2)
