"""Tiny models of the transformers library and of timm that nobody prepared, by the name of their family.

    python tests/support/hf_zoo.py list
    python tests/support/hf_zoo.py run llama t5_1_0 --factor 2
    python tests/support/hf_zoo.py run --named --factor 3
    python tests/support/hf_zoo.py run --all
    python tests/support/hf_zoo.py deepen --all
    python tests/support/hf_zoo.py images --all

`run` doubles the width, `deepen` the number of layers, and `images` the width of folders of models that read images or
sounds beside text, which are compared on both. All print one line for each: exact, refused with the
reason, WRONG, or BROKEN where something else was raised.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from zoo_entry import Entry
from zoo_images import FAMILIES, images_trial
from zoo_timm import timm_entries
from zoo_transformers import transformers_entries
from zoo_trial import Outcome, depth_trials, trial

import mupscale  # noqa: F401  (lets torchvision be imported, which transformers and timm do)

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in [*transformers_entries(), *timm_entries()]}
NAMED = [name for name, entry in ENTRIES.items() if entry.named]


_COMMANDS = {
    "run": "widen in mid-training",
    "deepen": "double the number of layers of models of the transformers library",
    "images": "widen folders of models of images or sounds beside text",
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
    known = FAMILIES if options.command == "images" else ENTRIES
    unknown = sorted(set(options.names) - known.keys())
    if unknown:
        parser.error(f"no entry {unknown[0]!r}")
    names = list(known) if options.all else options.names + NAMED * options.named
    if options.command == "deepen":
        names = [name for name in names if not name.startswith("timm")]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    verdicts: Counter[str] = Counter()
    widen = partial(trial, factor=options.factor, as_shipped=options.as_shipped)
    trials: dict[str, Callable[[str], Iterable[Outcome]]] = {
        "run": lambda name: [widen(ENTRIES[name])],
        "deepen": lambda name: depth_trials(ENTRIES[name]),
        "images": lambda name: [images_trial(name, options.factor)],
    }
    for name in names:
        for outcome in trials[options.command](name):
            verdicts[outcome.verdict] += 1
            print(outcome, flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return int(bool(verdicts["WRONG"] or verdicts["BROKEN"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
