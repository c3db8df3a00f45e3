"""The base class of growable LightningModules: building by width, muP, optimizers, clipping and checkpoints.

A subclass defines `build(width)`, which returns the network, and `loss(batch)`; docs/own_model.md has one.
With `build(width, layers)` the network can become deeper too.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.cli import ReduceLROnPlateau as MonitoredPlateau
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from mupscale._torch import inner_schedulers, is_too_large, tree_map
from mupscale.base_shapes import Init, apply_mup, clip_grad_norm_, set_base_shapes
from mupscale.checks.recording import generators_kept, leaves_of, map_leaves
from mupscale.cuda_graph import use_fused
from mupscale.device_memory import bytes_of, physical_memory
from mupscale.errors import UserError, is_whole, prefix_errors, refuse_unless_level, refuse_unless_whole, shown
from mupscale.models import checkpoint as checkpoints
from mupscale.models._lightning import (
    averaged_copy,
    averaging_callbacks,
    recorders_in,
    replace_attributes,
    set_average,
    set_hyperparameters,
    trainer_of,
)
from mupscale.models.checkpoint import CHECKPOINT_KEY, Layers, Size, Width
from mupscale.schedules import refuse_unless_relative
from mupscale.widening.hints import refuse_lazy
from mupscale.widening.records import attach
from mupscale.widening.state import refuse_bad_levels
from mupscale.widening.write import carry_frozen_, carry_modes_, parameters_have_no_memory

if TYPE_CHECKING:
    from mupscale.stacking.stack import Losses


class Scores(NamedTuple):
    """The metrics of a validation."""

    of_batch: Callable[[nn.Module, Any], dict[str, Tensor]]
    """Means over a batch, by operations that `torch.vmap` supports."""
    finished: Callable[[dict[str, float]], dict[str, float]]
    """What is logged, by its names, of the means over all samples."""


Hook = Callable[..., None]

HOOKS = ("on_fit_start", "on_save_checkpoint", "on_load_checkpoint")
"""Hooks in which Growable has work to do, also if a subclass overrides them."""


def after_ours(ours: Hook, hook: Hook) -> Hook:
    """A hook of a subclass that runs after that of Growable; if it calls `super()`, that runs twice, to no effect."""

    @wraps(hook)
    def both(self: "Growable", *arguments: Any) -> None:
        ours(self, *arguments)
        hook(self, *arguments)

    both.is_after_ours = True  # type: ignore[attr-defined]
    return both


DRAWS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)
"""Functions that fill a tensor with random numbers. Others, such as Xavier's, call one of these."""


