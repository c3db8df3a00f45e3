"""prepare: tokenise FineWeb-Edu or your own text into a folder for the data module FineWeb.

To continue an interrupted command, run it again. The result is the same to the byte.
"""

import argparse
import os
from pathlib import Path

from mupscale.commands.arguments import ArgumentParser
from mupscale.commands.next_steps import command_line
from mupscale.datamodules.documents import SEPARATOR, FineWebEdu, TextFiles
from mupscale.datamodules.preparation import TRAINING_BYTES, Prepared, prepare
from mupscale.datamodules.token_files import SPLITS
from mupscale.errors import as_user_errors, needs_extra

CONTEXT = 256
"""Tokens of a row, in the command that is printed at the end; fewer where a split is shorter."""

BATCH = 32
"""Rows of a batch by default."""

UNITS = {"k": 10**3, "M": 10**6, "B": 10**9}


def main(command: str, arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.workers:
        os.environ["RAYON_NUM_THREADS"] = str(options.workers)  # read once, when tokenizers begins to encode
    with needs_extra("data"):
        import tokenizers  # noqa: F401
        import tqdm  # noqa: F401

        if options.kind == "fineweb":
            import datasets  # noqa: F401
    try:
        with as_user_errors(OSError):
            prepared = prepare(
                source_of(options),
                options.out,
                vocabulary=options.vocab,
                tokens=options.tokens,
                val_fraction=options.val_fraction,
            )
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"run the same command again to continue in {options.out}") from interrupt
    print(summary(prepared))
    print(f"  train on it: {training_command(prepared)}")


def parser() -> ArgumentParser:
    answer = ArgumentParser(prog="python -m mupscale prepare", description=__doc__)
    kinds = answer.add_subparsers(dest="kind", required=True, metavar="fineweb|text")
    fineweb = kinds.add_parser(
        "fineweb", help="stream FineWeb-Edu", description="Streams FineWeb-Edu from the Hugging Face Hub."
    )
    fineweb.add_argument(
        "--subset", required=True, help="a subset of HuggingFaceFW/fineweb-edu: CC-MAIN-2013-20, sample-10BT, …"
    )
    text = kinds.add_parser(
        "text", help="tokenise local files", description=f"Tokenises local files. {TextFiles.__doc__}"
    )
    text.add_argument("files", nargs="+", type=Path, metavar="FILE")
    separator_help = "the line between two documents of a plain text ('' for empty lines; default %(default)s)"
    text.add_argument("--separator", default=SEPARATOR, metavar="LINE", help=separator_help)
    for kind in (fineweb, text):
        size = f"{TRAINING_BYTES >> 20} MiB"
        vocab_help = f"GPT-2's vocabulary, or a byte-level BPE of N tokens trained on the first {size} of training text"
        tokens_help = "stop after the document that reaches this number of tokens (100M, 2.5B)"
        if kind is text:
            tokens_help += "; by default all documents are read"
        kind.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, or an unfinished one")
        kind.add_argument("--vocab", type=vocabulary, required=True, metavar="gpt2|N", help=vocab_help)
        kind.add_argument("--tokens", type=number_of_tokens, required=kind is fineweb, metavar="N", help=tokens_help)
        kind.add_argument(
            "--val-fraction",
            type=float,
            default=0.01,
            metavar="F",
            help="the fraction of documents to hold out (default %(default)s)",
        )
        kind.add_argument(
            "--workers", type=positive, metavar="N", help="the number of tokenising threads (default: one per core)"
        )
    return answer


def source_of(options: argparse.Namespace) -> FineWebEdu | TextFiles:
    if options.kind == "fineweb":
        return FineWebEdu(options.subset)
    return TextFiles(options.files, options.separator)


def summary(prepared: Prepared) -> str:
    def size(split: str) -> str:
        return f"{prepared.content[split]['tokens']:,} tokens of {prepared.content[split]['documents']:,} documents"

    content = f"{size('train')} to train on, {size('val')} held out, vocabulary {prepared.vocabulary:,}"
    return f"{prepared.folder}: {content}"


def training_command(prepared: Prepared) -> str:
    context = min(CONTEXT, *(prepared.count(split) - 1 for split in SPLITS))
    model = ["--model", "GPT2", "--model.width", 256, "--model.heads", 8, "--model.layers", 4]
    model += ["--model.vocabulary", prepared.vocabulary, "--model.context", context]
    data = ["--data", "FineWeb", "--data.data_dir", prepared.folder, "--data.context", context]
    rows = prepared.count("train") // context
    if rows < 2 * BATCH:
        data += ["--data.batch_size", max(1, rows // 2)]
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


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"wanted a number of threads, got {text!r}")
    return int(text)
