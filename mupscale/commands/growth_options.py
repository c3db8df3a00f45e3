"""The options for depth, noise and growth method of `upscale`."""

import argparse
from pathlib import Path
from typing import Literal

from mupscale.commands.process import refuse_output
from mupscale.errors import UserError
from mupscale.methods import METHODS, GrowthMethod
from mupscale.methods.noise import AUTO_LEVEL, AdditiveNoise, NoiseOrAuto, RecordedNoise, SignalNoise


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
        type=noise_level,
        metavar="auto|none|STD",
        help=f"auto (the default): --signal-noise {AUTO_LEVEL} --centred, which keeps the function; none: copies stay "
        "equal, and the new width is not used; or noise of this std, in units of the muP initialisation scale",
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


def add_mixture_options(parser: argparse.ArgumentParser) -> None:
    """The options for experts and for the vocabulary of a model folder."""
    parser.add_argument("--experts", type=int, metavar="N", help="experts per layer; a dense model becomes a mixture")
    parser.add_argument("--top-k", type=int, metavar="K", help="experts per token (by default 2 for a dense model)")
    parser.add_argument("--split", type=int, default=1, metavar="M", help="split each expert into M; none is copied")
    parser.add_argument("--to", metavar="FAMILY", help="the family of mixtures that a dense model becomes")
    parser.add_argument("--router-std", type=float, default=1e-4, help="std of a new router (default 1e-4)")
    parser.add_argument("--vocab", type=int, metavar="N", help="the new number of tokens")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a folder with the tokenizer of new tokens")
    parser.add_argument("--pad-to", type=int, default=1, metavar="N", help="a new number of rows is a multiple of this")
    parser.add_argument(
        "--new-rows",
        choices=["rare", "mean", "subwords"],
        default="rare",
        help="initial rows of new tokens: the mean of those of the rarest tokens (the default), of all, or of the old "
        "tokens that they consist of",
    )


def refuse_without_target(options: argparse.Namespace) -> None:
    """Raises a UserError for an option that says how experts or tokens are added, without how many there will be."""
    if options.experts is None and (options.top_k is not None or options.split != 1 or options.to is not None):
        raise UserError("--top-k, --split and --to say how a mixture grows: give --experts too, how many it gets")
    if options.vocab is None and options.tokenizer is None and (options.pad_to != 1 or options.new_rows != "rare"):
        raise UserError("--pad-to and --new-rows say how a vocabulary grows: give --vocab or --tokenizer too")


def expert_noise_of(options: argparse.Namespace) -> float:
    """The level of noise on copies of experts, relative to their weights."""
    return options.noise if options.experts is not None and isinstance(options.noise, float) else 0.0


def noise_level(text: str) -> float | str:
    return text if text in ("auto", "none") else float(text)


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


def noise_of(options: argparse.Namespace, inputs: dict[str, Path]) -> NoiseOrAuto:
    """The noise that the options mean. Refuses a --save-noise that would overwrite --out, or one of the inputs."""
    noise: NoiseOrAuto = None if options.noise == "none" else "auto"
    if isinstance(options.noise, float):
        noise = AdditiveNoise(options.noise, centred=options.centred)
    elif options.signal_noise is not None:
        noise = SignalNoise(options.signal_noise, centred=options.centred)
    elif options.recorded_noise is not None:
        noise = RecordedNoise(options.recorded_noise, centred=options.centred or None)
    elif options.centred:
        raise UserError("--centred: --noise auto is centred already. Give --noise STD or --signal-noise T too")
    if options.save_noise is not None:
        if noise is None:
            raise UserError("--save-noise: there is no noise to save; leave --noise none out")
        refuse_output("--save-noise", options.save_noise, inputs | {"--out": options.out})
    return noise
