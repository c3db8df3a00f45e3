"""The callback that upscales in the middle of a run: when it does, and what it refuses, saves and logs.

The swap itself is in `swap.py`.
"""

import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.strides import Strides
from mupscale.callbacks.swap import (
    Measured,
    RefusedSwap,
    Swap,
    keep_units_of_own_optimizers,
    measure_loss,
    refuse_callbacks,
    refuse_many_loaders,
    refuse_shared_rates,
)
from mupscale.callbacks.tensorboard import tag_in
from mupscale.checks.recording import generators_kept
from mupscale.device_memory import physical_memory, unreserved_bytes
from mupscale.errors import UserError, is_finite_number, prefix_errors, refuse_unless_whole, shown
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.noise import Constants, Noise
from mupscale.models import growth_check
from mupscale.models._lightning import callbacks_in, callbacks_of, hands_weights_back, is_trial_run, set_callbacks
from mupscale.models.base import (
    Growable,
    has_own_optimizers,
    hint_of_parameters_outside,
    parameters_outside,
    refuse_bad_width,
)
from mupscale.models.checkpoint import CHECKPOINT_KEY, PRE_UPSCALE, Layers, Size, Width, our_part
from mupscale.models.checkpoint_files import files_of, write_whole_files
from mupscale.text_tables import notes_by_layer
from mupscale.widening.hints import Hints
from mupscale.widening.layers import How, refuse_unknown_depth
from mupscale.widening.plan_text import Plan
from mupscale.widening.stepping import StateRule, check_own_count, check_state_rule


