"""Windows of tokens, on the training device or mapped from disk, and the loader that makes batches of them."""

from collections.abc import Hashable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mupscale.datamodules.resident import Plan, ResidentLoader
from mupscale.datamodules.token_files import MappedTokens, ModelVocabulary

COPIED_AT_ONCE = 2**24
"""Tokens that are in memory while all are copied to the training device."""
DRAWN_AT_ONCE = 2**20
"""Starts of random windows that are in memory, about."""
TYPES = {2: (torch.int16, torch.uint16), 4: (torch.int32, torch.uint32)}
"""Types by the bytes of a token: one of that size, and the token's own, for which torch lacks most operations."""

Order = Literal["random", "sequential"]


class ResidentWindows:
    """Windows of tokens that lie on the training device: one index operation and one conversion to int64 a batch.

    With a vocabulary, a token beyond it is a UserError.
    """

    def __init__(
        self, tokens: MappedTokens, size: int, device: torch.device, vocabulary: ModelVocabulary | None = None
    ) -> None:
        self.tokens, self.size, self.device = len(tokens), size, device
        self.starts_device = device
        signed, self._type = TYPES[tokens.token.itemsize]
        content = torch.empty(len(tokens), dtype=signed, device=device)
        for begin in range(0, len(tokens), COPIED_AT_ONCE):
            part = np.empty(min(len(tokens) - begin, COPIED_AT_ONCE), tokens.token)
            tokens.read(begin, part)
            if vocabulary is not None:
                tokens.refuse_beyond(vocabulary, begin, part)
            content[begin : begin + len(part)] = torch.from_numpy(part.view(f"<i{part.itemsize}"))
        self._windows = content.unfold(0, size, 1)  # a view: each row is the window that begins there

    def rows(self, starts: Tensor) -> Tensor:
        return self._windows.index_select(0, starts).view(self._type).to(torch.int64)


class MappedWindows:
    """Windows of tokens that lie on disk.

    The copy of a batch to a GPU is asynchronous: neither the CPU nor the GPU's work waits for it. With a vocabulary,
    the tokens of each batch are checked before they are copied; a token beyond it is a UserError.
    """

    starts_device = torch.device("cpu")

    def __init__(
        self, tokens: MappedTokens, size: int, device: torch.device, vocabulary: ModelVocabulary | None = None
    ) -> None:
        self.tokens, self.size, self.device = len(tokens), size, device
        self._mapped, self._vocabulary = tokens, vocabulary
        self._signed, self._type = TYPES[tokens.token.itemsize]

    def rows(self, starts: Tensor) -> Tensor:
        # pinned memory comes from torch's cache, which reuses a block only after its copy has ended
        rows = torch.empty(len(starts), self.size, dtype=self._signed, pin_memory=self.device.type == "cuda")
        found = rows.numpy().view(self._mapped.token)
        places = starts.tolist()
        for start, row in zip(places, found, strict=True):
            self._mapped.read(start, row)
        if self._vocabulary is not None and found.max(initial=0) >= self._vocabulary.size:
            for start, row in zip(places, found, strict=True):
                self._mapped.refuse_beyond(self._vocabulary, start, row)
        return rows.to(self.device, non_blocking=True).view(self._type).to(torch.int64)


class WindowLoader(ResidentLoader):
    """Batches of windows that overlap by one token, or begin anywhere; a state of other `files` is refused."""

    _rows_stand_alone = True

    def __init__(
        self,
        windows: ResidentWindows | MappedWindows,
        batch_size: int,
        *,
        order: Order,
        targets: bool = True,
        files: str | None = None,
        **options: Any,
    ) -> None:
        context = windows.size - 1
        rows = max(windows.tokens - 1, 0) // context
        # a tensor of so many rows for the ResidentLoader; it takes no memory, and nobody reads it
        counted = torch.zeros(1, dtype=torch.int8, device=windows.starts_device).expand(rows)
        super().__init__((counted,), batch_size, shuffle=False, **options)
        self._order_depends_on |= {"order": order, "tokens": windows.tokens, "context": context}
        if files is not None:
            self._order_depends_on["files"] = files
        self.windows, self.targets = windows, targets
        self._is_sequential = order == "sequential"

    @property
    def _last_start(self) -> int:
        return self.windows.tokens - self.windows.size

    def _made_of(self) -> tuple[Hashable, ...]:
        return id(self.windows), self.targets

    def _augmentation_draws(self, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        if self._is_sequential:
            return ()
        return (torch.randint(self._last_start + 1, (rows,), generator=generator),)

    def _new_plan(self, epoch: int) -> Plan:
        if isinstance(self.windows, ResidentWindows):
            return super()._new_plan(epoch)
        if self._is_sequential:
            return (Ascending(),)
        return Ascending(), RandomStarts(self._last_start, self._rows, self._generator(epoch))

    def _batch(self, rows: Tensor, *chances: Tensor) -> tuple[Tensor, ...]:
        starts = chances[0] if chances else rows * (self.windows.size - 1)
        tokens = self.windows.rows(starts)
        return (tokens if self.targets else tokens[:, :-1],)


class Ascending:
    """The numbers 0, 1, 2, … as parts of a tensor that is never made."""

    def __getitem__(self, places: slice) -> Tensor:
        return torch.arange(places.start, places.stop)


class RandomStarts:
    """The tensor that one `torch.randint` gives for a whole epoch, of which a part is in memory.

    torch draws numbers one by one, so several small draws give the same numbers as one large draw. Starting in the
    middle of an epoch repeats the draws before it, which takes 13 s for a thousand million rows; so does going back.
    """

    def __init__(self, largest: int, rows: int, generator: torch.Generator) -> None:
        self._largest, self._rows = largest, rows
        self._generator, self._first_state = generator, generator.get_state()
        self._begin, self._drawn = 0, torch.empty(0, dtype=torch.int64)
        """The place of the first number in memory, and these numbers."""

    def __getitem__(self, places: slice) -> Tensor:
        if places.start < self._begin:
            self._generator.set_state(self._first_state)
            self._begin, self._drawn = 0, self._drawn[:0]
        while places.stop > self._begin + len(self._drawn):
            kept = self._drawn[max(places.start - self._begin, 0) :]
            self._begin += len(self._drawn) - len(kept)
            rows = min(DRAWN_AT_ONCE, self._rows - self._begin - len(kept))
            self._drawn = torch.cat([kept, torch.randint(self._largest + 1, (rows,), generator=self._generator)])
        return self._drawn[places.start - self._begin : places.stop - self._begin]
