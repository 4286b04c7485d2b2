"""Self-distillation without labels: DINO (2104.14294), with what DINOv2 (2304.07193) added to it.

The student learns what the teacher, its moving average, says of other crops of the same image. A
batch holds two large crops, `image` and `image_2` [B, H, W, C], and small ones, `local`
[B, n, h, w, C], which the op `dino_crops` makes. The teacher sees the large ones alone. Both have a
head that compares an image with K prototypes; centring and sharpening the teacher's answers keeps
it from giving all images the same one. B: batch, V = 2 + n: crops, D: hidden size.
"""

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.kinds import check_known
from vit_jax.objectives.objective import Batch, Metrics, Objective, Task, masked_mean, scale_images

STUDENT, TEACHER = "student", "teacher"  # prefixes of the backbones' parameters
CENTERINGS = ("mean", "sinkhorn_knopp")
EPSILON = 1e-8
# A collapse has 0 nats. A small model on letters had 1.3 at the start, 0.3 after 60 updates.
COLLAPSED, WATCHED_FROM = 0.05, 500
_INIT = nn.initializers.truncated_normal(0.02)


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """x / |x| along an axis, in float32."""
    x = jnp.asarray(x, jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=axis, keepdims=True), 1e-24))


class ProjectionHead(nn.Module):
    """A dense network, then the cosine with each prototype: [..., D] -> [..., K] float32."""

    num_prototypes: int
    hidden_size: int
    bottleneck_size: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, is_frozen: jax.Array | bool = False) -> jax.Array:
        """If `is_frozen`, the prototypes have no gradient."""
        dense = functools.partial(nn.Dense, kernel_init=_INIT, dtype=self.dtype)
        for _ in range(2):
            x = nn.gelu(dense(self.hidden_size)(x), approximate=False)
        x = unit(dense(self.bottleneck_size)(x))
        shape = self.bottleneck_size, self.num_prototypes
        prototypes = unit(self.param("prototypes", _INIT, shape), axis=0)
        prototypes = jnp.where(is_frozen, jax.lax.stop_gradient(prototypes), prototypes)
        products = jnp.asarray(x, self.dtype) @ jnp.asarray(prototypes, self.dtype)
        return jnp.asarray(products, jnp.float32)


