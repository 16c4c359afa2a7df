"""The gated product's weight as a GPU reads it: this rank's gates and ups by eights, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taktline_kernels.fp8_rows import pack_gate_up, unpack_gate_up
from taktline_worker.models.cosmos3.mesh import Place
from taktline_worker.models.cosmos3.request import OFFICIAL
from taktline_worker.models.cosmos3.synthetic import NANO
from taktline_worker.models.cosmos3.weights import GatedLinear, _Packer
from torch.nn import functional


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
