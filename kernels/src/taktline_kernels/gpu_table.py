"""Kernels that a table may name for the operations that exist on a GPU only (`taktline_kernels.gpu`).

The last one of each runs where no table says anything.
"""

GPU_KERNELS: dict[str, tuple[str, ...]] = {
    "attention_cached": ("hopper", "triton"),
    "linear_geglu": ("hopper", "cublas"),
    "linear_swiglu": ("hopper", "cublas"),
    "product": ("cublaslt", "hopper", "cublas"),
    "product_add_layer_norm": ("hopper", "separate"),
    "byte_product": ("triton",),
}
