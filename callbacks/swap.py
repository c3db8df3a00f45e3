"""The swap: a wide network, with its optimizers, schedules and averages, takes the place of a narrow one in a run."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mupscale._torch import without_iterator
from mupscale.callbacks.fast_loop import LeanEpochLoop
from mupscale.checks.recording import generators_kept, state_kept
from mupscale.errors import UserError
from mupscale.methods import GrowthMethod
from mupscale.methods.grow import UpscaleReport, grow
from mupscale.methods.noise import Noise
from mupscale.models._lightning import (
    average_device,
    average_of,
    averaged_copy,
    averaging_callbacks,
    callbacks_in,
    datamodule_of,
    on_device,
    set_average,
)
from mupscale.models.base import Growable, has_own_optimizers, init_contexts, without_log
from mupscale.models.checkpoint import Layers, Size, Width
from mupscale.models.growth_check import depth_between
from mupscale.models.quiet_step import run_eagerly
from mupscale.schedules import continue_schedule, refuse_one_rate_for_all, refuse_unless_relative
from mupscale.widening.growth import Growth
from mupscale.widening.hints import Hints
from mupscale.widening.layers import Depth, layer_at
from mupscale.widening.optimizers import Sized, rule_of
from mupscale.widening.plan import branch_ratio, neutral_value
from mupscale.widening.plan_text import Plan
from mupscale.widening.state import (
    Continuation,
    RatesOf,
    Source,
    continue_scheduled_rates_,
    continue_settings_,
    refuse_uneven_groups,
)
from mupscale.widening.stepping import StateRule, attach, names_by_id
from mupscale.widening.write import carry_modes_


class RefusedSwap(UserError, RuntimeError):
    """A swap that fails because of the module: what it computes, or what its `configure_optimizers` returns."""


class Swap:
    """One growth in the middle of a run. `UpscaleCallback` is one, and explains the attributes."""

    width: Width | None
    layers: Layers | None
    depth: Depth
    residual: Mapping[str, float]
    ordinary: Any
    """An `OrdinaryGrowth`, of a module that is not a Growable; its file is loaded for such a module only."""
    method: GrowthMethod
    noise: Noise | None
    lr: float | None
    state_rule: StateRule
    rewarm_steps: int
    restart_schedule: bool

    def size_after(self, before: Size) -> Size:
        width = before.width if self.width is None else self.width
        return Size(width, before.layers if self.layers is None else self.layers)

    def perform(
        self, trainer: Trainer, module: LightningModule, compare: Callable[[], None]
    ) -> tuple[UpscaleReport, bool]:
        """Puts the wide network, its optimizers and its schedules in the place of the narrow ones.

        Returns what was done, and whether the loss should be the same just after it.

        `compare` is called before noise is added, unless the network is sharded or the method changes the function.
        """
        if isinstance(trainer.fit_loop.epoch_loop, LeanEpochLoop):
            trainer.fit_loop.epoch_loop.release()  # a captured step would keep the narrow network's memory
        seed = trainer.strategy.broadcast(_seed(trainer.global_step))
        if isinstance(module, Growable):
            report, keeps_function = self._grow_network(trainer, module, seed, compare)
        else:
            report, keeps_function = self._grow_ordinary(trainer, module, seed, compare)
        self._widen_averages(module, report, seed)
        self.method.forget()
        for monitor in callbacks_in(trainer, LearningRateMonitor):
            monitor.on_train_start(trainer)  # the number of parameter groups may have changed
        return report, keeps_function

    def _grow_ordinary(
        self, trainer: Trainer, module: LightningModule, seed: int, compare: Callable[[], None]
    ) -> tuple[UpscaleReport, bool]:
        assert self.ordinary is not None
        method = copy.copy(self.method)
        method.state, method.rewarm_steps = self.state_rule, self.rewarm_steps
        noise = method.noise if self.noise is None else self.noise
        report = self.ordinary.grow(trainer, module, method, self.noise, seed, self.lr, compare)
        keeps_function = keeps_loss(method, report.plan, module) and (noise is None or noise.centred)
        return report, keeps_function

    def _grow_network(
        self, trainer: Trainer, module: Growable, seed: int, compare: Callable[[], None]
    ) -> tuple[UpscaleReport, bool]:
        """Grows a Growable, with its optimizers and schedules. The narrow tensors are freed one by one."""
        narrow = module.net
        assert narrow is not None
        size = self.size_after(module.size)
        narrow_opts = list(trainer.optimizers)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        if module.hparams["compile"]:
            torch.compiler.reset()
        # building must not move the run's random numbers
        has_values = self.depth == "random"  # of random layers, which depend on nothing but the seed
        with generators_kept([module.device]), init_contexts(trainer):
            if has_values:
                torch.manual_seed(seed)
            wide = module.rebuild(*size, meta=not has_values)
        if has_values:
            wide.to(module.device)
        for part in wide.modules() if not has_values else ():
            # these cannot be given memory weight by weight
            if module.device_mesh is not None or isinstance(part, nn.RNNBase):
                part.to_empty(device=module.device, recurse=False)
        growth = self.method.plan(
            narrow, wide, Hints(depth=depth_between(narrow, wide, self.depth), residual=self.residual)
        )
        noise = self.method.noise if self.noise is None else self.noise
        is_function_kept = keeps_loss(self.method, growth, narrow)
        keeps_function = is_function_kept and (noise is None or noise.centred)
        # sharded, a network cannot run before the strategy has set it up
        is_compared = is_function_kept and noise is not None and module.device_mesh is None
        for optimizer in narrow_opts if self.state_rule != "reset" else ():
            Continuation(growth, narrow, optimizer, wide, state=self.state_rule).check(None)
        carry_modes_(narrow, wide)
        if self.method.needs_batches:
            self._fit_method(trainer, module, narrow, wide)
        if module.automatic_optimization:  # gradients are those of the last step; the window of accumulation begins
            narrow.zero_grad()
        report = grow(
            narrow,
            wide,
            noise=self.noise,
            seed=seed,
            hints=growth,
            consume=True,
            method=self.method,
            rebuild=partial(_built, trainer, module, size),
            before_noise=compare if is_compared else None,
        )
        trainer.strategy.connect(module)
        trainer.strategy.setup(trainer)
        keep_units_of_own_optimizers(trainer, module)
        sources: dict[int, list[Source]] = {}
        narrow_ids = {id(parameter) for parameter in narrow.parameters()}
        for before, after in zip(narrow_opts, trainer.optimizers, strict=True):
            if any(id(parameter) in narrow_ids for group in after.param_groups for parameter in group["params"]):
                raise UserError(
                    f"{type(module).__name__}.configure_optimizers returned an optimizer over the old parameters; make "
                    "a new one"
                )
            sources[id(after)] = self._continue(growth, module, narrow, before, wide, after)
        for config, old in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
            came_from = sources[id(config.scheduler.optimizer)]
            continue_schedule(old, config.scheduler, came_from, restart=self.restart_schedule)
        return report, keeps_function

    def _fit_method(self, trainer: Trainer, module: Growable, narrow: nn.Module, wide: nn.Module) -> None:
        """Lets the method learn from training batches, leaving the run's data and random numbers as they were."""
        average = None
        if trainer.world_size > 1:
            average = lambda gradient: trainer.strategy.reduce(gradient, reduce_op="mean")  # noqa: E731
        with isolate_rng(), trainer.precision_plugin.forward_context(), run_eagerly(module):
            batches = OwnBatches(trainer, module)
            with batches.generators_kept():
                # the loss is that of `module.net`, which is the wide network already
                self.method.fit(narrow, wide, batches, lambda _, batch: module.loss(batch), average=average)

    def _continue(
        self, growth: Plan, module: Growable, narrow: nn.Module, before: Optimizer, wide: nn.Module, after: Optimizer
    ) -> list[Source]:
        """Continues rates (base rate times where the schedule is), hyperparameters and state; sources of groups."""
        rates_of = partial(self._rates_of, growth, narrow, wide)
        continuation = Continuation(growth, narrow, before, wide, rates_of, self.state_rule)
        continued = continuation.groups()
        rates = {id(p): group for group in continued for p in group["params"]}
        if has_own_optimizers(module):
            try:
                refuse_uneven_groups(continued, wide, after)
            except UserError as error:
                raise RefusedSwap(f"{type(module).__name__}.configure_optimizers: {error}") from error
        source_of = continuation.sources()
        sources: list[Source] = []
        for group in after.param_groups:
            first = next((p for p in group["params"] if id(p) in rates), None)
            if first is None:  # of parameters that were not trained before
                sources.append(Source(0, 1.0))
                continue
            source = rates[id(first)]
            at = group if self.restart_schedule else source
            factor = at["lr"] / at["initial_lr"] if at.get("initial_lr") else 1.0
            base: Any
            if self.lr is None:
                base = source.get("initial_lr", source["lr"])
            else:  # relative to the configured constant: an earlier swap may have left that of the narrow run
                base = group.get("initial_lr", group["lr"]) * (self.lr / float(after.defaults["lr"]))
            start = source.get("initial_lr", source["lr"])
            ratio = 1.0 if self.lr is None or not start else float(base) / float(start)
            continue_scheduled_rates_(group, source, ratio)
            index, rate_factor = source_of[id(first)]
            sources.append(Source(index, rate_factor * ratio))
            group["lr"] = base * factor
            if "initial_lr" in group:
                group["initial_lr"] = base
            # a schedule of the momentum restarts with that of the rate
            starts_anew = ("momentum", "betas") if self.restart_schedule and "max_momentum" in group else ()
            continue_settings_(group, source, [key for key in after.defaults if key not in starts_anew])
        carried: dict[str, Any] = {"scale_of": self.method.scale, "to_copies": self.method.state_to_copies}
        continuation.transfer(after, consume=True, rewarm_steps=self.rewarm_steps, **carried)
        return sources

    def _rates_of(self, growth: Plan, narrow: nn.Module, wide: nn.Module, entry: Growth) -> Sized:
        """What the rates of a parameter follow: its width, and the depth of the model, by CompleteP.

        Beside new layers that add nothing, what kept ones put out is rescaled. That changes no rate, because new layers
        learn, too: the rates are those of the deep model.
        """
        place = layer_at(growth.layers, entry.name)
        if place is not None:
            ratio = branch_ratio(narrow, wide, place)
            rescale = entry.rescale
            if (
                entry.inserted is None
                and entry.branch != ratio
                and neutral_value(narrow, *place, self.residual) is not None
            ):
                rescale *= ratio
            entry = replace(entry, rescale=rescale, branch=ratio, layers=1 / ratio)
        return self.method.mup_rates(entry)

    def _widen_averages(self, module: LightningModule, report: UpscaleReport, seed: int) -> None:
        """Each EMA callback gets its average widened, with the very noise that the model got."""
        for callback in averaging_callbacks(module):
            old, new = average_of(callback), averaged_copy(callback, module)
            # the draw depends on the device, in which the average may differ
            narrow, wide = (network_of(average.module) for average in (old, new))
            narrow.to(module.device)
            wide.to(module.device, next(narrow.parameters()).dtype)
            grow(narrow, wide, noise=report.same_noise(), seed=seed, hints=report.plan, method=self.method)
            wide.to(average_device(callback, module))
            new.n_averaged.copy_(old.n_averaged)
            set_average(callback, new)


