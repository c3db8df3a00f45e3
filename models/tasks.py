"""Growable classifiers and language models: their losses, and what a validation measures."""

import math
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification.accuracy import MulticlassAccuracy
from torchmetrics.text.perplexity import Perplexity

from mupscale.models._lightning import trainer_of
from mupscale.models.base import Growable, Scores
from mupscale.models.checkpoint import Width
from mupscale.models.fp8 import refuse_without_float8, summary_of, use_float8_


class Classifier(Growable):
    """Trains on batches (inputs, labels); validates and tests with loss and accuracy; predicts class probabilities."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # outside the network, so that widening does not change them
        self.val_accuracy = MulticlassAccuracy(self.classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(self.classes, average="micro")

    @property
    def classes(self) -> int:
        """The number of classes: by default the argument `outputs`."""
        return self.hparams["outputs"]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_accuracy)

    def joint_scores(self) -> Scores | None:
        methods = ("validation_step", "_evaluate")
        if any(getattr(type(self), method) is not getattr(Classifier, method) for method in methods):
            return None
        return Scores(_scores_of_classes, lambda means: {f"val/{name}": value for name, value in means.items()})

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        return torch.softmax(self(inputs), dim=-1)

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str, accuracy: MulticlassAccuracy) -> None:
        logits = self(batch[0])
        accuracy(logits, batch[1])
        self.log(f"{stage}/loss", F.cross_entropy(logits, batch[1]), batch_size=len(batch[1]), sync_dist=True)
        self.log(f"{stage}/accuracy", accuracy, batch_size=len(batch[1]), prog_bar=True)


def _scores_of_classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    logits = model(batch[0])
    is_right = logits.argmax(-1) == batch[1]
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": is_right.double().mean()}


class LanguageModel(Growable):
    """Trains on rows of tokens, of which logits predict the next; validates and tests with loss and perplexity."""

    def __init__(self, width: Width, base_width: Width, *, fp8: bool = False, **kwargs: Any) -> None:
        """
        Args:
            fp8: Compute the blocks' linear layers of width 1024 and more in float8, on a GPU that can, with
                `trainer.precision: bf16-mixed`. Compile the network too: without that it is slower.
        """
        super().__init__(width, base_width, **kwargs)
        # outside the network, so that widening does not change them
        self.val_perplexity, self.test_perplexity = Perplexity(), Perplexity()

    def blocks_of(self, net: nn.Module) -> list[nn.Module]:
        """The layers of a network, which are compiled, sharded and put into float8 one by one."""
        return []

    def prepare_network(self) -> None:
        assert self.net is not None
        if self.hparams["fp8"] and not self.is_in_stack:
            trainer = trainer_of(self)
            for block in self.blocks_of(self.net):
                use_float8_(block)
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                refuse_without_float8(trainer.strategy.root_device, trainer.precision)
                rank_zero_info(summary_of(self.net))
        super().prepare_network()

    def shard(self, net: nn.Module, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in self.blocks_of(net):
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)

    def batch_size(self, batch: Tensor) -> int:
        return batch[:, 1:].numel()

    def loss(self, batch: Tensor) -> Tensor:
        return self.mappable_loss(batch)

    def mappable_loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "val", self.val_perplexity)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch, "test", self.test_perplexity)

    def joint_scores(self) -> Scores | None:
        methods = ("validation_step", "_evaluate")
        if any(getattr(type(self), method) is not getattr(LanguageModel, method) for method in methods):
            return None
        return Scores(
            _scores_of_tokens, lambda means: {"val/loss": means["loss"], "val/perplexity": math.exp(means["loss"])}
        )

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.log_softmax(self(batch), dim=-1)

    def _evaluate(self, batch: Tensor, stage: str, perplexity: Perplexity) -> None:
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        perplexity(logits.float(), targets)
        self.log(
            f"{stage}/loss",
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            batch_size=len(batch),
            sync_dist=True,
        )
        self.log(f"{stage}/perplexity", perplexity, batch_size=len(batch), prog_bar=True)


def _scores_of_tokens(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    logits = model(batch[:, :-1])
    return {"loss": F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())}
