"""What benchmarks/engine.py gives its policies, and how far from the fp32 statement their answers are."""

from __future__ import annotations

from typing import Any

import torch
from plain_pi import PlainPi
from taktline_worker.models.pi.graphs import Bucket, GraphRunner
from taktline_worker.models.pi.runner import PiBatch, PiRunner
from taktline_worker.models.pi.synthetic import PI0, PI05, conventions
from taktline_worker.models.pi.weights import FP32, pack_weights

HORIZON, STEPS = 50, 10
Subject = tuple[str, str]
"""A policy and a precision: bf16, fp8, or bf16 with the expert's matrices in a byte a number."""
FP32_GATE = 5e-4
"""Most that any action of our fp32 may differ from the plain statement's."""
BF16_GATE = 1.25
"""Most that the mean error of our bf16 may be of the official bf16 mode's."""


def make_batch(bucket: Bucket, seed: int = 1, policy: str = "pi05") -> PiBatch:
    """Random pixels, tokens, noise and (π0) state that fill the bucket exactly."""
    generator = torch.Generator().manual_seed(seed)
    rows, views, prompt, tokens = bucket.rows, bucket.views, bucket.prompt, PI05.tokens_per_image
    image = torch.arange(rows * views * tokens).view(rows, -1)
    text = rows * views * tokens + torch.arange(rows * prompt).view(rows, -1)
    return PiBatch(
        pixels=torch.rand(rows * views, 3, 224, 224, generator=generator) * 2 - 1,
        tokens=torch.randint(3, 257_000, (rows, prompt), generator=generator),
        source=torch.cat((image, text), dim=1),
        lengths=torch.full((rows,), views * tokens + prompt, dtype=torch.int32),
        noise=torch.randn(rows, HORIZON, 32, generator=generator),
        state=torch.randn(rows, 32, generator=generator) if policy == "pi0" else None,
    )


def peer_inputs(batch: PiBatch, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """The same batch as the plain statement takes it, on the device."""
    pixels = batch.pixels.view(bucket.rows, bucket.views, 3, 224, 224)
    valid = torch.ones(bucket.rows, bucket.prompt, dtype=torch.bool)
    given = (pixels, batch.tokens, valid, batch.noise, *(() if batch.state is None else (batch.state,)))
    return tuple(x.cuda() for x in given)


def errors(actions: torch.Tensor, oracle: torch.Tensor) -> dict[str, float]:
    """Distance of actions from the oracle, and the smallest cosine of a row."""
    distance = (actions - oracle).abs().flatten()
    cosine = torch.nn.functional.cosine_similarity(actions.flatten(1), oracle.flatten(1)).min()
    return {
        "mean_abs": float(distance.mean()),
        "p99_abs": float(distance.quantile(0.99)),
        "max_abs": float(distance.max()),
        "cosine": float(cosine),
    }


def oracle(tensors: dict[str, torch.Tensor], policy: str, batch: PiBatch, bucket: Bucket) -> torch.Tensor:
    """Actions of the fp32 statement in plain PyTorch."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        return PlainPi(tensors, PI05 if policy == "pi05" else PI0, STEPS)(*peer_inputs(batch, bucket))


def eager_fp32(tensors: dict[str, torch.Tensor], policy: str) -> PiRunner:
    """The eager runner in fp32."""
    architecture = PI05 if policy == "pi05" else PI0
    packed = pack_weights(dict(tensors), architecture, conventions(3, HORIZON, STEPS), FP32, torch.device("cuda"))
    return PiRunner(packed, architecture)


def accuracy(
    runners: dict[Subject, GraphRunner], tensors: dict[str, torch.Tensor], policy: str, bf16: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Error against the fp32 statement on one shape: of each precision, of our fp32, and of the official bf16 mode.

    Args:
        tensors: the policy's, in fp32.
        bf16: the same as that mode has them.

    Raises:
        SystemExit: our fp32 or our bf16 is farther from it than `FP32_GATE` or `BF16_GATE` says.
    """
    bucket, architecture = Bucket(1, 3, 1), PI05 if policy == "pi05" else PI0
    batch = make_batch(bucket, seed=5, policy=policy)
    expected = oracle(tensors, policy, batch, bucket)
    found: dict[str, Any] = {
        precision: errors(runner.run(batch).cuda(), expected)
        for (name, precision), runner in runners.items()
        if name == policy
    }
    found["eager_fp32"] = errors(eager_fp32(tensors, policy).run(batch).cuda(), expected)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with torch.inference_mode():
        found["official_bf16"] = errors(PlainPi(bf16, architecture, STEPS)(*peer_inputs(batch, bucket)), expected)
    if found["eager_fp32"]["max_abs"] > FP32_GATE:
        raise SystemExit(f"{policy} in fp32 is over {FP32_GATE} from the plain statement: {found}")
    if found["bf16"]["mean_abs"] > BF16_GATE * found["official_bf16"]["mean_abs"]:
        raise SystemExit(f"{policy} in bf16 is over {BF16_GATE} of the official mode's error: {found}")
    return found
