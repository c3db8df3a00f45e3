"""The options of noise and method, which every way to upscale offline has."""

import argparse
from pathlib import Path

from mupscale.errors import UserError
from mupscale.widening.methods import METHODS, GrowthMethod
from mupscale.widening.noise import AdditiveNoise, Noise, RecordedNoise, SignalNoise


def add_noise_options(parser: argparse.ArgumentParser) -> None:
    strength = parser.add_mutually_exclusive_group()
    strength.add_argument("--noise", type=float, metavar="STD", help="additive noise with this base constant")
    strength.add_argument(
        "--signal-noise", type=float, metavar="T", help="noise as this fraction of each weight's spectral norm"
    )
    strength.add_argument(
        "--recorded-noise", type=Path, metavar="FILE", help="per-weight noise constants of an earlier upscale"
    )
    parser.add_argument(
        "--centred",
        action="store_true",
        help="centre the noise over the copies of each input unit: the function stays as it was "
        "(recorded noise is centred anyway if it was so when it was recorded)",
    )
    parser.add_argument(
        "--method", choices=sorted(METHODS), default="duplication", help="the growth method (default duplication)"
    )
    parser.add_argument("--save-noise", type=Path, metavar="FILE", help="write the per-weight noise constants")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the noise (default 0)")


def method_of(options: argparse.Namespace) -> GrowthMethod:
    method = METHODS[options.method]()
    if method.needs_batches:
        raise UserError(
            f"--method {options.method}: {type(method).__name__} learns from data, which a checkpoint does not have. "
            "Use it in a run, as UpscaleCallback.method"
        )
    return method


def noise_of(options: argparse.Namespace) -> Noise | None:
    centred = options.centred
    if options.noise is not None:
        return AdditiveNoise(options.noise, centred=centred)
    if options.signal_noise is not None:
        return SignalNoise(options.signal_noise, centred=centred)
    if options.recorded_noise is not None:
        return RecordedNoise(options.recorded_noise, centred=centred or None)
    if centred:
        raise UserError("--centred: there is no noise to centre. Give --noise, --signal-noise or --recorded-noise too")
    return None
