"""Models of other projects, in the sizes of a config: what `benchmark.py` runs beside ours.

timm is a package; the official code and big_vision are read from clones of their repositories.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import vit_jax
from vit_jax.errors import UserError, missing_package
from vit_jax.measure.torchvision import provide_torchvision
from vit_jax.objectives.objective import scale_images

JAX_PEERS = ("official", "big_vision")
PEERS = (*JAX_PEERS, "timm", "timm_eager", "reference")
_REPOSITORIES = {"official": "vision_transformer", "big_vision": "big_vision"}

Forward = Callable[..., jax.Array]  # (params, images uint8, train, rng) -> logits


def check_peer(peer: str, model: Any, clones: str) -> None:
    """Raises UserError where a peer is unknown, is not here or does not have the model."""
    if peer not in PEERS:
        raise UserError(f"--against={peer}: it is unknown; there are {', '.join(PEERS)}.")
    if peer == "reference":
        return
    if model.get("resnet_layers") is not None or model.name != "vit":
        raise UserError(f"--against={peer} compares plain Vision Transformers only.")
    if peer.startswith("timm"):
        import_timm()
    elif not _folder(peer, clones).is_dir():
        raise UserError(
            f"--against={peer} needs a clone: git clone "
            f"https://github.com/google-research/{_REPOSITORIES[peer]} in the folder "
            f"--clones={clones or '.'}."
        )


def import_timm() -> Any:
    """timm and torch.

    Raises:
      UserError: they cannot be imported.
    """
    provide_torchvision()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries, at import
            import timm
            import torch
    except ImportError as error:
        raise missing_package("the comparison", f"timm ({error})", "peers") from error
    return timm, torch


def jax_peer(peer: str, model: Any, num_classes: int, clones: str) -> tuple[Any, Forward]:
    """(init(rng, images) -> params, forward) of the official code or of big_vision.

    `model` is `config.model`. The official code computes in float32 whatever `model.dtype`.
    """
    folder = _folder(peer, clones)
    module: Any
    if peer == "official":
        _module("vit_jax.models_resnet", folder / "vit_jax" / "models_resnet.py")
        code = _module("vit_jax.models_vit", folder / "vit_jax" / "models_vit.py")
        patches = types.SimpleNamespace(size=(model.patch_size,) * 2)
        module = code.VisionTransformer(
            num_classes=num_classes,
            patches=patches,
            transformer={
                "mlp_dim": model.mlp_dim,
                "num_heads": model.num_heads,
                "num_layers": model.num_layers,
                "attention_dropout_rate": 0.0,
                "dropout_rate": model.dropout_rate,
            },
            hidden_size=model.hidden_size,
        )
    else:
        # For loading checkpoints alone, and with them TensorFlow.
        for name in ("big_vision.utils", "big_vision.models.common"):
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.path.insert(0, str(folder))
        code = importlib.import_module("big_vision.models.vit")
        module = code._Model(
            num_classes=num_classes,
            patch_size=(model.patch_size,) * 2,
            width=model.hidden_size,
            depth=model.num_layers,
            mlp_dim=model.mlp_dim,
            num_heads=model.num_heads,
            pool_type="tok",
            dropout=model.dropout_rate,
            scan=model.scan,
            dtype_mm=model.dtype,
        )

    def forward(params: Any, images: jax.Array, train: bool, rng: jax.Array) -> jax.Array:
        out = module.apply(
            {"params": params}, scale_images(images), train=train, rngs={"dropout": rng}
        )
        return out if peer == "official" else out[0]

    def init(rng: jax.Array, images: jax.Array) -> Any:
        return module.init(rng, scale_images(images), train=False)["params"]

    return init, forward


def update_rule(optimizer: Any) -> optax.GradientTransformation:
    """Clipping and AdamW, as `config.optimizer` has them."""
    return optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm),
        optax.adamw(
            optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            mu_dtype=optimizer.momentum_dtype,
        ),
    )


def train_step(forward: Forward, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """((params, optimizer's state, step), images, labels) -> (the same updated, loss)."""

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        params, opt_state, count = state
        rng = jax.random.fold_in(jax.random.key(0), count)

        def loss_of(params: Any) -> jax.Array:
            logits = forward(params, images, True, rng)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, count + 1), loss

    return step


def timm_step(
    config: Any, images: Any, labels: Any, num_classes: int, *, train: bool, compiled: bool
) -> Any:
    """A function that runs updates, or forward passes, of timm's model and returns the last loss.

    bfloat16 is autocast's. On a GPU if torch sees one.

    Raises:
      UserError: what it returns raises it if torch cannot compile.
    """
    timm, torch = import_timm()
    model = config.model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    module = timm.models.vision_transformer.VisionTransformer(
        img_size=images.shape[1:3],
        patch_size=model.patch_size,
        num_classes=num_classes,
        embed_dim=model.hidden_size,
        depth=model.num_layers,
        num_heads=model.num_heads,
        mlp_ratio=model.mlp_dim / model.hidden_size,
        pos_drop_rate=model.dropout_rate,
        proj_drop_rate=model.dropout_rate,
    ).to(device)
    module.train(train)
    model_of = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=config.optimizer.learning_rate,
        weight_decay=config.optimizer.weight_decay,
    )
    pixels = torch.tensor(images).to(device).permute(0, 3, 1, 2)
    targets = torch.tensor(labels).long().to(device)
    low = {"device_type": device, "dtype": torch.bfloat16, "enabled": model.dtype == "bfloat16"}

    def logits() -> Any:
        with torch.autocast(**low):
            return model_of(pixels.float() / 127.5 - 1.0)

    def update() -> Any:
        with torch.autocast(**low):
            loss = torch.nn.functional.cross_entropy(logits(), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        return loss

    def infer() -> Any:
        with torch.no_grad():
            return logits()

    def run(steps: int) -> float:
        try:
            for _ in range(steps):
                value = update() if train else infer()
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(
                "--against=timm: torch.compile failed; on CPUs it needs a C++ compiler, and torch "
                "in a folder without a blank in its path. --against=timm_eager works without it."
            ) from error
        return float(value.detach().sum())  # waits for the device

    return run


def _folder(peer: str, clones: str) -> Path:
    return Path(clones or ".") / _REPOSITORIES[peer]


def _module(name: str, path: Path) -> Any:
    """The official code's package has our name: its files are put among our modules."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        setattr(vit_jax, name.rpartition(".")[2], module)
        spec.loader.exec_module(module)
    return sys.modules[name]
