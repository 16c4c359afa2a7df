"""Kernels compiled for a GPU that is not here: launches are recorded, and each becomes the machine code it would run.

Triton and NVRTC compile without a GPU. What is compiled is exactly what the launch would have compiled: the same
types, alignments and constants, so that a kernel that compiles here compiles there.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SHARED_BYTES = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_87": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}
"""Architecture -> most shared memory of a block (CUDA programming guide, table of compute capabilities). A100 is sm_80;
A40 and RTX 30 sm_86; Jetson Orin sm_87; L40S and RTX 40 sm_89; H100 and H200 sm_90."""

PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_87": 16, "sm_89": 142, "sm_90": 132}
"""Streaming multiprocessors of the largest card of each."""
_UNSET = ("PDL", "launch_pdl", "debug", "instrumentation_mode")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(slots=True)
class Compiled:
    """One kernel with one set of constants.

    Attributes:
        name: of the function.
        settings: constants and launch settings that the caller named.
        language: "triton" or "cuda".
        registers: of a thread.
        stack_bytes: of a thread's local memory: what did not fit its registers, and arrays indexed at run time.
        shared_bytes: of a block.
        launches: how often it was launched.
        error: why it cannot be compiled or launched; empty where it can.
    """

    name: str
    settings: Mapping[str, Any]
    language: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    launches: int = 0
    error: str = ""


@dataclass
class Ledger:
    """What was launched while `recording`; one entry for each kernel and set of constants, in order of first use."""

    arch: str
    compiled: bool = True
    kernels: dict[Any, Compiled] = field(default_factory=dict)

    @property
    def failed(self) -> list[Compiled]:
        """Kernels that the architecture cannot run."""
        return [one for one in self.kernels.values() if one.error]

    def check(self, one: Compiled, binary: bytes) -> None:
        """Reads registers and local memory off the machine code, and refuses what exceeds the architecture's blocks."""
        one.registers, one.stack_bytes = resources_of(binary)
        if one.shared_bytes > SHARED_BYTES[self.arch]:
            most = SHARED_BYTES[self.arch]
            one.error = f"needs {one.shared_bytes} bytes of shared memory; a block of {self.arch} has {most}"


class _Pointer:
    """A tensor as Triton sees it: dtype and alignment, nothing to read."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        # Allocations start at multiples of 512 bytes.
        self._address = 512 + int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return 0


def compute_capability(arch: str) -> tuple[int, int]:
    """(9, 0) of "sm_90".

    Raises:
        ValueError: naming the architectures there are.
    """
    if arch not in SHARED_BYTES:
        raise ValueError(f"there is no architecture {arch!r}; choose from {', '.join(SHARED_BYTES)}")
    number = int(arch.removeprefix("sm_"))
    return number // 10, number % 10


@contextmanager
def recording(arch: str, *, compiled: bool = True) -> Iterator[Ledger]:
    """Compiles every kernel that is launched while this lasts, for `arch`, and runs none. One thread only.

    Without `compiled` the launches are only listed, which takes no time.

    Tensors may be of any kind that has a dtype and a shape, `torch._subclasses.FakeTensor` above all. Calls of NVIDIA's
    libraries (cuBLASLt) become PyTorch operations.

    Raises:
        ValueError: an unknown architecture.
        RuntimeError: Triton was imported for its interpreter (TRITON_INTERPRET), which compiles nothing.
    """
    compute_capability(arch)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels are interpreted in this process; unset TRITON_INTERPRET")
    ledger = Ledger(arch, compiled)
    with ExitStack() as stack:
        for target, name, value in (*_triton(ledger), *_cuda(ledger)):
            stack.enter_context(mock.patch.object(target, name, value))
        yield ledger


def _triton(ledger: Ledger) -> Iterator[tuple[Any, str, Any]]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from taktline_kernels.triton_impl import launch

    major, minor = compute_capability(ledger.arch)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    stand_in = mock.Mock(
        get_current_device=lambda: ledger.arch,  # the key of Triton's own cache
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
    )
    run = JITFunction.run

    def compiled_run(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        del grid, warmup
        given = [_Pointer(value) if isinstance(value, Tensor) else value for value in args]
        shown = {name: value for name, value in settings.items() if name not in _UNSET}
        if not ledger.compiled:
            key: Any = (self, tuple(shown.items()))
            ledger.kernels.setdefault(key, Compiled(self.__name__, shown, "triton")).launches += 1
            return
        try:
            kernel = run(self, *given, grid=None, warmup=True, **settings)
        except Exception as error:  # whatever the compiler raises is the finding
            reason = f"{type(error).__name__}: {_innermost(error)}"
            key = (self, tuple(shown.items()), reason)
            ledger.kernels.setdefault(key, Compiled(self.__name__, shown, "triton", error=reason)).launches += 1
            return
        one = ledger.kernels.get(kernel.hash)
        if one is None:
            one = ledger.kernels[kernel.hash] = Compiled(self.__name__, shown, "triton")
            one.shared_bytes = kernel.metadata.shared
            ledger.check(one, kernel.asm["cubin"])
        one.launches += 1

    yield driver, "_active", stand_in
    yield JITFunction, "run", compiled_run
    yield launch, "pdl", lambda: major >= 9


def _innermost(error: BaseException) -> str:
    """The first line of the error that began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else ""


