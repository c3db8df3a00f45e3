"""Lightning's callbacks that do not work in a run that grows, each with the reason and an alternative."""

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.callbacks.spike import SpikeDetection

from mupscale.errors import UserError

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
