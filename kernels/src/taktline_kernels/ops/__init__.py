"""The operations: each is one function with a torch reference and accelerated implementations beside it."""

from taktline_kernels.ops.activations import geglu, relu2, swiglu
from taktline_kernels.ops.attention import (
    attention,
    attention_prefix,
    attention_suffix,
    attention_vision,
)
from taktline_kernels.ops.channels import channel_norm
from taktline_kernels.ops.linear import (
    linear,
    linear_add_layer_norm,
    linear_add_rms_norm,
    linear_on_rows,
    linear_silu_gate,
)
from taktline_kernels.ops.norms import (
    ada_rms_norm,
    add_layer_norm,
    add_rms_norm,
    gated_add_ada_rms_norm,
    layer_norm,
    rms_norm,
)
from taktline_kernels.ops.rope import norm_rotate, rope, rope_table
from taktline_kernels.ops.solver import euler_update

__all__ = [
    "ada_rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_prefix",
    "attention_suffix",
    "attention_vision",
    "channel_norm",
    "euler_update",
    "gated_add_ada_rms_norm",
    "geglu",
    "layer_norm",
    "linear",
    "linear_add_layer_norm",
    "linear_add_rms_norm",
    "linear_on_rows",
    "linear_silu_gate",
    "norm_rotate",
    "relu2",
    "rms_norm",
    "rope",
    "rope_table",
    "swiglu",
]
