"""experiment: run the paper's procedure, which a YAML file describes: tune small, grow large, compare.

It is a list of sweeps: of the learning rate at a small width; of the growth of the best of these models; and, with the
best values of both and several seeds, base models, their growth, and the same size from scratch. Then it writes a
report. The scripts in experiments/ ask other questions with the same functions.

All state is in the folder --out. To continue an interrupted experiment, run the same command again.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from mupscale.atomic import write_text
from mupscale.commands import sweep
from mupscale.commands.config import Config, read_json, refuse_difference
from mupscale.commands.lab.execution import add_options, goes_on_when_repeated, refuse_options
from mupscale.commands.process import ArgumentParser, command_line, without_collections
from mupscale.commands.sweep_folder import SweepFolder
from mupscale.commands.widths import Size, SizePair, growth_of, model_size
from mupscale.data_files import DECIMAL, interpreting, read_yaml
from mupscale.errors import UserError, needs_extra, prefix_errors

EPILOG = """All other options are those of fit, and override the configuration of every run (--data.data_dir=…,
--trainer.max_epochs=40). More in docs/experiments.md."""

REQUIRED = ("config", "small", "target", "seeds", "noise", "sweep_2")
OPTIONAL = ("metric", "sweep_1", "upscaled")
WAIT = 5.0
"""Seconds between looks at what other parts have finished."""

Axes = dict[str, list[Any] | str]
"""The values of each key, or LOW:HIGH:N."""


# --- sweeps in a folder


@dataclass(frozen=True)
class Study:
    """Makes sweeps in a folder, each by the command `sweep`; the same call goes on with it, or returns what is there.

    A study that `only_checks` makes none: it raises a UserError for one whose configuration `fit` would refuse.

    >>> study = Study(Path("runs/depths"), ["configs/depth/mlp.yaml"])
    >>> found = study.sweep("lr", {"model.optimizer.lr": "0.001:0.1:5"}, [0])  # doctest: +SKIP
    >>> final = study.sweep("deep", {}, [0, 1, 2], {"model": {"init_args": {"layers": 8}}})  # doctest: +SKIP
    """

    out: Path
    config: list[str | Config]
    """Files and mappings, later ones override earlier ones."""
    options: tuple[str, ...] = ()
    """Options of `fit`, for every run."""
    how: tuple[str, ...] = ()
    """Options of `sweep`: where runs are made."""
    metric: str = "last_epoch"
    only_checks: bool = False
    checked: list[str] = field(default_factory=list)
    """The names of the sweeps that a study which only checks was asked for."""

    @property
    def of_fit(self) -> list[str]:
        """The arguments of `fit` that all runs share."""
        files = [self._file(f"config-{index}", layer) for index, layer in enumerate(self.config)]
        return [*(f"--config={path}" for path in files), *self.options]

    def sweep(self, name: str, axes: Axes, seeds: list[int], *layers: Config | Path | None) -> SweepFolder:
        """Makes a sweep over `axes` in the folder `name`, or, without axes, one run of each seed.

        `layers` are mappings and files over the configuration; None is left out.
        """
        swept = SweepFolder(self.out / name)
        if swept.is_finished and not self.only_checks:
            return swept
        arguments = self.of_fit
        arguments += [f"--config={self._file(f'{name}-{index}', layer)}" for index, layer in enumerate(layers) if layer]
        arguments += [f"--sweep={key}={as_values(values)}" for key, values in axes.items()]
        arguments += [f"--seeds={','.join(map(str, seeds))}", f"--metric={self.metric}", f"--out={swept.folder}"]
        arguments += self.how
        if self.only_checks:
            with prefix_errors(name):
                sweep.sweep_settings(*sweep.parser().own_and_other(arguments))
            self.checked.append(name)
            return swept
        print(f"{name}: {command_line('sweep', *arguments)}", flush=True)
        try:
            sweep.main("sweep", arguments)
        except UserError:
            if not swept.has_diverged:
                raise
            print(f"{name}: all trials diverged", flush=True)
        while not swept.is_finished:  # other parts have runs left
            time.sleep(WAIT)
        return swept

    def _file(self, name: str, layer: str | Path | Config) -> str:
        """A file as it is; of a mapping, that in which it is written."""
        if not isinstance(layer, dict):
            return str(layer)
        path = self.out / "configs" / f"{name.replace('/', '-')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, yaml.safe_dump(layer, sort_keys=False))
        return str(path)


def as_values(values: list[Any] | str) -> str:
    """Values as `--sweep` takes them."""
    return values if isinstance(values, str) else ",".join(map(json.dumps, values))


def of_size(size: Size) -> Config:
    return {"model": {"init_args": model_size(size)}}


def growing(growth: SizePair, init_from: Path | None, at_step: int = 0, **arguments: Any) -> Config:
    """The configuration of a run that grows, from a checkpoint if one is named; `arguments` are the callback's."""
    after = growth.after if isinstance(growth.after, dict) else {"width": growth.after}
    swap = {"class_path": "UpscaleCallback", "init_args": {"at_step": at_step, **after, **arguments}}
    model = {**model_size(growth.before), **({"init_from": str(init_from)} if init_from else {})}
    return {"model": {"init_args": model}, "trainer": {"callbacks+": [swap]}}


