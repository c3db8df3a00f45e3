"""From documents to a prepared folder: in parallel, and the same bytes however often it is interrupted."""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

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
"""How much of the first training documents a vocabulary is trained on."""
COMMIT_SECONDS = 5.0
"""How much work an interruption can cost."""

Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tokens of several documents; for each how many it has, and whether it is held out."""


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
    """The index of the folder `out`, prepared from the documents of `source`; what was done there already is not done
    again.

    Tokens are GPT-2's, or those of a BPE of `vocabulary` tokens trained on the first training documents. A hash of its
    text decides whether a document is held out, so equal ones lie on one side. With `tokens`, the document that reaches
    that number, both splits together, is the last. The bytes written depend neither on `workers` (threads; by default
    one for each core) nor on interruptions. A source that cannot be used leaves nothing behind.
    """
    if vocabulary is not None and not BYTES < vocabulary <= LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab {vocabulary}: wanted {BYTES + 1} (all bytes, and the end of text) to {LARGEST_VOCABULARY}, which "
            "fit in 16 bits"
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
    """Whether a document is for validation: a matter of its text alone."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def tokenizer(source: Source, folder: Path, journal: Journal) -> "tiktoken.Encoding":
    """The encoding of the folder's vocabulary, which is fetched or trained first if there is none."""
    path, size = folder / TOKENIZER, journal.preparation["vocab"]
    if journal.tokenizer is None:
        if size == "gpt2":
            ranks, trained_on = gpt2_ranks(), None
        else:
            print(f"training a vocabulary of {size:,} tokens", flush=True)
            text = TrainingText(source, journal.preparation["val-fraction"])
            ranks = trained_ranks(text, size)
            if not text.documents:
                refuse_empty(source, {"train": 0, "val": text.held_out})
            if len(ranks) + 1 < size:
                raise Unusable(
                    f"--vocab {size}: {source} gives no more than {len(ranks) + 1} different tokens; choose that, or "
                    "less"
                )
            trained_on = {"documents": text.documents, "bytes": text.bytes}
        write_durably(path, dumped(ranks))
        journal.tokenizer = {"trained_on": trained_on}
        journal.write(folder)
    return loaded(path.read_bytes())


class TrainingText:
    """The first training documents, TRAINING_BYTES of them or a little more, counted as they are drawn."""

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
    """Encodes what the journal does not know as done, and brings shards and journal to the end."""
    if journal.complete:
        return
    asked = journal.preparation
    writers = {split: ShardWriter(folder, split, asked["shard tokens"], journal.shards[split]) for split in SPLITS}
    written = sum(writer.tokens for writer in writers.values())
    last_commit = time.monotonic()

    def work(documents: Sequence[str]) -> Encoded:
        return *encoded(encoding, documents), np.array(
            [is_held_out(document, asked["val-fraction"]) for document in documents]
        )

    def commit() -> None:
        for writer in writers.values():
            writer.close()
        journal.write(folder)

    with ThreadPoolExecutor(workers) as pool, progress_bar(source, asked["tokens"], journal.position, written) as show:
        try:
            for (tokens, lengths, held_out), position in in_order(
                pool, work, source.batches(journal.position), 2 * workers
            ):
                tokens, lengths, held_out = up_to((asked["tokens"] or np.inf) - written, (tokens, lengths, held_out))
                for split, chosen in (("train", ~held_out), ("val", held_out)):
                    writers[split].append(tokens[np.repeat(chosen, lengths)], lengths[chosen])
                written += len(tokens)
                # at one stroke, because an interrupt may come between any two lines, and be followed by a commit
                vars(journal).update(
                    position=position, shards={split: list(writer.counts) for split, writer in writers.items()}
                )
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
    """The encoded batches in their order, with their positions; no more than `ahead` are read before they are asked
    for.
    """
    waiting: deque[tuple[Future[Encoded], Position]] = deque()
    broken: ConnectionError | None = None
    with closing(batches):
        try:
            for documents, position in batches:
                waiting.append((pool.submit(work, documents), position))
                if len(waiting) > ahead:
                    future, position = waiting.popleft()
                    yield future.result(), position
        except ConnectionError as error:  # what came before it counts
            broken = error
        while waiting:
            future, position = waiting.popleft()
            yield future.result(), position
    if broken is not None:
        raise broken


def up_to(limit: float, batch: Encoded) -> Encoded:
    """The documents up to the one with which their tokens reach the limit."""
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
    """Shows how many tokens of those asked for are written or, if all are, how much of the source is read."""
    from tqdm import tqdm

    def state(position: Position, written: int) -> tuple[int, int | None]:
        return (written, tokens) if tokens else source.progress(position) or (written, None)

    done, total = state(position, written)
    with tqdm(
        total=total, initial=done, unit="tokens" if tokens else "B", unit_scale=True, disable=None, leave=False
    ) as bar:

        def show(position: Position, written: int) -> None:
            bar.set_postfix_str(f"{written / 1e6:,.1f} M tokens", refresh=False)
            bar.update(state(position, written)[0] - bar.n)

        yield show


def finish(source: Source, folder: Path, encoding: "tiktoken.Encoding", journal: Journal) -> Index:
    """Writes the index, after which the folder is prepared."""
    writers = {
        split: ShardWriter(folder, split, journal.preparation["shard tokens"], journal.shards[split])
        for split in SPLITS
    }
    refuse_empty(source, {split: writer.documents for split, writer in writers.items()})
    assert journal.tokenizer is not None
    content = {
        "version": VERSION,
        "vocabulary": encoding.n_vocab,
        "end_of_text": encoding.eot_token,
        "tokenizer": {**file_entry(folder / TOKENIZER), **journal.tokenizer},
        "preparation": journal.preparation,
        **{split: writer.index() for split, writer in writers.items()},
    }
    write_durably(folder / INDEX, json.dumps(content, indent=1).encode())
    (folder / JOURNAL).unlink()
    return read_index(folder)


def refuse_empty(source: Source, documents: dict[str, int]) -> None:
    """Unusable is a source without text, or with too little for two splits."""
    if not any(documents.values()):
        raise Unusable(f"{source}: there is no text in it")
    for split, count in documents.items():
        if count == 0:
            raise Unusable(
                f"{source}: none of its {sum(documents.values())} documents falls to the split `{split}`. It wants "
                "more documents"
                " (in plain text --separator tells where they end), or another --val-fraction"
            )
