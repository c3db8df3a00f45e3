"""Tokenises documents into a prepared folder, in parallel; interruptions do not change the result."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mupscale.atomic import write_durably
from mupscale.datamodules.documents import Batches, Position, Source, Unusable
from mupscale.datamodules.journal import JOURNAL, Journal, held, refuse_other, remove
from mupscale.datamodules.shards import (
    INDEX,
    LARGEST_VOCABULARY,
    SPLITS,
    TOKENIZER,
    VERSION,
    Index,
    ShardWriter,
    file_entry,
    read_index,
    usable_cores,
)
from mupscale.datamodules.vocabulary import BYTES, dumped, encoded, gpt2_ranks, loaded, trained_ranks
from mupscale.errors import UserError

if TYPE_CHECKING:
    import tiktoken

SHARD_TOKENS = 2**26
TRAINING_BYTES = 2**26
"""How much text of the first training documents a vocabulary is trained on."""
COMMIT_SECONDS = 5.0
"""The interval between commits in seconds: a killed process loses at most this much work."""

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The tokens of several documents, one after another; each document's number of tokens; whether it is held out."""


def prepare(
    source: Source,
    out: Path,
    *,
    vocabulary: int | None,
    tokens: int | None = None,
    val_fraction: float = 0.01,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Index:
    """Prepares the folder `out` from the documents of `source`, and returns its index.

    An unfinished folder is continued, and a finished one is not changed. The vocabulary is GPT-2's, or a BPE of
    `vocabulary` tokens trained on the first training documents. A hash of its text decides whether a document is held
    out, so equal documents are in the same split. With `tokens`, the last document is the one that reaches this number,
    both splits together. The result depends neither on `workers` (threads; by default one per core) nor on
    interruptions. A source that cannot be used leaves no files.
    """
    if vocabulary is not None and not BYTES < vocabulary <= LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab {vocabulary}: wanted {BYTES + 1} (all bytes, and the end of text) to {LARGEST_VOCABULARY}, "
            "which fit in 16 bits"
        )
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: wanted a number between 0 and 1")
    asked = {
        **source.described(),
        "vocab": vocabulary or "gpt2",
        "tokens": tokens,
        "val-fraction": val_fraction,
        "shard tokens": shard_tokens,
    }
    with held(out):
        if (out / INDEX).exists():
            index = read_index(out)
            refuse_other(out, index.content["preparation"], asked)
            (out / JOURNAL).unlink(missing_ok=True)
            print(f"{out} is finished already")
            return index
        journal = Journal.read(out)
        if journal is None:
            journal = Journal({**asked, **source.resolve(None)})
            journal.write(out)
        else:
            refuse_other(out, journal.preparation, asked)
            source.resolve(journal.preparation)
        try:
            encoding = tokenizer(source, out, journal)
            write_shards(source, out, encoding, journal, workers or usable_cores())
            return finish(source, out, encoding, journal)
        except Unusable:
            remove(out)
            raise
        except ConnectionError:
            if not any(journal.shards.values()):
                remove(out)
            raise


def is_held_out(document: str, val_fraction: float) -> bool:
    """Whether a document is for validation, which depends on its text alone."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def tokenizer(source: Source, folder: Path, journal: Journal) -> "tiktoken.Encoding":
    """The encoding of the folder's vocabulary, which is downloaded or trained first if the folder has none yet."""
    path, size = folder / TOKENIZER, journal.preparation["vocab"]
    if journal.tokenizer is None:
        trained_on: dict[str, int] | None = None
        if size == "gpt2":
            ranks = gpt2_ranks()
        else:
            print(f"training a vocabulary of {size:,} tokens", flush=True)
            text = TrainingText(source, journal.preparation["val-fraction"])
            ranks = trained_ranks(text, size)
            if not text.documents:
                refuse_empty(source, {"train": 0, "val": text.held_out})
            found = len(ranks) + 1
            if found < size:
                raise Unusable(
                    f"--vocab {size}: {source} gives no more than {found} different tokens; choose that, or less"
                )
            trained_on = {"documents": text.documents, "bytes": text.bytes}
        write_durably(path, dumped(ranks))
        journal.tokenizer = {"trained_on": trained_on}
        journal.write(folder)
    return loaded(path.read_bytes())


class TrainingText:
    """The first training documents, up to the one that reaches TRAINING_BYTES, counted as they are drawn."""

    def __init__(self, source: Source, val_fraction: float) -> None:
        self.source, self.val_fraction = source, val_fraction
        self.documents = self.held_out = self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        with closing(self.source.batches(None)) as batches:
            for document in chain.from_iterable(documents for documents, _ in batches):
                if is_held_out(document, self.val_fraction):
                    self.held_out += 1
                    continue
                self.documents += 1
                self.bytes += len(document.encode())
                yield document
                if self.bytes >= TRAINING_BYTES:
                    return