def keeps_loss(method: GrowthMethod, plan: Plan, narrow: nn.Module) -> bool:
    """Whether the loss is the same just after a growth, before noise is added."""
    return method.claim(plan, narrow, ()).function and plan.keeps_function


def refuse_shared_rates(
    module: LightningModule, narrow: nn.Module, schedulers: Sequence[Any], growth: Plan, rates_of: RatesOf
) -> None:
    """Raises a UserError for a schedule with one rate for all groups, if the growth changes their rates differently."""
    for scheduler in schedulers:
        factors = rate_factors(scheduler.optimizer, narrow, growth, rates_of)
        schedule = f"{type(module).__name__}.configure_optimizers: {type(scheduler).__name__}"
        remedy = "Use a schedule relative to each group's rate: eta_min = 0, LambdaLR or LinearLR"
        refuse_one_rate_for_all(scheduler.state_dict(), factors, schedule, remedy)
        if len(factors) > 1:
            refuse_unless_relative(scheduler, schedule, "and after the growth the groups have different ones")


def rate_factors(optimizer: Optimizer, narrow: nn.Module, growth: Plan, rates_of: RatesOf) -> set[float]:
    """What a growth multiplies the rates of an optimizer's parameters by."""
    names, rule = names_by_id(narrow), rule_of(optimizer)
    group_of = {names.get(id(parameter)): group for group in optimizer.param_groups for parameter in group["params"]}
    entries = [entry for entry in growth.parameters.values() if entry.origin in group_of]
    return {rule.scale(group_of[entry.origin], rates_of(entry)).lr for entry in entries}


