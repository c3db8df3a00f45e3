"""Training a wide model elsewhere: factors of learning rate, eps and weight decay per parameter, beside its weights."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mupscale.data_files import json_of, read_text, what_is_wrong
from mupscale.errors import UserError, refuse_unless_level, shown
from mupscale.hf.folder import GROWTH_FILE
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import UpscaleReport
from mupscale.text_tables import unwrapped
from mupscale.widening.growth import matches
from mupscale.widening.layers import at_depth
from mupscale.widening.optimizers import OptimizerRule, Sized, rule_of
from mupscale.widening.plan_text import Plan
from mupscale.widening.records import Record, Records, record_of, records_of, store_records, write_records
from mupscale.widening.write import remember_widths

FORMAT = "mupscale growth, version 1"

OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}


def growth_record(
    plan: Plan, narrow: nn.Module, wide: nn.Module, method: GrowthMethod, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """What `parameter_groups` reads: role, layouts and factors of each parameter. Plain data, for a JSON file."""
    narrow = at_depth(narrow, wide, plan.layers)
    remember_widths(plan, narrow, wide, method.scale, entrywise=method.hyperparameters == "table")
    widths = records_of(wide)
    scaling = _factors(plan, method)
    parameters = {}
    for name, entry in plan.parameters.items():
        parameters[name] = {
            "role": entry.role,
            "narrow_shape": list(entry.narrow_shape),
            "wide_shape": list(entry.wide_shape),
            "layouts": [[list(piece) for piece in layout] for layout in entry.layouts],
            "rescale": entry.rescale,
            "factors": scaling[name],
            "width": widths[name].as_primitives() if name in widths else None,
        }
    return {"format": FORMAT, **settings, "new_parameters": list(plan.new_parameters), "parameters": parameters}


def _factors(plan: Plan, method: GrowthMethod) -> dict[str, dict[str, dict[str, float]]]:
    """lr, eps and weight_decay of every parameter in units of the narrow run's, for each optimizer."""
    return {name: factors_of(method.rates(entry)) for name, entry in plan.parameters.items()}


def factors_of(sized: Sized) -> dict[str, dict[str, float]]:
    """lr, eps and weight_decay of a parameter that has grown so, for each optimizer."""
    return {kind: rule.scale({}, sized)._asdict() for kind, rule in _rules().items()}


@cache
def _rules() -> dict[str, OptimizerRule]:
    unused = [nn.Parameter(torch.zeros(1))]
    return {name: rule_of(kind(unused, lr=1.0)) for name, kind in OPTIMIZERS.items()}


