"""The LightningCLI behind every command that takes a configuration: short class names, sensible defaults."""

import importlib
import logging
import os
import pkgutil
import warnings
from argparse import ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import LightningEnum
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mupscale import callbacks, datamodules, models
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.fast_loop import FastLoop
from mupscale.callbacks.plain import LOG_EVERY, SAVE_EVERY, default_callbacks
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.tensorboard import keep_tables, log_folders
from mupscale.callbacks.upscale import UpscaleCallback, refuse_schedule
from mupscale.commands import trainer_options
from mupscale.commands._jsonargparse import arguments_of, key_and_problem, unknown_class, unknown_key
from mupscale.commands.arguments import did_you_mean
from mupscale.commands.checkpoints import checked, dictionary, refuse_changes
from mupscale.commands.config import Config, Parsed, derive, known
from mupscale.commands.endings import Ending, RunTrainer
from mupscale.commands.mistakes import IN_TRAINING, line_about
from mupscale.commands.next_steps import after_fit
from mupscale.commands.process import without_collections
from mupscale.commands.run_files import ResultFile, RunStart, SaveConfig
from mupscale.data_files import LOADER, read_yaml, yaml_of
from mupscale.errors import UserError, one_line
from mupscale.models._lightning import OpenCLI, Parsers, callbacks_in, is_remote, is_trial_run, name_arguments_apart
from mupscale.models.base import Growable
from mupscale.models.checkpoint import checkpoint_size, refuse_malformed, refuse_malformed_optimizers, run_in

LOGGER = {
    "class_path": "mupscale.callbacks.tensorboard.LossFirstLogger",
    "init_args": {"save_dir": "runs", "name": "default", "default_hp_metric": False},
}

DESCRIPTION = """{purpose} Options override the files, and later files override earlier ones. In YAML, `callbacks+:`
adds to a list. --print_config prints the resulting configuration. --model.help MLP lists the arguments of a class; use
--data.help and --trainer.callbacks.help likewise."""

PURPOSES = {
    "fit": "Train a configured model; with UpscaleCallback it grows during the run.",
    "validate": "Evaluate a checkpoint of any width (--ckpt_path) on the validation set.",
    "test": "Evaluate a checkpoint of any width (--ckpt_path) on the test set.",
    "predict": "Predict with a checkpoint of any width (--ckpt_path); writes predictions.pt.",
}

MISTAKES = (ValueError, OSError, ModuleNotFoundError, MisconfigurationException, ArgumentError)
"""The exceptions that mean a mistake in the configuration before the first batch; Lightning's own does at any time."""

PARSERS: dict[str, Parsers] = {}
"""By their commands and texts: to make one takes a third of the time of parsing."""

EVALUATIONS = ("validate", "test", "predict")
"""Commands that need a checkpoint; without this check they would run with random weights."""


