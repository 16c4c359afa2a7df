"""Triton kernel between two solver steps: last norm, action_out_proj, Euler update, action_in_proj, all in fp32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from taktline_kernels.guidance import Guidance
from taktline_kernels.triton_impl.launch import launch


@triton.jit
def _action_head_kernel(
    hidden_ptr,
    update_ptr,
    gate_ptr,
    scale_ptr,
    shift_ptr,
    out_weight_ptr,
    out_bias_ptr,
    in_weight_ptr,
    in_bias_ptr,
    actions_ptr,
    next_ptr,
    target_ptr,
    influence_ptr,
    dt,
    eps,
    tau,
    weight_of_target,
    tokens,
    before,
    WIDTH: tl.constexpr,
    ACTION: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_IN: tl.constexpr,
    SILU: tl.constexpr,
    GUIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Where the action's token is in the stream, which may hold others before each chunk.
    token = (row // tokens) * (tokens + before) + row % tokens + before
    dims = tl.arange(0, ACTION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    actions = tl.load(actions_ptr + row * ACTION + dims)
    if HAS_OUT:
        whole = tl.arange(0, WIDTH)
        x = tl.load(hidden_ptr + token * WIDTH + whole).to(tl.float32)
        y = tl.load(update_ptr + token * WIDTH + whole).to(tl.float32)
        x = (x + y * tl.load(gate_ptr + whole)).to(hidden_ptr.dtype.element_ty).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
        velocity = tl.load(out_bias_ptr + dims)
        for start in tl.range(0, WIDTH, CHUNK):
            part = start + tl.arange(0, CHUNK)
            part_x = tl.load(hidden_ptr + token * WIDTH + part).to(tl.float32)
            part_y = tl.load(update_ptr + token * WIDTH + part).to(tl.float32)
            part_x = (part_x + part_y * tl.load(gate_ptr + part)).to(hidden_ptr.dtype.element_ty).to(tl.float32)
            normed = part_x * factor * (1.0 + tl.load(scale_ptr + part)) + tl.load(shift_ptr + part)
            normed = normed.to(hidden_ptr.dtype.element_ty).to(tl.float32)
            weight = tl.load(out_weight_ptr + dims[:, None] * WIDTH + part[None, :])
            velocity += tl.sum(weight * normed[None, :], axis=1)
        if GUIDED:
            target = tl.load(target_ptr + row * ACTION + dims)
            error = (target - (actions - tau * velocity)) * tl.load(influence_ptr + row)
            velocity = velocity - weight_of_target * error
        actions += dt * velocity
        tl.store(actions_ptr + row * ACTION + dims, actions)
    if HAS_IN:
        for start in tl.range(0, WIDTH, CHUNK):
            part = start + tl.arange(0, CHUNK)
            weight = tl.load(in_weight_ptr + part[:, None] * ACTION + dims[None, :])
            embedded = tl.sum(weight * actions[None, :], axis=1) + tl.load(in_bias_ptr + part)
            if SILU:
                embedded = embedded * tl.sigmoid(embedded)
            tl.store(next_ptr + row * WIDTH + part, embedded.to(next_ptr.dtype.element_ty))


def action_head(
    actions: Tensor,
    next_hidden: Tensor,
    in_weight: Tensor,
    in_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    *,
    hidden: Tensor | None,
    update: Tensor | None,
    modulation: tuple[Tensor, Tensor] | Tensor | None,
    gate: Tensor | None,
    dt: float,
    last: bool,
    before: int = 0,
    silu: bool = False,
    guidance: Guidance | None = None,
    eps: float = 1e-6,
) -> None:
    """Finish one solver step and begin the next.

    With `hidden`: v = out_proj(ada_rms_norm(hidden + update * gate)), actions += dt * v, in place. Unless `last`:
    next_hidden = in_proj(actions).

    Args:
        actions: (rows, action_dim) fp32, changed in place.
        next_hidden: (rows, width), written unless `last`.
        in_weight: (width, action_dim) fp32.
        in_bias: (width,) fp32.
        out_weight: (action_dim, width) fp32.
        out_bias: (action_dim,) fp32.
        hidden: (batch, before + tokens, width) residual stream after the last attention, or None before the first step;
            rows = batch * tokens. Two dimensions are one chunk.
        update: likewise, output of the last MLP.
        modulation: (2, width) or longer fp32: scale and shift of the final norm.
        gate: (width,) fp32, gate of the last MLP.
        dt: solver step.
        last: no step follows.
        before: tokens of `hidden` that stand before each chunk's.
        silu: apply silu to in_proj's output.
        guidance: correction of v, or None.
        eps: of the final norm.
    """
    rows, action_dim = actions.shape
    tokens = rows if hidden is None else hidden.shape[-2] - before
    width = next_hidden.shape[-1]
    has_out = hidden is not None
    launch(
        _action_head_kernel,
        (rows,),
        hidden if hidden is not None else next_hidden,
        update if update is not None else next_hidden,
        gate if gate is not None else in_bias,
        modulation[0] if modulation is not None else in_bias,
        modulation[1] if modulation is not None else in_bias,
        out_weight,
        out_bias,
        in_weight,
        in_bias,
        actions,
        next_hidden,
        actions if guidance is None else guidance.target,
        actions if guidance is None else guidance.influence,
        dt,
        eps,
        0.0 if guidance is None else guidance.tau,
        0.0 if guidance is None else guidance.weight,
        tokens,
        before,
        WIDTH=width,
        ACTION=action_dim,
        CHUNK=min(128, width),
        HAS_OUT=has_out,
        HAS_IN=not last,
        SILU=silu,
        GUIDED=guidance is not None,
        num_warps=4,
    )