def parameter_groups(
    model: nn.Module,
    grown: str | Path | UpscaleReport | Mapping[str, Any],
    *,
    lr: float,
    weight_decay: float = 0.0,
    eps: float | None = None,
    optimizer: str = "AdamW",
    no_decay: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups with which any trainer continues the narrow run on the wide model, as the table of rules says.

        model = AutoModelForCausalLM.from_pretrained("wide")
        groups = parameter_groups(model, "wide", lr=3e-4, weight_decay=0.1, eps=1e-8)
        optimizer = torch.optim.AdamW(groups)

    Args:
        model: The wide model, as transformers loads it; wrapped or compiled ones will do.
        grown: The wide folder, its `mupscale.json`, or the report of an `upscale`.
        lr: The narrow run's learning rate.
        weight_decay: The narrow run's weight decay.
        eps: The narrow run's eps; by default 1e-8. SGD has none.
        optimizer: `SGD`, `Adam` or `AdamW`.
        no_decay: Patterns of names without weight decay, such as `("*.bias", "*norm*")`.
    """
    if optimizer not in OPTIMIZERS:
        raise UserError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {optimizer!r}")
    refuse_unless_level("lr", lr)
    refuse_unless_level("weight_decay", weight_decay)
    refuse_unless_level("eps", 0.0 if eps is None else eps)
    patterns = list(no_decay)
    if isinstance(no_decay, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"no_decay must be a list of name patterns, such as ['*.bias'], got {shown(patterns)}")
    factors, widths, shapes = _read(grown)
    parameters = {unwrapped(name): parameter for name, parameter in model.named_parameters()}
    if parameters.keys() != factors.keys():
        only_model, only_growth = sorted(parameters.keys() - factors.keys()), sorted(factors.keys() - parameters.keys())
        raise UserError(
            f"the growth is one of another model: {only_model[:3] or 'nothing'} is in the model only, "
            f"{only_growth[:3] or 'nothing'} in the growth only"
        )
    for name, parameter in parameters.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # DeepSpeed's own, where it holds a share
        if shape != shapes[name]:
            raise UserError(f"the growth is one of another model: {name} is {shape}, and {shapes[name]} in the growth")
    if widths:
        _remember(model, widths)
    groups: dict[tuple[float, float, float], dict[str, Any]] = {}
    records: dict[tuple[float, float, float], list[Record | None]] = {}
    for name, parameter in parameters.items():
        factor = factors[name][optimizer]
        decays = not any(matches(name, pattern) for pattern in patterns)
        decay = weight_decay * factor["weight_decay"] if decays else 0.0
        row: dict[str, Any] = {"lr": lr * factor["lr"], "weight_decay": decay}
        if optimizer != "SGD":
            row["eps"] = (1e-8 if eps is None else eps) * factor["eps"]
        key = row["lr"], row["weight_decay"], row.get("eps", 0.0)
        groups.setdefault(key, {"params": [], **row})["params"].append(parameter)
        records.setdefault(key, []).append(widths.get(name))
    for key, group in groups.items():
        write_records(group, records[key])
    return list(groups.values())


def freeze_old_parameters(model: nn.Module, grown: str | Path | UpscaleReport | Mapping[str, Any]) -> None:
    """Freezes all parameters but those of new layers, so that a deeper model forgets less of what it knows.

        model = AutoModelForCausalLM.from_pretrained("deep")
        freeze_old_parameters(model, "deep")

    Args:
        model: The deep model, as transformers loads it; wrapped or compiled ones will do.
        grown: The deep folder, its `mupscale.json`, or the report of an `upscale`.
    """
    if isinstance(grown, UpscaleReport):
        new = set(grown.new_parameters)
    else:
        found = read_growth(grown).get("new_parameters")
        new = {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
    parameters = {unwrapped(name): parameter for name, parameter in model.named_parameters()}
    if not new:
        raise UserError("the growth has added no layers, so there is nothing to train if all others are frozen")
    if not new <= parameters.keys():
        raise UserError(f"the growth is one of another model: {min(new - parameters.keys())!r} is not in the model")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in new)


def read_growth(grown: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of a growth: of a folder that `upscale` wrote, or of its `mupscale.json`."""
    if isinstance(grown, str | Path):
        path = Path(grown) / GROWTH_FILE if Path(grown).is_dir() else Path(grown)
        try:
            grown = json_of(read_text(path))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as the record of a growth ({error})") from error
    if (
        not isinstance(grown, Mapping)
        or grown.get("format") != FORMAT
        or not isinstance(grown.get("parameters"), Mapping)
    ):
        raise UserError(f"this is not the record of a growth: wanted a folder that `upscale` wrote, got {grown!r:.60}")
    return grown


def _read(
    grown: str | Path | UpscaleReport | Mapping[str, Any],
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, Record], dict[str, tuple[int, ...]]]:
    if isinstance(grown, UpscaleReport):
        shapes = {name: tuple(entry.wide_shape) for name, entry in grown.plan.parameters.items()}
        return _factors(grown.plan, grown.method), {}, shapes
    rows = read_growth(grown)["parameters"]
    try:
        factors = {name: _numbers(row["factors"]) for name, row in rows.items()}
        widths = {name: record_of(row["width"]) for name, row in rows.items() if row.get("width")}
        shapes = {name: tuple(row["wide_shape"]) for name, row in rows.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the record of the growth is damaged: {what_is_wrong(error)}") from error
    return factors, widths, shapes


def _numbers(factors: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    answer = {kind: {key: factors[kind][key] for key in ("lr", "eps", "weight_decay")} for kind in OPTIMIZERS}
    for kind, row in answer.items():
        for key, factor in row.items():
            refuse_unless_level(f"the factor of {key} for {kind}", factor)
    return answer


def _remember(model: nn.Module, widths: dict[str, Record]) -> None:
    owner = model
    while not widths.keys() <= {name for name, _ in owner.named_parameters()}:
        children = list(owner.children())
        if len(children) != 1:
            return
        owner = children[0]
    store_records(owner, Records(False, widths))


def written(record: Mapping[str, Any]) -> str:
    """The text of a record."""
    return json.dumps(record, indent=1) + "\n"