def write_shards(source: Source, folder: Path, encoding: "tiktoken.Encoding", journal: Journal, workers: int) -> None:
    """Encodes the documents that the journal does not hold yet, and completes shards and journal."""
    if journal.complete:
        return
    asked = journal.preparation
    writers = {split: ShardWriter(folder, split, asked["shard tokens"], journal.shards[split]) for split in SPLITS}
    written = sum(writer.tokens for writer in writers.values())
    last_commit = time.monotonic()

    def work(documents: Sequence[str]) -> Encoded:
        tokens, lengths = encoded(encoding, documents)
        held_out = [is_held_out(document, asked["val-fraction"]) for document in documents]
        return tokens, lengths, np.array(held_out)

    def commit() -> None:
        for writer in writers.values():
            writer.close()
        journal.write(folder)

    with ThreadPoolExecutor(workers) as pool, progress_bar(source, asked["tokens"], journal.position, written) as show:
        try:
            for batch, position in in_order(pool, work, source.batches(journal.position), ahead=2 * workers):
                tokens, lengths, held_out = up_to((asked["tokens"] or np.inf) - written, batch)
                for split, chosen in (("train", ~held_out), ("val", held_out)):
                    writers[split].append(tokens[np.repeat(chosen, lengths)], lengths[chosen])
                written += len(tokens)
                shards = {split: list(writer.counts) for split, writer in writers.items()}
                # both in one statement: an interrupt between two would let `finally` commit a half-updated journal
                vars(journal).update(position=position, shards=shards)
                show(position, written)
                if asked["tokens"] and written >= asked["tokens"]:
                    break
                if time.monotonic() - last_commit > COMMIT_SECONDS:
                    commit()
                    last_commit = time.monotonic()
            journal.complete = True
        finally:
            commit()


def in_order(
    pool: ThreadPoolExecutor, work: Callable[[Sequence[str]], Encoded], batches: Batches, ahead: int
) -> Iterator[tuple[Encoded, Position]]:
    """The encoded batches in their order, with their positions; at most `ahead` batches are read in advance."""
    waiting: deque[tuple[Future[Encoded], Position]] = deque()
    broken: ConnectionError | None = None
    with closing(batches):
        try:
            for documents, position in batches:
                waiting.append((pool.submit(work, documents), position))
                if len(waiting) > ahead:
                    future, position = waiting.popleft()
                    yield future.result(), position
        except ConnectionError as error:  # after the batches that came before it
            broken = error
        while waiting:
            future, position = waiting.popleft()
            yield future.result(), position
    if broken is not None:
        raise broken


def up_to(limit: float, batch: Encoded) -> Encoded:
    """The documents up to the one that reaches the limit of tokens."""
    tokens, lengths, held_out = batch
    if len(tokens) < limit:
        return batch
    ends = lengths.cumsum()
    count = int(np.searchsorted(ends, limit)) + 1
    return tokens[: ends[count - 1]], lengths[:count], held_out[:count]


@contextmanager
def progress_bar(
    source: Source, tokens: int | None, position: Position, written: int
) -> Iterator[Callable[[Position, int], None]]:
    """Shows the tokens written out of `tokens` or, without that number, the bytes of the source that are read."""
    from tqdm import tqdm

    def state(position: Position, written: int) -> tuple[int, int | None]:
        if tokens:
            return written, tokens
        return source.progress(position) or (written, None)

    done, total = state(position, written)
    unit = "tokens" if tokens else "B"
    with tqdm(total=total, initial=done, unit=unit, unit_scale=True, disable=None, leave=False) as bar:

        def show(position: Position, written: int) -> None:
            bar.set_postfix_str(f"{written / 1e6:,.1f} M tokens", refresh=False)
            bar.update(state(position, written)[0] - bar.n)

        yield show


def finish(source: Source, folder: Path, encoding: "tiktoken.Encoding", journal: Journal) -> Index:
    """Writes the index, after which the folder is prepared."""
    shard_tokens = journal.preparation["shard tokens"]
    writers = {split: ShardWriter(folder, split, shard_tokens, journal.shards[split]) for split in SPLITS}
    refuse_empty(source, {split: writer.documents for split, writer in writers.items()})
    assert journal.tokenizer is not None
    content: dict[str, Any] = {
        "version": VERSION,
        "vocabulary": encoding.n_vocab,
        "end_of_text": encoding.eot_token,
        "tokenizer": {**file_entry(folder / TOKENIZER), **journal.tokenizer},
        "preparation": journal.preparation,
    }
    for split, writer in writers.items():
        content[split] = writer.index()
    write_durably(folder / INDEX, json.dumps(content, indent=1).encode())
    (folder / JOURNAL).unlink()
    return read_index(folder)


def refuse_empty(source: Source, documents: dict[str, int]) -> None:
    """Raises Unusable for a source without text, or with too little for two splits."""
    if not any(documents.values()):
        raise Unusable(f"{source}: there is no text in it")
    for split, count in documents.items():
        if count == 0:
            raise Unusable(
                f"{source}: none of its {sum(documents.values())} documents falls to the split `{split}`. "
                "Give more documents (--separator sets where they end in plain text), or another --val-fraction"
            )