class UpscaleCallback(Swap, Strides):
    """Makes a module, with its optimizer state, wider or deeper at a given step of a run; several do so several times.

    Any LightningModule grows by the arguments of its constructor, which it keeps by `save_hyperparameters`:

        UpscaleCallback(at_step=300, hparams={"hidden": 512})

    `fit` trains the same object before and after; its submodules are replaced by wide ones. Its optimizers and
    schedules continue, with rates rescaled by Table 1. A `Growable` module grows by `width`, by `layers`, or by both.

    The swap happens just before the first batch after `at_step` optimizer steps. So a checkpoint of that step is still
    narrow, and a run that resumes from it repeats the swap. A network that already has the target size stays as it is.
    Before the swap, the plan and the noise are validated, and `pre-upscale-<step>.ckpt` is written next to the run's
    checkpoints, unless the run was resumed from a checkpoint of the same step.

    Whether the growth is exact is checked twice: at the first batch of the run, in float64, so that a wrong model fails
    at once; and at the swap, by the loss of a batch before noise is added. The first check compares the losses of
    `training_step`, or under manual optimization those given to `self.manual_backward`, and all gradients; where the
    layout of a layer was guessed wrongly, it searches for the right one. Of a Growable it compares small networks of
    the same factor, with new layers that add nothing.

    Its saved state is a record of the swap, for the summary, and what the search found.
    """

    def __init__(
        self,
        at_step: int,
        width: Width | None = None,
        noise: Noise | None = None,
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
            at_step: The number of optimizer steps before the swap; with 0 the network grows before the first step.
                Under manual optimization the steps of all optimizers count.
            width: The target width of a Growable module, larger than the current one. If a norm averages over the
                width, it must be a multiple of the current width.
            noise: Noise that breaks the symmetry of copies. Without it, training continues exactly as before.
            lr: The base learning rate after the swap, of a module with one optimizer; by default unchanged.
            transfer_state: What happens to the optimizer state. `carry` moves it; `reset` drops it;
                `reset_new_copies` moves it for the first copy of each unit only. The default depends on `method`; the
                paper's duplication moves it.
            restart_schedule: Restart the learning-rate schedule from its beginning.
            rewarm_steps: With `reset_new_copies`, the steps over which the learning rate of new copies rises.
            method: The growth method; by default the paper's duplication.
            hparams: Of any other module, the arguments of its constructor that change, with their new values.
            make: In the place of `hparams`, a function that returns the wide module.
            call: In the place of the losses of `training_step`, what the check compares: a function of the module and a
                batch that returns what the module computes.
            layers: The target number of layers of a Growable module, larger than the current one.
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
        size = None if width is None and layers is None else {"width": width, "layers": layers}
        targets = {"width or layers": size, "hparams": hparams or None, "make": make}
        if sum(target is not None for target in targets.values()) != 1:
            raise UserError(
                "UpscaleCallback needs one of width or layers (of a Growable), hparams (the arguments of the module "
                f"that change) and make (a function that returns the wide module); got {targets}"
            )
        for key, number in (("width", width), ("layers", layers)):
            if number is not None:
                refuse_bad_width(f"UpscaleCallback.{key}", number)
        with prefix_errors("UpscaleCallback"):
            refuse_unknown_depth(depth)
        if layers is None and width is not None and depth != "identity":
            raise UserError(f"UpscaleCallback.depth = {depth} needs layers, the target number of layers")
        if call is not None and size is not None:
            raise UserError("UpscaleCallback.call is for modules that grow by hparams or make; leave it out")
        if lr is not None and not (is_finite_number(lr) and lr > 0):
            raise UserError(f"UpscaleCallback.lr must be positive and finite, got {lr}")
        if noise is not None and not isinstance(noise, Noise):
            raise UserError(
                "UpscaleCallback.noise must be AdditiveNoise(std), SignalNoise(t) or RecordedNoise(path), got "
                f"{noise!r}"
            )
        self.method = Duplication() if method is None else method
        if not isinstance(self.method, GrowthMethod):
            raise UserError(
                f"UpscaleCallback.method must be a growth method, such as mupscale.methods.Net2Net; got {method!r}"
            )
        if noise is not None and self.method.noise is not None:
            raise UserError(
                f"UpscaleCallback.noise: {type(self.method).__name__} has noise of its own. Give none, or use another "
                "method"
            )
        state_rule = self.method.state if transfer_state is None else transfer_state
        with prefix_errors("UpscaleCallback.transfer_state"):
            check_state_rule(state_rule, rewarm_steps)
        self.at_step = at_step
        self.width = width
        self.layers = layers
        self.depth = depth
        self.ordinary = None
        if size is None:
            from mupscale.callbacks.ordinary import OrdinaryGrowth
            from mupscale.models.ordinary import Recipe

            self.ordinary = OrdinaryGrowth(Recipe(hparams, make), call, depth)
        self.noise = noise
        self.lr = lr
        self.state_rule = state_rule
        self.rewarm_steps = rewarm_steps
        self.restart_schedule = restart_schedule
        self.checkpoint: Path | None = None
        self.summary: dict[str, Any] = {}
        self.residual: dict[str, float] = {}
        """What makes new layers of a Growable add nothing, where their classes do not declare it."""
        self.constants: Constants = {}
        """Of the noise that was added."""
        self._needs_check = self._keeps_function = self._is_before_first_step = False
        self._optimizers_in_checkpoint: tuple[Any, Any] | None = None
        self._factor = math.inf
        """How many times as many parameters there are after the swap, where it is known before."""
        self.ahead: subprocess.Popen[bytes] | None = None
        """Compiles the wide network until the swap."""

    def state_dict(self) -> dict[str, Any]:
        return {**self.summary, **(self.ordinary.state_dict() if self.ordinary is not None else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.summary = {key: value for key, value in state_dict.items() if key != "hints"}
        if self.ordinary is not None:
            self.ordinary.load_state_dict(state_dict)

    @property
    def state_key(self) -> str:
        target: Any = self.ordinary.recipe if self.ordinary is not None else ",".join(self._goals("="))
        return f"UpscaleCallback[at_step={self.at_step},{target}]"

    def _goals(self, between: str) -> list[str]:
        goals = (("width", self.width), ("layers", self.layers))
        return [f"{key}{between}{number}" for key, number in goals if number is not None]

    @property
    def _goal(self) -> str:
        """The options that say what a Growable grows to, for messages."""
        return " and ".join(f"UpscaleCallback.{goal}" for goal in self._goals(" = "))

    @property
    def target(self) -> str:
        if self.ordinary is None:
            return " and ".join(self._goals(" "))
        changed = self.ordinary.recipe.hparams
        return "what `make` returns" if changed is None else ", ".join(f"{key}={changed[key]}" for key in changed)

    # --- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses, before training, what cannot work."""
        if self.ordinary is not None and not isinstance(pl_module, Growable):
            self.ordinary.load_growths(trainer, pl_module, lambda checkpoint: _grown_in(checkpoint, trainer))
        if stage != "fit":
            return
        name = type(pl_module).__name__
        if self.ordinary is None and not isinstance(pl_module, Growable):
            key = "layers" if self.width is None else "width"
            raise UserError(
                f"UpscaleCallback.{key} needs a Growable module, and {name} is none. Name the arguments of {name} that "
                f"change, UpscaleCallback(at_step={self.at_step}, hparams={{...}}), or give make=, a function that "
                "returns the wide module"
            )
        if self.ordinary is not None and isinstance(pl_module, Growable):
            raise UserError(f"UpscaleCallback: {name} is a Growable module, which grows by width or layers. Give these")
        if hands_weights_back(trainer):
            raise UserError(
                "UpscaleCallback does not work with ddp_spawn, ddp_fork and ddp_notebook: they load the grown weights "
                'into the module of the parent process, which has not grown. Use strategy="ddp"'
            )
        self.refuse_step(trainer)
        refuse_schedule(swaps_of(trainer))
        write_whole_files(trainer)
        refuse_callbacks(callbacks_of(trainer))
        self.checkpoint = None
        self._needs_check = False
        # what it saves before a swap must hold what the other callbacks (EMA, curves) did after the step
        order = lambda c: (isinstance(c, Checkpoint), isinstance(c, UpscaleCallback))  # noqa: E731
        set_callbacks(trainer, sorted(callbacks_of(trainer), key=order))
        if self.ordinary is not None:
            if self.method.needs_batches:
                raise UserError(
                    f"UpscaleCallback.method: {type(self.method).__name__} learns from batches, which needs a Growable "
                    "module. Use another method"
                )
            if self.restart_schedule:
                raise UserError("UpscaleCallback.restart_schedule needs a Growable module. Leave it out")
            self.ordinary.setup(trainer, pl_module)
            self._needs_check = True
            return
        assert isinstance(pl_module, Growable)
        before = self._size_before(trainer, pl_module)
        self._refuse_fixed_depth(pl_module)
        if not is_smaller(before, self.size_after(before)):
            return  # right for a run that is resumed after the swap; whether it is one is not known yet
        growth = self.planned(pl_module, before)
        weights, wide_weights = _count_weights(growth)
        self._factor = wide_weights / weights
        with generators_kept([]):
            narrow = pl_module.network(*before, meta=True)
        self._keeps_function = self.method.claim(growth, narrow, ()).function  # others change it anyway
        self._needs_check = self._keeps_function or bool(growth.layers)
        if self.method.needs_batches and pl_module.device_mesh is not None:
            raise UserError(
                f"UpscaleCallback.method: {type(self.method).__name__} cannot learn on sharded weights. Use another "
                "method, or train with DDP or on one device"
            )
        if pl_module.device_mesh is None:  # sharded, it may fit
            self._refuse_too_wide(growth, trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_before_first_step = True
        steps = trainer.estimated_stepping_batches
        if 0 < steps <= self.at_step and not is_trial_run(trainer):
            raise UserError(f"UpscaleCallback.at_step = {self.at_step} is never reached: the run has {steps} steps")
        for optimizer in trainer.optimizers:
            if self.state_rule == "reset_new_copies":
                check_own_count(optimizer)
        if isinstance(pl_module, Growable):
            self._start_growable(trainer, pl_module)
        elif self.ordinary is not None:
            self.ordinary.start(trainer, pl_module, self._earlier(trainer))
            if not self.ordinary.is_done:
                self.refuse_one_rate(trainer, pl_module)
        if self.is_due(trainer, pl_module):
            self.checkpoint = Path(trainer.ckpt_path) if trainer.ckpt_path else self._saved(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.ordinary is not None and self.ordinary.is_done and self._optimizers_in_checkpoint is not None:
            self.ordinary.regroup(trainer, pl_module, *self._optimizers_in_checkpoint)
            for other in swaps_of(trainer):
                other._optimizers_in_checkpoint = None  # one of them has done it

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.ordinary is not None:
            # the names of the parameters of each optimizer, by which its groups are found again
            checkpoint.setdefault(CHECKPOINT_KEY, our_part(pl_module, None, trainer.optimizers))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        ours = checkpoint.get(CHECKPOINT_KEY)
        if self.ordinary is not None and ours is not None and trainer.state.fn == "fit":
            self._optimizers_in_checkpoint = ours["optimizer_names"], checkpoint["optimizer_states"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_before_first_step:  # until now: the run has taken the memory that it needs
            self._is_before_first_step = False
            files_of(trainer).go_on()
            self._begin_ahead(trainer, pl_module, batch)
        if self.is_due(trainer, pl_module) and self.checkpoint is None:
            # here loops and data can be resumed exactly; in the middle of a step they cannot
            self.checkpoint = self._saved(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._needs_check:
            self._needs_check = False
            if isinstance(pl_module, Growable):
                self._check_growth(trainer, pl_module, batch)
            elif self.ordinary is not None and not self.ordinary.is_done:
                earlier = self._earlier(trainer)
                self.ordinary.check(trainer, pl_module, batch, batch_idx, earlier, self.method, self.noise)
        elif self.ordinary is not None and self.ordinary.weights_outside is not None:
            self.ordinary.weights_outside.refuse_updates(pl_module)
        if self.is_due(trainer, pl_module):
            self._end_ahead()
            try:
                self._swap(trainer, pl_module, batch)
            except Exception as error:
                hint = None
                if isinstance(pl_module, Growable):
                    is_of_shapes = type(error) is RuntimeError and not self._is_to_come(pl_module)
                    hint = hint_of_parameters_outside(pl_module) if is_of_shapes else None
                    # it may be neither narrow nor wide: Lightning would fail on it before it reports this error
                    pl_module.net = None
                kind = RefusedSwap if isinstance(error, RefusedSwap) else RuntimeError
                files_of(trainer).wait()
                is_saved = self.checkpoint is not None and self.checkpoint.exists()
                raise kind(
                    f"upscaling to {self.target} at step {trainer.global_step} failed "
                    f"({type(error).__name__}: {error}). {f'{hint}. ' if hint else ''}The run before the upscale "
                    f"{f'is saved in {self.checkpoint}' if is_saved else 'was not saved'}"
                ) from error
            for swap in swaps_of(trainer):
                swap._is_before_first_step = True

    def on_steps(self, trainer: Trainer, pl_module: LightningModule, batch: Any, losses: Sequence[float]) -> None:
        files_of(trainer).go_on()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        files_of(trainer).go_on()  # it may take long, and the swap comes after it

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end_ahead()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_ahead()

    def free_steps(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """All steps before the one that ends with a checkpoint; after the swap, all steps."""
        is_to_come = self._is_to_come(pl_module)
        if is_to_come and self._needs_check:
            return 0
        return max(0, self.at_step - 1 - trainer.global_step) if is_to_come else math.inf

    def is_due(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        return trainer.global_step >= self.at_step and self._is_to_come(pl_module)

    def _is_to_come(self, module: LightningModule) -> bool:
        if self.ordinary is not None:
            return not self.ordinary.is_done
        assert isinstance(module, Growable)
        return is_smaller(module.size, self.size_after(module.size))

    def _begin_ahead(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        if not isinstance(module, Growable) or not pays_ahead(trainer, module):
            return
        coming = [swap for swap in swaps_of(trainer) if swap._is_to_come(module)]
        if coming[:1] == [self] and not self.is_due(trainer, module):
            from mupscale.callbacks.compile_ahead import start_compiling  # most runs do not

            self.ahead = start_compiling(trainer, module, self.size_after(module.size), batch)

    def _end_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.kill()
            self.ahead.wait()
            self.ahead = None

    def _start_growable(self, trainer: Trainer, module: Growable) -> None:
        """Refuses, at the start of the training, what cannot work with a Growable."""
        before = self._size_before(trainer, module)
        if trainer.ckpt_path is None:
            self.refuse_smaller(before)
        if self.method.needs_batches:
            refuse_many_loaders(f"UpscaleCallback.method = {type(self.method).__name__}", trainer)
        keep_units_of_own_optimizers(trainer, module)
        if is_smaller(before, self.size_after(before)):
            self.refuse_one_rate(trainer, module)
            _refuse_parameters_outside(trainer, module)
            if has_own_optimizers(module) and trainer.lr_scheduler_configs:
                assert module.net is not None
                schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
                refuse_shared_rates(module, module.net, schedulers, self.planned(module, before), self.method.mup_rates)

    def _earlier(self, trainer: Trainer) -> list[Any]:
        """The growths before this one that are still to come, in their order."""
        before = (c.ordinary for c in swaps_of(trainer) if c.at_step < self.at_step)
        return [growth for growth in before if growth is not None and not growth.is_done]

    # --- what can be refused without a run

    def refuse_step(self, trainer: Trainer) -> None:
        if 0 < trainer.max_steps <= self.at_step and not is_trial_run(trainer):
            raise UserError(
                f"UpscaleCallback.at_step = {self.at_step} is never reached: trainer.max_steps = {trainer.max_steps}"
            )

    def refuse_smaller(self, before: Size) -> None:
        """Raises a UserError if the target is narrower than the width before it, or has fewer layers."""
        after = self.size_after(before)
        if not is_narrower(before.width, after.width) and before.width != after.width:
            raise UserError(
                f"UpscaleCallback.width = {self.width} is not wider than the width before it, {before.width}"
            )
        if before.layers is None or after.layers is None or before.layers == after.layers:
            return
        if not is_narrower(before.layers, after.layers):
            raise UserError(
                f"UpscaleCallback.layers = {self.layers} are not more layers than before it, {before.layers}"
            )

    def refuse_one_rate(self, trainer: Trainer, module: LightningModule) -> None:
        if self.lr is not None and len(trainer.optimizers) > 1:
            raise UserError(
                f"UpscaleCallback.lr = {self.lr}: {type(module).__name__} has {len(trainer.optimizers)} optimizers, "
                "which would all get this rate. Leave it out, and change their rates by schedules, such as LambdaLR"
            )

    def planned(self, module: Growable, before: Size) -> Plan:
        """The plan of the swap. Raises a UserError if the size before it, or the noise, does not fit."""
        self._refuse_fixed_depth(module)
        there = f"the width before it, {before.width}" if self.layers is None else f"the {before} before it"
        refusals = prefix_errors(f"{self._goal} does not fit {there}", ValueError)
        with refusals, generators_kept([]):  # building a network must not move the run's random numbers
            narrow, wide = (module.network(*size, meta=True) for size in (before, self.size_after(before)))
            residual = growth_check.pending_residual(narrow, wide, self.depth, self.residual)
            depth = growth_check.depth_between(narrow, wide, self.depth)
            growth = self.method.plan(narrow, wide, Hints(depth=depth, residual=residual))
        with prefix_errors("UpscaleCallback.noise", ValueError):
            self.method.choose_noise(self.noise, growth, narrow)
        return growth

    # --- what is refused in a run

    def _refuse_fixed_depth(self, module: Growable) -> None:
        if self.layers is not None and module.size.layers is None:
            why = "has a fixed number of layers: define build(self, width, layers)"
            if module.builds_layers:
                why = "has no residual blocks: give model.layers"
            raise UserError(f"UpscaleCallback.layers = {self.layers}: {type(module).__name__} {why}")

    def _refuse_too_wide(self, growth: Plan, device: torch.device) -> None:
        _, weights = _count_weights(growth)
        on_gpu = device.type == "cuda"
        memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else physical_memory()
        if 2 * weights > memory:
            raise UserError(
                f"UpscaleCallback.{self._goals(' = ')[0]} gives {weights:,} parameters, which do not fit into the "
                f"{memory / 2**30:.0f} GiB of memory of {device}; choose a smaller one"
            )

    def _size_before(self, trainer: Trainer, module: Growable) -> Size:
        """The size this swap will start from: the model's, or that of the swap before it."""
        return size_after_all(module.size, (c for c in swaps_of(trainer) if c.at_step < self.at_step))

    def undeclared(self, module: Growable, before: Size) -> list[str]:
        """The lists of layers of which only a batch shows what makes new ones add nothing."""
        with generators_kept([]):
            narrow, wide = (module.network(*size, meta=True) for size in (before, self.size_after(before)))
            return growth_check.undeclared_lists(narrow, wide, self.depth, {})

    def probe(self, module: Growable, before: Size, batch: Any) -> None:
        """Finds what makes new layers add nothing, where their class does not declare it."""
        lists = self.undeclared(module, before)
        try:
            self.residual = growth_check.find_residual_outputs(module, before, lists, batch) if lists else {}
        except UserError as error:
            if self.depth == "identity":
                raise UserError(f"{self._goal}: {error}") from error

    def _check_growth(self, trainer: Trainer, module: Growable, batch: Any) -> None:
        before = self._size_before(trainer, module)
        if not self._is_to_come(module):
            return  # the run was resumed after the swap
        self.probe(module, before, batch)
        if not self._keeps_function:
            return
        found = growth_check.check_growth(module, before, self.size_after(before), batch, self.depth, self.residual)
        growth_check.refuse_inexact(self._goal, before, found)
        if found.exact is None:
            rank_zero_info(f"whether growth from {before} to {self.size_after(before)} is exact was {found}")

    # --- the swap

    def _saved(self, trainer: Trainer) -> Path | None:
        if is_trial_run(trainer):
            return None
        policy = next(iter(callbacks_in(trainer, RunCheckpoint)), None)
        keeper = policy or trainer.checkpoint_callback
        folder = getattr(keeper, "dirpath", None) or trainer.log_dir or trainer.default_root_dir
        path = Path(trainer.strategy.broadcast(str(folder))) / f"{PRE_UPSCALE}{trainer.global_step}.ckpt"
        if policy is not None:
            path = policy.free_path(path, trainer)
        files = files_of(trainer)
        if self._leaves_room(trainer.strategy.root_device):
            files.hold()  # until the first wide step is launched: writing would make the pause longer
        with files.deferring():
            trainer.save_checkpoint(path, weights_only=False)
        return path

    def _leaves_room(self, device: torch.device) -> bool:
        """Whether the copy that is written later may stay on a GPU: if all that is there now could grow beside it."""
        return device.type != "cuda" or self._factor * torch.cuda.memory_reserved(device) <= unreserved_bytes(device)

    def _swap(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        start = time.perf_counter()
        measure = partial(measure_loss, trainer, module, self._loss(trainer, module, batch))
        before, narrow_size = measure(), self.size_of(module)

        def compare() -> None:
            _refuse_jump(before, measure(), trainer, "an upscale before its noise")

        report, keeps_function = self.perform(trainer, module, compare)
        self.constants = report.noise
        after = measure()
        losses = float(before.loss), float(after.loss)  # waits for the device
        if keeps_function:
            _refuse_jump(before, after, trainer, "centred noise" if self.noise else "an upscale without noise")
        self.summary = {
            "step": trainer.global_step,
            "before": narrow_size,
            "after": self.size_of(module),
            "parameters": sum(p.numel() for p in module.parameters()),
            "seconds": time.perf_counter() - start,
            "loss_before": losses[0],
            "loss_after": losses[1],
        }
        self._log(trainer, report.plan)
        notes = list(report.notes)
        if not torch.equal(before.random_state, after.random_state):
            notes.append(
                "the loss draws other random numbers at the new width (dropout, or noise for each unit): training does "
                "not continue exactly"
            )
        if notes:
            rank_zero_info("\n".join(notes_by_layer(notes)))

    def _loss(self, trainer: Trainer, module: LightningModule, batch: Any) -> Callable[[], Tensor]:
        if isinstance(module, Growable):
            return torch.no_grad()(partial(module.loss, batch))
        assert self.ordinary is not None
        return partial(self.ordinary.quiet_step(trainer, batch).total, module)

    def size_of(self, module: LightningModule) -> Any:
        """The present size of a module: its width, or as text the rest, or the hyperparameters that this changes."""
        if isinstance(module, Growable):
            return module.width if self.layers is None else str(module.size)
        if self.ordinary is None or self.ordinary.recipe.hparams is None:
            return f"{sum(p.numel() for p in module.parameters()):,} parameters"
        return ", ".join(f"{name}={module.hparams[name]}" for name in self.ordinary.recipe.hparams)

    def _log(self, trainer: Trainer, growth: Plan) -> None:
        done = self.summary
        values = {f"upscale/{key}": done[key] for key in ("loss_before", "loss_after", "parameters")}
        values["upscale/pause_seconds"] = done["seconds"]
        if self.width is not None:
            values["upscale/width"] = max(self.width) if isinstance(self.width, list) else self.width
        if self.layers is not None:
            values["upscale/layers"] = sum(self.layers) if isinstance(self.layers, list) else self.layers
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is not None:
                add_text(tag_in(logger, "upscale/plan"), f"```\n{growth}\n```", trainer.global_step)
        rank_zero_info(
            f"step {done['step']}: upscaled {growth_text(done)}, {done['parameters']:,} parameters, "
            f"loss {done['loss_before']:.6f} → {done['loss_after']:.6f}, {done['seconds']:.2f} s"
        )


def _count_weights(growth: Plan) -> tuple[int, int]:
    """The parameters of the network before a growth and after it."""
    entries = growth.parameters.values()
    return sum(math.prod(e.narrow_shape) for e in entries), sum(math.prod(e.wide_shape) for e in entries)


def growth_text(summary: dict[str, Any]) -> str:
    noun = "" if isinstance(summary["before"], str) else "width "
    return f"{noun}{summary['before']} → {summary['after']}"


def pays_ahead(trainer: Trainer, module: Growable) -> bool:
    """Whether to compile ahead: a run that is compiled on one GPU, beside which the host has time."""
    is_compiled = module.hparams["compile"] and not module.is_in_stack
    return is_compiled and trainer.world_size == 1 and module.device.type == "cuda"


def swaps_of(trainer: Trainer) -> list[UpscaleCallback]:
    return sorted(callbacks_in(trainer, UpscaleCallback), key=lambda callback: callback.at_step)


def size_after_all(size: Size, swaps: Iterable[UpscaleCallback]) -> Size:
    """What a Growable of this size has become after several upscales."""
    for swap in swaps:
        size = swap.size_after(size)
    return size


def refuse_schedule(swaps: Sequence[UpscaleCallback]) -> None:
    """Raises a UserError for two upscales at one step, or for an invalid level of noise."""
    targets: dict[int, str] = {}
    for swap in swaps:
        if swap.at_step in targets:
            first = targets[swap.at_step]
            what = f"to {first}, twice" if first == swap.target else f"to {first} and to {swap.target}"
            raise UserError(f"UpscaleCallback.at_step = {swap.at_step}: two upscales {what}. Keep one of them")
        targets[swap.at_step] = swap.target
        if swap.noise is not None:
            with prefix_errors("UpscaleCallback.noise", ValueError):
                swap.noise.check_level()


def _grown_in(checkpoint: dict[str, Any], trainer: Trainer) -> list[tuple[Any, bool]]:
    """The growths of a module that is no Growable, in their order, and whether a checkpoint was written after each."""
    states = checkpoint.get("callbacks", {})
    return [(c.ordinary, "step" in states.get(c.state_key, {})) for c in swaps_of(trainer) if c.ordinary is not None]


def _refuse_parameters_outside(trainer: Trainer, module: Growable) -> None:
    outside = {id(parameter): name for name, parameter in parameters_outside(module)}
    for optimizer in trainer.optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) in outside:
                raise UserError(
                    f"{type(module).__name__}.configure_optimizers trains {outside[id(parameter)]!r}, which is not in "
                    "the network, so a growth cannot continue its optimizer. Make it in `build`, as a part of `net`"
                )


def _refuse_jump(before: Measured, after: Measured, trainer: Trainer, growth: str) -> None:
    """Raises a RefusedSwap if a growth has changed the loss; not if the losses draw unlike random numbers.

    With TF32, on by default in convolutions on a GPU, and strong centred noise, losses differ by up to 0.2 %; in half
    precision by more.
    """
    if not torch.equal(before.random_state, after.random_state):
        return
    on_gpu = trainer.strategy.root_device.type == "cuda"
    is_fine = trainer.precision.startswith("64") or (trainer.precision.startswith("32") and not on_gpu)
    then, now = float(before.loss), float(after.loss)
    if abs(now - then) > (1e-3 if is_fine else 5e-2) * max(abs(then), abs(now), 1e-3):
        raise RefusedSwap(
            f"the loss of a batch changed from {then:.6g} to {now:.6g}, but {growth} keeps it: the model is not "
            f"widened exactly. {growth_check.REMEDY}"
        )


def is_smaller(size: Size, target: Size) -> bool:
    """Whether a size has less than the target, in at least one layer or list of layers."""
    if is_narrower(size.width, target.width):
        return True
    return size.layers is not None and target.layers is not None and is_narrower(size.layers, target.layers)


def is_narrower(width: Width, target: Width) -> bool:
    layers = max(len(w) if isinstance(w, list) else 1 for w in (width, target))
    widths, targets = (w if isinstance(w, list) else [w] * layers for w in (width, target))
    return any(a < b for a, b in zip(widths, targets, strict=False))  # of lists of unequal length `plan` tells
