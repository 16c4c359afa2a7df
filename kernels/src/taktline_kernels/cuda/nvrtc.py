"""CUDA C++ kernels compiled at start by NVRTC (it ships with PyTorch) and launched on PyTorch's stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor

ARCHITECTURE = "sm_90a"
_HEADERS = ("hopper.cuh",)


def _check(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"{type(code).__name__}.{code.name}")
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def compile_source(file: str, defines: tuple[tuple[str, int], ...], prologue: str = "") -> bytes:
    """Compile a .cu file of this package to a cubin for Hopper.

    Args:
        file: name of the file beside this module.
        defines: preprocessor constants.
        prologue: generated source text that goes before the file.

    Raises:
        RuntimeError: the compiler's log, where it refuses.
    """
    here = resources.files("taktline_kernels.cuda")
    source = prologue + here.joinpath(file).read_text(encoding="utf-8")
    headers = {name.encode(): here.joinpath(name).read_bytes() for name in _HEADERS}
    program = _check(
        nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), len(headers), [*headers.values()], [*headers])
    )
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in defines]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(code) != 0:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check((*nvrtc.nvrtcGetProgramLog(program, log), None))
        raise RuntimeError(f"{file}: {log.decode(errors='replace')}")
    binary: bytes = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check((*nvrtc.nvrtcGetCUBIN(program, binary), None))
    return binary


class CudaKernel:
    """One entry point of a compiled file.

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
        torch.cuda.current_stream()  # makes PyTorch's context current on this thread
        binary = compile_source(file, tuple(sorted(defines.items())), prologue)
        self._module = _check(driver.cuModuleLoadData(binary))
        self._function = _check(driver.cuModuleGetFunction(self._module, entry.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check((*driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), None))
        # All of an SM's shared memory, whatever this kernel needs: blocks of the next kernel start beside it.
        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check((*driver.cuFuncSetAttribute(self._function, carveout, 100), None))
        self._threads, self._shared, self._cluster = threads, shared_bytes, cluster

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any], *, overlap: bool) -> None:
        """Launch on the current stream.

        Args:
            grid: blocks.
            arguments: tensors (their address is passed), ctypes values, or objects with getPtr (tensor maps).
            overlap: start before the preceding kernel ends; the kernel waits by itself.
        """
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
