"""Which parts of the configuration may change when a run continues from a checkpoint."""

import warnings
from typing import Any

from mupscale.commands.config import Config, brief, class_name, differences
from mupscale.errors import UserError

FREE = (
    "trainer.",
    "checkpoint.",
    "loop.",
    "stop_on_nan",
    "ckpt_path",
    "weights_only",
    "callback_args",
    "model.init_args.compile",
)
"""Keys that may change in a continued run; for `trainer.callbacks` see the rules below."""

FREE_DATA = ("data_dir", "resident", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers")
"""Arguments of data modules that determine where samples are and how they are read, but not which samples."""

WORKERS = ("num_workers", "persistent_workers")
"""Those of them on which the random numbers in the processes of a DataLoader depend."""

PLACE = ("trainer.logger", "trainer.default_root_dir", "checkpoint.dirpath")
"""Keys that determine the folder of a run; `resume` continues in the same folder."""

SUMMARY = (
    "These may change: trainer.*, checkpoint.*, loop.*, stop_on_nan, model.compile, data.data_dir, upscales after the "
    "checkpoint, additional callbacks"
)


def refuse_changes(saved: Any, config: Config, step: int, *, same_place: bool) -> None:
    """Raises a UserError if a configuration differs from that of a checkpoint of `step` in what must not change."""
    try:
        found = differences(saved, _of_then(saved, config))
        callbacks = _callbacks(saved)
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError("the configuration in the checkpoint is damaged; use another checkpoint") from error
    for key, there, here in found:
        if key.startswith("trainer.callbacks") or _is_one_class(key, there, here):
            continue
        is_place = key.startswith(PLACE)
        free = key.startswith(FREE) or (key.startswith("data.init_args.") and key.rpartition(".")[2] in FREE_DATA)
        if (same_place and is_place) or not free:
            rule = (
                "A continued run stays in its folder" if is_place else "A continued run keeps what its checkpoint holds"
            )
            raise UserError(
                f"{key.replace('.init_args.', '.')} is {brief(there)} in the run and {brief(here)} here. {rule}. "
                f"{SUMMARY}. To change anything else, start a new run from the weights: --model.init_from CHECKPOINT"
            )
        if key.startswith("data.init_args.") and key.rpartition(".")[2] in WORKERS:
            warnings.warn(
                f"{key.replace('.init_args.', '.')} is {brief(there)} in the run and {brief(here)} here: random "
                "numbers that a data set draws in worker processes, for augmentation say, will be others from here on",
                stacklevel=2,
            )
    _refuse_callbacks(callbacks, _callbacks(config), step)


def _of_then(there: Any, here: Any) -> Any:
    """The values `here` of the keys in `there`, because a later version may have more keys."""
    if isinstance(there, dict) and isinstance(here, dict):
        return {key: _of_then(value, here.get(key)) for key, value in there.items()}
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        return [_of_then(a, b) for a, b in zip(there, here, strict=True)]
    return here


def _refuse_callbacks(there: list[Config], here: list[Config], step: int) -> None:
    """Those of the run must be there, in their order, but for upscales to come; and no upscale that is too late."""
    wanted = [callback for callback in there if not _is_to_come(callback, step)]
    given = [callback for callback in here if not _is_to_come(callback, step)]
    for callback in given:
        if wanted and _are_same(wanted[0], callback):
            wanted.pop(0)
        elif class_name(callback) == "UpscaleCallback":
            raise UserError(
                f"trainer.callbacks: {brief(callback)} comes too late, the run is at step {step} and was without it. "
                "Upscales that are still to come may change"
            )
    if wanted:
        raise UserError(
            f"trainer.callbacks: the run has {brief(wanted[0])}, which is missing here, or has other arguments. A "
            f"continued run keeps it, because its state is in the checkpoint. {SUMMARY}"
        )


def _callbacks(config: Config) -> list[Config]:
    given = config["trainer"]["callbacks"] or []
    answer = given if isinstance(given, list) else [given]
    if not all(isinstance(callback, dict) and "class_path" in callback for callback in answer):
        raise TypeError("trainer.callbacks is not a list of classes")
    return answer


def _is_to_come(callback: Config, step: int) -> bool:
    at_step = callback.get("init_args", {}).get("at_step")
    return class_name(callback) == "UpscaleCallback" and isinstance(at_step, int) and at_step >= step


def _are_same(there: Config, here: Config) -> bool:
    """Whether two callbacks have one class, and the same values of the arguments that there were then.

    The folder of a callback's checkpoints may be another one, as `checkpoint.dirpath` may.
    """
    then, now = there.get("init_args", {}), here.get("init_args", {})
    then = {key: value for key, value in then.items() if key != "dirpath"}
    return class_name(there) == class_name(here) and not differences(then, _of_then(then, now))


def _is_one_class(key: str, there: Any, here: Any) -> bool:
    """Whether two names are of one class, by its short name: the module of a user's class may go by two."""
    return key.endswith(".class_path") and str(there).rpartition(".")[2] == str(here).rpartition(".")[2]
