"""Many modules of one class as one LightningModule: they differ in numbers, and one step trains all of them.

The tensors of the modules are views of tensors with a leading axis (`mupscale.stacking`). Every module keeps an
optimizer and a schedule of its own, so that it grows as any other does, and has an ordinary checkpoint in the end.
"""

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.hooks import DataHooks, ModelHooks
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mupscale._torch import step_by_hand, tree_map
from mupscale.cuda_graph import batch_kind
from mupscale.errors import UserError, prefix_errors
from mupscale.growing.upscale import upscale
from mupscale.methods import Duplication, GrowthMethod
from mupscale.methods.grow import UpscaleReport
from mupscale.methods.noise import Constants, NoiseOrAuto
from mupscale.models import checkpoint as checkpoints
from mupscale.models.base import Growable, init_contexts
from mupscale.models.checkpoint import CHECKPOINT_KEY, Layers, Size, Width
from mupscale.models.optimizers import continue_optimizers_
from mupscale.schedules import restart_schedule_
from mupscale.seeds import seeded
from mupscale.stacking.dropout import mixed
from mupscale.stacking.stack import Captured, CapturedStack, MaxNorm, Stack, captured_scores
from mupscale.widening.layers import Depth
from mupscale.widening.plan_text import Plan

STACK_KEY = "mupscale_stack"
"""The key of mupscale's part of the checkpoint of a stack."""

HONOURED = {"configure_model"}
"""The hooks of Lightning that a module of a stack may have of its own."""


@dataclass(frozen=True)
class TrialGrowth:
    """How one module of a stack grows, by the names that `UpscaleCallback` has for it."""

    at_step: int
    width: Width | None = None
    layers: Layers | None = None
    noise: NoiseOrAuto = "auto"
    method: GrowthMethod = field(default_factory=Duplication)
    depth: Depth = "identity"
    lr: float | None = None
    restart_schedule: bool = False

    def size_after(self, size: Size) -> Size:
        layers = size.layers if self.layers is None else self.layers
        return Size(size.width if self.width is None else self.width, layers)


