"""π0.5's attentions, norms and gated product on one GPU: the kernels in use beside FlashInfer's and PyTorch's.

    python benchmarks/flashinfer_kernels.py [--batches 1,8,32] [--out DIR]

Needs `flashinfer-python`, which builds its kernels where the GPU is (some minutes the first time), and a GPU with a
table. Each op runs some times over buffers of its own in one CUDA graph, as the layers of a request do; the graphs are
replayed in turns, and a row a peer has the time of one call. An answer is held to PyTorch's in fp32 first.

FlashInfer has no head of 72 (vision: padded to 128 beforehand, which is not timed), no AdaRMS and no LayerNorm with a
residual: those rows name what its kernel leaves out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from engine import capture, event_times
from floors import H200
from result_rows import Row
from taktline_kernels import gpu, ops
from torch import Tensor
from torch.nn import functional

PREFIX, LONG_PREFIX, CHUNK, IMAGE = 769, 968, 50, 256
"""Tokens of three cameras with one and with 200 prompt tokens, of a chunk, of an image."""
HEADS, WIDTH = 8, 256
VISION_HEADS, VISION_WIDTH, PADDED = 16, 72, 128
TURNS, WARM, RUNS = 5, 2, 4
EPS = 1e-6
TOLERANCE = 1e-2
"""Most of ||answer - fp32|| / ||fp32||."""
Calls = Sequence[Callable[[], Tensor]]


def draw(*shape: int) -> Tensor:
    """Random bf16 numbers."""
    return torch.randn(shape, device="cuda").bfloat16()


class Bench:
    """Rows of one batch size; all rows are saved as they come."""

    def __init__(self, batch: int, rows: list[Row], out: Path) -> None:
        import flashinfer  # which a checkout lacks

        self.batch, self.rows, self.out, self.theirs = batch, rows, out, flashinfer

    def compare(
        self,
        op: str,
        sizes: dict[str, int],
        flops: float,
        moved: float,
        want: Tensor,
        ours: Calls,
        peers: dict[str, Calls],
    ) -> None:
        """Time `ours` and each of `peers` in turns.

        Args:
            op: what it is called in the rows.
            sizes: of one call.
            flops: operations of one call.
            moved: bytes that one call must read and write.
            want: the answer of the first call, or its first rows, fp32.
            ours: calls, each over buffers of its own.
            peers: the same by name.

        Raises:
            SystemExit: an answer is far from `want`.
        """
        graphs = {}
        for name, calls in {"ours": ours, **peers}.items():
            kept: list[Tensor] = []
            answer = calls[0]().float().flatten()[: want.numel()].view(want.shape)
            error = float((answer - want).norm() / want.norm())
            if not error < TOLERANCE:
                raise SystemExit(f"{op}, {name}: {error:.1e} from fp32")

            def run(calls: Calls = calls, kept: list[Tensor] = kept) -> None:
                kept[:] = [call() for call in calls]

            graphs[name] = capture(run, 1)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(TURNS):
            for name in list(graphs)[:: 1 if turn % 2 else -1]:
                times[name] += [ms / len(ours) for ms in event_times(graphs[name].replay, WARM, RUNS)]
        own = statistics.median(times["ours"])
        said = [f"ours {1e3 * own:.1f} us"]
        for name in peers:
            theirs = statistics.median(times[name])
            said.append(f"{name} {1e3 * theirs:.1f} ({theirs / own:.2f})")
            self.rows.append(
                Row(
                    policy="pi05",
                    shape=sizes,
                    batch=self.batch,
                    median_ms=own,
                    p99_ms=max(times["ours"]),
                    n=len(times["ours"]),
                    floor_ms=1e3 * max(flops / H200.flops, moved / H200.bytes_per_s),
                    versions={
                        "torch": torch.__version__,
                        "flashinfer": self.theirs.__version__,
                        "gpu": torch.cuda.get_device_name(),
                    },
                    date=time.strftime("%Y-%m-%d"),
                    peer=name,
                    peer_median_ms=theirs,
                    ratio=theirs / own,
                    bench="flashinfer-kernels",
                    command="python benchmarks/flashinfer_kernels.py",
                    details={"op": op},
                )
            )
        text = json.dumps([asdict(row) for row in self.rows], indent=1)
        (self.out / "flashinfer_kernels.json").write_text(text + "\n", encoding="utf-8")
        print(f"batch {self.batch}, {op}: {', '.join(said)}", flush=True)

    def ragged(self, backend: str, queries: int, keys: int, rows: int, heads: int, kv_heads: int, width: int) -> object:
        """FlashInfer's planned attention of `rows` sequences; its scale is that of the true head."""
        room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        planned = self.theirs.BatchPrefillWithRaggedKVCacheWrapper(room, "NHD", backend=backend)
        starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        true = VISION_WIDTH if width == PADDED else width
        planned.plan(
            starts * queries,
            starts * keys,
            heads,
            kv_heads,
            width,
            causal=False,
            sm_scale=true**-0.5,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        return planned

    def attention(self, op: str, queries: int, keys: int, calls: int) -> None:
        """The prefix over itself, or a chunk over prefix and itself: eight heads on one."""
        batch, extra = self.batch, 0 if queries == keys else queries
        count = calls * batch * keys
        stored = [draw(count + gpu.CACHE_MARGIN, WIDTH)[:count].view(calls, batch, keys, WIDTH) for _ in range(2)]
        q = draw(calls, batch, queries, HEADS, WIDTH)
        lengths = torch.full((batch,), keys - extra, dtype=torch.int32, device="cuda")
        k, v = stored

        def plain(i: int, dtype: torch.dtype, rows: int) -> Tensor:
            few = [t[i, :rows, None].to(dtype).expand(-1, HEADS, -1, -1) for t in (k, v)]
            return functional.scaled_dot_product_attention(q[i, :rows].transpose(1, 2).to(dtype), *few).transpose(1, 2)

        peers: dict[str, Calls] = {}
        for backend in ("fa2", "fa3"):
            plan = self.ragged(backend, queries, keys, batch, HEADS, 1, WIDTH)
            peers[f"FlashInfer {backend}"] = [
                lambda i=i, plan=plan: plan.run(q[i].flatten(0, 1), k[i].view(-1, 1, WIDTH), v[i].view(-1, 1, WIDTH))
                for i in range(calls)
            ]
        peers["PyTorch"] = [lambda i=i: plain(i, torch.bfloat16, batch) for i in range(calls)]
        ours = [lambda i=i: gpu.attention_cached(q[i], k[i], v[i], lengths, extra) for i in range(calls)]
        flops = 4.0 * batch * HEADS * queries * keys * WIDTH
        moved = 2.0 * batch * WIDTH * (2 * queries * HEADS + 2 * keys)
        self.compare(op, {"queries": queries, "keys": keys}, flops, moved, plain(0, torch.float32, 1), ours, peers)

    def vision(self, calls: int) -> None:
        """Inside three images a robot."""
        images = 3 * self.batch
        qkv = draw(calls, images, IMAGE, 3, VISION_HEADS, VISION_WIDTH)
        padded = functional.pad(qkv, (0, PADDED - VISION_WIDTH)).permute(0, 3, 1, 2, 4, 5).flatten(2, 3).contiguous()

        def plain(i: int, dtype: torch.dtype, rows: int) -> Tensor:
            parts = (qkv[i, :rows, :, j].transpose(1, 2).to(dtype) for j in range(3))
            return functional.scaled_dot_product_attention(*parts).transpose(1, 2).contiguous()

        peers: dict[str, Calls] = {}
        for backend in ("fa2", "fa3"):
            plan = self.ragged(backend, IMAGE, IMAGE, images, VISION_HEADS, VISION_HEADS, PADDED)
            calls_of = [lambda i=i, plan=plan: plan.run(*padded[i])[..., :VISION_WIDTH] for i in range(calls)]
            peers[f"FlashInfer {backend}, heads padded to {PADDED}"] = calls_of
        peers["PyTorch"] = [lambda i=i: plain(i, torch.bfloat16, images) for i in range(calls)]
        ours = [lambda i=i: ops.attention_vision(*qkv[i].unbind(2)) for i in range(calls)]
        flops = 4.0 * images * VISION_HEADS * IMAGE**2 * VISION_WIDTH
        moved = 8.0 * images * IMAGE * VISION_HEADS * VISION_WIDTH
        sizes = {"images": images, "tokens": IMAGE}
        self.compare("vision attention", sizes, flops, moved, plain(0, torch.float32, 1), ours, peers)

    def norms(self, calls: int) -> None:
        """Residual add and RMSNorm of the prefix; what an expert's and a vision layer's norm does."""
        rows, width, their_norm = PREFIX * self.batch, 2048, self.theirs.norm
        x, y, weight = draw(calls, rows, width), draw(calls, rows, width), draw(width) * 0.1
        wide = weight.float()

        def rms(value: Tensor) -> Tensor:
            return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)

        def theirs(i: int) -> Tensor:  # in place: the first call of each pair of buffers is the one that is checked
            their_norm.gemma_fused_add_rmsnorm(inputs[i], streams[i], weight, EPS)
            return inputs[i]

        inputs, streams = y.clone(), x.clone()
        want = rms(x[0].float() + y[0].float()) * (1 + wide)
        ours: Calls = [lambda i=i: ops.add_rms_norm(x[i], y[i], wide, EPS)[1] for i in range(calls)]
        peers: dict[str, Calls] = {"FlashInfer, in place": [lambda i=i: theirs(i) for i in range(calls)]}
        self.compare("prefix: add, RMSNorm", _sizes(rows, width), 0, 8.0 * rows * width, want, ours, peers)

        want = rms(x[0].float()) * (1 + wide)
        ours = [lambda i=i: ops.rms_norm(x[i], wide, EPS) for i in range(calls)]
        peers = {"FlashInfer": [lambda i=i: their_norm.gemma_rmsnorm(x[i], weight, EPS) for i in range(calls)]}
        self.compare("prefix: RMSNorm", _sizes(rows, width), 0, 4.0 * rows * width, want, ours, peers)

        rows, width = CHUNK * self.batch, 1024
        x, scale = draw(calls, rows, width), draw(width) * 0.3
        shift, whole = torch.zeros(width, device="cuda"), (1 + scale.float()).bfloat16()
        scale = whole.float() - 1
        want = rms(x[0].float()) * whole.float()
        ours = [lambda i=i: ops.ada_rms_norm(x[i], scale, shift, EPS) for i in range(calls)]
        peers = {"FlashInfer, without shift": [lambda i=i: their_norm.rmsnorm(x[i], whole, EPS) for i in range(calls)]}
        self.compare("chunk: AdaRMS", _sizes(rows, width), 0, 4.0 * rows * width, want, ours, peers)

        rows, width = 3 * IMAGE * self.batch, 1152
        x, scaling, bias = (
            draw(calls, rows, width),
            1 + 0.1 * torch.randn(width, device="cuda"),
            draw(width).float() * 0.1,
        )
        want = functional.layer_norm(x[0].float(), (width,), scaling, bias, EPS)
        ours = [lambda i=i: gpu.layer_norm(x[i], None, scaling, bias, EPS, torch.bfloat16)[1] for i in range(calls)]
        peers = {"FlashInfer": [lambda i=i: their_norm.layernorm(x[i], scaling, bias, EPS) for i in range(calls)]}
        self.compare("vision: LayerNorm", _sizes(rows, width), 0, 4.0 * rows * width, want, ours, peers)

    def gated(self, calls: int) -> None:
        """Gate and up products with gelu(gate) * up."""
        rows, depth, width = PREFIX * self.batch, 2048, 16384
        x, both = draw(calls, rows, depth), draw(2 * width, depth) * depth**-0.5
        packed = gpu.pack_gate_up(both)
        gate, up = functional.linear(x[0, :64].float(), both.float()).chunk(2, dim=-1)
        want = functional.gelu(gate, approximate="tanh") * up

        def theirs(i: int) -> Tensor:
            return self.theirs.gelu_tanh_and_mul(functional.linear(x[i], both))

        ours = [lambda i=i: gpu.linear_geglu(x[i], packed) for i in range(calls)]
        peers: dict[str, Calls] = {"cuBLAS, then FlashInfer": [lambda i=i: theirs(i) for i in range(calls)]}
        flops, moved = 4.0 * rows * depth * width, 2.0 * (rows * (depth + width) + 2 * depth * width)
        sizes = {"rows": rows, "depth": depth, "width": width}
        self.compare("prefix: gate, up, GELU", sizes, flops, moved, want, ours, peers)


def _sizes(rows: int, width: int) -> dict[str, int]:
    return {"rows": rows, "width": width}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32", help="robots; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"), help="default: %(default)s")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    benches = [Bench(int(text), rows, options.out) for text in options.batches.split(",")]
    with torch.inference_mode():
        for bench in benches:
            calls = 16 if bench.batch < 32 else 4
            bench.attention("prefix attention", PREFIX, PREFIX, calls)
            bench.attention("prefix attention", LONG_PREFIX, LONG_PREFIX, calls)
            bench.attention("chunk attention", CHUNK, PREFIX + CHUNK, 18)
            bench.norms(calls)
            bench.gated(calls // 2)
            torch.cuda.empty_cache()
        for bench in benches:
            bench.vision(16 if bench.batch < 32 else 4)


if __name__ == "__main__":
    main()