class Parser(LightningArgumentParser):
    """Raises a UserError of one line where jsonargparse would print two hundred lines of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        key, text = key_and_problem(message)
        kind = {"model": Growable, "data": LightningDataModule, "trainer.callbacks": Callback}.get(key)
        class_name, unknown = unknown_class(message), unknown_key(message)
        if "class_path 'mupscale.models.base.Growable'" in message:  # which jsonargparse takes for want of another
            text = (
                "model: the configuration has no model.class_path. If it is one to lay over another, give both: "
                "--config BASE --config FILE"
            )
        elif kind is not None and class_name is not None:
            names = {child.__name__ for child in descendants(Callback)[1:]} if kind is Callback else short_names(kind)
            listed = "" if kind is Callback else f"There are {', '.join(sorted(names))}. "
            text += did_you_mean(class_name, names) or f". {listed}Name other classes by their import path"
        elif unknown is not None:
            name, owner = unknown
            accepted = arguments_of(owner) if owner else self.get_defaults(skip_validation=True).keys()
            text += did_you_mean(name, accepted) or ". --help lists the options"
        elif message.startswith("the following arguments are required"):
            text = "the configuration has no model, or no data: give --config FILE, or --model and --data"
        raise UserError(text) from ex


class CLI(OpenCLI):
    """The command line of a run. `folder` is the folder of the run to resume; `start` claims its folders."""

    def __init__(
        self,
        *args: Any,
        ending: Ending,
        start: RunStart,
        command: str = "",
        folder: Path | None = None,
        plain: Config | None = None,
        **kwargs: Any,
    ) -> None:
        self.command = command
        self.given_plainly = plain
        self._derived = None if plain is None else derive(plain)
        self.folder = folder
        self.ending = ending
        self.start = start
        self.results = ResultFile()
        self.text = ""
        self.saved: Config = {}
        self._log_folders: list[str | None] = []
        super().__init__(*args, **kwargs)

    def setup_parser(
        self, add_subcommands: bool, main_kwargs: dict[str, Any], subparser_kwargs: dict[str, Any]
    ) -> None:
        key = repr((self.command, add_subcommands, main_kwargs, subparser_kwargs))
        if key in PARSERS:
            self.share_parsers(PARSERS[key])
        else:
            super().setup_parser(add_subcommands, main_kwargs, subparser_kwargs)
            PARSERS[key] = self.parsers

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The requested subcommand only, because making each parser takes a good part of the start-up time."""
        known = OpenCLI.subcommands()
        return {self.command: known[self.command]} if self.command in known else known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(FastLoop, "loop")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        # a link, because copying a large model takes time
        parser.set_defaults({"checkpoint.save_last": "link", "checkpoint.every_n_train_steps": SAVE_EVERY})
        parser.add_argument(
            "--callback_args",
            type=dict[str, dict[str, Any] | list[dict[str, Any]]] | None,
            default=None,
            help="by class, arguments that override those of the callbacks in trainer.callbacks, or a list of them for "
            "one callback after another (used by best.yaml)",
        )
        parser.add_argument(
            "--stop_on_nan",
            "--stop-on-nan",
            action="store_true",
            help="stop with an error if the training loss is NaN or infinite; by default, only warn",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        if self._derived is not None:
            self.config = self._derived.config
            trainer_options.refuse_levels(self.config["fit"])
            return
        # Lightning's own way would warn that there is a command line as well
        self.config = parser.parse_args(with_merged_callback_args(args))
        command = self.config.get("subcommand")
        config = self.config[command] if command else self.config
        trainer_options.refuse_values_for_sections(config)
        if config["callback_args"]:
            # as if the callbacks had these arguments themselves, also in the run's config.yaml
            values = {"trainer": {"callbacks": with_callback_args(config)}, "callback_args": None}
            self.config = parser.parse_object({command: values} if command else values, cfg_base=self.config)
            config = self.config[command] if command else self.config
        trainer_options.refuse_levels(config)
        if self.folder is None:
            make_dirpaths_absolute(config)

    def on_checkpoint_path(self) -> None:
        """Keeps the configuration as it was given: Lightning would override it by the checkpoint's class and arguments.

        The width of the checkpoint may differ, because the module rebuilds itself. Only a sharded checkpoint, and one
        for FSDP2, is loaded too late for that, so its width is set here.
        """
        self.given = deepcopy(self.config)
        command = self.config.get("subcommand", "")
        path = self.config.get(command, {}).get("ckpt_path")
        if path is None:
            if command in EVALUATIONS:
                base = self.config.get(f"{command}.model.init_args.init_from")
                raise UserError(
                    f"ckpt_path: {command} needs a checkpoint, without one the weights are random, and model.init_from "
                    f"is for fit alone; name it: --ckpt_path {base or 'runs/NAME/version_0/checkpoints/last.ckpt'}"
                )
            return
        if path in ("last", "best", "hpc") or not Path(path).exists():
            raise UserError(
                f"ckpt_path: there is no checkpoint {path}. Name one, or continue a run: python -m mupscale resume RUN"
            )
        if Path(path).is_dir() and not (Path(path) / "meta.pt").is_file():
            raise UserError(
                f"ckpt_path: {path} is not a checkpoint. If it is a run's folder: python -m mupscale resume {path}"
            )
        section = self.config[self.config.subcommand]
        if Path(path).is_file() and section.get("weights_only") is False:
            return  # the user trusts the file
        try:
            saved = checked(Path(path))
            refuse_malformed(saved)
            if command == "fit":
                refuse_malformed_optimizers(saved)
        except UserError as error:
            raise UserError(f"ckpt_path: {error}") from error
        if command == "fit":
            self._log_folders = run_in(saved).get("log_folders", [])
            # checkpoints that were written before they held the configuration lie beside it
            then = run_in(saved).get("config") or (self.folder and read_yaml(self.folder / "config.yaml"))
            if then is not None:
                refuse_changes(
                    then, self.plain(self.config), saved.get("global_step", 0), same_place=self.folder is not None
                )
        self._replace_files(section.model.get("init_args") or {}, saved)
        if Path(path).is_dir() or trainer_options.is_sharding(section.trainer.get("strategy")):
            name = section.model.class_path.rpartition(".")[2]
            for key, value in checkpoint_size(saved, name)._asdict().items():
                if value is not None:
                    self.config[f"{self.config.subcommand}.model.init_args.{key}"] = value

    def _replace_files(self, arguments: Any, saved: dict[str, Any]) -> None:
        """A released model that a run started from may be gone: the checkpoint has its weights and configuration."""
        config = dictionary(saved.get("hyper_parameters")).get("config")
        starts_from_files = arguments.get("folder") is not None or isinstance(arguments.get("config"), str)
        if starts_from_files and isinstance(config, dict):
            arguments["folder"], arguments["config"] = None, config

    def plain(self, config: Any) -> Config:
        return cast(Config, yaml.load(self.dumped(config), LOADER))

    def dumped(self, config: Any) -> str:
        """The section of the command as the text of config.yaml."""
        command = config["subcommand"]
        # it was validated as it was parsed
        return str(self.parser_of(command).dump(config[command], skip_none=False, skip_validation=True))

    def before_instantiate_classes(self) -> None:
        trainer = self.section("trainer")
        if self.subcommand == "fit" and not trainer["logger"] and not trainer["fast_dev_run"]:
            # Lightning's folder for a run without a logger is the same for all of them
            trainer["default_root_dir"] = str(self.start.folder_without_logger(trainer["default_root_dir"]))
        if self.folder is None:
            return
        if trainer["logger"] is True:
            name = f"{TensorBoardLogger.__module__}.{TensorBoardLogger.__qualname__}"
            place = Namespace(save_dir=None, name="", version=None)
            trainer["logger"] = Namespace(class_path=name, init_args=place)
        loggers = trainer_options.listed(trainer["logger"])
        for logger, written in zip_longest(loggers, self._log_folders[: len(loggers)]):
            arguments = getattr(logger, "init_args", {})
            if all(name in arguments for name in ("save_dir", "name", "version")):
                # the run may have been moved, and the working directory may be another one
                folder = Path(os.path.normpath(self.folder / (written or ".")))
                folder = folder if folder.is_dir() else self.folder
                arguments["save_dir"] = str(folder.parent)
                arguments["name"] = ""
                arguments["version"] = folder.name

    def on_trainer_config(self, config: Any) -> None:
        given = trainer_options.listed(config["callbacks"])
        refuse_schedule([callback for callback in given if isinstance(callback, UpscaleCallback)])
        trainer_options.refuse_processes(config)
        if self.subcommand in (None, "fit"):
            trainer_options.refuse_options({**config, "callbacks": given})
        self.trainer_defaults["callbacks"] = default_callbacks(
            given,
            logger=bool(config["logger"]),
            progress_bar=config["enable_progress_bar"] is not False and not config["barebones"],
        )
        if self.subcommand is not None:
            self.given[f"{self.subcommand}.ckpt_path"] = None
            self.given[f"{self.subcommand}.seed_everything"] = self.section("seed_everything")
            if self._derived is not None:
                self.text, self.saved = self._derived.text, self._derived.saved
            else:
                self.text = self.dumped(self.given)
                self.saved = yaml.load(self.text, LOADER)
                if self.given_plainly is not None:
                    known.append(Parsed(self.given_plainly, self.given, self.text, self.saved))
            saver = SaveConfig(self.text, resumed=self.folder is not None)
            config["callbacks"] = [self.ending, *given, saver, self.results]

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        name_arguments_apart(self.model, self.datamodule)

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        trainer = super().instantiate_trainer(**arguments)
        self.ending.attach(trainer)
        for curves in callbacks_in(trainer, Curves):
            curves.stop_on_nan = curves.stop_on_nan or self.section("stop_on_nan")
        return trainer

    def before_validate(self) -> None:
        if self.trainer.is_global_zero and self.trainer.loggers and self.trainer.log_dir is not None:
            self.start.leftovers.watch(Path(self.trainer.log_dir))

    before_test = before_predict = before_validate

    def before_fit(self) -> None:
        trainer = self.trainer
        if not trainer.is_global_zero or is_trial_run(trainer):
            return
        claimed = self.start.claim(trainer, takes_next=self._takes_next_version())
        for callback in callbacks_in(trainer, ExactResume):
            callback.run = {**claimed, "config": self.saved, "log_folders": log_folders(trainer)}
        keep_tables(trainer)

    def after_fit(self) -> None:
        trainer, ending = self.trainer, self.ending
        if not trainer.is_global_zero or is_trial_run(trainer) or ending.received_sigterm:
            return
        saved = ending.checkpoints()
        if ending.folder is not None and saved:
            last = getattr(trainer.checkpoint_callback, "last_model_path", None) or saved[0][1]
            for line in after_fit(trainer, self.model, ending.folder, Path(last)):
                print(line, flush=True)

    def _takes_next_version(self) -> bool:
        """Whether the first logger finds its version itself."""
        loggers = self.section("trainer")["logger"]
        first = loggers[0] if isinstance(loggers, list) else loggers
        own = isinstance(next(iter(self.trainer.loggers), None), TensorBoardLogger | CSVLogger)
        return own and self.folder is None and getattr(first, "init_args", {}).get("version") is None

    def predict(self, **arguments: Any) -> None:
        predictions = self.trainer.predict(**arguments)
        path = Path(self.trainer.log_dir or self.trainer.default_root_dir) / "predictions.pt"
        if predictions and self.trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(predictions, path)
            print(f"predictions of {len(predictions)} batches: {path}")


def parsed(arguments: list[str], *, run: bool = True, **options: Any) -> CLI:
    """Parses a command line and runs its command; without `run`, only makes its model, data and trainer.

    The options are those of `opened`.
    """
    with opened(arguments, run=run, **options) as cli:
        if run:
            cli.run_subcommand()
    return cli


@contextmanager
def opened(
    arguments: list[str],
    *,
    run: bool = True,
    handles_signals: bool = True,
    parser_kwargs: dict[str, Any] | None = None,
    folder: Path | None = None,
    plain: Config | None = None,
) -> Iterator[CLI]:
    """A command line, parsed, with its model, data and trainer; its command is run inside of the context, if `run`.

    `plain` is the configuration of a `fit` with a single file, which is derived from a similar one if there was one. A
    command that `handles_signals` ends by SIGTERM after its step.

    A mistake in the configuration is a UserError. An error after the first step is raised unchanged.
    """
    refuse_unreadable(arguments)
    import_classes()
    quieten()
    dump_enums_as_text()
    command = arguments[0] if run and arguments and arguments[0] in PURPOSES else ""
    texts = {
        name: {
            "description": DESCRIPTION.format(purpose=purpose),
            "usage": f"python -m mupscale {name} --config FILE [--config FILE …] [options]",
        }
        for name, purpose in PURPOSES.items()
        if command in ("", name)
    }
    ending = Ending()
    start = RunStart(folder)
    try:
        with ending.explained(handles_signals=handles_signals) if run else nullcontext():
            yield CLI(
                Growable,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,  # the constructor arguments in a checkpoint are enough
                seed_everything_default=0,
                save_config_callback=None,
                trainer_defaults={"logger": LOGGER, "log_every_n_steps": LOG_EVERY, "enable_model_summary": False},
                parser_class=Parser,
                parser_kwargs={"prog": "python -m mupscale", **(texts if run else {}), **(parser_kwargs or {})},
                args=arguments,
                run=run,
                command=command,
                folder=folder,
                plain=plain,
                ending=ending,
                start=start,
                trainer_class=RunTrainer,
            )
    except Exception as error:
        is_mistake = isinstance(error, MisconfigurationException if ending.has_begun else MISTAKES)
        if ending.has_stepped and not is_mistake:
            error.add_note(IN_TRAINING)
        line = (key_and_problem(str(error))[1] or one_line(error)) if is_mistake else line_about(error)
        if line is not None and not ending.has_stepped:
            start.leftovers.remove()
        if line is None or isinstance(error, UserError):
            raise
        raise UserError(line) from error
    finally:
        start.release()


def given(arguments: list[str], *options: str) -> Iterator[tuple[str, str]]:
    """Those of the options that a command line has, each with its value: `--config FILE`, or `--config=FILE`."""
    for before, argument in pairwise(["", *arguments]):
        name, equals, value = argument.partition("=")
        if before in options:
            yield before, argument
        elif equals and name in options:
            yield name, value


def refuse_unreadable(arguments: list[str]) -> None:
    """Raises a UserError for a file of --config that is not YAML with keys, or stands for too many values."""
    for _, file in given(arguments, "--config"):
        if Path(file).is_file():
            try:
                content = read_yaml(Path(file))
            except UserError as error:
                raise UserError(f"config: {error}") from error
            if not isinstance(content, dict):
                raise UserError(
                    f"config: give a YAML file with keys (model:, data:, trainer:), got {content or 'nothing'}"
                )


def import_classes() -> None:
    """Imports the classes that a configuration can name without their import path."""
    with without_collections():
        for package in (models, datamodules, callbacks):
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package.__name__}.{module.name}")


