"""Kernels that a table may name for the operations that exist on a GPU only (`taktline_kernels.gpu`)."""

GPU_KERNELS: dict[str, tuple[str, ...]] = {
    "attention_cached": ("triton",),
    "linear_geglu": ("hopper", "cublas"),
    "product": ("cublaslt", "cublas"),
}
