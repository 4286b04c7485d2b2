"""Models and updates of other projects, in the sizes of a config.

timm is a package; the official code, big_vision and scenic are read from clones of their
repositories.
"""

from __future__ import annotations

import functools
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
import numpy as np
import optax

import vit_jax
from vit_jax.errors import UserError, missing_package
from vit_jax.kinds import check_known

# name: folder
CLONES = {"official": "vision_transformer", "big_vision": "big_vision", "scenic": "scenic"}
PEERS = (*CLONES, "timm", "timm_eager")


def check_peer(peer: str, model: Any, clones: str) -> None:
    """Raises UserError where a peer is unknown, is not here or does not have the model."""
    check_known("--against", peer, PEERS)
    if model.name != "vit" or (model.resnet_layers is not None and peer in CLONES):
        raise UserError(f"--against={peer} compares plain Vision Transformers only.")
    if peer in CLONES and not (Path(clones) / CLONES[peer]).is_dir():
        raise UserError(
            f"--against={peer} needs a clone: git clone "
            f"https://github.com/google-research/{CLONES[peer]} in the folder --clones={clones}."
        )
    if peer not in CLONES:
        import_timm()


def import_timm() -> Any:
    """timm.

    Raises:
      UserError: it cannot be imported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, at import
        try:
            import torch

            make_torchvision_importable(torch)
            import timm
        except ImportError as error:
            raise missing_package("the comparison", f"timm ({error})", "peers") from error
    return timm


def make_torchvision_importable(torch: Any) -> None:
    """Declares the two operations that torchvision describes when it is imported.

    Its wheel on PyPI is for CUDA; beside the CPU build of torch its own operations are missing.
    timm and transformers import it, and their ViTs use none of them. Beside the CUDA build it
    declares them itself, and aborts if they are there.
    """
    for name in ("nms", "qnms") if torch.version.cuda is None else ():
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor"
            )


def jax_peer(peer: str, config: Any, num_classes: int, clones: str) -> tuple[Any, Any]:
    """The training of a clone's model, with clipping and AdamW.

    The official code and scenic compute in float32 whatever `model.dtype`.

    Returns:
      init: (rng, images [B, H, W, 3] uint8) -> (params, optimizer's state, step).
      update: (the same, images, labels [B]) -> (the same updated, loss).
    """
    folder, model = Path(clones) / CLONES[peer], config.model
    patch_size = (model.patch_size,) * 2
    patches = types.SimpleNamespace(size=patch_size)
    encoder = {
        "mlp_dim": model.mlp_dim,
        "num_heads": model.num_heads,
        "num_layers": model.num_layers,
        "attention_dropout_rate": 0.0,
        "dropout_rate": model.dropout_rate,
    }
    sizes = {"num_classes": num_classes, "hidden_size": model.hidden_size, "patches": patches}
    module: Any
    if peer == "official":
        # Its package has our name: its files are put among our modules.
        for name in ("models_resnet", "models_vit"):
            code = load_file(f"vit_jax.{name}", folder / "vit_jax" / f"{name}.py")
        module = code.VisionTransformer(**sizes, transformer=encoder)
    elif peer == "scenic":
        # For its trainers and for files, and with them TensorFlow.
        stub(
            "scenic.model_lib.base_models.multilabel_classification_model",
            MultiLabelClassificationModel=object,
        )
        stub("tensorflow.io", gfile=None)
        sys.path.insert(0, str(folder))
        code = importlib.import_module("scenic.projects.baselines.vit")
        module = code.ViT(**sizes, **encoder, classifier="token")
    else:
        # For loading checkpoints alone, and with them TensorFlow.
        stub("big_vision.utils")
        stub("big_vision.models.common")
        sys.path.insert(0, str(folder))
        module = importlib.import_module("big_vision.models.vit")._Model(
            num_classes=num_classes,
            patch_size=patch_size,
            width=model.hidden_size,
            depth=model.num_layers,
            mlp_dim=model.mlp_dim,
            num_heads=model.num_heads,
            pool_type="tok",
            dropout=model.dropout_rate,
            scan=model.scan,
            dtype_mm=model.dtype,
        )
    rule = config.optimizer
    adamw = optax.adamw(
        config.schedule.learning_rate, weight_decay=rule.weight_decay, mu_dtype=rule.momentum_dtype
    )
    tx = optax.chain(optax.clip_by_global_norm(rule.clip_norm), adamw)

    def init(rng: jax.Array, images: jax.Array) -> Any:
        params = module.init(rng, scaled(images), train=False)["params"]
        return params, tx.init(params), jnp.zeros((), jnp.int32)

    def update(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        params, opt_state, step = state
        rngs = {"dropout": jax.random.fold_in(jax.random.key(0), step)}

        def loss_of(params: Any) -> jax.Array:
            out = module.apply({"params": params}, scaled(images), train=True, rngs=rngs)
            logits = out[0] if peer == "big_vision" else out
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, step + 1), loss

    return init, update


def scaled(images: jax.Array) -> jax.Array:
    """uint8 -> float32 in [-1, 1]."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1.0


def stub(name: str, **contents: Any) -> None:
    """Something in the place of a module that a clone imports and the model does not use."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(name, module)


def load_file(name: str, path: Path) -> Any:
    """The module in a file, under another name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(vit_jax, name.rpartition(".")[2], module)
    spec.loader.exec_module(module)
    return module


def timm_model(model: Any, image_size: tuple[int, int], num_classes: int, **options: Any) -> Any:
    """timm's module with the sizes of `config.model`, on a ResNet if that has one."""
    from timm.models import vision_transformer, vision_transformer_hybrid

    hybrid = {}
    if model.resnet_layers is not None:
        resnet = vision_transformer_hybrid._resnetv2(tuple(model.resnet_layers))
        embed = functools.partial(vision_transformer_hybrid.HybridEmbed, backbone=resnet)
        hybrid = {"embed_layer": embed}
    return vision_transformer.VisionTransformer(
        img_size=image_size,
        patch_size=model.patch_size,
        num_classes=num_classes,
        embed_dim=model.hidden_size,
        depth=model.num_layers,
        num_heads=model.num_heads,
        mlp_ratio=model.mlp_dim / model.hidden_size,
        pos_drop_rate=model.dropout_rate,
        proj_drop_rate=model.dropout_rate,
        **hybrid,
        **options,
    )


def create_timm(
    config: Any, batch: Any, num_classes: int, *, compiled: bool
) -> Callable[[int], float]:
    """What runs so many updates of timm's model and returns the last loss.

    bfloat16 is autocast's. On a GPU if torch sees one; `compiled` needs a C++ compiler on a CPU.

    Raises:
      UserError: timm cannot be imported.
    """
    import_timm()
    import torch

    model = config.model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    module = timm_model(model, batch["image"].shape[1:3], num_classes)
    module = module.to(device, memory_format=torch.channels_last)
    logits_of = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=config.schedule.learning_rate,
        weight_decay=config.optimizer.weight_decay,
        fused=device == "cuda",
    )
    pixels = torch.tensor(np.asarray(batch["image"])).to(device).permute(0, 3, 1, 2)
    targets = torch.tensor(np.asarray(batch["label"])).long().to(device)

    def update() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=model.dtype == "bfloat16"):
            logits = logits_of(pixels.float() / 127.5 - 1.0)
            loss = torch.nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        return loss

    def run(steps: int) -> float:
        for _ in range(steps):
            loss = update()
        return float(loss.detach())  # waits for the device

    return run
