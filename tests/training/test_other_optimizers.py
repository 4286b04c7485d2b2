"""Ten updates beside PyTorch's and timm's optimizers, and what docs/coming_from.md says of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests.golden import VIT
from tests.peers import import_timm
from vit_jax.training.optimizer import create_optimizer
from vit_jax.trees import flatten_names, unflatten_names

RATE, DECAY = 0.01, 0.3
KERNEL, BIAS = (f"Transformer/encoderblock_0/MlpBlock_0/Dense_0/{x}" for x in ("kernel", "bias"))
SHAPES = {KERNEL: (64, 48), BIAS: (48,)}


def draw(seed: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.float32(scale * rng.normal(size=shape)) for name, shape in SHAPES.items()}


START, GRADIENTS = draw(0, 0.2), [draw(seed, 0.1) for seed in range(1, 11)]


def ours(name: str, **kwargs: Any) -> dict[str, np.ndarray]:
    tx = create_optimizer(name, table=VIT, schedule=lambda _: jnp.float32(RATE), **kwargs)

    @jax.jit
    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params: Any = unflatten_names(START)
    state = tx.init(params)
    for gradient in GRADIENTS:
        params, state = update(params, state, unflatten_names(gradient))
    return {name: np.asarray(x) for name, x in flatten_names(params).items()}


def theirs(create: Callable[..., Any], **kwargs: Any) -> dict[str, np.ndarray]:
    """Their kernels are [outputs, inputs]; biases do not decay, as in recipes."""
    params = {name: torch.nn.Parameter(torch.tensor(x.T.copy())) for name, x in START.items()}
    kernel, bias = params[KERNEL], params[BIAS]
    decay = kwargs.pop("weight_decay", DECAY)
    groups = [{"params": [kernel], "weight_decay": decay}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = create(groups, lr=RATE, **kwargs)
    for gradient in GRADIENTS:
        for name, parameter in params.items():
            parameter.grad = torch.tensor(gradient[name].T.copy())
        optimizer.step()
    return {name: x.detach().numpy().T for name, x in params.items()}


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray], name: str = KERNEL) -> float:
    """Relative to how far the second has moved."""
    return float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name] - START[name]))


@pytest.mark.parametrize(
    ("name", "own", "their_name", "theirs_own"),
    [
        ("sgd", {"coupled_decay": True}, "torch.SGD", {"momentum": 0.9}),
        (
            "sgd",
            {"coupled_decay": True, "nesterov": True},
            "torch.SGD",
            {"momentum": 0.9, "nesterov": True},
        ),
        ("sgd", {}, "timm.SGDW", {"momentum": 0.9}),
        ("adamw", {}, "torch.AdamW", {}),
        ("adamw", {"coupled_decay": True}, "torch.Adam", {}),
        ("lion", {}, "timm.Lion", {}),
        ("lamb", {"adapted_parameters": "kernels", "clip_norm": 1.0}, "timm.Lamb", {}),
        ("adafactor", {}, "timm.AdafactorBigVision", {"momentum_dtype": torch.float32}),
        ("lars", {"weight_decay": 0.0}, "timm.Lars", {"momentum": 0.9, "always_adapt": True}),
    ],
)
def test_the_same_as_there(name: str, own: Any, their_name: str, theirs_own: Any) -> None:
    import_timm()
    import timm.optim

    package, _, kind = their_name.partition(".")
    create = getattr(torch.optim if package == "torch" else timm.optim, kind)
    own = {"weight_decay": DECAY, **own}
    expected = theirs(create, weight_decay=own["weight_decay"], **theirs_own)
    result = ours(name, **own)
    # float32; Adam's first updates divide small numbers by small numbers.
    assert distance(result, expected) < 1e-5
    if name != "lars":  # timm adapts all parameters or those that decay
        assert distance(result, expected, BIAS) < 1e-5


def test_where_definitions_differ() -> None:
    """The figures of docs/coming_from.md, of these gradients."""
    import_timm()
    import timm.optim

    ways = {
        "sgd": (0.65, torch.optim.SGD, {"momentum": 0.9}),
        "adamw": (0.79, torch.optim.Adam, {}),
        "lars": (0.37, timm.optim.Lars, {"momentum": 0.9}),
        "adafactor": (0.003, timm.optim.AdafactorBigVision, {}),
    }
    for name, (expected, create, own) in ways.items():
        result = ours(name, weight_decay=DECAY)
        assert distance(result, theirs(create, **own)) == pytest.approx(expected, rel=0.1), name
    nesterov = theirs(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.0)
    assert distance(ours("sgd"), nesterov) == pytest.approx(0.12, rel=0.1)
    lamb = theirs(timm.optim.Lamb)
    assert distance(ours("lamb", weight_decay=DECAY), lamb, BIAS) == pytest.approx(0.53, rel=0.1)
    kernels = ours("lamb", weight_decay=DECAY, adapted_parameters="kernels")
    assert distance(kernels, lamb) == pytest.approx(0.0056, rel=0.1)


def orthogonalised(x: np.ndarray) -> np.ndarray:
    """Five Newton-Schulz iterations of Muon, in float32."""
    x = x / np.linalg.norm(x)
    for _ in range(5):
        square = x.T @ x
        x = 3.4445 * x + x @ (-4.7750 * square + 2.0315 * square @ square)
    return x


def muon(is_corrected: bool) -> dict[str, np.ndarray]:
    kernel, momentum = START[KERNEL], np.zeros_like(START[KERNEL])
    for step, gradients in enumerate(GRADIENTS, start=1):
        momentum = 0.95 * momentum + 0.05 * gradients[KERNEL]
        norms = (1 - 0.95 ** (step + 1), 1 - 0.95**step) if is_corrected else (1.0, 1.0)
        mixed = 0.95 * momentum / norms[0] + 0.05 * gradients[KERNEL] / norms[1]
        kernel = kernel - RATE * 0.2 * np.sqrt(64) * orthogonalised(mixed)
    return {KERNEL: kernel}


def test_muon_corrects_the_bias_of_its_momentum_and_torch_does_not() -> None:
    kernel = torch.nn.Parameter(torch.tensor(START[KERNEL].T.copy()))
    optimizer = torch.optim.Muon([kernel], RATE, 0.0, adjust_lr_fn="match_rms_adamw")
    for gradient in GRADIENTS:
        kernel.grad = torch.tensor(gradient[KERNEL].T.copy())
        optimizer.step()
    result, expected = ours("muon"), {KERNEL: kernel.detach().numpy().T}
    assert distance(result, muon(is_corrected=True)) < 1e-5
    assert distance(expected, muon(is_corrected=False)) < 0.02  # it iterates in bfloat16
    assert 0.02 < distance(result, expected) < 0.06