class WithoutDraws(TorchFunctionMode):
    """Skips random numbers for tensors on the meta device, which have no values: they take most of the time there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DRAWS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


class Growable(LightningModule):
    """A LightningModule whose network can be built at any width, and rebuilt at another width during a run.

    If `build` takes the number of layers too, the network can also be rebuilt with more of them.

    Checkpoints hold weights, buffers, optimizer and scheduler state, and the constructor's arguments with the current
    size. A checkpoint of any size loads: the network is first rebuilt at the checkpoint's size. The muP tables are
    recomputed, except for parameters whose pieces grew by different factors.

    Hooks of a subclass need not call `super()`: what this class does in them is done before.
    """

    init: Init = "fan_in"
    """How `build` initialises the weights: the argument `init` of `set_base_shapes`."""

    builds_layers: bool = False
    """Whether the network can be built with any number of layers: whether `build` takes it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.builds_layers = "layers" in signature(cls.build).parameters
        for name in HOOKS:
            ours, hook = getattr(Growable, name), getattr(cls, name)
            if hook is not ours and not hasattr(hook, "is_after_ours"):
                setattr(cls, name, after_ours(ours, hook))

    def __init__(
        self,
        width: Width,
        base_width: Width,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        compile: bool = False,
        init_from: str | None = None,
        layers: Layers | None = None,
    ) -> None:
        """
        Args:
            width: The initial width.
            base_width: The width for which the optimizer's hyperparameters are given; muP rescales them to `width`.
            optimizer: Makes the optimizer from the parameters; its hyperparameters are those of `base_width`.
            lr_scheduler: Makes a schedule relative to each group's base rate; it advances at every optimizer step.
            compile: Compile the network with torch.compile.
            init_from: A checkpoint with initial weights (from an EMA run, the average), buffers and optimizer state.
                Step counters, data order and schedule start from the beginning. Ignored when a run is resumed.
            layers: The initial number of layers, if `build` takes it.
        """
        super().__init__()
        for key, value in (("width", width), ("base_width", base_width)):
            refuse_bad_width(f"model.{key}", value)
        if getattr(type(self).build, "__isabstractmethod__", False):
            raise UserError(
                f"{type(self).__name__} has no method `build`: define build(self, width), which returns the network "
                "at a width"
            )
        if layers is not None:
            refuse_bad_width("model.layers", layers)
        taken = signature(self.build).parameters.get("layers")
        if layers is None and taken is not None and taken.default is Parameter.empty:
            raise UserError(f"model.layers: {type(self).__name__} needs the number of layers; give it")
        if layers is not None and taken is None:
            raise UserError(
                f"model.layers = {layers}: {type(self).__name__} has a fixed number of layers. Leave it out, or define "
                "build(self, width, layers)"
            )
        # a callable is no primitive: checkpoints must load with weights_only=True
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.optimizer_callable = optimizer
        self.lr_scheduler_callable = lr_scheduler
        self.net: nn.Module | None = None
        self.train_loss: Tensor | None = None
        self.is_in_stack = False  # its steps are taken with those of other models, and compiled there
        self._references: dict[str, tuple[nn.Module, nn.Module]] = {}

    # --- what a subclass gives

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The network, freshly initialised: `build(self, width)`, or `build(self, width, layers)` to grow in depth."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The training loss of a batch."""
        raise UserError(f"{type(self).__name__} has no method `loss`: define loss(self, batch), the loss of a batch")

    def mappable_loss(self, batch: Any) -> Tensor:
        """The loss by operations that `torch.vmap` supports, for stacked models."""
        return self.loss(batch)

    def stacked_losses(self) -> "Losses | None":
        """The losses of many models at once, if a subclass has a faster way than `torch.vmap` of one loss."""
        return None

    def joint_scores(self) -> Scores | None:
        """What a validation measures, if it can be computed for many models at once; None if it cannot."""
        return None

    def batch_size(self, batch: Any) -> int:
        """The samples or tokens in a batch, which curves count: by default the length of its first tensor."""
        return samples_in(self, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_loss = loss.detach()  # `self.log` would cost time at every step
        return loss

    # --- the network

    @property
    def width(self) -> Width:
        return self.hparams["width"]

    @property
    def size(self) -> Size:
        return Size(self.width, self.hparams["layers"] if self.builds_layers else None)

    def forward(self, *inputs: Any) -> Any:
        assert self.net is not None, "call configure_model() first"
        return self.net(*inputs)

    def configure_model(self) -> None:
        """Makes the network. A subclass may do more here, such as freeze layers; this runs again after every growth."""
        if self.net is None:
            self.net = self.network(*self.size)
            self.prepare_network()

    def rebuild(self, width: Width, layers: Layers | None = None) -> nn.Module:
        """Makes and returns the network at another size, by `configure_model`; by default with as many layers."""
        self.hparams["width"] = width
        if layers is not None:
            self.hparams["layers"] = layers
        self.net = None
        self.configure_model()
        net: nn.Module | None = self.net
        assert net is not None, "configure_model made no network"
        return net

    def make_twin(self, changes: Mapping[str, Any]) -> "Growable":
        """Returns a module like this one with other arguments, whose network `configure_model` makes."""
        if changes.get("layers") is not None and self.size.layers is None:
            why = "has a fixed number of layers: define build(self, width, layers)"
            if self.builds_layers:
                why = "has no residual blocks: give model.layers"
            raise UserError(f"{type(self).__name__} {why}")
        alike = copy.copy(self)
        memo = {id(self): alike, **recorders_in(self)}
        for key in ("_modules", "_parameters", "_buffers"):
            others = {name: part for name, part in vars(self)[key].items() if name != "net"}
            vars(alike)[key] = copy.deepcopy(others, dict(memo))
        alike.net = None
        # it is never trained, and these need not be what can be pickled
        alike.optimizer_callable, alike.lr_scheduler_callable = torch.optim.SGD, None
        set_hyperparameters(alike, {**self.hparams, **changes})
        return alike

    def prepare_network(self) -> None:
        """Prepares a finished network for training: sharding under FSDP2, and compilation."""
        assert self.net is not None
        mesh = self.device_mesh
        if mesh is not None:
            self.shard(self.net, mesh["data_parallel"])
        if self.hparams["compile"] and not self.is_in_stack:
            self.compile_network(self.net)

    def compile_network(self, net: nn.Module) -> None:
        """Compiles the network in place; override to compile it in parts."""
        net.compile()

    def shard(self, net: nn.Module, mesh: Any) -> None:
        """Shards the network over the data-parallel mesh (ModelParallelStrategy); override to shard block by block."""
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=mesh)

    def network(self, width: Width, layers: Layers | None = None, *, meta: bool = False) -> nn.Module:
        """The network at a size, by default with as many layers as now, with its muP tables; or on the meta device."""
        layers = self.size.layers if layers is None else layers
        at_base, at_delta = self._at_base_width(layers)
        # some systems promise memory that they do not have, and end the process that uses it
        on_meta = parameters_have_no_memory()
        widths, bases = (each if isinstance(each, list) else [each] for each in (width, self.hparams["base_width"]))
        may_be_too_large = bytes_of(at_delta) * (max(widths) / min(bases)) ** 2 > physical_memory()
        if meta or may_be_too_large:
            with torch.device("meta"), WithoutDraws():
                net = self._built("width", width, layers)
            if not (meta or on_meta) and bytes_of(net) > physical_memory():
                raise UserError(_too_wide("width", width))
        if not meta:
            net = self._built("width", width, layers)
        return set_base_shapes(net, at_base, at_delta, init=None if meta or on_meta else self.init)

    def _at_base_width(self, layers: Layers | None) -> tuple[nn.Module, nn.Module]:
        """The network at the base width and at twice that, on the meta device. They are built once."""
        base = self.hparams["base_width"]
        key = f"{base}, {layers}"
        if key not in self._references:
            with torch.device("meta"), WithoutDraws():
                networks = self._built("base_width", base, layers), self._built("base_width", doubled(base), layers)
            self._references[key] = networks
        return self._references[key]

    def _built(self, key: str, width: Width, layers: Layers | None) -> nn.Module:
        try:
            net = self.build(width, layers=layers) if self.builds_layers else self.build(width)
        except (RuntimeError, TypeError) as error:
            if not is_too_large(error):
                raise
            raise UserError(_too_wide(key, width)) from error
        refuse_lazy(net)
        return net

    def training_flops(self, batch: Any) -> float:
        """Operations of a forward and backward pass, counted on the meta device; a UserError if `loss` fails there."""
        twin = self.make_twin({}).to("meta")
        held = {
            name: value for name, value in vars(twin).items() if name not in ("_modules", "_parameters", "_buffers")
        }
        vars(twin).update({name: tree_map(_on_meta, value) for name, value in held.items()})
        with (
            generators_kept([]),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),  # which looks at values: the meta device has none
            FlopCounterMode(display=False) as counter,
        ):
            twin.net = self.network(*self.size, meta=True)
            try:
                with without_log(twin):
                    twin.train().loss(map_leaves(_on_meta, batch)).backward()
            except UserError:
                raise
            except Exception as error:
                reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
                raise UserError(
                    f"the FLOPs of {type(self).__name__} cannot be counted, because its `loss` does not run on the "
                    f"meta device, where tensors have shapes but no values ({type(error).__name__}: {reason})"
                ) from error
        return float(counter.get_total_flops())

    # --- optimisation

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        inside = set(self.net.parameters())
        outside = [name for name, each in self.named_parameters() if each.requires_grad and each not in inside]
        if outside:
            rank_zero_warn(
                f"{outside[0]!r} of {type(self).__name__} is not in the network, so the optimizer does not train it. "
                "Make it in `build`, or freeze it with requires_grad_(False)",
                stacklevel=2,
            )
        optimizer = self.optimizer_callable(self.net.parameters())
        refuse_bad_hyperparameters(optimizer, trainer_of(self))
        apply_mup(optimizer, self.net)
        use_fused(optimizer)
        attach(self.net, optimizer)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]  # ReduceLROnPlateau does not keep it, and a swap must know how far it is
        if self.lr_scheduler_callable is None:
            return optimizer
        scheduler = self.lr_scheduler_callable(optimizer)
        refuse_absolute_rates(scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            monitor = scheduler.monitor if isinstance(scheduler, MonitoredPlateau) else "val/loss"
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": monitor},
            }
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """`Trainer(gradient_clip_val=…)` clips by the width-invariant norm."""
        if gradient_clip_val is None or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            assert self.net is not None
            clip_grad_norm_(self, gradient_clip_val)

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = trainer_of(self)
        checkpoint[CHECKPOINT_KEY] = checkpoints.growth_metadata(
            self, self.net, [] if trainer is None else trainer.optimizers
        )
        # it has weights of its own, also where the base does not exist
        checkpoint["hyper_parameters"]["init_from"] = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rebuilds the network at the checkpoint's size; this is the last hook before weights load."""
        size, before = checkpoints.checkpoint_size(checkpoint, type(self).__name__), self.net
        if before is None or size != self.size:
            # without moving the run's random numbers, of which its data may be made
            kept = generators_kept([]) if before is not None else nullcontext()
            with kept, init_contexts(trainer_of(self)):
                rebuilt = self.rebuild(*size)
            if before is not None:  # it may have been frozen outside of configure_model
                carry_frozen_(before, rebuilt)
                carry_modes_(before, rebuilt)
            self._renew_averages()
        assert self.net is not None
        trainer = trainer_of(self)
        if trainer is not None and isinstance(trainer.precision_plugin, DoublePrecision):
            self.net.double()  # Lightning does so after it has loaded the weights, which were rounded then
        checkpoints.refuse_other_architecture(self.net, self.hparams, checkpoint)
        checkpoints.restore_mixed_widths(self.net, checkpoint[CHECKPOINT_KEY]["mixed_widths"])
        for optimizer in trainer.optimizers if trainer is not None else ():
            attach(self.net, optimizer)  # a sharded checkpoint is read after they were made

    def on_fit_start(self) -> None:
        path = self.hparams["init_from"]
        if path is None or self.trainer.ckpt_path is not None:
            return
        assert self.net is not None
        with prefix_errors(f"model.init_from = {path}"):
            checkpoint = checkpoints.start_from(path, self, self.net)
            if checkpoint[CHECKPOINT_KEY]["mixed_widths"]:  # whose rates follow these widths, entry by entry
                self.trainer.strategy.setup_optimizers(self.trainer)
            self._renew_averages()
            checkpoints.load_optimizer_state(self, self.trainer.optimizers, checkpoint)

    def _renew_averages(self) -> None:
        """EMA callbacks start again from the network as it is."""
        for callback in averaging_callbacks(self):
            set_average(callback, averaged_copy(callback, self))