def short_names(kind: type[Any]) -> set[str]:
    """The names of this project's classes of a kind, which a configuration can use without their import path."""
    ours = (child for child in descendants(kind) if child.__module__.startswith("mupscale."))
    return {child.__name__ for child in ours if not is_abstract(child)}


def is_abstract(kind: type[Any]) -> bool:
    return any(getattr(getattr(kind, name, None), "__isabstractmethod__", False) for name in ("build", "loss"))


def descendants(kind: type[Any]) -> list[type[Any]]:
    """A class and those that inherit from it, as far as they are imported."""
    return [kind, *(each for child in kind.__subclasses__() for each in descendants(child))]


def with_callback_args(config: Any) -> list[dict[str, Any]]:
    """The configured callbacks, as plain values, their arguments overridden by `callback_args`."""
    answer = [callback.as_dict() for callback in trainer_options.listed(config["trainer"]["callbacks"])]
    for name, arguments in config["callback_args"].items():
        named = [callback for callback in answer if callback["class_path"].rpartition(".")[2] == name]
        if not named:
            raise UserError(f"callback_args.{name}: there is no {name} in trainer.callbacks")
        of_each = arguments if isinstance(arguments, list) else [arguments] * len(named)
        if len(of_each) != len(named):
            raise UserError(
                f"callback_args.{name}: a list for {len(of_each)} callbacks, but trainer.callbacks has {len(named)}; "
                "give one entry for each"
            )
        for callback, own in zip(named, of_each, strict=True):
            callback["init_args"] = callback.get("init_args", {}) | own
    return answer