class JointOptimizer(Optimizer):
    """The optimizers and schedules of all trials as one. Lightning calls it; its parameters are the stacked tensors."""

    def __init__(self, stack: Stack, schedules: Sequence[Any]) -> None:
        super().__init__([stack.parameters[name] for name in stack.trained], {})
        self.adopt(stack, schedules)

    def adopt(self, stack: Stack, schedules: Sequence[Any]) -> None:
        """Goes on with another stack: after a growth, a loaded checkpoint, or the end of a trial."""
        self.stack, self.schedules = stack, list(schedules)
        self.param_groups[0]["params"] = [stack.parameters[name] for name in stack.trained]
        for optimizer in stack.optimizers:
            step_by_hand(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes the step of all trials, which is the closure: losses, gradients, clipping and update in one."""
        assert closure is not None
        answer = closure()
        for schedule in self.schedules:
            schedule.step()
        if self.schedules:
            self.stack.optimizer.read_rates()
        return answer

    def state_dict(self) -> dict[str, Any]:
        names = [
            checkpoints.optimizer_names(model, optimizer)
            for model, optimizer in zip(self.stack.models, self.stack.optimizers, strict=True)
        ]
        return {
            "names": names,
            "trials": [optimizer.state_dict() for optimizer in self.stack.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pairs = zip(self.stack.models, self.stack.optimizers, strict=True)
        for (model, optimizer), names, own in zip(pairs, state["names"], state["trials"], strict=True):
            parameters, names = dict(model.named_parameters()), iter(names)
            # a growth may have split groups
            optimizer.param_groups = [
                {**group, "params": [parameters[next(names)] for _ in group["params"]]} for group in own["param_groups"]
            ]
            optimizer.load_state_dict(own)
        for schedule, own in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(own)
        self.adopt(stack_of(self.stack.models, self.stack.optimizers), self.schedules)


class StackedModule(LightningModule):
    """Growable modules of one class and size that train together in one ordinary fit, each with its own numbers.

        trials = [MLP(16, base_width=16, optimizer=lambda p, lr=lr: AdamW(p, lr=lr)) for lr in (0.01, 0.02)]
        module = StackedModule(trials, seeds=[0, 0])
        Trainer(max_steps=100).fit(module, JointData([Covertype(200), Covertype(200)], seeds=[0, 0]))

    They may differ in learning rates, weight decay, betas, eps, noise and seeds. Each ends as it would alone, up to
    rounding. A trial whose weights are no longer finite ends when it would grow, or by `drop`; the others go on.

    Attributes:
        running: The numbers of the trials that are still trained.
        ended: The step after which each of the others ended.
        losses: Those of the last step, of the trials in `running`, on their device.
        scores: What the last validation measured of each trial, by its names.
        growths_done: For each trial a summary of every growth.
        constants: The constants of the noise of the last growth in this process, by trial.
    """

    def __init__(
        self,
        trials: Sequence[Growable],
        seeds: Sequence[int],
        growths: Sequence[Sequence[TrialGrowth]] = (),
        *,
        max_norm: MaxNorm = None,
        cuda_graph: bool = False,
    ) -> None:
        """
        Args:
            trials: The modules, without networks: each is initialised by its seed.
            seeds: One for each trial.
            growths: For each trial its growths, in their order. All trials grow at the same steps to the same sizes.
            max_norm: Clip the gradients of each trial to this width-invariant norm.
            cuda_graph: On a GPU, replay a whole step as one CUDA graph.
        """
        super().__init__()
        for trial in trials:
            reason = why_apart(trial)
            if reason is not None:
                raise UserError(reason)
            trial.is_in_stack = True
        self.save_hyperparameters(dict(trials[0].hparams))  # by which data modules judge whether a model fits them
        self.automatic_optimization = False
        self.trials = nn.ModuleList(trials)  # a checkpoint has the weights of each under its ordinary names
        self._members: list[Any] = list(trials)
        self.seeds, self.max_norm = list(seeds), max_norm
        self.growths = [list(own) for own in growths] or [[] for _ in trials]
        self.cuda_graph = cuda_graph
        self.running = list(range(len(trials)))
        self.ended: dict[int, int] = {}
        self.losses = torch.empty(0)
        self.scores: list[dict[str, float]] = [{} for _ in trials]
        self.growths_done: list[list[dict[str, Any]]] = [[] for _ in trials]
        self.constants: dict[int, Constants] = {}
        self.joint: JointOptimizer
        self._plans: dict[int, Plan] = {}
        self._is_checked = self._draws = False
        self._captured: CapturedStack | None = None
        self._kind: Any = None
        self._evaluations: dict[str, Captured] = {}

    @property
    def stack(self) -> Stack:
        return self.joint.stack

    @property
    def shares_batches(self) -> bool:
        """Whether a training batch is one for all trials."""
        return self._is_shared(self.trainer.train_dataloader)

    @property
    def alive(self) -> list[Any]:
        return [self._members[index] for index in self.running]

    # --- networks and optimizers

    def configure_model(self) -> None:
        for trial, seed in zip(self._members, self.seeds, strict=True):
            if trial.net is None:
                with seeded(seed):
                    trial.configure_model()

    def configure_optimizers(self) -> Any:
        is_new = self.trainer.ckpt_path is None
        made = [self._configured(trial, from_file=is_new) for trial in self.alive]
        optimizers, schedules = [optimizer for optimizer, _ in made], [each for _, each in made if each is not None]
        for index, optimizer in zip(self.running, optimizers, strict=True):
            done = self.growths[index][: len(self.growths_done[index])]
            rates = [growth.lr for growth in done if growth.lr is not None]
            optimizer.defaults["lr"] = [optimizer.defaults["lr"], *rates][-1]  # to which that of a growth is relative
        self._draws = self.alive[0].stacked_losses() is None  # a loss by kernels of its own has no dropout
        self.joint = JointOptimizer(stack_of(self.alive, optimizers), schedules)
        return self.joint

    def _configured(self, trial: Growable, *, from_file: bool) -> tuple[Optimizer, Any]:
        """The optimizer and the schedule of a trial, with what the checkpoint holds that it starts from, if any."""
        path = trial.hparams["init_from"] if from_file else None
        if path is None:
            return optimizer_and_schedule(trial)
        with prefix_errors(f"model.init_from = {path}"):
            assert trial.net is not None
            checkpoint = checkpoints.start_from(path, trial, trial.net)
            optimizer, schedule = optimizer_and_schedule(trial)
            checkpoints.load_optimizer_state(trial, [optimizer], checkpoint)
        return optimizer, schedule

    # --- a step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if not self._is_checked:
            self._check_growths(batch)
            self._is_checked = True
        if self.grows_at(self.global_step):
            self._grow(batch)
        return None if self.running else -1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.step(closure=lambda: self._take_step(batch))

    def _take_step(self, batch: Any) -> Tensor:
        stack, shared = self.stack, self.shares_batches
        batch = self._own(batch, shared)
        if self._draws:
            seeds = torch.tensor([self.seeds[index] for index in self.running])
            stack.seeds.copy_(mixed(seeds, self.global_step))  # of dropout
        options: dict[str, Any] = {
            "shared": shared,
            "max_norm": self.max_norm,
            "context": self.trainer.precision_plugin.train_step_context,
        }
        kind, before = (shared, batch_kind(batch)), self._kind
        self._kind = kind
        with torch.autocast(self.device.type, enabled=False):  # which holds for the losses alone
            if not self.cuda_graph or self.device.type != "cuda" or kind != before:
                self._captured = None
                losses = stack.advance(batch, **options)
            else:  # a graph is made for the second step in a row of a kind
                self._captured = self._captured or CapturedStack(stack, batch, **options)
                losses = self._captured(batch)
        self.losses = losses.double()
        return losses

    def _is_shared(self, loader: Any) -> bool:
        return not getattr(loader, "has_own_batches", False)  # of a JointLoader

    def _own(self, batch: Any, shared: bool) -> Any:
        """The batches of the trials that are still running."""
        if shared or len(self.running) == len(self.seeds):
            return batch
        return tree_map(lambda part: part[self.running], batch)

    def _adopt(self, optimizers: Sequence[Optimizer], schedules: Sequence[Any]) -> None:
        self._captured = self._kind = None
        self._evaluations = {}
        self.joint.adopt(stack_of(self.alive, optimizers), schedules)

    # --- trials that end early

    def drop(self, trials: Sequence[int]) -> None:
        """Ends some trials after the last step. The others are trained on as if these had never been there."""
        kept = [place for place, index in enumerate(self.running) if index not in trials]
        for index in trials:
            self.ended[index] = self.global_step
            self._members[index].net = None  # or its views would hold the memory of the whole stack
        self.running = [self.running[place] for place in kept]
        self.losses = self.losses[kept]
        if not kept:
            self.trainer.should_stop = True
            return
        schedules = [self.joint.schedules[place] for place in kept] if self.joint.schedules else []
        self._adopt([self.stack.optimizers[place] for place in kept], schedules)

    # --- growth

    def grows_at(self, step: int) -> bool:
        """Whether a growth that is to come is due after a step."""
        return any(growth.at_step <= step for growth in self._coming())

    def _coming(self) -> list[TrialGrowth]:
        """The growths of the first trial that is running, as far as they are to come."""
        if not self.running:
            return []
        return self.growths[self.running[0]][len(self.growths_done[self.running[0]]) :]

    def _check_growths(self, batch: Any) -> None:
        """Refuses growths that are not exact, by small steps of copies of the first trial, and keeps their plans."""
        trial, shared = self.alive[0], self.shares_batches
        own = batch if shared else tree_map(lambda part: part[self.running[0]], batch)
        net, size = trial.net, trial.size

        def loss(model: nn.Module) -> Tensor:
            trial.net = model
            try:
                return trial.mappable_loss(own)
            finally:
                trial.net = net

        for growth in self._coming():
            after = growth.size_after(size)
            with torch.random.fork_rng(), init_contexts(self.trainer):
                narrow = net if size == trial.size else trial.network(*size).to(self.device)
                wide = trial.network(*after).to(self.device)
                depth = growth.depth if growth.layers is not None else None
                with prefix_errors(f"the growth at step {growth.at_step}"):
                    options: dict[str, Any] = {"method": growth.method, "on_mismatch": "error"}
                    report = upscale(narrow, wide, call=loss, depth=depth, **options)
            if type(growth.method) is Duplication:
                self._plans[growth.at_step] = report.plan
            size = after

    def _grow(self, batch: Any) -> None:
        self._drop_non_finite()
        if not self.running:
            return
        growth = self._coming()[0]
        shared = self.shares_batches
        context = self.trainer.precision_plugin.train_step_context
        with context():
            before = self.stack.measure(self._own(batch, shared), shared=shared).tolist()
        size, keeps, start = self.alive[0].size, [], time.perf_counter()
        if self.alive[0].hparams["compile"]:
            torch.compiler.reset()
        for place, index in enumerate(self.running):
            report = self._grow_trial(place, self.growths[index][len(self.growths_done[index])])
            keeps.append(keeps_loss(report))
            self.constants[index] = report.noise
        self._adopt(self.stack.optimizers, self.joint.schedules)
        with context():
            after = self.stack.measure(self._own(batch, shared), shared=shared).tolist()
        for place, index in enumerate(self.running):
            if keeps[place]:
                self._refuse_jump(before[place], after[place])
            self.growths_done[index].append(
                {
                    "step": growth.at_step,
                    "before": size_text(size, growth),
                    "after": size_text(self._members[index].size, growth),
                    "parameters": sum(weight.numel() for weight in self._members[index].parameters()),
                    "seconds": (time.perf_counter() - start) / len(self.running),
                    "loss_before": before[place],
                    "loss_after": after[place],
                }
            )

    def _drop_non_finite(self) -> None:
        """Ends trials that cannot grow."""
        sums = torch.stack([weight.detach().flatten(1).sum(1) for weight in self.stack.parameters.values()]).sum(0)
        finite = sums.isfinite().tolist()
        lost = [index for index, is_finite in zip(self.running, finite, strict=True) if not is_finite]
        if lost:
            self.drop(lost)

    def _grow_trial(self, place: int, growth: TrialGrowth) -> UpscaleReport:
        """Grows one trial as any model is grown; its optimizer and schedule stay the objects that they are."""
        index = self.running[place]
        trial, optimizer = self.alive[place], self.stack.optimizers[place]
        schedules = self.joint.schedules[place : place + 1]
        narrow, seed = trial.net, self.seeds[index] * 1_000_003 + self.global_step
        with seeded(seed % 2**32), init_contexts(self.trainer):  # in the precision of the run
            wide = trial.rebuild(*growth.size_after(trial.size))
        plan = self._plans.get(growth.at_step) if type(growth.method) is Duplication else None
        depth = growth.depth if plan is None and growth.layers is not None else None
        options: dict[str, Any] = {"noise": growth.noise, "seed": seed, "method": growth.method, "depth": depth}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = upscale(narrow, wide, optimizer, plan=plan, **options)
        trial.net = report.wide
        continue_optimizers_([optimizer], schedules, narrow, report.wide, report, growth.lr)
        if growth.restart_schedule and schedules:
            restart_schedule_(schedules[0], optimizer_and_schedule(trial)[1])
        return report

    def _refuse_jump(self, before: float, after: float) -> None:
        """Raises a UserError if a growth has changed a loss that it keeps; TF32 on a GPU rounds otherwise."""
        is_fine = self.trainer.precision.startswith(("64", "32")) and self.device.type == "cpu"
        if abs(after - before) > (1e-3 if is_fine else 5e-2) * max(abs(before), abs(after), 1e-3):
            raise UserError(
                f"the loss of a batch changed from {before:.6g} to {after:.6g} in the growth at step "
                f"{self.global_step}, which keeps it: the model does not grow exactly"
            )

    # --- validation

    def on_validation_epoch_start(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._samples = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        shared = self._is_shared(self.trainer.val_dataloaders)
        scoring = self._members[0].joint_scores()
        size = self._members[0].batch_size(batch if shared else tree_map(lambda part: part[0], batch))
        self._samples += size
        for name, mean in self._evaluated(scoring.of_batch, self._own(batch, shared), shared).items():
            self._sums[name] = self._sums.get(name, 0) + mean.double() * size

    def on_validation_epoch_end(self) -> None:
        finished = self._members[0].joint_scores().finished
        means = {name: (total / self._samples).tolist() for name, total in self._sums.items()}
        for place, index in enumerate(self.running):
            self.scores[index] = finished({name: values[place] for name, values in means.items()})

    def _evaluated(self, function: Any, batch: Any, shared: bool) -> dict[str, Tensor]:
        if not self.cuda_graph or self.device.type != "cuda":
            return self.stack.evaluate(function, batch, shared=shared)
        kind = str((shared, batch_kind(batch)))
        if kind not in self._evaluations:
            context = self.trainer.precision_plugin.val_step_context
            self._evaluations[kind] = captured_scores(self.stack, function, batch, shared=shared, context=context)
        return self._evaluations[kind](batch)

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trials = [
            {
                "hyper_parameters": {**trial.hparams, "init_from": None},
                CHECKPOINT_KEY: checkpoints.growth_metadata(trial, trial.net, [optimizer]),
            }
            for trial, optimizer in zip(self.alive, self.stack.optimizers, strict=True)
        ]
        checkpoint[STACK_KEY] = {
            "trials": trials,
            "sizes": [tuple(trial.size) for trial in self._members],
            **{name: getattr(self, name) for name in ("running", "ended", "scores", "growths_done")},
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Gives the networks the sizes of the checkpoint before the weights load, and leaves ended trials out."""
        own = checkpoint[STACK_KEY]
        for name in ("running", "ended", "scores", "growths_done"):
            setattr(self, name, own[name])
        for index in self.ended:
            self._members[index].net = None
            self._members[index].hparams.update(zip(("width", "layers"), own["sizes"][index], strict=True))
        for trial, parts in zip(self.alive, own["trials"], strict=True):
            size = checkpoints.checkpoint_size(parts, type(trial).__name__)
            if size != trial.size:
                with init_contexts(self.trainer):
                    trial.rebuild(*size)
            checkpoints.restore_mixed_widths(trial.net, parts[CHECKPOINT_KEY]["mixed_widths"])


def trial_checkpoint(whole: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The ordinary checkpoint of one trial that is running, cut out of that of a stack."""
    own, prefix = whole[STACK_KEY], f"trials.{index}."
    place = own["running"].index(index)
    weights = {name: value for name, value in whole["state_dict"].items() if name.startswith(prefix)}
    joint = whole["optimizer_states"][0]
    loops = copy.deepcopy(whole["loops"])
    fit = loops["fit_loop"]
    for loader in fit["state_dict"].get("combined_loader", []):
        loader.update(loader.pop("loaders")[index] if "loaders" in loader else {})
    # where Lightning counts the steps of a module that leaves the optimization to it
    steps = fit["epoch_loop.manual_optimization.optim_step_progress"]
    fit["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"] = steps
    return {
        **{key: value for key, value in whole.items() if key != STACK_KEY},
        "callbacks": {},
        "loops": loops,
        "state_dict": {name.removeprefix(prefix): value.clone() for name, value in weights.items()},
        "optimizer_states": [joint["trials"][place]],
        "lr_schedulers": joint["schedules"][place : place + 1],
        **own["trials"][place],
    }


# --- parts


def stack_of(trials: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Stack:
    first: Any = trials[0]
    is_compiled, on_gpu = first.hparams["compile"], first.device.type == "cuda"
    return Stack(trials, optimizers, loss_of, first.stacked_losses(), compiled=is_compiled, fused=on_gpu)


def loss_of(model: Any, batch: Any) -> Tensor:
    try:
        return model.mappable_loss(batch)
    except MisconfigurationException as error:  # by self.log
        raise UserError(f"`loss` of many models at once cannot call Lightning: {error}") from error


def optimizer_and_schedule(trial: Growable) -> tuple[Optimizer, Any]:
    made = trial.configure_optimizers()
    if not isinstance(made, dict):
        return made, None
    schedule = made["lr_scheduler"]["scheduler"]
    if isinstance(schedule, ReduceLROnPlateau):
        raise UserError("model.lr_scheduler: ReduceLROnPlateau follows what is logged of one model")
    return made["optimizer"], schedule


def why_apart(module: Growable) -> str | None:
    """Why a module cannot be trained with others of its class; None if it can, as far as can be seen without a step."""
    kind, name = type(module), type(module).__name__
    steps = ("training_step", "configure_optimizers", "configure_gradient_clipping", "optimizer_step", "backward")
    hooks = [hook for base in (ModelHooks, DataHooks) for hook in vars(base) if not hook.startswith("_")]
    for method in (*steps, *hooks):
        if method not in HONOURED and getattr(kind, method) is not getattr(Growable, method):
            return f"{name} overrides {method}"
    if module.joint_scores() is None:
        return f"{name} has a validation of its own, which cannot be computed for many models at once"
    return None


def keeps_loss(report: UpscaleReport) -> bool:
    """Whether the loss is the same just after a growth."""
    is_quiet = not any(torch.as_tensor(level).any() for level in report.noise.values()) or report.centred
    claim = report.method.claim(report.plan, report.wide, ())
    return is_quiet and claim.function and report.plan.keeps_function


def size_text(size: Size, growth: TrialGrowth) -> Any:
    """A size as the summary of a growth has it: the width, if that is all that changes; else in words."""
    names = [name for name in size._fields if getattr(growth, name) is not None]
    return size.width if names == ["width"] else ", ".join(f"{name}={getattr(size, name)}" for name in names)