def _cuda(ledger: Ledger) -> Iterator[tuple[Any, str, Any]]:
    nvrtc = importlib.import_module("taktline_kernels.cuda.nvrtc")
    cublaslt = importlib.import_module("taktline_kernels.cuda.cublaslt")
    fp8_sum = importlib.import_module("taktline_kernels.cuda.fp8_sum")
    geglu = importlib.import_module("taktline_kernels.cuda.geglu")
    image_attention = importlib.import_module("taktline_kernels.cuda.image_attention")
    action_block = importlib.import_module("taktline_kernels.cuda.action_block")
    few_tokens = importlib.import_module("taktline_kernels.cuda.few_tokens")
    patch_attention = importlib.import_module("taktline_kernels.cuda.patch_attention")
    frame_attention = importlib.import_module("taktline_kernels.cuda.frame_attention")
    frame_norm = importlib.import_module("taktline_kernels.cuda.frame_norm")
    fp8_norm = importlib.import_module("taktline_kernels.cuda.fp8_norm")
    cached_attention = importlib.import_module("taktline_kernels.cuda.cached_attention")
    fp8_attention = importlib.import_module("taktline_kernels.cuda.fp8_attention")
    suffix_attention = importlib.import_module("taktline_kernels.cuda.suffix_attention")
    wide_product = importlib.import_module("taktline_kernels.cuda.wide_product")
    product = importlib.import_module("taktline_kernels.cuda.product")

    def prepare(
        self: Any,
        file: str,
        entry: str,
        defines: Mapping[str, int],
        *,
        threads: int,
        shared_bytes: int,
        cluster: int = 1,
        prologue: str = "",
    ) -> None:
        given = tuple(sorted(defines.items()))
        key = (file, entry, given)
        self.entry_of_ledger = key
        if key in ledger.kernels:
            return
        shown = dict(defines) | {"threads": threads, "cluster": cluster}
        one = ledger.kernels[key] = Compiled(f"{file}:{entry}", shown, "cuda", shared_bytes=shared_bytes)
        if ledger.arch != "sm_90":
            one.error = f"is written for Hopper, not for {ledger.arch}"
            return
        if not ledger.compiled:
            return
        try:
            ledger.check(one, nvrtc.compile_source(file, given, prologue))
        except RuntimeError as error:
            one.error = str(error)[:300]

    def launch(self: Any, grid: Sequence[int], arguments: Sequence[Any], *, overlap: bool) -> None:
        del grid, arguments, overlap
        ledger.kernels[self.entry_of_ledger].launches += 1

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, algorithm: int) -> Tensor:
        del algorithm
        out = torch.nn.functional.linear(x, weight, bias)
        return torch.nn.functional.gelu(out, approximate="tanh") if gelu else out

    def prepared(*shape: Any) -> Any:
        del shape

        def run(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, algorithm: int) -> None:
            del algorithm
            out.copy_(torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), weight, bias))

        return mock.Mock(algorithms=[None], run=run)

    def summed(*shape: Any) -> Any:
        del shape

        def run(x: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, y: Tensor) -> None:
            y += torch._scaled_mm(x, weight.t(), scales, weight_scales, out_dtype=y.dtype)

        return mock.Mock(run=run)

    yield nvrtc.CudaKernel, "__init__", prepare
    yield nvrtc.CudaKernel, "launch", launch
    yield cublaslt, "linear", linear
    yield cublaslt, "_product", prepared
    yield fp8_sum, "_product", summed
    yield nvrtc, "tensor_map", lambda tensor, box: None
    yield nvrtc, "processors", lambda device: PROCESSORS[ledger.arch]
    # Kernels that a process made before would not be seen, and these must not stay.
    others = (
        image_attention,
        action_block,
        few_tokens,
        patch_attention,
        frame_attention,
        frame_norm,
        fp8_norm,
        cached_attention,
        product,
        wide_product,
        fp8_attention,
        suffix_attention,
    )
    for module, name in ((geglu, "product_kernel"), *((one, "_kernel") for one in others)):
        yield module, name, _fresh(getattr(module, name))


def _fresh(cached: Any) -> Callable[..., Any]:
    made: dict[Any, Any] = {}

    def kernel(*key: Any) -> Any:
        if key not in made:
            made[key] = cached.__wrapped__(*key)
        return made[key]

    return kernel


def resources_of(binary: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) of a thread of a cubin with one kernel, the most where it has several.

    Raises:
        RuntimeError: the tool that ships with Triton cannot read it.
    """
    backend = importlib.import_module("triton.backends.nvidia")
    tool = Path(next(iter(backend.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        answer = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=False
        )
    found = [tuple(map(int, each)) for each in _RESOURCES.findall(answer.stdout)]
    if answer.returncode or not found:
        raise RuntimeError(f"cuobjdump: {(answer.stderr or answer.stdout).strip()[:200]}")
    return max(each[0] for each in found), max(each[1] for each in found)
