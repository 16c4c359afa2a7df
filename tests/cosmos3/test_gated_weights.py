"""The gated product's weight as a GPU reads it: this rank's gates and ups by eights, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taktline_kernels.fp8_rows import Fp8Rows, pack_gate_up, quantise_weight, unpack_gate_up
from taktline_kernels.gpu_reference import quantise_rows
from taktline_kernels.ops.fp8_products import fuses_swiglu_fp8
from taktline_worker.models.cosmos3.mesh import Place
from taktline_worker.models.cosmos3.request import OFFICIAL
from taktline_worker.models.cosmos3.synthetic import NANO
from taktline_worker.models.cosmos3.weights import Fp8GatedLinear, GatedLinear, _Packer
from torch.nn import functional

NEEDS_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("place", [Place(), Place(ranks=2, index=1)], ids=str)
def test_stored_matrices_go_straight_to_their_place(place):
    a = replace(NANO, width=64, mlp=512)
    packer = _Packer(a, OFFICIAL, torch.bfloat16, torch.device("cpu"), place)
    product = packer._gated("gate", "up")
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 512, 64, generator=generator).bfloat16()
    packer._stores["gate"](gate)
    packer._stores["up"](up)
    own = torch.cat([matrix.chunk(place.shards)[place.shard] for matrix in (gate, up)])
    assert torch.equal(product.weight, pack_gate_up(own))
    assert torch.equal(product.plain().weight, own)
    assert torch.equal(unpack_gate_up(pack_gate_up(own)), own)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [32, 300, 1093])
def test_the_product_has_its_activation_inside(rows):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, rows, 512, generator=generator).cuda().bfloat16()
    weight = (torch.randn(2048, 512, generator=generator) * 512**-0.5).cuda().bfloat16()
    gate, up = functional.linear(x.double(), weight.double()).chunk(2, dim=-1)
    expected = functional.silu(gate) * up
    found = GatedLinear(pack_gate_up(weight))(x)
    assert found.shape == expected.shape
    assert float((found.double() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("rows", [1, 7, 300, 1093])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_HOPPER])])
def test_the_product_in_fp8_has_its_activation_inside(rows, device):
    generator = torch.Generator().manual_seed(1)
    x = quantise_rows(torch.randn(2, rows, 512, generator=generator))
    stored = quantise_weight(torch.randn(512, 512, generator=generator) * 512**-0.5)
    x, stored = (Fp8Rows(one.values.to(device), one.scales.to(device)) for one in (x, stored))
    packed = Fp8Rows(pack_gate_up(stored.values), pack_gate_up(stored.scales))
    both = (x.values.double().flatten(0, 1) @ stored.values.double().T) * x.scales * stored.scales.T
    gate, up = both.view(2, rows, -1).chunk(2, dim=-1)
    expected = functional.silu(gate) * up
    found = Fp8GatedLinear(packed)(x)
    assert found.shape == expected.shape
    assert found.dtype == torch.bfloat16
    # Sums of FP8 products have fewer bits on a GPU.
    assert float((found.double() - expected).norm() / expected.norm()) < (3e-3 if device == "cpu" else 6e-3)


def test_a_weight_without_a_kernel_for_it_keeps_its_activation_behind():
    assert not fuses_swiglu_fp8(512, 512, torch.device("cpu"))
    assert not fuses_swiglu_fp8(192, 512, torch.device("cpu"))
