"""Rows of tokens from token files, which `prepare` and datatrove write: FineWeb-Edu, or any text.

See token_files.py for the format, README.md for the embedded sample.
"""

from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from mupscale.datamodules.files import once, shared
from mupscale.datamodules.resident import SeededData, ranks
from mupscale.datamodules.token_files import SPLITS, ModelVocabulary, TokenFolder
from mupscale.datamodules.windows import MappedWindows, Order, ResidentWindows, WindowLoader
from mupscale.errors import UserError, prefix_errors, refuse_unless_whole

JARGON = Path(__file__).with_name("jargon")
RESIDENT_SHARE = 1 / 8
"""Tokens that take at most this share of a GPU's memory are kept there, unless `resident` is set."""


class FineWeb(SeededData):
    """Tokens of FineWeb-Edu or of your own text: a folder of `python -m mupscale prepare`, or datatrove's .ds files.

    A batch is int64 [rows, context + 1]: each position predicts the next. Training uses random crops, or sequential
    windows in which every token is a target once per epoch; both have the same number of rows per epoch, and drop an
    incomplete last batch. Validation and test use the held-out documents in order, without an incomplete last window;
    prediction uses their inputs only. Documents are concatenated, with an end-of-text token after each (of datatrove,
    if it wrote one), and a row may span several of them. Batches do not depend on the type or number of devices.
    They resume exactly, from the state that the training loader saves in Lightning's checkpoints.

    Args:
        data_dir: A prepared folder, or any with .ds files at any depth. By default the embedded sample, the Jargon File
            (0.4 M tokens, vocabulary 4,096).
        batch_size: Rows per batch, over all devices together.
        context: The number of tokens that a row predicts.
        order: `random` draws crops of the training text, `sequential` reads its windows in order.
        resident: Keep the tokens on the training device. By default this is done on a GPU if they take at most an
            eighth of its memory; otherwise batches are read from disk, by memory map.
        seed: The seed of the crops; by default that of `seed_everything`.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        batch_size: int = 32,
        context: int = 1024,
        order: Order = "random",
        resident: bool | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed)
        refuse_unless_whole("data.context", context, least=None)
        self.data_dir = data_dir
        self.context = context
        self.order: Order = order
        self.resident = resident
        self._windows: dict[str, ResidentWindows | MappedWindows]

    def prepare_data(self) -> None:
        corpus = self._corpus
        with prefix_errors("data_dir", OSError):
            once(corpus.version, corpus.verify)

    def setup(self, stage: str | None = None) -> None:
        for split in SPLITS:
            tokens = self._corpus.count(split)
            if not 0 < self.context < tokens:
                raise UserError(f"data.context = {self.context}: wanted 1 to {tokens - 1}, {split} has {tokens} tokens")
        super().setup(stage)

    def load(self, device: torch.device) -> None:
        corpus = self._corpus
        self._refuse_other_files(corpus)
        if self.data_dir is not None:
            once(("described", corpus.version), lambda: rank_zero_info(corpus.summary()))
        vocabulary = _vocabulary_in(self.model_arguments)
        resident = self.resident
        if resident is None:
            size = sum(corpus.count(split) for split in SPLITS) * corpus.token.itemsize
            on_gpu = device.type == "cuda"
            resident = on_gpu and size <= RESIDENT_SHARE * torch.cuda.get_device_properties(device).total_memory
        kind = ResidentWindows if resident else MappedWindows
        key = corpus.version, kind, self.context, device, vocabulary

        def made(split: str) -> ResidentWindows | MappedWindows:
            return kind(corpus.tokens(split), self.context + 1, device, vocabulary)

        self._windows = {split: shared((*key, split), partial(made, split)) for split in SPLITS}

    def train_dataloader(self) -> WindowLoader:
        return self._loader("train", self.order if self.shuffles else "sequential")

    def val_dataloader(self) -> WindowLoader:
        return self._loader("val", "sequential")

    def predict_dataloader(self) -> WindowLoader:
        return self._loader("val", "sequential", targets=False)

    def _loader(self, split: str, order: Order, *, targets: bool = True) -> WindowLoader:
        options = self.loader_options(training=split == "train")
        files = self._corpus.order(split)
        return WindowLoader(self._windows[split], self.batch_size, order=order, targets=targets, files=files, **options)

    @cached_property
    def _corpus(self) -> TokenFolder:
        with prefix_errors("data_dir", OSError):
            listed = TokenFolder(Path(self.data_dir).expanduser() if self.data_dir is not None else JARGON)
            # that of another data module, if there is one, which has read more of its files
            corpus: TokenFolder = shared((TokenFolder, listed.version), lambda: listed)
            corpus.count("train")  # reads the files
        return corpus

    def _refuse_other_files(self, corpus: TokenFolder) -> None:
        """UserError on all ranks if one of them finds other token files: its rows would be others."""
        if ranks(self.trainer)["world_size"] == 1:
            return
        assert self.trainer is not None
        strategy = self.trainer.strategy
        own = [corpus.order(split) for split in SPLITS]
        if not strategy.reduce_boolean_decision(strategy.broadcast(own) == own, all=True):
            raise UserError(
                f"data_dir: the processes find different token files in {corpus.folder}: give each the same"
            )

    def refuse_model(self, arguments: Mapping[str, Any]) -> None:
        vocabulary = _vocabulary_in(arguments)
        if vocabulary is not None:
            self._corpus.refuse_vocabulary(vocabulary)
        key, context = _size_in(arguments, "context", "max_position_embeddings", "n_positions")
        if context is not None and context < self.context:
            raise UserError(f"data.context = {self.context}: the model has {key} = {context}; make them agree")


def _vocabulary_in(arguments: Mapping[str, Any]) -> ModelVocabulary | None:
    """The vocabulary among a model's arguments, if it is there."""
    key, size = _size_in(arguments, "vocabulary", "vocab_size")
    return None if size is None else ModelVocabulary(key, size)


def _size_in(arguments: Mapping[str, Any], own: str, *of_transformers: str) -> tuple[str, int | None]:
    """The key of a size among a model's arguments, or in the configuration of transformers among them; and the size."""
    if own in arguments:
        return f"model.{own}", arguments[own]
    config, prefix = arguments.get("config"), "model.config"
    if isinstance(config, Mapping) and isinstance(config.get("text_config"), Mapping):
        config, prefix = config["text_config"], f"{prefix}.text_config"
    if isinstance(config, Mapping):
        for name in of_transformers:
            if isinstance(config.get(name), int) and config[name] > 0:
                return f"{prefix}.{name}", config[name]
    return own, None
