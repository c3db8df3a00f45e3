"""Tokenises documents into a folder of token files; interruptions do not change the result.

A prepared folder holds:

    train/00000.ds, …     the token files to train on, see token_files.py
    val/00000.ds, …       those of the documents that are held out
    tokenizer.json        the vocabulary, as the library tokenizers reads it
    preparation.json      the options, and what the folder holds. Written last
    progress.json         the state of a preparation that is not finished
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mupscale.atomic import locked, partial, remove_empty, write_durably
from mupscale.data_files import interpreting, json_of, read_bytes, refuse_links
from mupscale.datamodules.documents import Source, Unusable
from mupscale.datamodules.token_files import PREPARED, PROGRESS, SPLITS
from mupscale.datamodules.token_writer import LARGEST_VOCABULARY, TokenWriter
from mupscale.errors import UserError, is_whole, needs_extra, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, LOCK = "tokenizer.json", ".lock"
END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # every text can be written with these alone
GPT2 = "openai-community/gpt2"
PIECE = 2**20
"""Characters encoded as one text, so that memory does not grow with the length of documents."""
LONGEST_WORD = 256
"""Characters. Training a vocabulary takes time in the square of the length of a word: minutes for one of a megabyte."""
LONG_TEXT = 2**22
"""Characters of such words that a vocabulary is trained on: each takes some three hundred bytes of memory."""
LONG_WORDS = re.compile(rf"(?<!\S)\S{{{LONGEST_WORD + 1},}}|(?<!\s)\s{{{LONGEST_WORD + 1},}}")
FILE_TOKENS = 2**26
TRAINING_BYTES = 2**26
"""How much text of the first training documents a vocabulary is trained on."""
DAMAGED = "{} is damaged; delete the folder and prepare it again"
COMMIT_SECONDS = 5.0
"""The interval between commits in seconds: a killed process loses at most this much work."""

Prepared = dict[str, Any]
"""What a finished folder holds: the content of its preparation.json."""

Watch = Callable[[str, int, int], None]
"""Called with what is done in words and in a number, and with the number of all of it; 0 if that is not known."""


@dataclass
class Progress:
    """The state of an unfinished folder. Files are cut back to this state."""

    preparation: dict[str, Any]
    """The options, and what was settled when the preparation began."""
    trained_on: dict[str, int] | None = None
    """The text that the vocabulary was trained on, and 0 documents of GPT-2's; None until its file is written."""
    position: Any = None
    files: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    """The tokens and documents of each file."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        path = folder / PROGRESS
        if path.exists():
            with interpreting(DAMAGED.format(path)):
                progress = cls(**json_of(read_bytes(path)))
                rows = [(tokens, documents) for split in SPLITS for tokens, documents in progress.files[split]]
                if not isinstance(progress.preparation, dict) or not isinstance(progress.trained_on, dict | None):
                    raise ValueError("its preparation or vocabulary is not that of a preparation")
                is_count = all(is_whole(count, 0) for row in rows for count in row)
                if not is_count or len(progress.files) != len(SPLITS):
                    raise ValueError("its files are not those of a preparation")
                return progress
        own = (LOCK, partial(path).name)  # a process that ended before it wrote its first progress leaves them
        other = sorted(entry.name for entry in folder.iterdir() if entry.name not in own)
        if other:
            raise UserError(f"--out {folder} has other files ({', '.join(other[:5])}): name a new or empty folder")
        return None

    def write(self, folder: Path) -> None:
        write_durably(folder / PROGRESS, json.dumps(asdict(self)).encode())


def prepare(
    source: Source,
    out: Path,
    vocabulary: int | None,
    *,
    tokens: int | None = None,
    val_fraction: float = 0.01,
    file_tokens: int = FILE_TOKENS,
    watch: Watch = lambda words, done, total: None,
) -> Prepared:
    """Prepares the folder `out` from the documents of `source`.

    An unfinished folder is continued, and a finished one is not changed. The vocabulary is GPT-2's, or a BPE of
    `vocabulary` tokens trained on the first training documents. A hash of its text decides whether a document is held
    out, so equal documents are in the same split. With `tokens`, the last document is the one that reaches this number,
    both splits together. The result depends neither on the number of cores nor on interruptions. A source that cannot
    be used leaves no files.
    """
    if vocabulary is not None and not BYTES < vocabulary <= LARGEST_VOCABULARY:
        raise UserError(
            f"--vocab {vocabulary}: wanted {BYTES + 1}, all bytes and the end of text, to {LARGEST_VOCABULARY}"
        )
    if not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction {val_fraction}: wanted a number between 0 and 1")
    asked = {
        **source.options(),
        "vocab": vocabulary or "gpt2",
        "tokens": tokens,
        "val-fraction": val_fraction,
        "tokens of a file": file_tokens,
    }
    with lock_folder(out):
        if (out / PREPARED).exists():
            prepared = read_prepared(out)
            refuse_other(out, prepared["preparation"], asked)
            (out / PROGRESS).unlink(missing_ok=True)
            print(f"{out} is finished already")
            return prepared
        progress = Progress.read(out)
        if progress is None:
            progress = Progress({**asked, **source.resolve(None)})
            progress.write(out)
        else:
            refuse_other(out, progress.preparation, asked)
            source.resolve(progress.preparation)
        try:
            tokenizer = make_tokenizer(source, out, progress)
            writers = write_tokens(source, out, tokenizer, progress, watch)
            return finish(source, out, tokenizer, progress, writers)
        except Unusable:
            remove(out)
            raise
        except ConnectionError:
            if not any(progress.files.values()):
                remove(out)
            raise


def read_prepared(folder: Path) -> Prepared:
    """What a finished folder holds. Raises a UserError if its preparation.json is damaged."""
    path = folder / PREPARED
    with interpreting(DAMAGED.format(path)):
        content: Prepared = json_of(read_bytes(path))
        numbers = [content["vocabulary"], *(content[split]["tokens"] for split in SPLITS)]
        if not isinstance(content["preparation"], dict) or not all(type(n) is int and n > 0 for n in numbers):
            raise ValueError(f"its vocabulary and tokens are {numbers}")
        return content


def is_held_out(document: str, val_fraction: float) -> bool:
    """Whether a document is for validation, which depends on its text alone."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def make_tokenizer(source: Source, folder: Path, progress: Progress) -> "Tokenizer":
    """The tokenizer of the folder, whose vocabulary is downloaded or trained first if the folder has none yet."""
    path, size = folder / TOKENIZER, progress.preparation["vocab"]
    if progress.trained_on is None:
        texts: list[str] = []
        if size == "gpt2":
            tokenizer = download_gpt2()
        else:
            print(f"training a vocabulary of {size:,} tokens", flush=True)
            texts = read_training_text(source, progress.preparation["val-fraction"])
            tokenizer = train_tokenizer(texts, size)
            found = tokenizer.get_vocab_size()
            if found < size:
                raise Unusable(f"--vocab {size}: {source} has but {found} different tokens; choose that, or less")
        write_durably(path, tokenizer.to_str().encode())
        progress.trained_on = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        progress.write(folder)
    return load_tokenizer(read_bytes(path))


