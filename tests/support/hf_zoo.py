"""Tiny models of the transformers library and of timm that nobody prepared, by the name of their family.

    python tests/support/hf_zoo.py list
    python tests/support/hf_zoo.py run llama t5_1_0 --factor 2
    python tests/support/hf_zoo.py run --named --factor 3
    python tests/support/hf_zoo.py run --all
    python tests/support/hf_zoo.py deepen --all

`run` doubles the width and `deepen` the number of layers. Both print one line for each: exact, refused with the
reason, WRONG, or BROKEN where something else was raised.
"""

import argparse
import sys
import warnings
from collections import Counter
from functools import partial

import torch
from zoo_entry import Entry
from zoo_timm import timm_entries
from zoo_transformers import transformers_entries
from zoo_trial import depth_trials, trial

import mupscale  # noqa: F401  (lets torchvision be imported, which transformers and timm do)

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in [*transformers_entries(), *timm_entries()]}
NAMED = [name for name, entry in ENTRIES.items() if entry.named]


_COMMANDS = {
    "run": "widen in mid-training",
    "deepen": "double the number of layers of models of the transformers library",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Tiny models that nobody prepared.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names of all entries; those with a star must come out exact")
    for command, text in _COMMANDS.items():
        sub = commands.add_parser(command, help=text)
        sub.add_argument("names", nargs="*", metavar="NAME")
        sub.add_argument("--named", action="store_true", help="those that must come out exact")
        sub.add_argument("--all", action="store_true")
        sub.add_argument("--factor", type=float, default=2)
        sub.add_argument("--as-shipped", action="store_true", help="leave the models' own casts to float32")
    options = parser.parse_args(arguments)
    if options.command == "list":
        for name in ENTRIES:
            print(name + " *" * (name in NAMED))
        return 0
    unknown = sorted(set(options.names) - ENTRIES.keys())
    if unknown:
        parser.error(f"no entry {unknown[0]!r}")
    names = list(ENTRIES) if options.all else options.names + NAMED * options.named
    if options.command == "deepen":
        names = [name for name in names if not name.startswith("timm")]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    verdicts: Counter[str] = Counter()
    for name in names:
        entry = ENTRIES[name]
        widen = partial(trial, entry, options.factor, as_shipped=options.as_shipped)
        for outcome in depth_trials(entry) if options.command == "deepen" else [widen()]:
            verdicts[outcome.verdict] += 1
            print(outcome, flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return int(bool(verdicts["WRONG"] or verdicts["BROKEN"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