@contextmanager
def init_contexts(trainer: Trainer | None) -> Iterator[None]:
    """The contexts in which a trainer calls `configure_model`; outside of them the precision would be wrong."""
    with ExitStack() as stack:
        if trainer is not None:
            stack.enter_context(trainer.strategy.tensor_init_context())
            stack.enter_context(trainer.strategy.model_sharded_context())
            stack.enter_context(trainer.precision_plugin.module_init_context())
        yield


def samples_in(module: LightningModule, batch: Any) -> int:
    """The length of the first tensor of a batch."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.ndim > 0), None)
    if first is None:  # of objects of another kind
        first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    try:
        return len(first)
    except TypeError as error:
        raise UserError(
            f"{type(module).__name__} has batches of {type(batch).__name__}, in which no tensor was found: define "
            "batch_size(self, batch), which returns the number of samples"
        ) from error


def returned_loss(module: LightningModule, outputs: Any) -> Tensor | None:
    """The loss that a `training_step` returned, of the `outputs` that callbacks get; None if it returned none."""
    returned = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(returned, Tensor) or returned.numel() != 1:
        return None
    returned = returned.detach().reshape(())
    if module.automatic_optimization and module.trainer.accumulate_grad_batches > 1:
        return returned * module.trainer.accumulate_grad_batches  # Lightning has divided it
    return returned


def tensors_in(batch: Any) -> Sequence[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses, in their order; every step calls it."""
    kinds = set(map(type, batch)) if type(batch) in (tuple, list) else {type(batch)}
    if kinds == {Tensor}:
        return [batch] if type(batch) is Tensor else batch
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def without_log(module: LightningModule) -> AbstractContextManager[None]:
    """`self.log` and `self.log_dict` do nothing meanwhile."""
    return replace_attributes(module, dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))