# --- the paper's procedure


def procedure(study: Study, content: dict[str, Any]) -> None:
    """Makes the sweeps of the paper's procedure, whose keys are those of the YAML file."""
    begun = begin(study, content)
    grow(study, content, begun)


@dataclass(frozen=True)
class Begun:
    """What growths start from: the small model that was tuned, the bases of all seeds, and the best values."""

    small: Path
    base: Path
    tuned: Path | None


def begin(study: Study, content: dict[str, Any]) -> Begun:
    """Makes sweep 1, or one small model without it, the bases, and the target from scratch."""
    small, target = growths_of(content)
    seeds, first = content["seeds"], of_size(small.before)
    if content.get("sweep_1"):
        tuner = study.sweep("sweep_1", content["sweep_1"], seeds[:1], first)
        tuned = tuner.best
    else:
        tuner, tuned = study.sweep("small_base", {}, seeds[:1], first), None
    base = study.sweep("base", {}, seeds, of_size(target.before), tuned)
    for part in (tuner, base):
        refuse_diverged(part)
    study.sweep("scratch", {}, seeds, of_size(target.after), tuned)
    return Begun(checkpoint_of(study, tuner), checkpoint_of(study, base), tuned)


def grow(study: Study, content: dict[str, Any], begun: Begun, name: str = "", **arguments: Any) -> SweepFolder | None:
    """Makes sweep 2, and the growth of every base with its best values; None if all trials of the sweep diverged.

    `name` and `arguments` of the callback are those of a growth method, where several are compared.
    """
    small, target = growths_of(content)
    seeds, upscaled, arguments = content["seeds"], content.get("upscaled"), {"noise": content["noise"], **arguments}
    above = begun.tuned, upscaled
    sweep_2, last = (f"{part}/{name}".removesuffix("/") for part in ("sweep_2", "upscale"))
    found = study.sweep(sweep_2, content["sweep_2"], seeds[:1], growing(small, begun.small, **arguments), *above)
    if found.has_diverged:
        if not name:
            refuse_diverged(found)
        return None
    return study.sweep(last, {}, seeds, growing(target, begun.base, **arguments), *above, found.best)


def growths_of(content: dict[str, Any]) -> list[SizePair]:
    return [growth_of(key, content[key]) for key in ("small", "target")]


def refuse_diverged(swept: SweepFolder) -> None:
    if swept.has_diverged:
        raise UserError(
            f"{swept.folder}: all runs diverged, and others depend on them; give smaller learning rates or less noise "
            "in the file, and another --out"
        )


def checkpoint_of(study: Study, swept: SweepFolder) -> Path:
    """The checkpoint of a sweep; a placeholder while a study is only checked."""
    return Path("base.ckpt") if study.only_checks else swept.checkpoint