def read_training_text(source: Source, val_fraction: float) -> list[str]:
    """The first training documents, up to the one that reaches TRAINING_BYTES."""
    texts: list[str] = []
    size = held_out = 0
    with closing(source.batches(None)) as batches:
        for document in chain.from_iterable(documents for documents, _ in batches):
            if is_held_out(document, val_fraction):
                held_out += 1
                continue
            texts.append(document[:TRAINING_BYTES])
            size += len(document.encode())
            if size >= TRAINING_BYTES:
                break
    if not texts:
        refuse_empty(source, {"train": 0, "val": held_out})
    return texts


def write_tokens(
    source: Source, folder: Path, tokenizer: "Tokenizer", progress: Progress, watch: Watch
) -> dict[str, TokenWriter]:
    """Encodes the documents that are not in the token files yet; the writers of the splits."""
    asked = progress.preparation
    writers = {split: TokenWriter(folder / split, asked["tokens of a file"], progress.files[split]) for split in SPLITS}
    written = sum(writer.tokens for writer in writers.values())
    wanted = asked["tokens"] or np.inf
    last_commit = time.monotonic()

    def commit() -> None:
        for writer in writers.values():
            writer.flush()
        progress.write(folder)

    with closing(source.batches(progress.position)) as batches:
        try:
            while written < wanted:
                documents, position = next(batches, (None, None))
                if documents is None:
                    break
                held_out = np.array([is_held_out(document, asked["val-fraction"]) for document in documents])
                tokens, lengths = encode(tokenizer, documents)
                count = int(np.searchsorted(lengths.cumsum(), wanted - written)) + 1  # with the one that reaches it
                lengths, held_out = lengths[:count], held_out[:count]
                tokens = tokens[: lengths.sum()]
                for split, chosen in (("train", ~held_out), ("val", held_out)):
                    writers[split].append(tokens[np.repeat(chosen, lengths)], lengths[chosen])
                written += len(tokens)
                files = {split: list(writer.counts) for split, writer in writers.items()}
                # both in one statement: an interrupt between two would let `finally` commit a half-updated state
                vars(progress).update(position=position, files=files)
                done, total = (written, asked["tokens"]) if asked["tokens"] else source.progress(position)
                watch(f"{written / 1e6:,.1f} M tokens", done, total)
                if time.monotonic() - last_commit > COMMIT_SECONDS:
                    commit()
                    last_commit = time.monotonic()
        finally:
            commit()
    return writers


def finish(
    source: Source, folder: Path, tokenizer: "Tokenizer", progress: Progress, writers: dict[str, TokenWriter]
) -> Prepared:
    """Completes the token files, and writes what the folder holds, after which it is prepared."""
    refuse_empty(source, {split: writer.documents for split, writer in writers.items()})
    size = tokenizer.get_vocab_size()
    name = "gpt2" if progress.preparation["vocab"] == "gpt2" else f"BPE of {size} tokens in {TOKENIZER}"
    content: dict[str, Any] = {
        "vocabulary": size,
        "end_of_text": tokenizer.token_to_id(END_OF_TEXT),
        "trained_on": progress.trained_on,
        "preparation": progress.preparation,
    }
    for split, writer in writers.items():
        writer.finish(name)
        content[split] = {"tokens": writer.tokens, "documents": writer.documents}
    write_durably(folder / PREPARED, json.dumps(content, indent=1).encode())
    (folder / PROGRESS).unlink()
    return content


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