def has_own_optimizers(module: LightningModule) -> bool:
    """Whether a module does not use the `configure_optimizers` of Growable."""
    return type(module).configure_optimizers is not Growable.configure_optimizers


def _on_meta(value: Any) -> Any:
    """A tensor without values; anything else as it is."""
    return value.detach().to("meta").requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _too_wide(key: str, width: Width) -> str:
    return f"model.{key} = {width}: a network of this width does not fit into memory; choose a smaller width"


def doubled(width: Width) -> Width:
    return [2 * w for w in width] if isinstance(width, list) else 2 * width


# --- arguments


def refuse_bad_width(key: str, width: Any) -> None:
    widths = width if isinstance(width, list | tuple) else [width]
    for each in widths or [None]:
        if not is_whole(each):
            raise UserError(f"{key} must be a whole number of at least 1, or a list of them; got {shown(width)}")


def refuse_bad_counts(**counts: Any) -> None:
    for key, count in counts.items():
        refuse_unless_whole(f"model.{key}", count)


def refuse_bad_hyperparameters(optimizer: Optimizer, trainer: Trainer | None) -> None:
    """Raises a UserError for hyperparameters that are NaN or infinite, and for a clip that is, or that would ascend."""
    with prefix_errors("model.optimizer"):
        refuse_bad_levels(optimizer)
    if trainer is not None and trainer.gradient_clip_val is not None:
        refuse_unless_level("trainer.gradient_clip_val", trainer.gradient_clip_val)


def refuse_absolute_rates(scheduler: Any) -> None:
    """Raises a UserError for a schedule with absolute learning rates, which would erase muP scaling."""
    for part in inner_schedulers(scheduler):
        refuse_absolute_rates(part)
    name = f"model.lr_scheduler: {type(scheduler).__name__}"
    for attribute in ("eta_min", "max_lrs", "min_lrs"):
        value = getattr(scheduler, attribute, 0)
        if any(float(rate) != 0 for rate in (value if isinstance(value, Sequence) else [value])):
            raise UserError(
                f"{name} has an absolute rate ({attribute.removesuffix('s')} = {value}), which erases muP scaling. Use "
                "a schedule relative to each group's base rate: LambdaLR, LinearLR, CosineAnnealingLR with eta_min = "
                "0, or a SequentialLR of these"
            )
    if type(scheduler).__name__ in ("OneCycleLR", "CyclicLR", "SWALR"):
        raise UserError(f"{name} sets absolute rates (max_lr, swa_lr), which erases muP scaling")
    refuse_unless_relative(scheduler, name, "which erases muP scaling")
