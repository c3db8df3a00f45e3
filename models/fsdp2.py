"""Training with weights, gradients and optimizer state sharded over all processes: `trainer.strategy: fsdp2`."""

from lightning.pytorch.strategies import StrategyRegistry

from mupscale.models._lightning import DataParallelMesh

NAME = "fsdp2"
"""What `trainer.strategy` calls it."""


class FSDP2(DataParallelMesh):
    """Lightning's ModelParallelStrategy over all processes, whatever their number: that of a resumed run may differ.

    A checkpoint is a folder to which every rank writes its shard (torch's distributed checkpoint). Any number of
    processes can load it.
    """

    def __init__(self, save_distributed_checkpoint: bool = True) -> None:
        """
        Args:
            save_distributed_checkpoint: Write folders of shards. If false, rank 0 gathers everything into one file.
        """
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=save_distributed_checkpoint)


if NAME not in StrategyRegistry:
    StrategyRegistry.register(NAME, FSDP2, description=str(FSDP2.__doc__).partition("\n")[0])