class OwnBatches:
    """The training batches of a run, on its device, from a separate loader. `iter` begins with the next epoch.

    The loader is a new one from `train_dataloader` of the data module or the model. A loader that was passed to `fit`
    is copied.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        refuse_many_loaders("OwnBatches", trainer)
        self._trainer = trainer
        data = datamodule_of(trainer)
        source = data if data is not None and is_overridden("train_dataloader", data) else module
        if is_overridden("train_dataloader", source):
            self._loader = source.train_dataloader()
        else:
            self._loader = copy.copy(trainer.train_dataloader)
        if isinstance(self._loader, DataLoader):
            self._loader = without_iterator(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield on_device(self._trainer, batch)

    @contextmanager
    def generators_kept(self) -> Iterator[None]:
        """Puts the random generators back that the loader shares with the run's."""
        states = [(generator, generator.get_state()) for generator in generators_of([self._loader])]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def generators_of(loaders: Iterable[Any]) -> list[torch.Generator]:
    """The generators that data loaders and their samplers were given, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        for holder in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def refuse_many_loaders(what: str, trainer: Trainer) -> None:
    if isinstance(trainer.train_dataloader, dict | list | tuple):
        raise UserError(f"{what}: the run has several training data loaders. Give one")


def keep_units_of_own_optimizers(trainer: Trainer, module: Growable) -> None:
    """Does for optimizers of an own `configure_optimizers` what that of Growable does for its own."""
    assert module.net is not None
    for optimizer in trainer.optimizers if has_own_optimizers(module) else ():
        attach(module.net, optimizer)


class Measured(NamedTuple):
    """The loss of a batch over all ranks."""

    loss: Tensor
    random_state: Tensor
    """That of torch's generator after it: two networks that draw equally many numbers end with the same."""