def with_merged_callback_args(arguments: list[str]) -> list[str]:
    """A command line in which the `callback_args` of its options and files are merged: later ones would replace all.

    So best.yaml, which has the tuned ones, keeps what the command line of a sweep says of the others.
    """
    merged: Config = {}
    count = 0
    for option, value in given(arguments, "--config", "--callback_args"):
        with suppress(UserError, ValueError, yaml.YAMLError):  # the parser says what is wrong with it
            is_file = option == "--config"
            content = dictionary(read_yaml(Path(value))).get("callback_args") if is_file else yaml_of(value)
            count += bool(content)
            for name, own in dictionary(content).items():
                merged[name] = _merged(merged.get(name, {}), own)
    if count < 2:
        return arguments
    return [*arguments, f"--callback_args={yaml.safe_dump(merged, default_flow_style=True)}"]


def _merged(before: Any, after: Any) -> Any:
    """The arguments of callbacks of one class, which may be a list with an entry for each of them."""
    if isinstance(before, list) and isinstance(after, list):
        pairs = list(zip_longest(before, after))
    elif isinstance(before, list) or isinstance(after, list):
        pairs = [(own, after) for own in before] if isinstance(before, list) else [(before, own) for own in after]
    else:
        return {**before, **after} if isinstance(before, dict) and isinstance(after, dict) else after
    return [_merged(one or {}, other or {}) for one, other in pairs]


