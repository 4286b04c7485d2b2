"""The arrays of a run before its first update."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from ml_collections import ConfigDict

from vit_jax.data.datasets import Dataset
from vit_jax.data.pipeline import batch_spec
from vit_jax.errors import UserError, naming
from vit_jax.models.create import family_of
from vit_jax.objectives.objective import Objective
from vit_jax.parameters.groups import stop_frozen_gradients
from vit_jax.parameters.sharding import parameter_shardings
from vit_jax.parameters.table import ParameterTable
from vit_jax.trees import flatten_names, merge_trees, unflatten_names


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run starts from, and how its objective sees the parameters of the state."""

    objective: Objective
    table: ParameterTable
    init: Callable[[jax.Array], Any]  # key -> all parameters
    shapes: Any  # of these
    # Those of `pretrained.source` in these shapes, with shapes where an array is to be random (a
    # new head); None without a source.
    load: Callable[[], Any] | None
    freeze: str  # regular expression of those that are not trained
    lora: Any  # `Lora`, or None

    def draw(self, mesh: Mesh, seed: int, loaded: Any = None) -> Any:
        """All parameters on the devices: `loaded`, by default those of `load`, the rest random."""
        if loaded is None:
            loaded = self.load() if self.load else {}
        places = flatten_names(parameter_shardings(self.shapes, mesh, self.table))
        leaves = flatten_names({**loaded, **self.objective.start})
        arrays = {k: x for k, x in leaves.items() if not isinstance(x, jax.ShapeDtypeStruct)}
        random = {name: place for name, place in places.items() if name not in arrays}

        def init(rng: jax.Array) -> dict[str, jax.Array]:
            params = flatten_names(self.init(rng))
            return {name: params[name] for name in random}

        params = jax.jit(init, out_shardings=random)(jax.random.key(seed)) if random else {}
        for name in list(arrays):
            # One at a time: a large model is never completely on both host and devices.
            params[name] = place_array(arrays.pop(name), places[name])
        return unflatten_names(params)

    def split(self, params: Any) -> tuple[Any, Any]:
        """All arrays of the start -> (parameters, buffers: statistics and the objective's own)."""
        flat = flatten_names(params)
        names = [name for name in flat if self.table.find(name).row.is_statistic]
        statistics = unflatten_names({name: flat.pop(name) for name in names})
        params = unflatten_names(flat)
        return params, merge_trees(statistics, self.objective.start_buffers(params))

    def merge(self, params: Any) -> Any:
        """Parameters of the state to those of the objective: without adapters."""
        return params if self.lora is None else self.lora.merge(params)

    def to_model(self, params: Any) -> Any:
        """`merge` in an update: frozen parameters have no gradient."""
        if self.freeze:
            params = stop_frozen_gradients(params, self.freeze, self.table)
        return self.merge(params)

    @functools.cached_property
    def model_shapes(self) -> Any:
        """Shapes of everything that the objective reads."""
        params, buffers = jax.eval_shape(self.split, self.shapes)
        constants = jax.eval_shape(lambda: self.objective.constants)
        return merge_trees(jax.eval_shape(self.merge, params), buffers, constants)


def place_array(array: Any, sharding: NamedSharding) -> jax.Array:
    """A host array on the devices; each process has all of it."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def create_start(
    config: ConfigDict, objective: Objective, dataset: Dataset, grid: tuple[int, int] | None
) -> Start:
    """The start of a run of that objective; `grid`: rows and columns of tokens."""
    families = {prefix: family_of(model) for prefix, model in objective.models.items()}
    table = ParameterTable(families, objective.own_parameters)
    lora, rank, alpha = None, config.lora.rank, config.lora.alpha
    if rank:
        if not config.pretrained.source:
            text = f"lora.rank={rank} adapts pre-trained weights, but the weights are random"
            raise UserError(f"{text}; set pretrained.source.")
        from vit_jax.parameters.lora import Lora  # few runs need it

        lora = Lora(rank, alpha)

    def init(rng: jax.Array) -> Any:
        params = objective.init(rng, optax.tree.zeros_like(batch_spec(dataset, 1)))
        params = params if lora is None else lora.add(params, rng, table)
        # Without weak types: an update returns strong ones, and would be compiled twice.
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), params)

    shapes = jax.eval_shape(init, jax.random.key(0))
    who = f"objective.name={config.objective.name!r}"
    table.check(flatten_names(shapes), who)
    freeze = config.optimizer.freeze
    if lora is not None:
        freeze = lora.frozen(shapes, freeze, table)
    start = Start(objective, table, init, shapes, None, freeze, lora)
    table.check(flatten_names(start.model_shapes), who)
    if not config.pretrained.source:
        return start
    load = functools.partial(_load, config, jax.eval_shape(start.merge, shapes), objective, grid)
    return dataclasses.replace(start, load=load)


def _load(
    config: ConfigDict, shapes: Any, objective: Objective, grid: tuple[int, int] | None
) -> Any:
    """`Start.load`: the source has the parameters of the objective's model alone."""
    from vit_jax.inference.class_order import match_classes  # imports class name lists
    from vit_jax.pretrained.load import load_pretrained  # imports readers of many formats

    options = {key: value for key, value in config.pretrained.items() if key != "keep"}
    own = {name.partition("/")[0] for name in objective.own_parameters}
    alone = {name: leaf for name, leaf in shapes.items() if name not in own}
    like = shapes[objective.prefix] if objective.prefix else alone
    model, classes = config.model, objective.class_names

    def outputs_of(names: tuple[str, ...], count: int) -> np.ndarray:
        if len(classes) > count:  # the error lists what does not fit
            return np.arange(count)
        # Numbers are the names of classes without one; other names are not compared with them.
        is_unnamed = classes == tuple(map(str, range(len(classes))))
        names = () if is_unnamed and not all(map(str.isdecimal, names)) else names
        hint = "pretrained.reset_head=True starts a new head"
        return match_classes(classes, names, count, hint=hint)

    options["outputs_of"] = outputs_of if classes else None
    with naming(f"pretrained.source={config.pretrained.source!r}"):
        params, _ = load_pretrained(
            **options, like=like, kind=model.name, target_grid=grid, model=model
        )
    return {**shapes, **objective.below_prefix(params)}
