"""prepare: tokenise FineWeb-Edu or your own text into a folder for the data module FineWeb.

To continue an interrupted command, run it again. The result is the same to the byte.
"""

import argparse
import os
from pathlib import Path

from mupscale.commands.process import ArgumentParser, command_line, progress_bar
from mupscale.datamodules.documents import SEPARATOR, FineWebEdu, TextFiles
from mupscale.datamodules.preparation import TRAINING_BYTES, Prepared, prepare
from mupscale.datamodules.token_files import SPLITS
from mupscale.errors import UserError, as_user_errors, needs_extra

CONTEXT = 256
"""Tokens of a row, in the command that is printed at the end; fewer where a split is shorter."""

BATCH = 32
"""Rows of a batch by default."""

UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def main(command: str, arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.workers is not None and options.workers < 1:
        raise UserError(f"--workers must be at least 1, got {options.workers}")
    if options.workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)  # read once, when tokenizers begins to encode
    with needs_extra("data"):
        import tokenizers  # noqa: F401
        import tqdm  # noqa: F401

        if options.kind == "fineweb":
            import datasets  # noqa: F401
    is_hub, fraction = options.kind == "fineweb", options.val_fraction
    try:
        with as_user_errors(OSError):
            source = FineWebEdu(options.subset) if is_hub else TextFiles(options.files, options.separator)
            settings = {"tokens": options.tokens, "val_fraction": fraction}
            with progress_bar() as status:
                prepared = prepare(source, options.out, options.vocab, **settings, watch=status)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"run the same command again to continue in {options.out}") from interrupt
    train, val = (
        f"{prepared[split]['tokens']:,} tokens of {prepared[split]['documents']:,} documents" for split in SPLITS
    )
    print(f"{options.out}: {train} to train on, {val} held out, vocabulary {prepared['vocabulary']:,}")
    print(f"  train on it: {training_command(options.out, prepared)}")


def parser() -> ArgumentParser:
    shared = ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="a new folder, or an unfinished one")
    bpe = f"a byte-level BPE of N tokens trained on the first {TRAINING_BYTES >> 20} MiB of training text"
    add("--vocab", type=vocabulary, required=True, metavar="gpt2|N", help=f"GPT-2's vocabulary, or {bpe}")
    held_out = "the fraction of documents to hold out (default %(default)s)"
    add("--val-fraction", type=float, default=0.01, metavar="F", help=held_out)
    add("--workers", type=int, metavar="N", help="the number of tokenising threads (default: one per core)")
    stop = "stop after the document that reaches this number of tokens (100M, 2.5B)"

    answer = ArgumentParser(prog="python -m mupscale prepare", description=__doc__)
    kinds = answer.add_subparsers(dest="kind", required=True, metavar="fineweb|text")
    about = "Streams FineWeb-Edu from the Hugging Face Hub."
    add = kinds.add_parser("fineweb", help="stream FineWeb-Edu", description=about, parents=[shared]).add_argument
    add("--subset", required=True, help="a subset of HuggingFaceFW/fineweb-edu: CC-MAIN-2013-20, sample-10BT, …")
    add("--tokens", type=number_of_tokens, required=True, metavar="N", help=stop)

    about = f"Tokenises local files. {TextFiles.__doc__}"
    add = kinds.add_parser("text", help="tokenise local files", description=about, parents=[shared]).add_argument
    add("files", nargs="+", type=Path, metavar="FILE")
    between = "the line between two documents of a plain text ('' for empty lines; default %(default)s)"
    add("--separator", default=SEPARATOR, metavar="LINE", help=between)
    add("--tokens", type=number_of_tokens, metavar="N", help=f"{stop}; by default all documents are read")
    return answer


def training_command(folder: Path, prepared: Prepared) -> str:
    train, val = (prepared[split]["tokens"] for split in SPLITS)
    context = min(CONTEXT, train - 1, val - 1)
    model = ["--model", "GPT2", "--model.width", 256, "--model.heads", 8, "--model.layers", 4]
    model += ["--model.vocabulary", prepared["vocabulary"], "--model.context", context]
    data = ["--data", "FineWeb", "--data.data_dir", folder, "--data.context", context]
    if train // context < 2 * BATCH:
        data += ["--data.batch_size", max(1, train // context // 2)]
    return command_line("fit", *model, *data, "--trainer.max_steps", 1000)


def vocabulary(text: str) -> int | None:
    if text == "gpt2":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted gpt2 or a number of tokens, got {text!r}") from None


def number_of_tokens(text: str) -> int:
    try:
        tokens = round(float(text.rstrip("kMB")) * UNITS.get(text[-1:], 1))
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"wanted a number like 500k, 100M or 2.5B, got {text!r}")
    return tokens
