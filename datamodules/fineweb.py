"""Rows of tokens from a prepared folder: FineWeb-Edu, or any text.

See shards.py for the format, README.md for the embedded sample.
"""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from mupscale.datamodules.resident import (
    ResidentLoader,
    model_arguments,
    ranks,
    refuse_bad_number,
    seed_of_run,
    shuffles,
    training_device,
)
from mupscale.datamodules.shards import INDEX, SPLITS, TOKEN, Index, MappedTokens, read_index
from mupscale.datamodules.shared import once, shared, version_of
from mupscale.errors import UserError

JARGON = Path(__file__).with_name("jargon")
RESIDENT_SHARE = 1 / 8
"""Tokens that take at most this share of a GPU's memory are kept there, unless `resident` is set."""

Order = Literal["random", "sequential"]


class FineWeb(LightningDataModule):
    """Tokens of FineWeb-Edu, or of text of your own, from a folder made by `python -m mupscale prepare`.

    A batch is int64 [rows, context + 1]: each position predicts the next. Training sees random crops or, in order,
    every token as a target once an epoch; an epoch has as many rows either way, and drops the ragged last batch.
    Validation and test see the held-out documents in order, without the last window if it is not full; prediction sees
    their inputs alone. Documents follow each other, an end-of-text token after each, and a row may span several of
    them. Batches are the same on any device and for any number of devices. They resume exactly, from the state that the
    training loader saves in Lightning's checkpoints.

    Args:
        data_dir: The prepared folder. Left out: the embedded sample, the Jargon File (0.4 M tokens, vocabulary 4,096).
        batch_size: Rows per batch over all devices together; each of N devices takes one N-th.
        context: Tokens that a row predicts.
        order: random: crops of the training text. sequential: its windows one after another.
        resident: Keep the tokens on the training device. By default on a GPU if they take at most an eighth of its
            memory; otherwise batches are read from disk, by memory map.
        seed: Determines the crops. Left out: they follow `seed_everything`.
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
        super().__init__()
        refuse_bad_number("batch_size", batch_size)
        refuse_bad_number("context", context, least=None)
        if seed is not None:
            refuse_bad_number("seed", seed, least=0)
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.context = context
        self.order: Order = order
        self.resident = resident
        self.seed = seed
        self._order_seed = seed
        self._windows: dict[str, ResidentWindows | MappedWindows] = {}

    def prepare_data(self) -> None:
        index = self._index()
        with about_data_dir():
            once(version_of(_files(index)), index.verify)

    def setup(self, stage: str | None = None) -> None:
        index, device = self._index(), training_device(self.trainer)
        self._refuse_context(index)
        if self._order_seed is None:
            self._order_seed = seed_of_run()
        self.refuse_model(model_arguments(self.trainer))
        if any(windows.device == device for windows in self._windows.values()):
            return
        resident = self.resident
        if resident is None:
            size = sum(index.content[split]["tokens"] for split in SPLITS) * TOKEN.itemsize
            resident = device.type == "cuda" and size <= RESIDENT_SHARE * _memory(device)
        kind = ResidentWindows if resident else MappedWindows
        key = type(self), version_of(_files(index)), kind, self.context, device
        windows = shared(key, lambda: tuple(kind(index.tokens(split), self.context + 1, device) for split in SPLITS))
        self._windows = dict(zip(SPLITS, windows, strict=True))
        if stage == "fit":
            self.train_dataloader()  # refuses a batch size that does not fit the data before a run begins

    def train_dataloader(self) -> "WindowLoader":
        order: Order = self.order if shuffles(self.trainer) else "sequential"
        return self._loader("train", order, drop_last=True)

    def val_dataloader(self) -> "WindowLoader":
        return self._loader("val", "sequential")

    def test_dataloader(self) -> "WindowLoader":
        return self.val_dataloader()

    def predict_dataloader(self) -> "WindowLoader":
        return self._loader("val", "sequential", targets=False)

    def _loader(self, split: str, order: Order, *, targets: bool = True, drop_last: bool = False) -> "WindowLoader":
        return WindowLoader(
            self._windows[split],
            self.batch_size,
            order=order,
            targets=targets,
            seed=self._order_seed,
            drop_last=drop_last,
            **ranks(self.trainer),
        )

    def _index(self) -> Index:
        with about_data_dir():
            return read_index(Path(self.data_dir).expanduser() if self.data_dir is not None else JARGON)

    def _refuse_context(self, index: Index) -> None:
        """Raises a UserError if a split has no window of so many tokens."""
        for split in SPLITS:
            tokens = index.content[split]["tokens"]
            if not 0 < self.context < tokens:
                raise UserError(
                    f"data.context = {self.context}: {index.folder} has {tokens} tokens for {split}, "
                    f"wanted 1 to {tokens - 1}"
                )

    def refuse_model(self, arguments: Mapping[str, Any]) -> None:
        """UserError if a model with these arguments does not fit the data."""
        index = self._index()
        key, vocabulary = _size_in(arguments, "vocabulary", "vocab_size")
        if vocabulary is not None and vocabulary < index.vocabulary:
            raise UserError(
                f"{key} = {vocabulary}: the tokens of {index.folder} are of a vocabulary of "
                f"{index.vocabulary}; set {key}: {index.vocabulary}, or more"
            )
        key, context = _size_in(arguments, "context", "max_position_embeddings", "n_positions")
        if context is not None and context < self.context:
            raise UserError(
                f"data.context = {self.context}: the model has {key} = {context} positions; make them agree"
            )


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


@contextmanager
def about_data_dir() -> Iterator[None]:
    """Names the option in a UserError about the prepared folder."""
    try:
        yield
    except UserError as error:
        raise UserError(f"data_dir: {error}") from error


def _files(index: Index) -> list[Path]:
    """All files of a prepared folder."""
    return [index.folder / name for name in (INDEX, *index.files())]


def _memory(device: torch.device) -> int:
    """The bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