def measure_loss(trainer: Trainer, module: LightningModule, loss: Callable[[], Tensor]) -> Measured:
    """The loss of a batch, leaving what the module holds and the random numbers of the run as they were."""
    on_gpu = module.device.type == "cuda"
    precision, kept = trainer.precision_plugin.forward_context(), generators_kept([module.device])
    with state_kept(module.modules()), kept, precision, run_eagerly(module), without_log(module):
        value = trainer.strategy.reduce(loss().detach(), reduce_op="mean")
        random_state = torch.cuda.get_rng_state(module.device) if on_gpu else torch.get_rng_state()
    for part in module.modules():
        reshard: Any = getattr(part, "reshard", None)
        if reshard is not None:
            reshard()  # FSDP2 keeps the outermost parameters whole for a backward pass that does not come
    return Measured(value, random_state)


def network_of(module: Any) -> nn.Module:
    """What grows of a module: the network of a Growable, or all of it."""
    network = module.net if isinstance(module, Growable) else module
    assert isinstance(network, nn.Module)
    return network


def _built(trainer: Trainer, module: Growable, size: Size) -> nn.Module:
    with generators_kept([]), init_contexts(trainer):
        return module.network(*size)


def _seed(step: int) -> int:
    """The noise of a run depends on its seed and the step, not on how often it was interrupted."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0")) * 1_000_003 + step


# --- Lightning's callbacks that do not work in a run that grows

ABSOLUTE = "it sets absolute learning rates, which erases muP scaling, and its average does not grow with the network"

CALLBACKS: dict[type[Callback], tuple[str, str]] = {
    StochasticWeightAveraging: (ABSOLUTE, "use EMAWeightAveraging, whose average is widened with the network"),
    ModelPruning: ("its masks have the shapes of the network before an upscale", "prune the finished model"),
    BaseFinetuning: (
        "it adds parameter groups to an optimizer that an upscale replaces",
        "set requires_grad in the module's configure_model; a callback of your own may change it at any step",
    ),
    LearningRateFinder: (
        "it sets the attribute `lr` of a module, but learning rates are those of model.optimizer",
        "python -m mupscale sweep --sweep model.optimizer.lr=…",
    ),
    BatchSizeFinder: (
        "it chooses the batch size at the narrow width, and a resumed run might choose another one",
        "set data.batch_size",
    ),
    SpikeDetection: ("Lightning cannot load its state, so the run could not be resumed", "--stop_on_nan"),
}
"""Classes, why they do not work, and the remedy."""


def refuse_callbacks(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        for kind, (reason, remedy) in CALLBACKS.items():
            if isinstance(callback, kind):
                raise UserError(f"trainer.callbacks: {type(callback).__name__} does not work here: {reason}; {remedy}")
