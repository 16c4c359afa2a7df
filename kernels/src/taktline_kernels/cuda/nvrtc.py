"""CUDA C++ kernels compiled at start by NVRTC (it ships with PyTorch) and launched on PyTorch's stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata, resources
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

from taktline_kernels import compiling, store

ARCHITECTURE = "sm_90a"
_HEADERS = ("hopper.cuh",)


def _check(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"{type(code).__name__}.{code.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def _version() -> str:
    """What the library says, which is no more than major.minor, and its package's version where it has one."""
    major, minor = _check(nvrtc.nvrtcVersion())
    builds = []
    for package in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{major}"):
        with suppress(metadata.PackageNotFoundError):
            builds.append(metadata.version(package))
    return " ".join((f"{major}.{minor}", *builds))


@functools.cache
def compile_source(file: str, defines: tuple[tuple[str, int], ...], prologue: str = "") -> bytes:
    """Compile a .cu file of this package to a cubin for Hopper, or take the one that is kept.

    Args:
        file: name of the file beside this module.
        defines: preprocessor constants.
        prologue: generated source text that goes before the file.

    Raises:
        RuntimeError: the compiler's log, where it refuses.
    """
    here = resources.files("taktline_kernels.cuda")
    source = (prologue + here.joinpath(file).read_text(encoding="utf-8")).encode()
    headers = {name.encode(): here.joinpath(name).read_bytes() for name in _HEADERS}
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defines]
    flags = [option.encode() for option in options]
    parts = [_version().encode(), *flags, source, *(part for pair in headers.items() for part in pair)]
    return store.kept(parts, lambda: _compile(file, source, headers, flags))


def _compile(file: str, source: bytes, headers: Mapping[bytes, bytes], flags: list[bytes]) -> bytes:
    program = _check(nvrtc.nvrtcCreateProgram(source, file.encode(), len(headers), [*headers.values()], [*headers]))
    try:
        (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if int(code) != 0:
            log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
            _check((*nvrtc.nvrtcGetProgramLog(program, log), None))
            raise RuntimeError(f"{file}: {log.decode(errors='replace')}")
        binary: bytes = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check((*nvrtc.nvrtcGetCUBIN(program, binary), None))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary


class CudaKernel:
    """One entry point of a compiled file; among kernels that are compiled together, loaded when all are.

    Args:
        file: .cu file beside this module.
        entry: extern "C" name.
        defines: preprocessor constants.
        threads: threads a block.
        shared_bytes: dynamic shared memory.
        cluster: blocks a cluster, along x.
        prologue: generated source text that goes before the file.
    """

    def __init__(
        self,
        file: str,
        entry: str,
        defines: Mapping[str, int],
        *,
        threads: int,
        shared_bytes: int,
        cluster: int = 1,
        prologue: str = "",
    ) -> None:
        self._entry = entry
        self._threads, self._shared, self._cluster = threads, shared_bytes, cluster
        self._compiled = functools.partial(compile_source, file, tuple(sorted(defines.items())), prologue)
        self._function: Any = None
        batch = compiling.current()
        if batch is None:
            self._load()
        else:
            batch.add(self._compiled, self._load)

    def _load(self) -> None:
        torch.cuda.current_stream()  # makes PyTorch's context current on this thread
        self._module = _check(driver.cuModuleLoadData(self._compiled()))
        function = _check(driver.cuModuleGetFunction(self._module, self._entry.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check((*driver.cuFuncSetAttribute(function, attribute, self._shared), None))
        # All of an SM's shared memory, whatever this kernel needs: blocks of the next kernel start beside it.
        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check((*driver.cuFuncSetAttribute(function, carveout, 100), None))
        self._function = function

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any], *, overlap: bool) -> None:
        """Launch on the current stream; in a dry batch, nowhere.

        Args:
            grid: blocks.
            arguments: tensors (their address is passed), ctypes values, or objects with getPtr (tensor maps).
            overlap: start before the preceding kernel ends; the kernel waits by itself.
        """
        batch = compiling.current()
        if batch is not None and batch.dry:
            return
        if self._function is None:
            self._load()
        attributes = []
        if overlap:
            serial = driver.CUlaunchAttribute()
            serial.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            serial.value.programmaticStreamSerializationAllowed = 1
            attributes.append(serial)
        if self._cluster > 1:
            shape = driver.CUlaunchAttribute()
            shape.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape.value.clusterDim.x, shape.value.clusterDim.y, shape.value.clusterDim.z = self._cluster, 1, 1
            attributes.append(shape)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = attributes
        config.numAttrs = len(attributes)
        kept: list[Any] = []
        addresses = (ctypes.c_void_p * len(arguments))()
        for index, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                value: Any = ctypes.c_void_p(argument.data_ptr())
            elif hasattr(argument, "getPtr"):
                addresses[index] = int(argument.getPtr())
                kept.append(argument)
                continue
            else:
                value = argument
            kept.append(value)
            addresses[index] = ctypes.addressof(value)
        _check((*driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(addresses), 0), None))


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> Any:
    """Describe a bf16 tensor to the bulk tensor copy engine: 128-byte swizzle, zeros outside.

    Args:
        tensor: bf16 of two dimensions or more, the last one contiguous.
        box: shape of one copy; its last dimension times 2 bytes must be 128.
    """
    unsigned, small = driver.cuuint64_t, driver.cuuint32_t
    return _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            tensor.dim(),
            tensor.data_ptr(),
            [unsigned(size) for size in reversed(tensor.shape)],
            [unsigned(stride * 2) for stride in reversed(tensor.stride()[:-1])],
            [small(size) for size in reversed(box)],
            [small(1) for _ in box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
