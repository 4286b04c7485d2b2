"""Floating point operations of a traced function: its matrix products and convolutions.

A multiply-add counts as two. Everything else (norms, activations, softmax) is left out, as in
the published figures: about 1.5 % of a ViT. Nothing is executed or compiled; tracing
G/14 takes seconds. The counts agree with the closed form of a ViT with n patches and N tokens,

    n * P * P * 3 * D + L * (N * (4 * D * D + 2 * D * F) + 2 * N * N * D) + D * K

multiply-adds per image, and, for training, with the exaFLOPs in table 6 of the paper.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var, jaxprs_in_params

# A backward pass does twice the products of the forward pass: for the gradient of the inputs and
# for that of the weights. Recomputation by remat is not counted: divided by time and peak, this
# gives model FLOPs utilization (MFU).
TRAIN_OVER_FORWARD = 3


def forward_flops(function: Callable[..., Any], *abstract_args: Any) -> float:
    """Operations in the matrix products and convolutions of a function, which is only traced.

    A `lax.scan` counts every iteration, a `while_loop` one. A Pallas kernel counts its own cost
    estimate (ours state the mathematical cost, without padding and recomputation), or else
    its body times the size of its grid.
    """
    return jaxpr_flops(jax.make_jaxpr(function)(*abstract_args).jaxpr)


def train_flops(loss: Callable[..., Any], trained: Any, *abstract_args: Any) -> float:
    """Operations of a loss and of its gradient by its first argument.

    What does not depend on that (a teacher, a locked tower) has no backward pass.
    """
    jaxpr = jax.make_jaxpr(loss)(trained, *abstract_args).jaxpr
    reached, flops = set(jaxpr.invars[: len(jax.tree.leaves(trained))]), 0.0
    for eqn in jaxpr.eqns:
        depends = any(isinstance(x, Var) and x in reached for x in eqn.invars)
        flops += flops_of(eqn) * (TRAIN_OVER_FORWARD if depends else 1)
        reached.update(eqn.outvars if depends else ())
    return flops


def jaxpr_flops(jaxpr: Jaxpr) -> float:
    """`forward_flops` of a traced program; a backward pass in it is counted as written."""
    return sum(map(flops_of, jaxpr.eqns))


def flops_of(eqn: Any) -> float:
    """Of one equation of a jaxpr."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * terms * math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        # The kernel's input features are already per group.
        terms = math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        # Dilating the input (the input gradient of a strided convolution) inserts zeros: only one
        # in so many terms of a window is a product.
        zeros = math.prod(eqn.params["lhs_dilation"])
        return 2.0 * terms * math.prod(eqn.outvars[0].aval.shape) / zeros
    if name.startswith("dot_product_attention"):  # cuDNN's, without what its gradient recomputes
        (batch, num_queries, heads, width), key = (x.aval.shape for x in eqn.invars[:2])
        num_products = 4 if "bwd" in name else 2
        return 2.0 * num_products * batch * num_queries * key[1] * heads * width
    counts = list(map(jaxpr_flops, jaxprs_in_params(eqn.params)))
    if name == "pallas_call" and (stated := eqn.params["cost_estimate"]):
        return stated.flops
    if name == "pallas_call":  # of blocks, including all padding
        return math.prod(eqn.params["grid_mapping"].grid) * sum(counts)
    if name == "scan":
        return eqn.params["length"] * sum(counts)
    if name == "shard_map":  # the body is per device
        return eqn.params["mesh"].size * sum(counts)
    # Of branches the mean: those of an update with several patch sizes are equally likely.
    return sum(counts) / len(counts) if name == "cond" else sum(counts)
