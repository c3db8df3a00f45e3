"""A larger vocabulary: old logits stay, new rows are made of old ones, and their optimizer state of the median's.

No new row leaves the normaliser of the softmax as it is, but the mean of the rarest rows nearly does.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from mupscale.errors import UserError, needs_extra, prefix_errors, refuse_unless_whole
from mupscale.hf.config import parts
from mupscale.hf.forward_pass import arguments_of, logits_of
from mupscale.hf.in_memory import wide_model
from mupscale.hf.recipes import EntryRun, Recipe, continued, copy_of, named_tensors, write

NewRows = Literal["rare", "mean", "subwords"]

RARE_SHARE = 1 / 64
"""The share of old tokens, the least seen ones, whose mean new rows become."""


@dataclass(frozen=True)
class Vocabulary:
    """A model with a larger vocabulary, and what continues its training."""

    model: PreTrainedModel
    optimizer: Optimizer | None
    tokens: int
    rows: int
    shift: float
    """By how much the logarithm of the normaliser grows, in the mean over random tokens: what old text loses."""
    check: str


def extend_vocabulary(
    model: PreTrainedModel,
    tokens: int,
    *,
    used: int | None = None,
    pad_to: int = 1,
    new_rows: NewRows = "rare",
    pieces: Mapping[int, Sequence[int]] | None = None,
    optimizer: Optimizer | None = None,
) -> Vocabulary:
    """Makes room for so many tokens; the logits of old ones stay, bit for bit.

        larger = mupscale.hf.extend_vocabulary(model, 50_304, optimizer=optimizer)
        larger.model.save_pretrained("larger")
        optimizer = larger.optimizer

    Args:
        model: A model of the transformers library.
        tokens: How many tokens there will be.
        used: How many there are now, where rows beyond them are padding; these are used first. By default all rows.
        pad_to: A number that the number of rows becomes a multiple of, if it grows.
        new_rows: What new rows are: the mean of the rows of the rarest old tokens, or of all, or (`subwords`, of the
            embedding) of the old tokens that the text of the new one consisted of. Rare are those with the smallest
            squared gradients in the optimizer's state; without one the last ones, as tokenizers learn them.
        pieces: The old tokens of each new one, for `subwords`.
        optimizer: The model's; `Vocabulary.optimizer` continues it: new rows have the median state of seen ones.
    """
    state = optimizer.state.get(embedding_of(model), {}) if optimizer is not None else {}
    growth = VocabularyGrowth(model, tokens, used, pad_to, new_rows, pieces, state.get("exp_avg_sq"))
    tensors = named_tensors(model)
    recipes = growth.recipes(lambda name, first, last: tensors[name].detach().view(growth.old_rows, -1)[first:last])
    wide = wide_model(model, growth.config())
    write(model, wide, recipes)
    made = None if optimizer is None else continued(model, wide, recipes, optimizer)
    shift, check = growth.compare(model, wide)
    return Vocabulary(wide, made, tokens, growth.rows, shift, check)


Rows = Callable[[str, int, int], Tensor]
"""Reads the rows of a table from one number to another, each on one axis."""

SAME = 1e-5
"""By how much old logits may differ, relative to the largest one, since a larger matrix may be multiplied otherwise."""

CHUNK_ROWS = 256
"""How many rows of a table are summed at once."""


class VocabularyGrowth:
    """How the tables of a model get rows for new tokens; the model may be one without memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: int,
        used: int | None,
        pad_to: int,
        new_rows: NewRows,
        pieces: Mapping[int, Sequence[int]] | None,
        squares: Tensor | None = None,
    ) -> None:
        if new_rows not in get_args(NewRows):
            raise UserError(f"new_rows must be rare, mean or subwords; got {new_rows!r}")
        if new_rows == "subwords" and pieces is None:
            raise UserError("new_rows: subwords needs a tokenizer, which says what new tokens consist of")
        refuse_unless_whole("tokens", tokens, least=1)
        refuse_unless_whole("pad_to", pad_to, least=1)
        self.model, self.tokens, self.tables = model, tokens, _tables(model)
        self.embedding = embedding_of(model)
        self.old_rows = self.embedding.shape[0]
        self.used = self.old_rows if used is None else used
        if not 0 < self.used <= self.old_rows or tokens <= self.used:
            raise UserError(
                f"vocab: {tokens} is not more than the {self.used} tokens there are; a vocabulary never shrinks"
            )
        self.rows = self.old_rows if tokens <= self.old_rows else math.ceil(tokens / pad_to) * pad_to
        self.basis = torch.arange(self.used) if new_rows == "mean" else _rarest(self.used, squares)
        self.pieces = pieces if pieces is not None and new_rows == "subwords" else {}

    def config(self) -> PretrainedConfig:
        return _with_rows(self.model.config, self.old_rows, self.rows)

    def recipes(self, rows: Rows) -> dict[str, Recipe]:
        tensors = named_tensors(self.model)
        answer = {name: copy_of(name, tensor) for name, tensor in tensors.items()}
        for name in self.tables:
            table = tensors[name]
            pieces = self.pieces if table is self.embedding else {}
            answer[name] = self._recipe(name, table.numel() // self.old_rows, pieces, rows)
        return answer

    def _recipe(self, name: str, length: int, pieces: Mapping[int, Sequence[int]], rows: Rows) -> Recipe:
        """New rows from `used` to `tokens`, old padding behind them, and padding with the same row."""
        row = _mean(name, self.basis, rows)
        runs = [EntryRun(name, self.used * length)]
        for token in range(self.used, self.tokens):
            if pieces.get(token):
                own = _mean(name, torch.tensor(list(pieces[token])), rows)
                runs.append(EntryRun(None, length, values=own))
            elif runs[-1].values is row:
                runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
            else:
                runs.append(EntryRun(None, length, values=row))
        if self.tokens < self.old_rows:
            runs.append(EntryRun(name, (self.old_rows - self.tokens) * length, self.tokens * length))
        padding = self.rows - max(self.tokens, self.old_rows)
        if padding:
            runs.append(EntryRun(None, length, count=padding, values=row))
        return Recipe(name, tuple(runs), fresh=lambda old, power: _median_of_seen(old[: self.used], power))

    @torch.no_grad()
    def compare(self, narrow: Any, wide: Any) -> tuple[float, str]:
        """By how much the normaliser grows, and whether the logits of old tokens stay, in words; else a UserError."""
        modes = narrow.training, wide.training
        inputs = {
            name: value % self.used if name.endswith("input_ids") else value  # rows of padding do not stay
            for name, value in arguments_of(narrow).items()
        }
        before, after = (logits_of(model.eval()(**inputs)) for model in (narrow, wide))
        for model, mode in zip((narrow, wide), modes, strict=True):
            model.train(mode)
        if not isinstance(before, Tensor) or before.shape[-1] != self.old_rows:
            return math.nan, "this model returns no logits: nothing was compared"
        largest = float((after[..., : self.used] - before[..., : self.used]).abs().max())
        if not largest <= SAME * float(before.abs().max()):
            raise UserError(f"vocab: logits of old tokens change by {largest:.1e}; nothing was written")
        sums = [logits.double().logsumexp(-1) for logits in (before[..., : self.used], after[..., : self.tokens])]
        shift = float((sums[1] - sums[0]).mean())
        same = "the same, bit for bit" if largest == 0 else f"the same up to {largest:.1e}"
        old = f"logits of the {self.used} old tokens are {same}"
        return shift, f"{old}; the normaliser grows, so old text loses {shift:.4f}"


def _mean(name: str, numbers: Tensor, rows: Rows) -> Tensor:
    """The mean of rows of a table, some of them in memory at a time; in the table's precision."""
    total: Any = 0.0
    for part in numbers.split(CHUNK_ROWS):
        first, last = int(part.min()), int(part.max()) + 1
        found = rows(name, first, last)
        total = total + found[(part - first).to(found.device)].double().sum(0)
    return (total / len(numbers)).to(found.dtype)


def _median_of_seen(old: Tensor, power: int) -> Tensor:
    """The state of a new row: no momentum, and the median square of the rows that were seen."""
    seen = old.flatten(1).any(1) if old.ndim > 1 else old != 0
    if power == 1 or not bool(seen.any()):
        return torch.zeros_like(old[0])
    return old[seen].median(0).values


def embedding_of(model: PreTrainedModel) -> Tensor:
    """The table with a row for each token; a UserError if the model reads no tokens."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding):
        raise UserError(f"vocab: a {type(model).__name__} has no table with a row for each token")
    return embedding.weight


def _tables(model: PreTrainedModel) -> list[str]:
    """The names of the embedding, of what reads it out, and of saved biases of logits.

    Raises a UserError if a vocabulary has further tables.
    """
    tensors, rows = named_tensors(model), embedding_of(model).shape[0]
    modules = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    found = []
    for name, tensor in tensors.items():
        is_bias = not isinstance(tensor, nn.Parameter) and tensor.numel() == rows  # BART's
        if id(tensor) in own or is_bias:
            found.append(name)
        elif rows in tensor.shape:
            raise UserError(f"vocab: {name!r} has an entry for each token too, and how it grows is not known")
    return found


def _rarest(used: int, squares: Tensor | None) -> Tensor:
    """The old tokens that were seen least: those of the smallest squared gradients, or the last ones."""
    count = max(int(used * RARE_SHARE), min(used, 16))
    if squares is None:
        return torch.arange(used - count, used)
    return squares[:used].flatten(1).sum(1).argsort()[:count].sort().values


def _with_rows(config: PretrainedConfig, old: int, rows: int) -> PretrainedConfig:
    wide = copy.deepcopy(config)
    for _, part in parts(wide):
        if getattr(part, "vocab_size", None) == old:
            part.vocab_size = rows
    return wide


def pieces_of(old: Path, new: Path) -> tuple[int, int, dict[int, list[int]]]:
    """How many tokens two tokenizers have, and the old tokens in the text of each new one."""
    before, after = _tokenizer(old), _tokenizer(new)
    known, wanted = before.get_vocab(), after.get_vocab()
    moved = next((token for token, number in known.items() if wanted.get(token) != number), None)
    if moved is not None:
        raise UserError(
            f"--tokenizer {new}: {moved!r} is token {known[moved]} of the model and {wanted.get(moved)} there. A "
            "tokenizer that extends the old one keeps its numbers"
        )
    new_tokens = {number: after.decode([number], skip_special_tokens=False) for number in wanted.values()}
    pieces = {
        number: before.encode(text, add_special_tokens=False).ids
        for number, text in new_tokens.items()
        if number > max(known.values())
    }
    return max(known.values()) + 1, max(wanted.values()) + 1, pieces


def _tokenizer(folder: Path) -> Any:
    with needs_extra("hf"):
        from tokenizers import Tokenizer
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"{folder} has no tokenizer.json; save the tokenizer there by save_pretrained")
    with prefix_errors(f"{file} is not a tokenizer", Exception):  # which is all that the library raises
        return Tokenizer.from_file(str(file))


def known_tokens(folder: Path) -> int | None:
    """How many tokens the tokenizer in a model folder has; None without one."""
    try:
        return max(_tokenizer(folder).get_vocab().values()) + 1
    except (UserError, ValueError):
        return None
