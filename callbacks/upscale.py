"""The callback by which a module grows in the middle of a run: its arguments, and when Lightning calls it.

All of its kind in a run share a `GrowthSchedule` (growth_schedule.py), which checks the growths and makes them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mupscale.callbacks.growth_schedule import GrowthSchedule
from mupscale.callbacks.swap import refuse_callbacks
from mupscale.errors import UserError, is_finite_number, prefix_errors, refuse_unless_whole, shown
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.noise import KINDS, Constants, Noise, NoiseOrAuto
from mupscale.models._lightning import callbacks_in, callbacks_of, hands_weights_back, is_trial_run
from mupscale.models.base import refuse_bad_width
from mupscale.models.checkpoint import CHECKPOINT_KEY, Layers, Size, Width, growth_metadata
from mupscale.models.checkpoint_files import files_of
from mupscale.models.twin import SIZES, TwinSpec
from mupscale.widening.hints import Hints
from mupscale.widening.layers import How, refuse_unknown_depth
from mupscale.widening.records import StateRule, check_state_rule


class UpscaleCallback(Callback):
    """Makes a module, with its optimizer state, wider or deeper at a given step of a run; several do so several times.

    Any LightningModule grows by the arguments of its constructor, which it keeps by `save_hyperparameters`:

        UpscaleCallback(at_step=300, hparams={"hidden": 512})

    `width=256` is short for `hparams={"width": 256}`, and `layers=8` for `hparams={"layers": 8}`. `fit` trains the same
    object before and after; its submodules are replaced by those of a twin, a second module with these arguments. Its
    optimizers and schedules continue, with rates rescaled by Table 1.

    It grows just before the first batch after `at_step` optimizer steps. So a checkpoint of that step is still
    narrow, and a run that resumes from it grows again. A network that already has the target size stays as it is.
    Before it grows, the plan and the noise are validated, and `pre-upscale-<step>.ckpt` is written next to the run's
    checkpoints, unless the run was resumed from a checkpoint of the same step.

    Whether the growth is exact is checked twice: before the first batch of the run, so that a wrong model fails at
    once; and at the growth, by the loss of a batch before noise is added. The first check takes a real training step in
    float64, narrow and wide, by Lightning's loops, and compares all weights and state; where the layout of a layer was
    guessed wrongly, a search by the losses of `training_step` finds the right one. Of a large module it compares small
    ones of the same factor. New layers add nothing in this comparison.

    Its saved state is a record of the growth, for the summary, and what the search found.
    """

    def __init__(
        self,
        at_step: int,
        width: Width | None = None,
        noise: NoiseOrAuto = "auto",
        lr: float | None = None,
        transfer_state: StateRule | None = None,
        restart_schedule: bool = False,
        rewarm_steps: int = 0,
        method: GrowthMethod | None = None,
        hparams: dict[str, Any] | None = None,
        make: Callable[[], LightningModule] | None = None,
        call: Callable[[Any, Any], Any] | None = None,
        layers: Layers | None = None,
        depth: How | dict[str, list[int]] = "identity",
    ) -> None:
        """
        Args:
            at_step: The number of optimizer steps before the growth; with 0 the network grows before the first step.
                Under manual optimization the steps of all optimizers count.
            width: The target width of a module with an argument of this name, larger than the current one. If a norm
                averages over the width, it must be a multiple of the current width.
            noise: Noise that makes copies of a unit different. "auto" is centred noise of 0.3 of each weight's spectral
                norm, or none where no weight sums over copies or reads them linearly. With None training continues
                exactly as before, and the new width is not used.
            lr: The base learning rate after the growth, of a module with one optimizer; by default unchanged.
            transfer_state: What happens to the optimizer state. `carry` moves it; `reset` drops it;
                `reset_new_copies` moves it for the first copy of each unit only. The default depends on `method`; the
                paper's duplication moves it.
            restart_schedule: Restart the learning-rate schedule from its beginning.
            rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
            method: The growth method; by default the paper's duplication.
            hparams: The arguments of the constructor that change, with their new values. "cfg.dim" changes an entry of
                the argument `cfg`.
            make: In the place of `hparams`, a function that returns the wide module.
            call: In the place of the losses of `training_step`, what the check compares: a function of the module and a
                batch that returns what the module computes.
            layers: The target number of layers of a module with an argument of this name.
            depth: How new layers are made. `identity`: they add nothing at first, so the function stays. `interleave`:
                each layer several times in place; `stack`: the whole stack again; `random`: with new initial values.
                Or the source of each layer, by the name of its list: `{blocks: [0, 0, 1, 1]}`.
        """
        refuse_unless_whole("UpscaleCallback.at_step", at_step, least=0)
        if hparams is not None and not isinstance(hparams, Mapping):
            raise UserError(
                "UpscaleCallback.hparams must be the arguments that change, with their values, such as "
                f'{{"hidden": 256}}; got {shown(hparams)}'
            )
        for key, number in (("width", width), ("layers", layers)):
            if number is not None:
                refuse_bad_width(f"UpscaleCallback.{key}", number)
        size = {key: number for key, number in (("width", width), ("layers", layers)) if number is not None}
        targets = {"width or layers": size or None, "hparams": hparams or None, "make": make}
        if sum(target is not None for target in targets.values()) != 1:
            raise UserError(
                "UpscaleCallback needs one of width or layers (arguments of the module with these names), hparams (its "
                f"arguments that change) and make (a function that returns the wide module); got {targets}"
            )
        with prefix_errors("UpscaleCallback"):
            refuse_unknown_depth(depth)
        if layers is None and width is not None and depth != "identity":
            raise UserError(f"UpscaleCallback.depth = {depth} needs layers, the target number of layers")
        if lr is not None and not (is_finite_number(lr) and lr > 0):
            raise UserError(f"UpscaleCallback.lr must be positive and finite, got {lr}")
        if noise != "auto" and not isinstance(noise, Noise | None):
            raise UserError(f"UpscaleCallback.{KINDS}; got {noise!r}")
        self.method = Duplication() if method is None else method
        if not isinstance(self.method, GrowthMethod):
            raise UserError(
                f"UpscaleCallback.method must be a growth method, such as mupscale.methods.Net2Net; got {method!r}"
            )
        if isinstance(noise, Noise) and self.method.noise is not None:
            raise UserError(
                f"UpscaleCallback.noise: {type(self.method).__name__} has noise of its own. Give none, or use another "
                "method"
            )
        state_rule = self.method.state if transfer_state is None else transfer_state
        with prefix_errors("UpscaleCallback.transfer_state"):
            check_state_rule(state_rule, rewarm_steps)
        self.at_step = at_step
        self.recipe = TwinSpec(None if make is not None else {**(hparams or {}), **size}, make)
        self.width, self.layers = ((self.recipe.hparams or {}).get(key) for key in SIZES)
        self.call, self.depth, self.noise, self.lr = call, depth, noise, lr
        self.state_rule, self.rewarm_steps, self.restart_schedule = state_rule, rewarm_steps, restart_schedule
        self.is_done = False
        self.hints: Hints | None = None
        """How parameters grow, as the check found it."""
        self.nonlinear: list[str] = []
        """Weights that noise="auto" leaves out, as the check found them."""
        self.chosen_noise: Noise | None = None
        """What is added: `noise`, or what "auto" means for this module."""
        self.summary: dict[str, Any] = {}
        self.constants: Constants = {}
        """The constants of the noise that was added."""
        self.schedule: GrowthSchedule | None = None
        """All growths of the run; the first of its callbacks holds it."""

    def state_dict(self) -> dict[str, Any]:
        if self.hints is None:
            return self.summary
        return {
            **self.summary,
            "nonlinear": self.nonlinear,
            "hints": json.dumps({each.name: getattr(self.hints, each.name) for each in fields(Hints)}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.summary = {key: value for key, value in state_dict.items() if key not in ("hints", "nonlinear")}
        self.nonlinear = list(state_dict.get("nonlinear", []))
        self.is_done = "step" in state_dict
        if "hints" in state_dict:
            known = json.loads(state_dict["hints"])
            blocks = {
                name: {int(axis): row for axis, row in axes.items()} for name, axes in known.pop("blocks").items()
            }
            self.hints = Hints(blocks=blocks, **known)

    @property
    def state_key(self) -> str:
        return f"UpscaleCallback[at_step={self.at_step},{self.recipe}]"

    @property
    def target(self) -> str:
        return self.recipe.target

    def size_after(self, before: Size) -> Size:
        """The size of a model with arguments `width` and `layers` after this growth."""
        width = before.width if self.width is None else self.width
        return Size(width, before.layers if self.layers is None else self.layers)

    def is_due(self, trainer: Trainer) -> bool:
        return trainer.global_step >= self.at_step and not self.is_done

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses, before training, what cannot work."""
        swaps = swaps_of(trainer)
        if stage == "fit":
            self._refuse_fit(trainer, swaps)
        if self is swaps[0]:
            self.schedule = GrowthSchedule(trainer, pl_module, swaps)
            self.schedule.prepare(stage)

    def _refuse_fit(self, trainer: Trainer, swaps: Sequence["UpscaleCallback"]) -> None:
        if hands_weights_back(trainer):
            raise UserError(
                "UpscaleCallback does not work with ddp_spawn, ddp_fork and ddp_notebook: they load the grown weights "
                'into the module of the parent process, which has not grown. Use strategy="ddp"'
            )
        self.refuse_step(trainer)
        refuse_schedule(swaps)
        refuse_callbacks(callbacks_of(trainer))
        if self.method.needs_batches and trainer.strategy.restore_checkpoint_after_setup:
            raise UserError(
                f"UpscaleCallback.method: {type(self.method).__name__} cannot learn on sharded weights. Use another "
                "method, or train with DDP or on one device"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.schedule is not None:
            self.schedule.start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.schedule is not None:
            self.schedule.regroup()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # the names of the parameters of each optimizer, by which its groups are found again
        checkpoint.setdefault(CHECKPOINT_KEY, growth_metadata(pl_module, None, trainer.optimizers))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.schedule is not None and trainer.state.fn == "fit":
            self.schedule.read(checkpoint)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.schedule is not None:
            self.schedule.before_batch(batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.schedule is not None:
            self.schedule.after_batch(batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.schedule is not None:
            self.schedule.end()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        files_of(trainer).go_on()  # it may take long, and the growth comes after it

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.schedule is not None:
            self.schedule.end_ahead()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.schedule is not None:
            self.schedule.end_ahead()
            self.schedule = None

    # --- what can be refused without a run

    def refuse_step(self, trainer: Trainer) -> None:
        if 0 < trainer.max_steps <= self.at_step and not is_trial_run(trainer):
            raise UserError(
                f"UpscaleCallback.at_step = {self.at_step} is never reached: trainer.max_steps = {trainer.max_steps}"
            )


def swaps_of(trainer: Trainer) -> list[UpscaleCallback]:
    return sorted(callbacks_in(trainer, UpscaleCallback), key=lambda callback: callback.at_step)


def refuse_schedule(swaps: Sequence[UpscaleCallback]) -> None:
    """Raises a UserError for two growths at one step, or for an invalid level of noise."""
    targets: dict[int, str] = {}
    for swap in swaps:
        if swap.at_step in targets:
            first = targets[swap.at_step]
            what = f"to {first}, twice" if first == swap.target else f"to {first} and to {swap.target}"
            raise UserError(f"UpscaleCallback.at_step = {swap.at_step}: two growths {what}. Keep one of them")
        targets[swap.at_step] = swap.target
        if isinstance(swap.noise, Noise):
            with prefix_errors("UpscaleCallback.noise", ValueError):
                swap.noise.check_level()
