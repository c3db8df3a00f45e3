"""What every width-scalable LightningModule shares: its network by width, muP, optimizers, clipping and checkpoints.

A subclass gives `build(width)`, the network at a width, and `loss(batch)`; see the README for one in twenty lines.
"""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.cli import ReduceLROnPlateau as MonitoredPlateau
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from mupscale.base_shapes import Init, set_base_shapes
from mupscale.clip import clip_grad_norm_
from mupscale.optim import apply_mup, keep_reference_units

Width = int | list[int]

_CHECKPOINT_KEY = "mupscale"
"""Our part of a checkpoint: the class, the network's class, and the parameter names behind the optimizer's indices."""


class WidthScalable(LightningModule):
    """A LightningModule whose network can be built at any width, and rebuilt at another one in the middle of a run.

    Saved: weights, buffers, optimizer and scheduler state, and the constructor's arguments with the width of the moment. A
    checkpoint of any width loads: the network is rebuilt to the checkpoint's width first. Recomputed: the muP tables.
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
            base_width: The width at which the optimizer's hyperparameters mean what they say; muP scales them from there.
            optimizer: Makes the optimizer from the parameters; its hyperparameters are muP base constants.
            lr_scheduler: Makes a schedule relative to each group's own rate, stepped every optimizer step.
            compile: Compile the network with torch.compile.
            init_from: A checkpoint to take weights, buffers and optimizer state from; counters, data and schedule start at zero.
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
        self.train_loss = loss.detach()  # for the Curves callback, which writes it before the step's checkpoint
        self.log("loss", self.train_loss, prog_bar=True, logger=False)
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
            if self.hparams["init_from"] is not None and not self._resuming():
                self._load_base(self.hparams["init_from"])
            self.prepare_network()

    def prepare_network(self) -> None:
        """What is done to a finished network before it trains: sharding under FSDP2, compiling."""
        assert self.net is not None
        mesh = self.device_mesh
        if mesh is not None:
            self.shard(self.net, mesh["data_parallel"])
        if self.hparams["compile"]:
            self.net.compile()

    def shard(self, net: nn.Module, mesh: Any) -> None:
        """Shards the network over the data-parallel mesh (ModelParallelStrategy); override to shard block by block."""
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=mesh)

    def network(self, width: Width, *, meta: bool = False) -> nn.Module:
        """The network at `width` with its muP tables; on the meta device for planning, or to be written by an upscale."""
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
        keep_reference_units(self.net, optimizer)
        if self.lr_scheduler_callable is None:
            return optimizer
        scheduler = self.lr_scheduler_callable(optimizer)
        refuse_absolute_rates(scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            monitor = scheduler.monitor if isinstance(scheduler, MonitoredPlateau) else "val/loss"
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch", "monitor": monitor}}
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
        checkpoint[_CHECKPOINT_KEY] = {"module": type(self).__name__, "optimizer_names": self._optimizer_names()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The last hook before weights load: the network is rebuilt to the checkpoint's width, whichever it is."""
        width = checkpoint_width(checkpoint, type(self).__name__)
        if self.net is None or width != self.width:
            self.hparams["width"] = width
            self.net = self.network(width)
            self.prepare_network()

    def on_fit_start(self) -> None:
        if self.hparams["init_from"] is not None and not self._resuming():
            self._load_base_state(self.hparams["init_from"])

    def _resuming(self) -> bool:
        return self._trainer is not None and self.trainer.ckpt_path is not None

    def _optimizer_names(self) -> list[list[str]]:
        """For each optimizer the names of its parameters, in the order in which its state_dict counts them."""
        if self._trainer is None:
            return []
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        return [[names[id(p)] for g in o.param_groups for p in g["params"]] for o in self.trainer.optimizers]

    def _load_base(self, path: str) -> None:
        checkpoint = load_checkpoint(path)
        width = checkpoint_width(checkpoint, type(self).__name__)
        if width != self.width:
            raise ValueError(f"model.init_from: {path} has width {width}, but model.width is {self.width}; set model.width: {width}")
        assert self.net is not None
        weights = {name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items() if name.startswith("net.")}
        self.net.load_state_dict(weights)

    def _load_base_state(self, path: str) -> None:
        """Optimizer state by parameter name: other weight decay or learning rates may split the groups in another way."""
        checkpoint = load_checkpoint(path)
        saved_names = checkpoint[_CHECKPOINT_KEY]["optimizer_names"]
        for optimizer, names, saved in zip(self.trainer.optimizers, saved_names, checkpoint.get("optimizer_states", []), strict=False):
            by_name = {names[index]: state for index, state in saved["state"].items()}
            current = optimizer.state_dict()
            order = self._optimizer_names()[self.trainer.optimizers.index(optimizer)]
            current["state"] = {index: by_name[name] for index, name in enumerate(order) if name in by_name}
            optimizer.load_state_dict(current)


def doubled(width: Width) -> Width:
    return [2 * w for w in width] if isinstance(width, list) else 2 * width


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint file on the CPU, tensors and primitives only."""
    if not Path(path).is_file():
        raise ValueError(f"there is no checkpoint {path}")
    return cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))


def checkpoint_width(checkpoint: dict[str, Any], module: str) -> Width:
    """The width a checkpoint was saved at; ValueError if it is of another architecture."""
    ours = checkpoint.get(_CHECKPOINT_KEY)
    if ours is None or "width" not in checkpoint.get("hyper_parameters", {}):
        raise ValueError("this checkpoint was not saved by a width-scalable module")
    if ours["module"] != module:
        raise ValueError(f"this checkpoint is of a {ours['module']}, the configured model is a {module}")
    return checkpoint["hyper_parameters"]["width"]


def refuse_absolute_rates(scheduler: Any) -> None:
    """ValueError for a schedule that sets absolute learning rates, which would erase the muP scaling of its groups."""
    for part in getattr(scheduler, "_schedulers", ()):
        refuse_absolute_rates(part)
    for attribute in ("eta_min", "max_lrs", "min_lrs"):
        value = getattr(scheduler, attribute, 0)
        if any(float(rate) != 0 for rate in (value if isinstance(value, Sequence) else [value])):
            raise ValueError(
                f"model.lr_scheduler: {type(scheduler).__name__} has an absolute rate ({attribute.removesuffix('s')} = {value}), which is "
                "not the same for parameters that muP scales differently. Use a schedule relative to each group's own rate: "
                "LambdaLR, LinearLR, CosineAnnealingLR with eta_min = 0, SequentialLR of such"
            )
    if type(scheduler).__name__ in ("OneCycleLR", "CyclicLR"):
        raise ValueError(f"model.lr_scheduler: {type(scheduler).__name__} sets absolute rates (max_lr), which erases muP scaling")
