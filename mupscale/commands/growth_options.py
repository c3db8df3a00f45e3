"""The options for depth, noise and growth method of `upscale`."""

import argparse
from pathlib import Path
from typing import Literal

from mupscale.commands.process import refuse_output
from mupscale.errors import UserError
from mupscale.methods import METHODS, GrowthMethod
from mupscale.methods.noise import AdditiveNoise, Noise, RecordedNoise, SignalNoise

AUTO = 0.3
"""The level of `--noise auto`, relative to each weight; measured by docs/folder_noise.py."""


def add_growth_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--depth",
        choices=["identity", "interleave", "stack"],
        help="how the model becomes deeper: inserted layers add nothing at first (identity, the default), each layer "
        "several times in place (interleave), or the whole stack again (stack)",
    )
    strength = parser.add_mutually_exclusive_group()
    strength.add_argument(
        "--noise",
        type=std_or_auto,
        metavar="STD",
        help=f"noise of this std, in units of the muP initialisation scale; or auto, which is --signal-noise {AUTO} "
        "--centred and keeps the function (docs/hf.md says how it was measured)",
    )
    strength.add_argument(
        "--signal-noise", type=float, metavar="T", help="noise as this fraction of each weight's spectral norm"
    )
    strength.add_argument(
        "--recorded-noise", type=Path, metavar="FILE", help="noise with the constants that --save-noise wrote"
    )
    parser.add_argument(
        "--centred",
        action="store_true",
        help="preserve the function: centre the noise over the copies of each input unit "
        "(recorded noise is always centred if the original was)",
    )
    parser.add_argument(
        "--method", choices=sorted(METHODS), default="duplication", help="the growth method (default duplication)"
    )
    parser.add_argument("--save-noise", type=Path, metavar="FILE", help="write the noise constants of each weight")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the noise (default 0)")


def std_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


def depth_of(options: argparse.Namespace) -> Literal["identity", "interleave", "stack"]:
    if options.depth is not None and not options.layers:
        raise UserError(f"--depth {options.depth} says how a model becomes deeper: give --layers too, how many it gets")
    return options.depth or "identity"


def method_of(options: argparse.Namespace) -> GrowthMethod:
    method = METHODS[options.method]()
    if method.needs_batches:
        raise UserError(
            f"--method {options.method}: {type(method).__name__} learns from data, and a checkpoint has none. "
            "Use it in a run, as UpscaleCallback.method"
        )
    return method


def noise_of(options: argparse.Namespace, inputs: dict[str, Path]) -> Noise | None:
    """The noise that the options mean. Refuses a --save-noise that would overwrite --out, or one of the inputs."""
    noise: Noise | None = None
    if options.noise == "auto":
        noise = SignalNoise(AUTO, centred=True)
    elif options.noise is not None:
        noise = AdditiveNoise(options.noise, centred=options.centred)
    elif options.signal_noise is not None:
        noise = SignalNoise(options.signal_noise, centred=options.centred)
    elif options.recorded_noise is not None:
        noise = RecordedNoise(options.recorded_noise, centred=options.centred or None)
    elif options.centred:
        raise UserError("--centred: there is no noise to centre. Give --noise, --signal-noise or --recorded-noise too")
    if options.save_noise is not None:
        if noise is None:
            raise UserError("--save-noise: there is no noise to save; give --noise STD or --signal-noise T")
        refuse_output("--save-noise", options.save_noise, inputs | {"--out": options.out})
    return noise