def read(path: Path, required: tuple[str, ...], optional: tuple[str, ...]) -> dict[str, Any]:
    """The content of an experiment's file. Raises a UserError that names a key that is wrong or missing."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; name the YAML file of an experiment (configs/experiments)")
    known = (*required, *optional)
    with interpreting(path):
        content = read_yaml(path, DECIMAL)
        if not isinstance(content, dict):
            raise UserError(f"{path}: an experiment has the keys {', '.join(known)}")
        for key in content:
            if key not in known:
                raise UserError(f"{path}: an experiment has no key {key!r}; its keys are {', '.join(known)}")
        for key in required:
            if content.get(key) is None:
                raise UserError(f"{path}: an experiment needs the key {key!r}; it needs {', '.join(required)}")
        seeds = content["seeds"]
        if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
            raise UserError(f"seeds: give a list of different whole numbers, got {seeds!r}")
        for key in ("sweep_1", "sweep_2"):
            table = content.get(key) or {}
            if not isinstance(table, dict) or not all(isinstance(values, list | str) for values in table.values()):
                raise UserError(
                    f"{key}: give keys and their values, {{model.optimizer.lr: [0.01, 0.02]}}, got {table!r}"
                )
        if not isinstance(content["config"], list):
            content["config"] = [content["config"]]
        if "small" in content:
            growths = growths_of(content)
            if growths[0].factors != growths[1].factors:
                raise UserError(f"target grows from {growths[1]}, small from {growths[0]}; give one factor")
    return content


# --- the command


Make = Callable[["Study", dict[str, Any]], Any]


def conduct(study: Study, make: Make, content: dict[str, Any], *, only_plan: bool = False) -> bool:
    """Checks all sweeps of an experiment, and makes them; or prints which of them are finished, and returns False.

    A folder of another experiment is refused.
    """
    from mupscale.commands.lab.run import prepare_process

    prepare_process()
    path = study.out / "experiment.json"
    identity = json.loads(json.dumps({"experiment": content, "options": study.options}))
    has_begun = path.exists()
    if has_begun:
        refuse_difference(read_json(path), identity, f"--out {study.out} holds another experiment")
    elif study.out.is_dir() and any(study.out.iterdir()):
        raise UserError(f"--out {study.out} is not empty and has no experiment; name a new folder")
    if only_plan or not has_begun:
        with without_collections(), tempfile.TemporaryDirectory() as folder:
            make(replace(study, out=Path(folder), only_checks=True), content)
    if only_plan:
        for name in study.checked:
            is_finished = SweepFolder(study.out / name).is_finished
            print(f"{name}: {'finished' if is_finished else 'not finished'}")
        return False
    study.out.mkdir(parents=True, exist_ok=True)
    if not has_begun:
        write_text(path, json.dumps(identity, indent=1) + "\n")
    make(study, content)
    return True


def parser(prog: str, description: str | None) -> ArgumentParser:
    """The options of an experiment; all others are those of fit."""
    layout = argparse.RawDescriptionHelpFormatter
    usage = "%(prog)s FILE [--out FOLDER] [--workers N | --ray ADDRESS] [--stack auto|N|off] …"
    answer = ArgumentParser(prog=prog, usage=usage, description=description, epilog=EPILOG, formatter_class=layout)
    answer.add_argument("file", type=Path, metavar="FILE", help="the YAML file of the experiment")
    answer.add_argument(
        "--out", type=Path, help="the folder of the experiment (default runs/experiments/NAME OF THE FILE)"
    )
    answer.add_argument("--plan", action="store_true", help="check the file, and list the sweeps; run nothing")
    add_options(answer)
    return answer


def run(
    prog: str,
    description: str | None,
    make: Make,
    required: tuple[str, ...],
    optional: tuple[str, ...],
    arguments: list[str],
) -> Study | None:
    """Makes what a file with these keys describes, or goes on with it; None if it was only planned."""
    options, rest = parser(prog, description).own_and_other(arguments)
    refuse_options(options)
    with needs_extra("experiment"), without_collections():
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import pandas  # noqa: F401
    content = read(options.file, required, optional)
    how = {key: value for key, value in vars(options).items() if key not in ("file", "out", "plan")}
    chosen = tuple(f"--{key}={value}" for key, value in how.items() if value is not None)
    out = options.out or Path("runs/experiments") / options.file.stem
    study = Study(out, content["config"], tuple(rest), chosen, content.get("metric", "last_epoch"))
    with goes_on_when_repeated():
        return study if conduct(study, make, content, only_plan=options.plan) else None


def main(command: str, arguments: list[str]) -> None:
    study = run("python -m mupscale experiment", __doc__, procedure, REQUIRED, OPTIONAL, arguments)
    if study is None:
        return
    with goes_on_when_repeated():
        from mupscale.commands.reporting import write_report

        write_report([study.out], study.out / "report")
    print(f"the report is {study.out / 'report' / 'index.html'}")