class Dino(Objective):
    """Cross-entropy between the teacher's answer to a large crop and the student's to the others.

    Teacher, its head, the center of its answers and the number of updates are buffers.
    """

    example_keys: tuple[str, ...] = ("image", "image_2", "local")
    measures = ()  # it needs the crops of a batch: evaluators of features measure the teacher
    num_outputs = 0
    prefix = STUDENT
    spans_batch = True
    probabilities_by = "none"

    def __init__(
        self,
        task: Task,
        *,
        num_prototypes: int = 65_536,
        head_hidden_size: int = 2048,
        head_bottleneck_size: int = 256,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        warmup_teacher_temperature: float = 0.04,
        warmup_teacher_steps: int = 0,
        teacher_momentum: float = 0.996,
        centering: str = "mean",
        center_momentum: float = 0.9,
        frozen_prototypes_steps: int = 0,
        koleo_weight: float = 0.0,
    ):
        """
        Args:
          task: its model, without a head of its own, is the student and the teacher.
          num_prototypes: of each head.
          head_hidden_size, head_bottleneck_size: widths of a head's layers.
          student_temperature: by which the student's cosines are divided.
          teacher_temperature: the teacher's, after the warm-up.
          warmup_teacher_temperature: at the start of the warm-up, in which it changes linearly.
          warmup_teacher_steps: updates of the warm-up.
          teacher_momentum: of the teacher as an average of the student; from this at the start a
            cosine leads to 1 at the end of the run.
          centering: `mean`, less the moving average of all answers (DINO), or `sinkhorn_knopp`,
            such that the batch uses all prototypes alike (DINOv2).
          center_momentum: of that moving average.
          frozen_prototypes_steps: updates at the start in which the prototypes stay as they are.
          koleo_weight: of the loss `koleo` of both large crops (DINOv2: 0.1).

        Raises:
          UserError: an unknown centering, or a model without tokens of patches, or of masked ones.
        """
        super().__init__()
        check_known("objective.centering", centering, CENTERINGS)
        assert task.tokens_of is not None
        self.model = task.build_model(0)
        self._tokens = task.tokens_of(self.model, masks="masked_patches" in self.example_keys)
        sizes = num_prototypes, head_hidden_size, head_bottleneck_size
        self._heads = {"head": ProjectionHead(*sizes, self.model.dtype)}
        self._centers: tuple[str, ...] = ("center",)
        self._student_temperature = student_temperature
        self._teacher_temperatures = warmup_teacher_temperature, teacher_temperature
        self._warmup_steps, self._total_steps = warmup_teacher_steps, task.total_steps
        self._momentum, self._center_momentum = teacher_momentum, center_momentum
        self._centering, self._koleo_weight = centering, koleo_weight
        self._frozen_steps = frozen_prototypes_steps
        self._has_warned = False

    @property
    def own_parameters(self) -> dict[str, tuple[str | None, ...]]:  # type: ignore[override]
        axes: dict[str, tuple[str | None, ...]] = {"updates": ()}
        axes |= dict.fromkeys(self._centers, ("classes",))
        for head in self._heads:
            for name in (f"{STUDENT}_{head}", f"{TEACHER}_{head}"):
                axes[f"{name}/prototypes"] = (None, "classes")
                for layer, kernel in enumerate((("embed", "mlp"), ("mlp", None), ("mlp", None))):
                    axes[f"{name}/Dense_{layer}/kernel"] = kernel
                    axes[f"{name}/Dense_{layer}/bias"] = kernel[1:]
        return axes

    @property
    def models(self) -> dict[str, Any]:
        return {TEACHER: self.model, STUDENT: self.model}

    def describe(self, description: Any) -> dict[str, Any]:
        return {TEACHER: description, STUDENT: description}

    def init(self, rng: jax.Array, batch: Batch) -> Any:
        images = scale_images(batch["image"])
        pooled, variables = self.model.init_with_output(
            rng, images, train=False, **self._first_inputs(images)
        )
        params = {STUDENT: variables["params"]}
        for number, (name, head) in enumerate(self._heads.items()):
            key = jax.random.fold_in(rng, 1 + number)
            params[f"{STUDENT}_{name}"] = head.init(key, pooled)["params"]
        return params

    def _first_inputs(self, images: jax.Array) -> dict[str, Any]:
        """What else the model gets when its parameters are drawn."""
        del images
        return {}

    def start_buffers(self, params: Any) -> dict[str, Any]:
        """The teacher is the student at the start."""
        buffers = {name.replace(STUDENT, TEACHER, 1): tree for name, tree in params.items()}
        centers = {name: jnp.zeros(self._heads["head"].num_prototypes) for name in self._centers}
        return {**buffers, **centers, "updates": jnp.zeros((), jnp.float32)}

    def update(self, buffers: Any, params: Any, seen: Any) -> Any:
        done = buffers["updates"] / max(self._total_steps, 1)
        momentum = 1.0 - (1.0 - self._momentum) * (jnp.cos(jnp.pi * done) + 1.0) / 2.0
        new = {"updates": buffers["updates"] + 1.0}
        for name, mean in seen.items():  # centers
            new[name] = _average(self._center_momentum, buffers[name], mean)
        for name, tree in params.items():
            name = name.replace(STUDENT, TEACHER, 1)
            new[name] = _average(momentum, buffers[name], tree)
        return new

    def embed(self, params: Any, batch: Batch, rng: jax.Array) -> Any:
        """What the heads get: the student's [B, V, D], large crops first, the teacher's [B, 2, D].

        iBOT adds patches.
        """
        large_rng, small_rng = jax.random.split(rng)
        large = jnp.stack([batch["image"], batch["image_2"]], axis=1)  # [B, 2, H, W, C]
        large, small = scale_images(large), scale_images(batch["local"])  # small: [B, n, h, w, C]
        student = self._see(params[STUDENT], large, batch, train=True, rngs={"dropout": large_rng})
        pooled, _ = self._view(params[STUDENT], small, train=True, rngs={"dropout": small_rng})
        student["head"] = jnp.concatenate([student["head"], pooled], axis=1)
        teacher = self._see(params[TEACHER], large, batch, train=False)
        return {STUDENT: student, TEACHER: jax.lax.stop_gradient(teacher)}

    def _see(self, params: Any, large: jax.Array, batch: Batch, **options: Any) -> dict[str, Any]:
        """By head, what a model sees in the large crops."""
        del batch
        pooled, _ = self._view(params, large, **options)
        return {"head": pooled}

    def _view(self, params: Any, crops: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
        """Crops [B, n, H, W, C] -> pooled tokens [B, n, D], patches [B, n, P, D]."""
        outputs = self._tokens(params, jnp.reshape(crops, (-1, *crops.shape[2:])), **options)
        pooled, patches = (jnp.reshape(x, (*crops.shape[:2], *x.shape[1:])) for x in outputs)
        return pooled, patches

    def loss_of(self, params: Any, embeddings: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
        """`dino_loss`, the mean over pairs of crops and over the batch, plus the weighted `koleo`.

        Logged beside them: `teacher_entropy`, the mean of its answers' entropies, log(K) if they
        are uniform; `teacher_information`, the entropy of the mean answer less that, in nats: 0 if
        all images get the same one; `feature_std`, the deviation of unit features over the batch
        times sqrt(D): 0 if all look the same, about 1 if they fill the space.
        """
        student = self._answers(params, STUDENT, "head", embeddings[STUDENT]["head"])
        teacher = self._answers(params, TEACHER, "head", embeddings[TEACHER]["head"])
        targets = self._targets(params, "center", teacher, jnp.ones(teacher.shape[:2]))
        pairs = -jnp.einsum("bik,bvk->biv", targets, student)  # [B, 2, V]
        others = 1.0 - jnp.eye(pairs.shape[1], pairs.shape[2])  # never the same crop
        losses = jnp.einsum("biv,iv->b", pairs, others) / jnp.sum(others)
        entropy = jnp.mean(_entropy(targets))
        information = _entropy(jnp.mean(targets, axis=(0, 1))) - entropy
        features = unit(embeddings[STUDENT]["head"][:, :2])  # [B, 2, D]
        loss = masked_mean(losses, batch["mask"])
        metrics: dict[str, Any] = {
            "dino_loss": loss,
            "teacher_entropy": entropy,
            "teacher_information": information,
            "feature_std": jnp.mean(jnp.std(features, axis=0)) * math.sqrt(features.shape[-1]),
            "buffers": {"center": jnp.mean(teacher, axis=(0, 1))},
        }
        if self._koleo_weight:
            both = koleo(features[:, 0]) + koleo(features[:, 1])
            metrics["koleo_loss"] = both / 2.0
            loss += self._koleo_weight * both
        return loss, jax.lax.stop_gradient(metrics)

    def watch(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warns once if all images get the same answer, as in a collapse."""
        information = metrics["teacher_information"]
        if step >= WATCHED_FROM and information < COLLAPSED and not self._has_warned:
            self._has_warned = True
            logging.warning(
                f"step {step}: the teacher gives all images the same answer (teacher_information "
                f"{information:.3g} nats, feature_std {metrics['feature_std']:.3g}): this looks "
                "like a collapse. Try objective.teacher_momentum closer to 1, a lower "
                "objective.teacher_temperature, a lower learning rate, or larger batches."
            )

    def _answers(self, params: Any, who: str, head: str, x: jax.Array) -> jax.Array:
        """The student's log-probabilities of the prototypes, the teacher's cosines, [..., K]."""
        is_frozen = params["updates"] < self._frozen_steps
        cosines: Any = self._heads[head].apply({"params": params[f"{who}_{head}"]}, x, is_frozen)
        if who == TEACHER:
            return jnp.asarray(jax.lax.stop_gradient(cosines))
        return jax.nn.log_softmax(cosines / self._student_temperature)

    def _targets(self, params: Any, center: str, cosines: jax.Array, real: jax.Array) -> jax.Array:
        """The teacher's cosines [..., K] to probabilities; `real` [...]: 1 for those that count."""
        start, end = self._teacher_temperatures
        warmed = jnp.minimum(params["updates"] / max(self._warmup_steps, 1), 1.0)
        temperature = start + (end - start) * warmed if self._warmup_steps else end
        rows = jnp.reshape(cosines, (-1, cosines.shape[-1]))
        if self._centering == "mean":
            rows = jax.nn.softmax((rows - params[center][None]) / temperature)
        else:
            rows = sinkhorn_knopp(rows / temperature, jnp.ravel(real))
        return jnp.reshape(rows, cosines.shape)


def sinkhorn_knopp(scores: jax.Array, real: jax.Array, num_iterations: int = 3) -> jax.Array:
    """Assignment of rows to columns that uses all columns alike: [M, K] -> [M, K], rows sum to 1.

    `real` [M]: 1 for rows that count, 0 for others (SwAV, 2006.09882; DINOv2, section 4).
    """
    q = jnp.exp(scores - jnp.max(scores)) * real[:, None]
    for _ in range(num_iterations):
        q /= jnp.sum(q, axis=0, keepdims=True)
        q /= jnp.sum(q, axis=1, keepdims=True) + (1.0 - real[:, None])
    return q


def koleo(features: jax.Array) -> jax.Array:
    """-mean log distance to the nearest other row, of unit rows [B, D] (1806.03198)."""
    nearest = jnp.argmax(features @ features.T - 4.0 * jnp.eye(len(features)), axis=1)
    distances = jnp.linalg.norm(features - features[nearest] + EPSILON, axis=-1)
    return -jnp.mean(jnp.log(distances + EPSILON))


def _entropy(probabilities: jax.Array) -> jax.Array:
    """[..., K] -> [...], in nats."""
    return -jnp.sum(probabilities * jnp.log(probabilities + EPSILON), axis=-1)


def _average(momentum: Any, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: momentum * a + (1.0 - momentum) * b, old, new)
