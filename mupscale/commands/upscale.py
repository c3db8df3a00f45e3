"""upscale FOLDER: make a model folder of the transformers library larger, in another folder.

For example: upscale Llama-3.2-1B --factor 2 --out Llama-3.2-1B-wide
        and: upscale Llama-3.2-1B --layers 32 --out Llama-3.2-1B-deep
        and: upscale Llama-3.2-1B --experts 8 --top-k 2 --out Llama-3.2-8x1B
        and: upscale Llama-3.2-1B --vocab 130000 --out Llama-3.2-1B-vocab

The folder has config.json and safetensors files, and nothing in it is executed. Tensors grow one by one, so that
the model never has to fit into memory. mupscale.json beside the wide weights has the factors of learning rate, eps and
weight decay for each parameter; mupscale.hf.parameter_groups makes parameter groups of them.
"""

import argparse
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mupscale.commands.growth_options import (
    add_growth_options,
    add_mixture_options,
    depth_of,
    expert_noise_of,
    method_of,
    noise_of,
    refuse_without_target,
)
from mupscale.commands.process import ArgumentParser, progress_bar, refuse_folder, show
from mupscale.errors import UserError, needs_extra


def main(command: str, arguments: list[str]) -> None:
    """Loads only what the kind of input needs: Lightning for a checkpoint, transformers for a folder."""
    if names_folder(arguments):
        widen_folder(arguments)
    else:
        from mupscale.commands.upscale_checkpoint import widen_checkpoint

        widen_checkpoint(arguments)


def names_folder(arguments: list[str]) -> bool:
    """Whether a command line means a model folder: it has `--factor`, or begins with a folder with a configuration."""
    if any(argument.partition("=")[0] == "--factor" for argument in arguments):
        return True
    return bool(arguments) and (Path(arguments[0]) / "config.json").is_file()


def widen_folder(arguments: list[str]) -> None:
    parser = ArgumentParser(prog="python -m mupscale upscale", description=__doc__)
    parser.add_argument("folder", type=Path, help="the model folder to grow")
    parser.add_argument("--factor", type=float, help="by how much all widths grow")
    parser.add_argument(
        "--layers",
        action="append",
        default=[],
        metavar="N",
        help="how many layers it gets; FIELD=N, such as decoder_layers=12, if it has several numbers of layers",
    )
    parser.add_argument("--out", type=Path, required=True, help="the new folder; it must not exist yet")
    parser.add_argument(
        "--keep-heads",
        action="store_true",
        default=None,
        help="keep the number of heads; their size grows, unless config.json fixes it",
    )
    parser.add_argument("--only", choices=["feed_forward"], help="grow only the intermediate sizes")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=FACTOR",
        help="another factor for a field of config.json, such as intermediate_size=3; may be given again",
    )
    parser.add_argument(
        "--unchecked",
        action="store_true",
        help="grow a model even if how some of its parameters grow is a guess, because no output depends on them",
    )
    add_mixture_options(parser)
    add_growth_options(parser)
    options = parser.parse_args(arguments)
    method, noise = method_of(options), noise_of(options, {})
    remakes = options.experts is not None or options.vocab is not None or options.tokenizer is not None
    if options.factor is None and not options.layers and not remakes:
        raise UserError(
            "give --factor, by how much all widths grow, --layers, how many layers there will be, --experts or --vocab"
        )
    refuse_without_target(options)
    depth = depth_of(options)
    if options.factor is not None and not options.factor >= 1:
        raise UserError(f"--factor {options.factor:g}: give a number of at least 1")
    refuse_folder("--out", options.out)
    with needs_extra("hf"):
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    from mupscale import hf

    if options.factor is not None or options.layers:
        with TemporaryDirectory(dir=options.out.parent, prefix=".upscale-") if remakes else nullcontext() as between:
            target = Path(between) / options.out.name if between else options.out
            with progress_bar() as status:
                report = hf.upscale_folder(
                    options.folder,
                    1 if options.factor is None else options.factor,
                    target,
                    layers=_counts(options.layers),
                    depth=depth,
                    noise=noise,
                    seed=options.seed,
                    method=method,
                    keep_heads=options.keep_heads,
                    only=options.only,
                    fields=dict(map(_field, options.set)) or None,
                    unchecked=options.unchecked,
                    watch=status,
                )
            if options.save_noise:
                report.save_noise(options.save_noise)
            show(str(report))
            if remakes:
                show(str(_remake(target, options, hf.read_growth(target))))
            has_new = report.plan is not None and bool(report.plan.new_parameters)
    else:
        show(str(_remake(options.folder, options, None)))
        has_new = False
    if options.experts is not None and noise == "auto":
        print("noise: auto adds none to experts; in a mixture, --noise STD parts their copies")
    print(f"wrote {options.out}")
    model = json.loads((options.out / "config.json").read_text("utf-8")).get("architectures", ["AutoModel"])[0]
    print(f"  load it: model = transformers.{model}.from_pretrained({str(options.out)!r})")
    print(f"  train it with groups = mupscale.hf.parameter_groups(model, {str(options.out)!r}, lr=LR)")
    if has_new:
        print(f"  or train new layers only: mupscale.hf.freeze_old_parameters(model, {str(options.out)!r})")


def _remake(folder: Path, options: argparse.Namespace, earlier: Mapping[str, Any] | None) -> object:
    """More experts, a larger vocabulary, or both."""
    from mupscale import hf

    return hf.remake_folder(
        folder,
        options.out,
        experts=options.experts,
        top_k=options.top_k,
        split=options.split,
        to=options.to,
        router_std=options.router_std,
        noise=expert_noise_of(options),
        tokens=options.vocab,
        tokenizer=options.tokenizer,
        pad_to=options.pad_to,
        new_rows=options.new_rows,
        seed=options.seed,
        earlier=earlier,
    )


def _counts(texts: list[str]) -> int | dict[str, int] | None:
    """The numbers of layers: one, or several by field."""
    counts: dict[str, int] = {}
    for text in ",".join(texts).split(",") if texts else ():
        field, _, number = text.rpartition("=")
        if not number.isdecimal() or field in counts or ("" in counts and field) or (counts and not field):
            raise UserError(f"--layers {text}: give a whole number, or a field and its number, such as num_layers=12")
        counts[field] = int(number)
    return counts.get("", counts) if counts else None


def _field(text: str) -> tuple[str, float]:
    name, _, factor = text.partition("=")
    try:
        return name, float(factor)
    except ValueError as error:
        raise UserError(f"--set {text}: give a field and its factor, such as intermediate_size=3") from error
