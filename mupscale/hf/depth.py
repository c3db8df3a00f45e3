"""How a model of the transformers library becomes deeper: which field of its configuration grows, from which layers.

Before anything is done with a model, small ones of its family with as many layers are built, grown, compared, saved
and loaded.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from transformers import PretrainedConfig

from mupscale.checks.check_step import check_step
from mupscale.discovery.depth import find_residual
from mupscale.errors import UserError, refuse_unless_whole
from mupscale.hf.config import deep_config, numbers_of_layers, parts, wide_config
from mupscale.hf.config_shrunken import shrunken
from mupscale.hf.family import CannotShrink, Family, check_reloaded, on_cpu, on_meta
from mupscale.hf.forward_pass import Call, logits_of
from mupscale.text_tables import starred
from mupscale.widening.hints import NO_HINTS, Hints
from mupscale.widening.layers import layers_of, orders, source_of, unequal_lists
from mupscale.widening.modules import named_weights
from mupscale.widening.plan import as_identity, plan

How = Literal["identity", "interleave", "stack"]
"""`identity`: new layers add nothing at first. `interleave`: each layer k times in place. `stack`: the stack again."""

Counts = int | Mapping[str, int]
"""How many layers there will be; where a model has several numbers of layers, by the field of its configuration."""

MOST_PARAMETERS = 100_000_000
"""The largest model that is itself run to find how it grows, if there is no small one of its family."""

FINDING = "finding how the model becomes deeper"


@dataclass(frozen=True)
class Deepening:
    """How one number of layers of a configuration grows."""

    field: str
    """The path of the field, such as `text_config.num_hidden_layers`."""
    lists: tuple[str, ...]
    sources: tuple[int, ...]
    """The number of the shallow layer that each layer of the deep model comes from."""
    how: How
    others: tuple[str, ...]
    """All numbers of layers in the configuration."""
    residual: Mapping[str, float]
    """Name patterns of the parameters that make layers the identity, with the values that do; empty if none do."""

    def deep(self, config: PretrainedConfig) -> PretrainedConfig:
        """The deep configuration of a shallow one, whatever its width."""
        return deep_config(config, self.field, self.sources, self.others)


def deepened(config: PretrainedConfig, deepenings: Iterable[Deepening]) -> PretrainedConfig:
    """The configuration with all of its new numbers of layers."""
    for each in deepenings:
        config = each.deep(config)
    return config


def hints_at_depth(narrow: Any, wide: Any, deepenings: Sequence[Deepening], found: Hints | None = None) -> Hints:
    """Hints for a deeper model, on any device, whose width grows as `found` says for one of the old depth."""
    found = NO_HINTS if found is None else found
    if not deepenings:
        return found
    layers = layers_of(narrow, wide, {name: each.sources for each in deepenings for name in each.lists})
    for each in deepenings:
        for name in each.lists if each.how == "identity" else ():
            layers[name] = tuple(row._replace(how="identity") if row.is_new else row for row in layers[name])
    sources = {name: source_of(layers, name) for name in (*named_weights(wide), *dict(wide.named_buffers()))}

    def at_depth(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[source] for name, source in sources.items() if source in values}

    return replace(
        found,
        roles=at_depth(found.roles),
        blocks=at_depth(found.blocks),
        rescale=at_depth(found.rescale),
        depth=layers,
        residual={pattern: value for each in deepenings for pattern, value in each.residual.items()},
    )


def grown_config(
    family: Family, config: PretrainedConfig, factor: float, layers: Counts | None, how: How, **sizes: Any
) -> tuple[PretrainedConfig, list[Deepening], bool]:
    """The wide configuration of the old depth, how it becomes deeper, and whether it is wider; `sizes` as wide_config.

    Raises a UserError if nothing grows.
    """
    wide = wide_config(config, factor, **sizes)
    is_wider = wide.to_dict() != config.to_dict()
    if layers is not None:
        return wide, find_deepenings(family, config, layers, how), is_wider
    if not is_wider:
        raise UserError(f"factor {factor:g} leaves every size as it is; give a larger one, or more layers")
    return wide, [], is_wider


def find_deepenings(family: Family, config: PretrainedConfig, layers: Counts, how: How = "identity") -> list[Deepening]:
    """How a model of `config` gets so many layers, found with small models of its family; else a UserError."""
    if how not in get_args(How):
        raise UserError(f"depth must be {', '.join(get_args(How))}; got {how!r}")
    lists = growing_lists(config, family.model_class)
    counts = _counts(config, lists, layers)
    numbers = numbers_of_layers(config)
    for field, new in counts.items():
        if how != "identity" and new % numbers[field]:
            raise UserError(
                f"layers: {how} needs a multiple of {field}={numbers[field]}, got {new}; identity can reach any number"
            )
    answer = []
    for index, field in enumerate(counts):
        family.watch(FINDING, index, len(counts))
        wanted = Deepening(field, lists[field], (), how, tuple(lists), {})
        tried = [tuple(sources) for sources in orders(numbers[field], counts[field], how)]
        answer.append(_found(family, config, wanted, tried))
    return answer


def growing_lists(config: PretrainedConfig, model_class: Any) -> dict[str, tuple[str, ...]]:
    """The lists of layers that become longer with each number of layers. Raises a UserError if there are none."""
    numbers, answer = numbers_of_layers(config), {}
    model = on_meta(model_class, config)
    for field, old in numbers.items():
        try:
            deep = on_meta(model_class, deep_config(config, field, [*range(old), *range(old)], numbers))
        except UserError:  # it is another number
            continue
        lists = tuple(found.name for found in unequal_lists(model, deep))
        if lists:
            answer[field] = lists
    if not answer:
        raise UserError(
            f"layers: this {config.model_type} cannot become deeper: no list of layers becomes longer with a field of "
            "its configuration. Its layers are shared, or given by stage"
        )
    return answer


def _counts(config: PretrainedConfig, lists: Mapping[str, Any], layers: Counts) -> dict[str, int]:
    """The numbers of layers by field. Raises a UserError if it is not clear which grows, or if one does not grow."""
    numbers = numbers_of_layers(config)
    there = ", ".join(f"{field}={numbers[field]}" for field in lists)
    if not isinstance(layers, Mapping):
        if getattr(config, "is_encoder_decoder", False) and len({numbers[field] for field in lists}) == 1:
            return _counts(config, lists, dict.fromkeys(lists, layers))
        if len(lists) > 1:
            raise UserError(
                f"layers: this {config.model_type} has {there}; say which grows, as in {next(iter(lists))}=N"
            )
        layers = {next(iter(lists)): layers}
    for field, new in layers.items():
        if field not in lists:
            raise UserError(
                f"layers: this {config.model_type} has no field {field!r} with a number of layers; it has {there}"
            )
        refuse_unless_whole("layers", new)
        if new <= numbers[field]:
            raise UserError(f"layers: {new} is not more than the model has now, {field}={numbers[field]}")
    return dict(layers)


def _found(family: Family, config: PretrainedConfig, wanted: Deepening, orders: Sequence[tuple[int, ...]]) -> Deepening:
    """The first order with which a small model of the family, deepened, computes as before."""
    with on_cpu():
        small, narrow, call = _small(family, config)
        residual: dict[str, float] = {}
        try:
            for name, value in find_residual(narrow, wanted.lists, call).items():
                prefix = next(each for each in wanted.lists if name.startswith(f"{each}."))
                key, _, rest = name.removeprefix(f"{prefix}.").partition(".")
                residual[f"{prefix}.{key}.{starred(rest)}"] = value  # there may be fewer experts
        except UserError:
            if wanted.how == "identity":
                raise
        reasons = []
        for sources in orders:
            found = replace(wanted, sources=sources, residual=residual)
            try:
                _check(narrow, family.small_model(found.deep(small)), found, call)
            except UserError as error:
                reasons.append(str(error))
            else:
                return found
    raise UserError(f"layers: this {config.model_type} cannot become deeper by {wanted.how}: {reasons[0]}")


def _small(family: Family, config: PretrainedConfig) -> tuple[PretrainedConfig, Any, Call]:
    """A small model of the family with all layers, and a call that runs it; without one, a model of the same size."""
    for small in (shrunken(config, keep_layers=True), copy.deepcopy(config)):
        try:
            model = family.small_model(_without_dropout(small))
            return small, model, family.working_call(model)
        except CannotShrink as error:
            reason = error
            if sum(each.numel() for each in on_meta(family.model_class, config).parameters()) > MOST_PARAMETERS:
                break
    raise reason


def _without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """The same configuration without dropout, whose masks more layers change."""
    for _, part in parts(config):
        for name, value in list(vars(part).items()):
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _check(narrow: Any, deep: Any, found: Deepening, call: Call) -> None:
    """Compares the models with new layers that add nothing, also once the deep one is saved and loaded."""
    planned = plan(narrow, deep, hints=hints_at_depth(narrow, deep, [found]))
    across = [name for name, growth in planned.parameters.items() if growth.grows]
    if across:
        raise UserError(f"{across[0]!r} has a part for each layer")
    if not found.residual:
        return
    planned = as_identity(planned, narrow, deep, found.residual)
    agreement = check_step(narrow, deep, (), lambda model: logits_of(call(model)), planned)
    if agreement.exact is False:
        raise UserError(f"with layers that add nothing, {agreement.reason}")
    check_reloaded(narrow, deep, planned, call)
