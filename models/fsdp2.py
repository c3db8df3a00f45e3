"""Training with weights, gradients and optimizer state sharded over all processes: `trainer.strategy: fsdp2`."""

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from mupscale.errors import prefix_errors
from mupscale.models._lightning import DataParallelMesh
from mupscale.models.checkpoint import (
    CHECKPOINT_KEY,
    load_checkpoint,
    load_hyperparameters,
    load_optimizer_state,
    load_weights,
    refuse_other_architecture,
    refuse_other_size,
    size_of,
)
from mupscale.models.sharded import outline

NAME = "fsdp2"
"""What `trainer.strategy` calls it."""


class FSDP2(DataParallelMesh):
    """Lightning's ModelParallelStrategy over all processes, whatever their number: that of a resumed run may differ.

    A checkpoint is a folder to which every rank writes its shard (torch's distributed checkpoint). Any number of
    processes can load it, and one process without this strategy. Files of other strategies load too.
    """

    def __init__(self, save_distributed_checkpoint: bool = True) -> None:
        """
        Args:
            save_distributed_checkpoint: Write folders of shards. If false, rank 0 gathers everything into one file.
        """
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path, module = Path(self.broadcast(checkpoint_path)), self.lightning_module
        assert module is not None
        # Lightning would number the parameters of an optimizer in the order of the model, a file does so in its own
        checkpoint = outline(path) if path.is_dir() else load_checkpoint(path, mapped=True)
        if CHECKPOINT_KEY in checkpoint:
            refuse_other_architecture(module, module.hparams, checkpoint, "")
        if path.is_dir() or CHECKPOINT_KEY not in checkpoint:
            return super().load_checkpoint(path, weights_only)
        if size_of(module) is not None:
            with prefix_errors(str(path)):
                refuse_other_size(module, checkpoint)
        load_weights(module, checkpoint, "")
        load_optimizer_state(module, self.optimizers, checkpoint)
        load_hyperparameters(self.optimizers, checkpoint)
        del checkpoint["state_dict"]
        return checkpoint


if NAME not in StrategyRegistry:
    StrategyRegistry.register(NAME, FSDP2, description=str(FSDP2.__doc__).partition("\n")[0])