def refuse_other(folder: Path, recorded: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raises a UserError if an argument differs from the one that the folder was begun with."""
    for name, value in json.loads(json.dumps(asked)).items():
        if recorded.get(name) != value:
            raise UserError(
                f"--out {folder} was prepared with {name} = {recorded.get(name)}, this command has {name} = {value}: "
                "name another folder, or delete that one"
            )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes and locks the folder of a preparation; one that was made here and stays empty is removed at the end."""
    refuse_links(folder, LOCK, TOKENIZER, *SPLITS)
    made = [path for path in (folder, *folder.parents) if not path.exists() or (path / PROGRESS).exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--out {folder} is a file: name a folder") from None
    try:
        with locked(folder / LOCK, f"--out {folder} is being prepared by another process"):
            yield
    finally:
        remove_empty(made)


def remove(folder: Path) -> None:
    """Removes what a preparation writes."""
    files = [folder / name for name in (PROGRESS, TOKENIZER, PREPARED)]
    splits = [folder / split for split in SPLITS]
    for path in (*files, *map(partial, files), *(path for split in splits for path in split.glob("*.ds*"))):
        path.unlink(missing_ok=True)
    remove_empty(splits)


# --- vocabularies


def download_gpt2() -> "Tokenizer":
    """GPT-2's 50,257 tokens, which are downloaded once and kept in the cache of the Hugging Face Hub."""
    with needs_extra("data"):
        from tokenizers import Tokenizer

    try:
        return Tokenizer.from_pretrained(GPT2)
    except Exception as error:  # many exception types: from the Hub, the HTTP client and the operating system
        raise ConnectionError(
            f"--vocab gpt2: fetching GPT-2's vocabulary failed ({one_line(error, 200)}). Run "
            f"`hf download {GPT2} tokenizer.json` where there is a network and copy its cache, ~/.cache/huggingface or "
            "the folder that the environment variable HF_HOME names; or let --vocab 8192 train a vocabulary on the text"
        ) from error


def train_tokenizer(documents: Sequence[str], size: int) -> "Tokenizer":
    """A byte-level BPE of `size` tokens, fewer if the text has no more; the same on any number of cores."""
    with needs_extra("data"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # which cuts words as GPT-2 does
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(cut_long_words(documents), trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])  # the last number, as in GPT-2
    return tokenizer


def load_tokenizer(content: bytes) -> "Tokenizer":
    """The tokenizer of a tokenizer.json. The string <|endoftext|> inside a document is plain text to it."""
    with needs_extra("data"):
        from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        problem = one_line(error, 200)
        raise UserError(f"the vocabulary is damaged ({problem}); delete the folder and prepare it again") from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise UserError(f"the vocabulary has no {END_OF_TEXT}; delete the folder and prepare it again")
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: "Tokenizer", documents: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of the documents one after another, the end of text after each, and how many each document has."""
    parts = [cut_into_pieces(document) for document in documents]
    texts = [piece for pieces in parts for piece in pieces]
    encoded = encode_in_groups(tokenizer, texts)
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    tokens: list[np.ndarray] = []
    lengths = np.zeros(len(documents), np.int64)
    for number, pieces in enumerate(parts):
        found = [*(np.array(next(encoded).ids, np.uint16) for _ in pieces), np.array(end, np.uint16)]
        lengths[number] = sum(map(len, found))
        tokens += found
    return np.concatenate(tokens), lengths


def encode_in_groups(tokenizer: "Tokenizer", texts: Sequence[str]) -> Iterator[Any]:
    """The encodings of texts, a few megabytes of text at a time: one takes many times the memory of its text."""
    first = size = 0
    for last, text in enumerate(texts, 1):
        size += len(text)
        if size >= 4 * PIECE or last == len(texts):
            yield from tokenizer.encode_batch_fast(texts[first:last], add_special_tokens=False)
            first, size = last, 0


def cut_long_words(documents: Iterable[str]) -> Iterator[str]:
    """The documents, cut so that no word is long; of long words LONG_TEXT characters in all, the rest is left out."""
    room = LONG_TEXT
    for document in documents:
        start = 0
        for word in LONG_WORDS.finditer(document):
            end = min(word.end(), word.start() + room)
            room -= end - word.start()
            for cut in range(word.start() + LONGEST_WORD, end, LONGEST_WORD):
                yield document[start:cut]
                start = cut
            if end < word.end():
                yield document[start:end]
                start = word.end()
        yield document[start:]


def cut_into_pieces(document: str) -> list[str]:
    """The document in parts of at most PIECE characters, cut after the last line that fits, if any does."""
    parts, start = [], 0
    while len(document) - start > PIECE:
        cut = document.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        parts.append(document[start:cut])
        start = cut
    return [*parts, document[start:]]