class ResidentWindows:
    """Windows of tokens that lie on the training device: one index operation and one conversion to int64 a batch."""

    def __init__(self, tokens: MappedTokens, size: int, device: torch.device) -> None:
        self.tokens, self.size, self.device = len(tokens), size, device
        self.starts_device = device
        # the bits of uint16, a type for which torch lacks most index operations
        content = torch.empty(len(tokens), dtype=torch.int16, device=device)
        for begin, shard in tokens.shards():
            content[begin : begin + len(shard)] = torch.from_numpy(shard.view("<i2"))
        self._windows = content.unfold(0, size, 1)  # a view: each row is the window that begins there

    def rows(self, starts: Tensor) -> Tensor:
        return self._windows.index_select(0, starts).view(torch.uint16).to(torch.int64)


class MappedWindows:
    """Windows of tokens that lie on disk.

    The copy of a batch to a GPU is asynchronous: neither the CPU nor the GPU's work waits for it.
    """

    starts_device = torch.device("cpu")

    def __init__(self, tokens: MappedTokens, size: int, device: torch.device) -> None:
        self.tokens, self.size, self.device = len(tokens), size, device
        self._mapped = tokens

    def rows(self, starts: Tensor) -> Tensor:
        # pinned memory comes from torch's cache, which reuses a block only after its copy has ended
        rows = torch.empty(len(starts), self.size, dtype=torch.int16, pin_memory=self.device.type == "cuda")
        for start, row in zip(starts.tolist(), rows.numpy().view(TOKEN), strict=True):
            self._mapped.read(start, row)
        return rows.to(self.device, non_blocking=True).view(torch.uint16).to(torch.int64)


class WindowLoader(ResidentLoader):
    """Batches of windows of tokens. The tensor of the ResidentLoader holds the starts of the sequential windows.

    Sequential windows overlap by one token: the last target of one is the first input of the next.
    Random windows begin anywhere.
    """

    _rows_stand_alone = True

    def __init__(
        self,
        windows: ResidentWindows | MappedWindows,
        batch_size: int,
        *,
        order: Order,
        targets: bool = True,
        **options: Any,
    ) -> None:
        context = windows.size - 1
        starts = torch.arange(0, windows.tokens - context, context, device=windows.starts_device)
        super().__init__((starts,), batch_size, shuffle=False, **options)
        self._order_depends_on |= {"order": order, "tokens": windows.tokens, "context": context}
        self.windows, self.targets = windows, targets
        self._is_sequential = order == "sequential"

    def _made_of(self) -> tuple[Hashable, ...]:
        return id(self.windows), self.targets

    def _chances(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        if self._is_sequential:
            return ()
        return (torch.randint(self.windows.tokens - self.windows.size + 1, (rows,), generator=generator),)

    def _batch(self, rows: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        starts = chances[0] if chances else self.tensors[0].index_select(0, rows)
        tokens = self.windows.rows(starts)
        return (tokens if self.targets else tokens[:, :-1],)
