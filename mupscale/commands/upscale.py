"""upscale FOLDER: make a model folder of the transformers library wider or deeper, in another folder.

For example: upscale Llama-3.2-1B --factor 2 --out Llama-3.2-1B-wide
        and: upscale Llama-3.2-1B --layers 32 --out Llama-3.2-1B-deep

The folder has config.json and safetensors files, and nothing in it is executed. Tensors are widened one by one, so that
the model never has to fit into memory. mupscale.json beside the wide weights has the factors of learning rate, eps and
weight decay for each parameter; mupscale.hf.parameter_groups makes parameter groups of them.
"""

import json
from pathlib import Path

from mupscale.commands.growth_options import add_growth_options, depth_of, method_of, noise_of
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
    add_growth_options(parser)
    options = parser.parse_args(arguments)
    method, noise = method_of(options), noise_of(options, {})
    if options.factor is None and not options.layers:
        raise UserError("give --factor, by how much all widths grow, or --layers, how many layers there will be")
    depth = depth_of(options)
    if options.factor is not None and not options.factor >= 1:
        raise UserError(f"--factor {options.factor:g}: give a number of at least 1")
    refuse_folder("--out", options.out)
    with needs_extra("hf"):
        import safetensors  # noqa: F401
        import transformers  # noqa: F401
    from mupscale import hf

    with progress_bar() as status:
        report = hf.upscale_folder(
            options.folder,
            1 if options.factor is None else options.factor,
            options.out,
            layers=_counts(options.layers),
            depth=depth,
            noise=noise,
            seed=options.seed,
            method=method,
            keep_heads=options.keep_heads,
            only=options.only,
            fields=dict(map(_field, options.set)) or None,
            watch=status,
        )
    if options.save_noise:
        report.save_noise(options.save_noise)
    show(str(report))
    print(f"wrote {options.out}")
    model = json.loads((options.out / "config.json").read_text()).get("architectures", ["AutoModel"])[0]
    print(f"  load it: model = transformers.{model}.from_pretrained({str(options.out)!r})")
    print(f"  train it with groups = mupscale.hf.parameter_groups(model, {str(options.out)!r}, lr=LR)")
    if report.plan.new_parameters:
        print(f"  or train new layers only: mupscale.hf.freeze_old_parameters(model, {str(options.out)!r})")


def _counts(texts: list[str]) -> int | dict[str, int] | None:
    """The numbers of layers: one, or several by field."""
    counts = {}
    for text in texts:
        field, _, number = text.rpartition("=")
        if not number.isdecimal() or field in counts or (len(texts) > 1 and not field):
            raise UserError(f"--layers {text}: give a whole number, or a field and its number, such as num_layers=12")
        counts[field] = int(number)
    return counts.get("", counts) if counts else None


def _field(text: str) -> tuple[str, float]:
    name, _, factor = text.partition("=")
    try:
        return name, float(factor)
    except ValueError as error:
        raise UserError(f"--set {text}: give a field and its factor, such as intermediate_size=3") from error
