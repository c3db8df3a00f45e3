"""Growable classifiers and language models: their losses, and what a validation measures."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification.accuracy import MulticlassAccuracy
from torchmetrics.text.perplexity import Perplexity

from mupscale.models.base import Growable, Scores


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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # outside the network, so that widening does not change them
        self.val_perplexity, self.test_perplexity = Perplexity(), Perplexity()

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
