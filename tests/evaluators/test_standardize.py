"""Linear probes behind a batch norm without parameters, whose statistics are computed once."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests import tiny
from tests.pretrained import weights
from vit_jax.data.pipeline import eval_batches
from vit_jax.errors import UserError
from vit_jax.models.create import create_model
from vit_jax.models.features import feature_function
from vit_jax.objectives.objective import scale_images
from vit_jax.parameters.names import flatten_names, unflatten_names
from vit_jax.parameters.sharding import create_mesh, to_host
from vit_jax.run import create_run

SIZES = {"patch_size": 8, "hidden_size": 16, "num_layers": 1, "mlp_dim": 16, "num_heads": 2}


def probe(source: Any, **overrides: Any) -> Any:
    kinds = {"optimizer__name": "lars", "optimizer__freeze": "(?!head/).*"}
    loading = {"pretrained__source": str(source), "pretrained__standardize": True}
    return tiny.config(**{**kinds, **loading, **overrides})


@pytest.mark.parametrize("classifier", ["token", "gap"])
def test_the_last_norm_standardises_the_features(classifier: str, tmp_path: Path) -> None:
    model = create_model("vit", **SIZES, num_classes=3, classifier=classifier)
    before = weights.seeded(model, (16, 16, 3))
    weights.write(tmp_path / "model.npz", "npz", model, before, (16, 16, 3))
    mesh = create_mesh(fsdp=2)
    config = probe(tmp_path / "model.npz", model__classifier=classifier)
    with jax.set_mesh(mesh):
        run = create_run(config, mesh)
        after = flatten_names(to_host(run.initial_state(0).params))
    changed = {name for name, x in after.items() if not np.array_equal(x, before.get(name))}
    norm = "Transformer/encoder_norm"
    assert changed == {f"{norm}/scale", f"{norm}/bias", "head/kernel", "head/bias"}

    with eval_batches(run.dataset, batch_size=100, num_threads=1) as batches:
        images = scale_images(next(iter(batches))["image"])
    function = jax.jit(feature_function(run.objective.model, ["pre_logits"]))
    head = {name: after[name] for name in ("head/kernel", "head/bias")}
    z, found = (
        np.float64(function(unflatten_names({**params, **head}), images)["pre_logits"])
        for params in (before, after)
    )
    # Float32 features of deviation 0.1 to 1 in batches of another size.
    np.testing.assert_allclose(found, (z - z.mean(0)) / np.sqrt(z.var(0) + 1e-6), atol=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__classifier": "map"}, "needs a head on the last layer norm"),
        ({"model__representation_size": 8}, "needs a head on the last layer norm"),
        ({"pretrained__reset_head": False}, "needs pretrained.source and pretrained.reset_head"),
        ({"pretrained__source": ""}, "needs pretrained.source and pretrained.reset_head"),
    ],
)
def test_models_without_such_a_norm_are_refused(overrides: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"pretrained.standardize=True {message}"):
        create_run(probe("x.npz", **overrides), create_mesh())
