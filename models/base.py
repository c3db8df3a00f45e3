"""What every width-scalable LightningModule shares: its network by width, muP, optimizers, clipping and checkpoints.

A subclass gives `build(width)`, the network at a width, and `loss(batch)`; see the README for one in twenty lines.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.cli import ReduceLROnPlateau as MonitoredPlateau
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from mupscale.base_shapes import Init, set_base_shapes
from mupscale.cuda_graph import use_fused
from mupscale.mup_optimizers import apply_mup
from mupscale.widening.clip import clip_grad_norm_
from mupscale.widening.mixed_axes import keep_reference_units
from mupscale.widening.sharding import is_sharded, whole
from mupscale.widening.width_table import Table, merged_table, store_table
from mupscale.widening.width_table import Width as WidthFactors

Width = int | list[int]

CHECKPOINT_KEY = "mupscale"
"""Our part of a checkpoint: the module's class; for each optimizer its class and the names of its parameters, in its
order; and the widths of parameters whose pieces grew by different factors, which cannot be recomputed.
"""

_FREE = ("width", "init_from", "compile")
"""Arguments that may differ from those of a checkpoint, whatever the module is."""


class WidthScalable(LightningModule):
    """A LightningModule whose network can be built at any width, and rebuilt at another one in the middle of a run.

    Saved: weights, buffers, optimizer and scheduler state, and the constructor's arguments with the width of the
    moment. A checkpoint of any width loads: the network is rebuilt to the checkpoint's width first. Recomputed: the muP
    tables, but for what they hold of parameters whose pieces grew by different factors.
    """

    init: Init = "fan_in"
    """How `build` draws its weights, as `set_base_shapes` takes it."""

    def __init__(
        self,
        width: Width,
        base_width: Width,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        compile: bool = False,
        init_from: str | None = None,
    ) -> None:
        """
        Args:
            width: The width to start with.
            base_width: The width at which the optimizer's hyperparameters mean what they say; muP scales them from
                there.
            optimizer: Makes the optimizer from the parameters; its hyperparameters are muP base constants.
            lr_scheduler: Makes a schedule relative to each group's own rate, stepped every optimizer step.
            compile: Compile the network with torch.compile.
            init_from: A checkpoint from which a fit that is not resumed takes weights (of an EMA run the average),
                buffers and optimizer state; counters, data and schedule start at zero.
        """
        super().__init__()
        # a callable is no primitive: checkpoints must load with weights_only=True
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler"])
        self.optimizer_callable = optimizer
        self.lr_scheduler_callable = lr_scheduler
        self.net: nn.Module | None = None
        self.train_loss: Tensor | None = None

    # --- what a subclass gives

    @abstractmethod
    def build(self, width: Any) -> nn.Module:
        """The network at this width, freshly initialised."""

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The training loss of a batch."""

    def batch_size(self, batch: Any) -> int:
        """Samples in a batch, or tokens: what the curves are drawn against."""
        first = batch[0] if isinstance(batch, tuple | list) else batch
        return len(first)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        # for the curves, which write it before the step's checkpoint, and the progress bar: `self.log` would cost every
        # step
        self.train_loss = loss.detach()
        return loss

    # --- the network

    @property
    def width(self) -> Width:
        return self.hparams["width"]

    def forward(self, *inputs: Any) -> Any:
        assert self.net is not None, "call configure_model() first"
        return self.net(*inputs)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self.network(self.width)
            self.prepare_network()

    def prepare_network(self) -> None:
        """What is done to a finished network before it trains: sharding under FSDP2, compiling."""
        assert self.net is not None
        mesh = self.device_mesh
        if mesh is not None:
            self.shard(self.net, mesh["data_parallel"])
        if self.hparams["compile"]:
            self.compile_network(self.net)

    def compile_network(self, net: nn.Module) -> None:
        """Compiles the network in place; override to compile it in parts."""
        net.compile()

    def shard(self, net: nn.Module, mesh: Any) -> None:
        """Shards the network over the data-parallel mesh (ModelParallelStrategy); override to shard block by block."""
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=mesh)

    def network(self, width: Width, *, meta: bool = False) -> nn.Module:
        """The network at `width` with its muP tables; on the meta device for a plan, or for an upscale to fill."""
        base = self.hparams["base_width"]
        with torch.device("meta"):
            at_base, at_delta = self.build(base), self.build(doubled(base))
            net = self.build(width) if meta else None
        if net is None:
            net = self.build(width)
        return set_base_shapes(net, at_base, at_delta, init=None if meta else self.init)

    def training_flops(self, batch: Any) -> float:
        """Floating-point operations of a forward and backward pass at the current width, counted on the meta device."""
        net = self.net
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), FlopCounterMode(display=False) as counter:
            self.net = self.network(self.width, meta=True)
            try:
                self.loss(tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, batch)).backward()
            finally:
                self.net = net
        return float(counter.get_total_flops())

    # --- optimisation

    def configure_optimizers(self) -> Any:
        assert self.net is not None
        optimizer = apply_mup(self.optimizer_callable(self.net.parameters()), self.net)
        use_fused(optimizer)
        keep_reference_units(self.net, optimizer)
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
            clip_grad_norm_(self.net, gradient_clip_val)

    # --- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        optimizers = [] if self._trainer is None else self.trainer.optimizers
        checkpoint[CHECKPOINT_KEY] = {
            "class_path": class_path(self),
            "optimizer_classes": [class_path(optimizer) for optimizer in optimizers],
            "optimizer_names": [optimizer_names(self, optimizer) for optimizer in optimizers],
            "mixed_widths": mixed_widths(self.net) if self.net is not None else {},
        }
        checkpoint["hyper_parameters"]["init_from"] = (
            None  # it has weights of its own, also where the base does not exist
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The last hook before weights load: the network is rebuilt to the checkpoint's width, whichever it is."""
        width = checkpoint_width(checkpoint, type(self).__name__)
        if self.net is None or width != self.width:
            self.hparams["width"] = width
            with init_contexts(self._trainer):
                self.net = self.network(width)
                self.prepare_network()
            for callback in averaging_callbacks(self):
                callback._average_model = averaged_copy(callback, self)
        self._refuse_other_architecture(checkpoint)
        assert self.net is not None
        restore_mixed_widths(self.net, checkpoint[CHECKPOINT_KEY]["mixed_widths"])

    def on_fit_start(self) -> None:
        path = self.hparams["init_from"]
        if path is not None and self.trainer.ckpt_path is None:
            try:
                self._load_base(load_checkpoint(path))
            except ValueError as error:
                raise ValueError(f"model.init_from = {path}: {error}") from error

    @torch.no_grad()
    def _load_base(self, checkpoint: dict[str, Any]) -> None:
        width = checkpoint_width(checkpoint, type(self).__name__)
        if width != self.width:
            raise ValueError(f"its width is {width}, but model.width is {self.width}; set model.width: {width}")
        self._refuse_other_architecture(checkpoint)
        if checkpoint[CHECKPOINT_KEY]["mixed_widths"]:
            raise ValueError(
                "some of its parameters are made of pieces that grew by different factors; it can only be resumed"
            )
        assert self.net is not None
        for name, tensor in self.net.state_dict().items():
            with whole(tensor) as target:
                target.copy_(checkpoint["state_dict"][f"net.{name}"])
        for callback in averaging_callbacks(self):
            callback._average_model = averaged_copy(callback, self)
        if not checkpoint.get("optimizer_states"):
            return
        ours = checkpoint[CHECKPOINT_KEY]
        classes = [class_path(optimizer) for optimizer in self.trainer.optimizers]
        if classes != ours["optimizer_classes"]:
            raise ValueError(
                f"it has the state of {', '.join(ours['optimizer_classes'])}, but model.optimizer makes "
                f"{', '.join(classes)}; "
                "take the same, or leave the state out: python -m mupscale upscale --no-optimizer"
            )
        for optimizer, names, saved in zip(
            self.trainer.optimizers, ours["optimizer_names"], checkpoint["optimizer_states"], strict=True
        ):
            # by name: other weight decay or learning rates may split the groups in another way
            indices = dict(
                zip(names, (index for group in saved["param_groups"] for index in group["params"]), strict=True)
            )
            state = optimizer.state_dict()
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for index, (name, parameter) in enumerate(zip(optimizer_names(self, optimizer), parameters, strict=True)):
                moved = saved["state"].get(indices.get(name), {})
                state["state"][index] = {key: _sharded_like(parameter, value) for key, value in moved.items()}
            optimizer.load_state_dict(state)

    def _refuse_other_architecture(self, checkpoint: dict[str, Any]) -> None:
        """ValueError where this network, built at the checkpoint's width, is not the checkpoint's, naming the arguments
        that differ.
        """
        assert self.net is not None
        ours = {f"net.{name}": tensor for name, tensor in self.net.state_dict().items()}
        # a sharded checkpoint has loaded its weights before
        theirs = {
            name: tensor for name, tensor in checkpoint.get("state_dict", ours).items() if name.startswith("net.")
        }
        odd = sorted(ours.keys() ^ theirs.keys()) or [name for name in ours if ours[name].shape != theirs[name].shape]
        arguments = checkpoint["hyper_parameters"]
        differing = {
            key: value for key, value in self.hparams.items() if key not in _FREE and arguments.get(key, value) != value
        }
        if odd or "base_width" in differing:
            told = [f"model.{key} is {arguments[key]} there and {value} here" for key, value in differing.items()]
            raise ValueError(
                f"the checkpoint is of another architecture: {'; '.join(told) or f'it differs in {odd[:4]}'}"
            )


@contextmanager
def init_contexts(trainer: Trainer | None) -> Iterator[None]:
    """The contexts in which a trainer calls `configure_model`; outside of them the network would have the wrong
    precision.
    """
    with ExitStack() as stack:
        if trainer is not None:
            stack.enter_context(trainer.strategy.tensor_init_context())
            stack.enter_context(trainer.strategy.model_sharded_context())
            stack.enter_context(trainer.precision_plugin.module_init_context())
        yield


def class_path(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def optimizer_names(module: nn.Module, optimizer: Optimizer, prefix: str = "") -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state_dict counts them."""
    names = {id(parameter): f"{prefix}{name}" for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def mixed_widths(net: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The widths of parameters whose pieces grew by different factors, as primitives."""
    return {name: astuple(width) for name, width in merged_table(net).items() if width.relative}


def restore_mixed_widths(net: nn.Module, saved: dict[str, tuple[Any, ...]]) -> None:
    if saved:
        store_table(
            net, Table(True, merged_table(net) | {name: WidthFactors(*values) for name, values in saved.items()})
        )


def averaging_callbacks(module: LightningModule) -> list[WeightAveraging]:
    """The EMA callbacks of a run that hold an average already."""
    callbacks = [] if module._trainer is None else module.trainer.callbacks
    return [c for c in callbacks if isinstance(c, WeightAveraging) and c._average_model is not None]


def averaged_copy(callback: WeightAveraging, module: LightningModule) -> AveragedModel:
    """A new average, of the module as it is."""
    return AveragedModel(
        module, device=callback._device or module.device, use_buffers=callback._use_buffers, **callback._kwargs
    )


def _sharded_like(parameter: Tensor, value: Any) -> Any:
    if not (is_sharded(parameter) and isinstance(value, Tensor) and value.shape == parameter.shape):
        return value
    answer = torch.empty_like(parameter, dtype=value.dtype)
    with whole(answer) as target:
        target.copy_(value)
    return answer


def doubled(width: Width) -> Width:
    return [2 * w for w in width] if isinstance(width, list) else 2 * width


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint file on the CPU, tensors and primitives only."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    try:
        return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds
        raise ValueError(f"{path} is not a checkpoint, or a damaged one ({type(error).__name__})") from error


def checkpoint_width(checkpoint: dict[str, Any], module: str) -> Width:
    """The width a checkpoint was saved at; ValueError if it is of another architecture."""
    ours = checkpoint.get(CHECKPOINT_KEY)
    if ours is None or "width" not in checkpoint.get("hyper_parameters", {}):
        raise ValueError("this checkpoint was not saved by a width-scalable module")
    name = ours["class_path"].rpartition(".")[2]  # the module that defines it may go by another name: __main__
    if name != module:
        raise ValueError(f"this checkpoint is of a {name}, the configured model is a {module}")
    return checkpoint["hyper_parameters"]["width"]


def refuse_absolute_rates(scheduler: Any) -> None:
    """ValueError for a schedule that sets absolute learning rates, which would erase the muP scaling of its groups."""
    for part in getattr(scheduler, "_schedulers", ()):
        refuse_absolute_rates(part)
    for attribute in ("eta_min", "max_lrs", "min_lrs"):
        value = getattr(scheduler, attribute, 0)
        if any(float(rate) != 0 for rate in (value if isinstance(value, Sequence) else [value])):
            raise ValueError(
                f"model.lr_scheduler: {type(scheduler).__name__} has an absolute rate ({attribute.removesuffix('s')} = "
                f"{value}), which is "
                "not the same for parameters that muP scales differently. Use a schedule relative to each group's own "
                "rate: "
                "LambdaLR, LinearLR, CosineAnnealingLR with eta_min = 0, SequentialLR of such"
            )
    if type(scheduler).__name__ in ("OneCycleLR", "CyclicLR", "SWALR"):
        raise ValueError(
            f"model.lr_scheduler: {type(scheduler).__name__} sets absolute rates (max_lr, swa_lr), which erases muP "
            "scaling"
        )
