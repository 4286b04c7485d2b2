"""Feature distillation: students learn the features of a teacher, without labels.

A dense layer maps a student's features to the teacher's, which are whitened, as in "Contrastive
Learning Rivals Masked Image Modeling in Fine-tuning via Feature Distillation" (2205.14141, section
3). One pass of the teacher serves several students. P: patches, D: width of the teacher.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from vit_jax.errors import UserError
from vit_jax.kinds import check_known
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, masked_mean, scale_images

TEACHER, STUDENT = "teacher", "student"
FEATURES = ("patches", "pooled", "both")


# Of a student's features and the teacher's [..., D], to losses [...].
_DISTANCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    # Quadratic up to a difference of 2; divided by that, as PyTorch's `smooth_l1_loss(beta=2)`.
    "smooth_l1": lambda x, y: jnp.mean(optax.huber_loss(x, y, delta=2.0), axis=-1) / 2.0,
    "cosine": lambda x, y: jnp.asarray(optax.losses.cosine_distance(x, y, epsilon=1e-6)),
}


class FeatureDistillation(Objective):
    """The mean over students and images of the distance to the teacher's features."""

    example_keys = ("image",)
    num_outputs = 0
    probabilities_by = "none"
    prefix = STUDENT

    def __init__(
        self,
        task: Task,
        *,
        teacher: str = "",
        features: str = "patches",
        distance: str = "smooth_l1",
        students: tuple[str, ...] = (),
    ):
        """
        Args:
          task: its model is the first student.
          teacher: source of the teacher's weights, see `pretrained.source`.
          features: `patches` after the last norm, the `pooled` input of a head, or `both`.
          distance: `smooth_l1` of whitened features, or `cosine`.
          students: variants, such as Ti/16, of further students.

        Raises:
          UserError: no teacher, an unknown setting, or a model that has no patches.
        """
        super().__init__()
        check_known("objective.features", features, FEATURES)
        check_known("objective.distance", distance, _DISTANCES)
        if not teacher:
            raise UserError("--config.objective.teacher is missing: set the teacher's weights.")
        assert task.load_tower is not None
        assert task.tokens_of is not None
        self._distance, self._features = _DISTANCES[distance], features
        tower = task.load_tower(teacher, "objective.teacher")
        if tower.params is None:
            raise UserError(f"objective.teacher={teacher!r} is a variant: give trained weights.")
        self.model, self._size = task.build_model(0), task.image_shape[:2]
        others = [task.load_tower(name, "objective.students") for name in students]
        if weights := [name for name, other in zip(students, others, strict=True) if other.params]:
            raise UserError(f"objective.students={weights[0]!r} must be a variant, such as Ti/16.")
        self._students = {STUDENT: self.model}
        self._students |= {f"{STUDENT}_{i}": other.module for i, other in enumerate(others, 2)}
        self._others = dict(zip([*self._students][1:], others, strict=True))
        self._teacher, self._to_input = tower.module, tower.to_input
        self._tokens = {TEACHER: task.tokens_of(tower.module)}
        self._tokens |= {name: task.tokens_of(module) for name, module in self._students.items()}
        self.constants = {TEACHER: tower.params}
        self._eval_preprocess = task.eval_preprocess
        self.measures = ("loss", *(f"{name}_loss" for name in self._others))
        self._kinds = ("pooled", "patches") if features == "both" else (features,)
        widths = {"pooled": tower.width, "patches": tower.module.hidden_size}
        named = itertools.product(self._students, self._kinds)
        self._maps = {f"{name}_{kind}": nn.Dense(widths[kind]) for name, kind in named}

    @property
    def own_parameters(self) -> Mapping[str, tuple[str | None, ...]]:  # type: ignore[override]
        kernels = {f"{name}/kernel": ("embed", None) for name in self._maps}
        return kernels | {f"{name}/bias": (None,) for name in self._maps}

    @property
    def models(self) -> dict[str, Any]:
        return {**self._students, TEACHER: self._teacher}

    def describe(self, description: Any) -> dict[str, Any]:
        given = {"eval_preprocess": self._eval_preprocess}
        others = {n: dataclasses.replace(t.description, **given) for n, t in self._others.items()}
        return {STUDENT: description, **others}

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        images, params = scale_images(batch["image"]), {}
        for number, (name, module) in enumerate(self._students.items()):
            key = jax.random.fold_in(rng, number)
            params[name] = module.init(key, images, train=False)["params"]
            tokens = functools.partial(self._tokens[name], train=False)
            seen = optax.tree.zeros_like(jax.eval_shape(tokens, params[name], images))
            like = dict(zip(("pooled", "patches"), seen, strict=True))
            for kind in self._kinds:
                layer, rng_of = self._maps[f"{name}_{kind}"], jax.random.fold_in(key, 1)
                params[f"{name}_{kind}"] = layer.init(rng_of, like[kind])["params"]
        return params

    def loss(self, params: Any, batch: Batch, rng: jax.Array) -> tuple[jax.Array, Metrics]:
        """The mean over students; the loss of each of several is logged."""
        losses = self._losses(params, batch, train=True, rngs={"dropout": rng})
        means = {name: masked_mean(value, batch["mask"]) for name, value in losses.items()}
        return means.pop("loss"), means

    def evaluate(self, params: Any, batch: Batch) -> Metrics:
        """`measures`, [B] each."""
        return self._losses(params, batch, train=False)

    def _losses(self, params: Any, batch: Batch, **options: Any) -> Metrics:
        images = scale_images(batch["image"])
        seen = self._tokens[TEACHER](params[TEACHER], self._to_input(images), train=False)
        targets = dict(zip(("pooled", "patches"), map(_whitened, seen), strict=True))
        targets = jax.lax.stop_gradient(targets)
        grid, losses = self._teacher.token_grid(self._size), {}
        for name, module in self._students.items():
            pooled, patches = self._tokens[name](params[name], images, **options)
            if (own := module.token_grid(self._size)) != grid:
                cells = jnp.reshape(patches, (len(patches), *own, -1))
                cells = jax.image.resize(cells, (len(cells), *grid, cells.shape[-1]), "bilinear")
                patches = jnp.reshape(cells, (len(cells), -1, cells.shape[-1]))
            outputs = {"pooled": pooled, "patches": patches}
            parts = []
            for kind in self._kinds:
                mapped: Any = self._maps[f"{name}_{kind}"].apply(
                    {"params": params[f"{name}_{kind}"]}, outputs[kind]
                )
                distances = self._distance(mapped, targets[kind])  # [B] or [B, P]
                parts.append(jnp.mean(jnp.reshape(distances, (len(images), -1)), axis=1))
            losses[f"{name}_loss"] = jnp.mean(jnp.stack(parts), axis=0)
        mean = jnp.mean(jnp.stack([*losses.values()]), axis=0)
        return {"loss": mean, **{name: losses[name] for name in self.measures[1:]}}


def _whitened(x: jax.Array) -> jax.Array:
    """Of mean 0 and deviation 1 over the features: [..., D] -> [..., D] float32."""
    x = jnp.asarray(x, jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