def make_dirpaths_absolute(config: Any) -> None:
    """Replaces relative folders for checkpoints, in config.yaml as well: `resume` and `report` may be started
    elsewhere."""
    callbacks = [callback.get("init_args") for callback in trainer_options.listed(config["trainer"]["callbacks"])]
    for arguments in (config["checkpoint"], *(each for each in callbacks if each is not None)):
        dirpath = arguments.get("dirpath")
        if isinstance(dirpath, str) and not is_remote(dirpath):
            arguments["dirpath"] = os.path.abspath(os.path.expanduser(dirpath))


def dump_enums_as_text() -> None:
    """Lets YAML hold enumerations of text, such as the default of Timer's `interval`."""
    yaml.SafeDumper.add_multi_representer(LightningEnum, lambda dumper, value: dumper.represent_str(str(value.value)))


def quieten() -> None:
    """Drops messages of Lightning that advertise, or are about its own internals."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(no_tips)
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's calls
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    # the directory belongs to the run itself
    warnings.filterwarnings("ignore", r"(Checkpoint|Experiment logs) directory .* exists and is not empty")


def no_tips(record: logging.LogRecord) -> bool:
    """Whether a log record is none of Lightning's tips; that about CUDA devices is settled by loop.tf32."""
    return not str(record.msg).startswith(("💡", "You are using a CUDA device"))
