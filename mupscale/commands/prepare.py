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
    vocab_help = (
        "GPT-2's vocabulary, or a byte-level BPE of N tokens trained on the first "
        f"{TRAINING_BYTES >> 20} MiB of training text"
    )
    held_out_help = "the fraction of documents to hold out (default %(default)s)"
    threads_help = "the number of tokenising threads (default: one per core)"
    tokens_help = "stop after the document that reaches this number of tokens (100M, 2.5B)"
    shared = ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, or an unfinished one")
    shared.add_argument("--vocab", type=vocabulary, required=True, metavar="gpt2|N", help=vocab_help)
    shared.add_argument("--val-fraction", type=float, default=0.01, metavar="F", help=held_out_help)
    shared.add_argument("--workers", type=int, metavar="N", help=threads_help)

    answer = ArgumentParser(prog="python -m mupscale prepare", description=__doc__)
    kinds = answer.add_subparsers(dest="kind", required=True, metavar="fineweb|text")
    about_fineweb = "Streams FineWeb-Edu from the Hugging Face Hub."
    fineweb = kinds.add_parser("fineweb", help="stream FineWeb-Edu", description=about_fineweb, parents=[shared])
    subset_help = "a subset of HuggingFaceFW/fineweb-edu: CC-MAIN-2013-20, sample-10BT, …"
    fineweb.add_argument("--subset", required=True, help=subset_help)
    fineweb.add_argument("--tokens", type=number_of_tokens, required=True, metavar="N", help=tokens_help)

    about_text = f"Tokenises local files. {TextFiles.__doc__}"
    text = kinds.add_parser("text", help="tokenise local files", description=about_text, parents=[shared])
    text.add_argument("files", nargs="+", type=Path, metavar="FILE")
    separator_help = "the line between two documents of a plain text ('' for empty lines; default %(default)s)"
    text.add_argument("--separator", default=SEPARATOR, metavar="LINE", help=separator_help)
    tokens_help += "; by default all documents are read"
    text.add_argument("--tokens", type=number_of_tokens, metavar="N", help=tokens_help)
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
