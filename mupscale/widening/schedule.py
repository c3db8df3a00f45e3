"""Learning-rate schedules across an upscale: they keep their position, and use the rates of the new groups."""

from typing import Any

from mupscale.widening.rules import Group


def continue_schedule(old: Any, new: Any) -> None:
    """Moves `new`, a scheduler over the wide optimizer, to the position of `old`."""
    state = old.state_dict()
    rescale_schedule_state(state, new.optimizer.param_groups)
    new.load_state_dict(state)


def rescale_schedule_state(state: dict[str, Any], groups: list[Group]) -> None:
    """Replaces, in a scheduler's state_dict, what is kept per parameter group; recurses into schedules of schedules."""
    per_group = {
        "base_lrs": [group.get("initial_lr", group["lr"]) for group in groups],
        "_last_lr": [group["lr"] for group in groups],
        "min_lrs": [0.0] * len(groups),  # absolute rates are refused, so these are all zero
        "lr_lambdas": [None] * len(groups),
    }
    state.update({key: value for key, value in per_group.items() if key in state})
    for part in state.get("_schedulers", ()):
        rescale_schedule_state(part, groups)
