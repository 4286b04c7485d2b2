"""ViTMAEForPreTraining and facebookresearch/mae: the same pixels, the same loss, files both ways.

Tolerance: as in test_timm_parity.py, where logits are larger; theirs are in float64.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests import golden
from tests.peers import import_transformers
from tests.pretrained import weights
from vit_jax.errors import UserError
from vit_jax.files.paths import read_object
from vit_jax.inference.load import load_model
from vit_jax.models.create import create_model
from vit_jax.models.later.mae import sincos_table
from vit_jax.objectives.mae import MaskedAutoencoding
from vit_jax.objectives.objective import Task
from vit_jax.pretrained.arrays import read_arrays, write_safetensors
from vit_jax.trees import flatten_names, unflatten_names

transformers: Any = None
SAME = 1e-5
IMAGE = (96, 96, 3)
SIZES: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 768, "decoder_hidden_size": 64, "decoder_num_hidden_layers": 2}
SIZES |= {"decoder_num_attention_heads": 4, "decoder_intermediate_size": 256, "image_size": 96}
SIZES |= {"patch_size": 16}


@pytest.fixture(autouse=True, scope="module")
def _import() -> None:
    globals()["transformers"] = import_transformers()


@pytest.fixture(scope="module")
def theirs(_import: None) -> Any:
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**SIZES)).eval()
    # They start at zero, where the published weights have the table: x before y.
    from transformers.models.vit_mae import modeling_vit_mae as peer

    for positions, width in (
        (model.vit.embeddings.position_embeddings, 192),
        (model.decoder.decoder_pos_embed, 64),
    ):
        table = peer.build_2d_sinusoidal_position_embedding(6, 6, width, cls_token=True)
        table = torch.roll(table, width // 2, dims=-1)
        assert weights.difference(table.numpy(), sincos_table((6, 6), width)) < 1e-6
        positions.data.copy_(table)
    weights.randomise(model)
    return model


NOISE = np.random.default_rng(0).random((2, 36), np.float32)


def answers(model: Any, params: Any, **keys: Any) -> tuple[np.ndarray, float]:
    """Our pixels [B, P, K] and loss."""
    objective = MaskedAutoencoding(Task(lambda _: model, image_shape=IMAGE), **keys)
    images, tree = golden.images(2, 96, 96), unflatten_names(params)
    seen = objective.corruption(NOISE)

    @jax.jit
    def both(params: Any, images: Any) -> Any:
        pixels = model.apply({"params": params}, images, train=False, corruption=seen)
        return pixels, objective.losses(params, images, NOISE, {}, train=False).mean()

    pixels, loss = both(tree, images)
    return np.asarray(pixels), float(loss)


def their_answers(model: Any, norm_pix_loss: bool) -> tuple[np.ndarray, float]:
    images = golden.images(2, 96, 96).transpose(0, 3, 1, 2).copy()
    model.config.norm_pix_loss = norm_pix_loss
    with torch.no_grad():
        output = model.double()(torch.from_numpy(images).double(), noise=torch.from_numpy(NOISE))
    model.float()
    return output.logits.numpy(), float(output.loss)


def test_transformers_predicts_and_loses_the_same(theirs: Any, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = load_model(tmp_path / "theirs")
    assert loaded.description.model["name"] == "mae"
    assert loaded.description.model["layer_norm_epsilon"] == 1e-12
    flat = flatten_names(loaded.params)
    for norm_pix_loss in (True, False):
        pixels, loss = answers(loaded.module, flat, norm_pix_loss=norm_pix_loss)
        expected, expected_loss = their_answers(theirs, norm_pix_loss)
        assert expected.std() > 0.1
        assert weights.difference(pixels, expected) < SAME
        assert abs(loss - expected_loss) < SAME
    # The names in memory are newer than those of files.
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    assert "vit.layers.0.attention.q_proj.weight" in state
    write_safetensors(tmp_path / "state.safetensors", state, {})
    again = load_model(tmp_path / "state.safetensors", num_heads=3)
    assert again.description.model["decoder_num_heads"] == 16  # guessed: that of the published ones
    assert flatten_names(again.params).keys() == flat.keys()

    # Our folder, read by them.
    weights.write(tmp_path / "ours", "huggingface", loaded.module, flat, IMAGE, "mae")
    reread, info = transformers.ViTMAEForPreTraining.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert weights.difference(their_answers(reread.eval(), False)[0], expected) == 0.0


FACEBOOK = {
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.embeddings.": "",
    "vit.layers": "blocks",
    "vit.layernorm": "norm",
    "decoder.decoder_layers": "decoder_blocks",
    "decoder.": "",
    "attention.q_proj": "attn.qkv",
    "attention.o_proj": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}


def facebook_names(model: Any) -> dict[str, torch.Tensor]:
    """The same model under the names of facebookresearch/mae."""
    state = model.state_dict()
    renamed = {}
    for name, value in state.items():
        if ".q_proj." in name:
            value = torch.cat([state[name.replace(".q_", f".{part}_")] for part in "qkv"])
        for old, new in FACEBOOK.items():
            name = name.replace(old, new)
        renamed[name] = value
    return {n: x for n, x in renamed.items() if "k_proj" not in n and "v_proj" not in n}


def test_facebooks_files_both_ways(theirs: Any, tmp_path: Path) -> None:
    sizes = SIZES | {"decoder_num_attention_heads": 16, "layer_norm_eps": 1e-6}
    model = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**sizes)).eval()
    model.load_state_dict(theirs.state_dict())
    state = facebook_names(model)
    torch.save({"model": state}, tmp_path / "full.pth")
    loaded = load_model(tmp_path / "full.pth", num_heads=3)
    stated = {key: loaded.description.model[key] for key in ("name", "gelu", "decoder_num_heads")}
    assert stated == {"name": "mae", "gelu": "exact", "decoder_num_heads": 16}
    flat = flatten_names(loaded.params)
    pixels, _ = answers(loaded.module, flat)
    expected, _ = their_answers(model, True)
    assert weights.difference(pixels, expected) < SAME

    path = weights.write(tmp_path / "ours", "timm", loaded.module, flat, IMAGE, "mae")
    weights.assert_same(read_arrays(path), {n: x.numpy() for n, x in state.items()})
    args = read_object(tmp_path / "ours" / "config.json")["model_args"]
    assert (args["decoder_embed_dim"], args["decoder_num_heads"]) == (64, 16)

    # The published file has the encoder alone: a Vision Transformer with exact GELU.
    encoder = {n: x for n, x in state.items() if not n.startswith(("decoder", "mask"))}
    torch.save({"model": encoder}, tmp_path / "encoder.pth")
    alone = load_model(tmp_path / "encoder.pth", num_heads=3)
    assert alone.description.model["name"] == "vit"
    names = flatten_names(alone.params)
    weights.assert_same(names, {name: flat[name] for name in names})
    # The fine-tuned one averages the patches beside a class token, and has its norm after that.
    tuned = {n: x for n, x in encoder.items() if not n.startswith("norm.")}
    tuned |= {"fc_norm.weight": encoder["norm.weight"], "fc_norm.bias": encoder["norm.bias"]}
    torch.save({"model": tuned}, tmp_path / "tuned.pth")
    tuned_model = load_model(tmp_path / "tuned.pth", num_heads=3).module
    assert (tuned_model.classifier, tuned_model.final_norm) == ("gap", "pooled")
    assert tuned_model.prefix_tokens == ("cls",)


def test_what_others_cannot_store_is_refused(tmp_path: Path) -> None:
    sizes = {"patch_size": 8, "hidden_size": 16, "num_layers": 1, "mlp_dim": 32, "num_heads": 2}
    decoder = {f"decoder_{key}": value for key, value in sizes.items() if key != "patch_size"}

    def write(format: str, image: tuple[int, ...] = (16, 16, 3), **changes: Any) -> None:
        model = create_model(**{"name": "mae", "num_classes": 0, **sizes, **decoder, **changes})
        weights.write(tmp_path / "a", format, model, weights.seeded(model, image), image, "mae")

    for format in ("timm", "huggingface"):
        with pytest.raises(UserError, match="cannot store model.num_classes=3, only 0"):
            write(format, num_classes=3)
        with pytest.raises(UserError, match="cannot store model.name='mae' for 2x3 patches"):
            write(format, (16, 24, 3))
    with pytest.raises(UserError, match="cannot store model.decoder_mlp_dim=48.*huggingface"):
        write("timm", decoder_mlp_dim=48)
