"""Triton kernel that gathers a prefix: image tokens as they are, prompt tokens from the embedding, scaled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.triton_impl.launch import launch, power_of_two


@triton.jit
def _assemble_kernel(
    images_ptr,
    embedding_ptr,
    tokens_ptr,
    source_ptr,
    out_ptr,
    image_tokens,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.load(source_ptr + slot)
    if index < image_tokens:
        row = tl.load(images_ptr + index * WIDTH + columns, mask=inside, other=0.0)
        tl.store(out_ptr + slot * WIDTH + columns, row, mask=inside)
    else:
        token = tl.load(tokens_ptr + index - image_tokens)
        wide = tl.load(embedding_ptr + token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32) * scale
        tl.store(out_ptr + slot * WIDTH + columns, wide.to(out_ptr.dtype.element_ty), mask=inside)


def assemble(images: Tensor, embedding: Tensor, tokens: Tensor, source: Tensor) -> Tensor:
    """Gather each row's slots.

    Args:
        images: (n, width), all image tokens of the batch.
        embedding: (vocabulary, width), the dtype of `images`; rows are multiplied by sqrt(width) in fp32.
        tokens: (batch, prompt) int64.
        source: (batch, slots) int64, index into the image tokens followed by the prompt tokens.

    Returns:
        (batch, slots, width) in the dtype of `images`.
    """
    width = embedding.shape[1]
    out = torch.empty((*source.shape, width), dtype=embedding.dtype, device=images.device)
    launch(
        _assemble_kernel,
        (source.numel(),),
        images.contiguous(),
        embedding,
        tokens.contiguous(),
        source.contiguous(),
        out,
        images.numel() // width,
        width**0.5,
        WIDTH=width,
        BLOCK=power_of_two(width),
        num_warps=4,
    )
    return out
