"""Optimizers (paper, section 4.1 and tables 3 and 4).

Each is built as `kind(table, momentum_dtype, *, key=default, ...)` from the table of the run's
parameters; its keyword-only parameters are the keys of that kind in `config.optimizer`, besides
those of `create_optimizer`, which all kinds have.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.parameters.groups import add_multiplied_decay, freeze_parameters, scale_by_layer
from vit_jax.parameters.table import ParameterTable
from vit_jax.training import preconditioners
from vit_jax.training.schedule import Schedule
from vit_jax.trees import path_name

DECAY_MASKS = {
    # Kernels of dense layers, attention and convolutions; no biases, norms, cls, positions.
    "kernels": r".*/kernel",
    "all": ".*",
}


def adamw(
    _table: ParameterTable,
    momentum_dtype: str,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Adam, the paper's optimizer; `create_optimizer` adds the decay.

    Args:
      b1, b2, eps: of Adam.
    """
    return optax.scale_by_adam(b1, b2, eps, mu_dtype=momentum_dtype)


def sgd(
    _table: ParameterTable, momentum_dtype: str, *, momentum: float = 0.9, nesterov: bool = False
) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum.

    In bfloat16 a momentum of 0.9 is 0.8984375, as in the official code. With `nesterov` and
    `coupled_decay` it is timm's `sgd`.

    Args:
      momentum: decay of the accumulated gradient.
      nesterov: whether to add the gradient to the momentum once more (PyTorch's `nesterov`).
    """
    return optax.trace(decay=momentum, nesterov=nesterov, accumulator_dtype=momentum_dtype)


def adafactor(
    table: ParameterTable,
    momentum_dtype: str,
    *,
    momentum: float = 0.9,
    b2: float = 0.999,
    factored_decay: float = 0.8,
) -> optax.GradientTransformation:
    """Adafactor as for ViT-g (2106.04560, section 3.4; big_vision's `scale_by_adafactor`).

    A factored second moment, then momentum * m + (1 - momentum) * update, without bias correction.

    Args:
      momentum: decay of that average; 0 disables it.
      b2: limit of the second moment's decay.
      factored_decay: exponent of that decay, which is 1 - t ** -0.8 in update t.
    """
    scale = preconditioners.scale_by_factored_rms(factored_decay, b2, table)
    if not momentum:
        return scale
    return optax.chain(scale, optax.ema(momentum, debias=False, accumulator_dtype=momentum_dtype))


def lion(
    _table: ParameterTable, momentum_dtype: str, *, b1: float = 0.9, b2: float = 0.99
) -> optax.GradientTransformation:
    """The sign of the momentum (Chen et al., 2302.06675, algorithm 2).

    Its learning rate is 3 to 10 times lower than AdamW's, its decay higher by as much (section 5).

    Args:
      b1, b2: the update is the sign of b1 * m + (1 - b1) * g; b2 is the decay of the momentum m.
    """
    return optax.scale_by_lion(b1, b2, mu_dtype=momentum_dtype)


def lamb(
    table: ParameterTable,
    momentum_dtype: str,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    adapted_parameters: str = "all",
) -> optax.GradientTransformation:
    """Adam for large batches (You et al., 1904.00962, algorithm 2).

    `create_optimizer` scales each array's update, after weight decay, to its parameters' norm.

    Args:
      b1, b2, eps: of Adam.
      adapted_parameters: which updates to scale: all | kernels. timm's LAMB and NVIDIA's FusedLAMB
        scale only parameters that decay.
    """
    check_known("optimizer.adapted_parameters", adapted_parameters, DECAY_MASKS)
    return adamw(table, momentum_dtype, b1=b1, b2=b2, eps=eps)


def lars(
    table: ParameterTable,
    momentum_dtype: str,
    *,
    momentum: float = 0.9,
    trust_coefficient: float = 0.001,
) -> optax.GradientTransformation:
    """SGD with layer-wise rates for large batches (You et al., 1708.03888), as in MoCo v3 and MAE.

    The sum d = g + weight_decay * w of a kernel w is scaled by trust_coefficient * |w| / |d| and
    accumulated; other parameters are trained as by `sgd`. Algorithm 1 of the paper, and timm,
    divide by |g| + weight_decay * |w| instead; the paper accumulates after the learning rate.

    Args:
      momentum: decay of the accumulated gradient.
      trust_coefficient: ratio of the norms of a kernel's scaled gradient and the kernel.
    """
    scale = preconditioners.scale_by_trust_ratio(DECAY_MASKS["kernels"], table, trust_coefficient)
    return optax.chain(scale, sgd(table, momentum_dtype, momentum=momentum))


def muon(
    table: ParameterTable,
    momentum_dtype: str,
    *,
    momentum: float = 0.95,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Orthogonalised momentum for the kernels of blocks, Adam for all other parameters.

    Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) with Newton-Schulz iterations.
    Updates are scaled by 0.2 * sqrt(max(inputs, outputs)) to the size of AdamW's, so that
    both share learning rate and decay (Liu et al., 2502.16982, section 2.2). All heads of an
    attention layer form one matrix. `init` raises UserError if no kernel of a block is trained.

    Args:
      momentum: of Muon, Nesterov's.
      b1, b2, eps: of Adam.
    """

    def is_matrix(path: Any, _: Any) -> bool:
        name = path_name(path)
        return name.endswith("/kernel") and table.is_in_block(name)

    def matrices(tree: Any) -> Any:
        mask = jax.tree_util.tree_map_with_path(is_matrix, tree)
        if not any(jax.tree.leaves(mask)):
            raise UserError("optimizer.name='muon' finds no kernel in a block; use 'adamw'.")
        return mask

    def others(tree: Any) -> Any:
        return jax.tree.map(operator.not_, matrices(tree))

    orthogonal = preconditioners.scale_by_muon(momentum, momentum_dtype, table)
    adam = adamw(table, momentum_dtype, b1=b1, b2=b2, eps=eps)
    # optax.contrib.muon would add its labels to the paths of the moments, see freeze_parameters.
    return optax.chain(optax.masked(orthogonal, matrices), optax.masked(adam, others))


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adamw": adamw,
    "sgd": sgd,
    "adafactor": adafactor,
    "lion": lion,
    "lamb": lamb,
    "lars": lars,
    "muon": muon,
}


def create_optimizer(
    name: str,
    *,
    schedule: Schedule,
    table: ParameterTable,
    weight_decay: float = 0.0,
    final_weight_decay: float | None = None,
    decay_parameters: str = "kernels",
    decay_multipliers: Sequence[tuple[str, float]] = (),
    clip_norm: float | None = None,
    freeze: str = "",
    layer_decay: float = 1.0,
    momentum_dtype: str = "float32",
    coupled_decay: bool = False,
    **kwargs: Any,
) -> optax.GradientTransformation:
    """Clip, precondition, decay, scale by the learning rate, in this order.

    Weight decay is decoupled and multiplied by the learning rate: each update subtracts
    `rate * weight_decay * parameter` (the paper's 0.1 is 0.1 here; big_vision's is 0.1 * base).
    `layer_decay` scales this rate too, as in BEiT's AdamW (2106.08254). `init` raises the errors
    of `freeze`, `decay_multipliers` and `layer_decay`, see `parameters.groups`.

    Args:
      weight_decay: decoupled, multiplied by the learning rate.
      final_weight_decay: what it becomes by half a cosine over the run (DINO: 0.04 to 0.4); None:
        it stays.
      coupled_decay: add the decay to the gradient, before momentum (L2 regularisation: PyTorch's
        `SGD` and `Adam`). LARS always does.
      decay_parameters: which parameters to decay: kernels | all.
      decay_multipliers: pairs (regular expression, factor). The first pair that matches the full
        name of a decayed parameter multiplies its decay (ViT-g: 100 for `head/kernel`,
        big_vision's `wd_mults`). Names are those of `freeze`.
      clip_norm: maximum global norm of the gradient; None: no clipping.
      freeze: regular expression on full parameter names (`embedding/.*|cls|Transformer/.*`). These
        parameters are not trained, have no optimizer state, and do not count in the gradient's
        norm. Blocks are named as in the loop form, also under `model.scan`.
      layer_decay: the learning rate of layer l of L is multiplied by layer_decay ** (L + 1 - l):
        l = 0 for parameters before the first block, i + 1 for block i, L + 1 for those after
        the last one. 1.0 disables it.
      momentum_dtype: storage of momentum and first moment: float32 or bfloat16.
    """
    check_known("optimizer.name", name, OPTIMIZERS)
    check_known("optimizer.decay_parameters", decay_parameters, DECAY_MASKS)
    check_known("optimizer.momentum_dtype", momentum_dtype, ("float32", "bfloat16"))
    changes = {"decay_multipliers": decay_multipliers, "final_weight_decay": final_weight_decay}
    if (unused := [key for key, value in changes.items() if value]) and not weight_decay:
        raise UserError(f"optimizer.{unused[0]} needs optimizer.weight_decay > 0; it is 0.")
    steps = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    steps.append(OPTIMIZERS[name](table, momentum_dtype, **kwargs))
    if weight_decay:

        def decaying(weight_decay: Any) -> optax.GradientTransformation:
            mask = DECAY_MASKS[decay_parameters]
            return add_multiplied_decay(weight_decay, mask, decay_multipliers, table)

        decay = decaying(weight_decay)
        if final_weight_decay is not None:
            ratio = final_weight_decay / weight_decay
            rising = optax.cosine_decay_schedule(weight_decay, schedule.total_steps, alpha=ratio)
            decay = optax.inject_hyperparams(decaying)(rising)
        steps.insert(len(steps) - (coupled_decay or name == "lars"), decay)
    if name == "lamb":
        pattern = DECAY_MASKS[kwargs.get("adapted_parameters", "all")]
        steps.append(preconditioners.scale_by_trust_ratio(pattern, table))
    steps.append(optax.scale_by_learning_rate(schedule))
    tx = optax.chain(*steps)
    if freeze:
        tx = freeze_parameters(tx, freeze, table)
    # Outside of freezing, which hides blocks: all of them count.
    return tx if layer_decay == 1.0 else optax.chain(tx, scale_by_layer(layer_decay, table))
