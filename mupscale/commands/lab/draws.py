"""Points that Optuna draws, at random or by a TPE: each in a study of its own, which holds the results so far."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from mupscale.commands.config import Point
from mupscale.commands.lab.space import Axis

Parameters = dict[str, Any]
"""A point as Optuna has it: with all digits, and lists and dictionaries as text."""


def draw(
    axes: list[Axis], sampler: Literal["random", "tpe"], cell: int, before: list[tuple[Parameters, float | None]]
) -> Parameters:
    """The parameters of a cell, which seeds the draw.

    Args:
        axes: What is drawn.
        sampler: How.
        cell: The number of the trial.
        before: The parameters of the trials before it, and their metrics; None if they are not known yet.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {axis.key: distribution(axis) for axis in axes}
    with without_experimental_warnings():
        study = optuna.create_study(sampler=sampler_of(sampler, cell))
        for parameters, value in before:
            state = TrialState.RUNNING if value is None else TrialState.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(state=state, value=value, params=parameters, distributions=distributions)
            )
        return study.ask(distributions).params


def sampler_of(name: str, seed: int) -> optuna.samplers.BaseSampler:
    if name == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed)


@contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Hides warnings that a feature of Optuna may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


def distribution(axis: Axis) -> BaseDistribution:
    if axis.bounds is None:
        return CategoricalDistribution([encode(value) for value in axis.values])
    low, high = axis.bounds
    return IntDistribution(int(low), int(high), log=True) if axis.is_whole else FloatDistribution(low, high, log=True)


def encode(value: Any) -> Any:
    """A value of an axis in a form that Optuna accepts: lists and dictionaries as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def point_of(axes: list[Axis], parameters: Parameters) -> Point:
    """The point of these parameters. Raises a KeyError or a StopIteration if they are not of these axes."""
    return {axis.key: _decode(axis, parameters[axis.key]) for axis in axes}


def _decode(axis: Axis, stored: Any) -> Any:
    if axis.bounds is None:
        return next(value for value in axis.values if encode(value) == stored)
    return stored if axis.is_whole else float(f"{stored:.6g}")
