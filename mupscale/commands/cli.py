"""The LightningCLI behind every command that takes a configuration: short class names, sensible defaults."""

import importlib
import inspect
import logging
import os
import warnings
from argparse import SUPPRESS, ArgumentError
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import yaml
from jsonargparse import Namespace
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import LightningEnum
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mupscale import callbacks, datamodules, models
from mupscale.atomic import replacing
from mupscale.base_shapes import apply_mup
from mupscale.callbacks.captured_steps import CapturedSteps
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.run_defaults import LOG_EVERY, SAVE_EVERY, default_callbacks
from mupscale.callbacks.tensorboard import keep_tables, log_folders
from mupscale.callbacks.upscale import UpscaleCallback, refuse_schedule, swaps_of
from mupscale.commands import config as configuration
from mupscale.commands.checkpoints import load_validated, refuse_changes
from mupscale.commands.config import Config, dictionary, with_merged_callback_args
from mupscale.commands.growth_plans import plan_growth
from mupscale.commands.mistakes import IN_TRAINING, line_about
from mupscale.commands.process import did_you_mean, refuse_output, without_collections
from mupscale.commands.run import RunJournal, RunStart, after_fit
from mupscale.data_files import LOADER, META, refuse_links
from mupscale.errors import UserError, one_line, prefix_errors
from mupscale.models._lightning import callbacks_in, is_remote, is_trial_run, name_arguments_apart
from mupscale.models.base import Growable, has_own_optimizers, refuse_absolute_rates, refuse_bad_hyperparameters
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

OF_CHECKPOINTS = ("ckpt_path", "weights_only")
"""Keys of a run's config.yaml, both null, that commands without a checkpoint ignore."""

MISTAKES = (ValueError, OSError, ModuleNotFoundError, MisconfigurationException, ArgumentError)
"""The exceptions that mean a mistake in the configuration before the first batch; Lightning's own does at any time."""

PARSERS: dict[str, LightningArgumentParser] = {}
"""Parsers by their commands and texts: to make one takes a third of the time of parsing."""


class Parser(LightningArgumentParser):
    """Raises a UserError of one line where jsonargparse would print two hundred lines of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        from mupscale.commands._jsonargparse import arguments_of, key_and_problem, unknown_class, unknown_key

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


class CLI(LightningCLI):
    """The model, the data and the trainer of a command line, and the `command`, if there is one, that `run` runs.

    `args` is the command line, or a whole configuration.
    Every command has a parser of its own: Lightning's subcommands would parse every value several times. `folder` is
    the folder of the run to resume; `start` claims its folders.
    """

    def __init__(
        self,
        *args: Any,
        command: str,
        journal: RunJournal,
        start: RunStart,
        folder: Path | None = None,
        **kwargs: Any,
    ) -> None:
        self.command, self.folder = command, folder
        self.journal = journal
        self.start = start
        self._log_folders: list[str | None] = []
        super().__init__(*args, **kwargs)

    def setup_parser(self, *arguments: Any) -> None:
        key = repr((self.command, arguments))
        if key not in PARSERS:
            super().setup_parser(*arguments)
            PARSERS[key] = self.parser
        self.parser = PARSERS[key]

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(CapturedSteps, "loop")
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
        if self.command:
            parser.add_method_arguments(Trainer, self.command, skip={*self.subcommands()[self.command]})
        else:
            for key in OF_CHECKPOINTS:
                parser.add_argument(f"--{key}", type=Any, default=None, help=SUPPRESS)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if isinstance(args, dict):
            self.config = parser.parse_object(deepcopy(args))
            if self.command:
                self.config["ckpt_path"] = args.get("ckpt_path")
        else:
            assert isinstance(args, list)
            # Lightning's own way would warn that there is a command line as well
            self.config = parser.parse_args(with_merged_callback_args(args))
        for key in () if self.command else OF_CHECKPOINTS:
            value = self.config.pop(key)
            if value is not None:
                raise UserError(f"{key} = {value}: this command reads no checkpoint; leave {key} out")
        configuration.refuse_sections(self.config)
        if self.config["callback_args"]:
            # as if the callbacks had these arguments themselves, also in the run's config.yaml
            values = {"trainer": {"callbacks": with_callback_args(self.config)}, "callback_args": None}
            self.config = parser.parse_object(values, cfg_base=self.config)
        if self.folder is None:
            make_dirpaths_absolute(self.config)

    def before_instantiate_classes(self) -> None:
        """Keeps the configuration as it was given, before a checkpoint and the folder of a run change it."""
        if not self.command:
            return
        given = deepcopy(self.config)
        given["ckpt_path"] = None
        self.journal.config = as_plain(self.parser, given)
        self._use_checkpoint()
        self._place_logs()

    def _use_checkpoint(self) -> None:
        """Refuses a checkpoint that the command cannot go on from. The module rebuilds itself at its width.

        Only a sharded checkpoint, and one for FSDP2, is loaded too late for that, so its width is set here.
        """
        path, model = self.config["ckpt_path"], self.config["model"]
        if path is None:
            if self.command != "fit":
                base = (model.get("init_args") or {}).get("init_from")
                raise UserError(
                    f"ckpt_path: {self.command} needs a checkpoint, without one the weights are random, and "
                    "model.init_from is for fit alone; name it: "
                    f"--ckpt_path {base or 'runs/NAME/version_0/checkpoints/last.ckpt'}"
                )
            return
        if path in ("last", "best", "hpc") or not Path(path).exists():
            raise UserError(
                f"ckpt_path: there is no checkpoint {path}. Name one, or continue a run: python -m mupscale resume RUN"
            )
        if Path(path).is_dir() and not (Path(path) / META).is_file():
            raise UserError(
                f"ckpt_path: {path} is not a checkpoint. If it is a run's folder: python -m mupscale resume {path}"
            )
        if Path(path).is_file() and self.config["weights_only"] is False:
            return  # the user trusts the file
        with prefix_errors("ckpt_path"):
            checkpoint = load_validated(Path(path))
            refuse_malformed(checkpoint)
            if self.command == "fit":
                refuse_malformed_optimizers(checkpoint)
        if self.command == "fit":
            run = run_in(checkpoint)
            self._log_folders = run.get("log_folders", [])
            if run.get("config") is not None:
                step, stays = checkpoint.get("global_step", 0), self.folder is not None
                refuse_changes(run["config"], self.journal.config, step, same_place=stays)
        self._replace_files(model.get("init_args") or {}, checkpoint)
        if Path(path).is_dir() or configuration.is_sharding(self.config["trainer"]["strategy"]):
            size = checkpoint_size(checkpoint, model.class_path.rpartition(".")[2])
            for key, value in size.arguments.items():
                self.config[f"model.init_args.{key}"] = value

    def _replace_files(self, arguments: Any, saved: dict[str, Any]) -> None:
        """A released model that a run started from may be gone: the checkpoint has its weights and configuration."""
        config = dictionary(saved.get("hyper_parameters")).get("config")
        starts_from_files = arguments.get("folder") is not None or isinstance(arguments.get("config"), str)
        if starts_from_files and isinstance(config, dict):
            arguments["folder"], arguments["config"] = None, config

    def _place_logs(self) -> None:
        """Gives a run without a logger a folder of its own, and one that is resumed its old folders."""
        trainer = self.config["trainer"]
        if self.command == "fit" and not trainer["logger"] and not trainer["fast_dev_run"]:
            # Lightning's folder for a run without a logger is the same for all of them
            trainer["default_root_dir"] = str(self.start.folder_without_logger(trainer["default_root_dir"]))
        if self.folder is None:
            return
        if trainer["logger"] is True:
            name = f"{TensorBoardLogger.__module__}.{TensorBoardLogger.__qualname__}"
            place = Namespace(save_dir=None, name="", version=None)
            trainer["logger"] = Namespace(class_path=name, init_args=place)
        loggers = configuration.listed(trainer["logger"])
        for logger, written in zip_longest(loggers, self._log_folders[: len(loggers)]):
            arguments = getattr(logger, "init_args", {})
            if all(name in arguments for name in ("save_dir", "name", "version")):
                # the run may have been moved, and the working directory may be another one
                folder = Path(os.path.normpath(self.folder / (written or ".")))
                folder = folder if folder.is_dir() else self.folder
                arguments["save_dir"] = str(folder.parent)
                arguments["name"] = ""
                arguments["version"] = folder.name

    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        name_arguments_apart(self.model, self.datamodule)
        if self.command == "fit" and not has_own_optimizers(self.model):
            refuse_optimizer(self.model, self.trainer)  # before data are loaded

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        options = self.config_init["trainer"]
        given = configuration.listed(options["callbacks"])
        refuse_schedule([callback for callback in given if isinstance(callback, UpscaleCallback)])
        configuration.refuse_nodes(options)
        if self.command in ("", "fit"):
            configuration.refuse_options(options)
        options["callbacks"] = [self.journal, *given] if self.command else given
        self.trainer_defaults["callbacks"] = default_callbacks(
            given,
            logger=bool(options["logger"]),
            progress_bar=options["enable_progress_bar"] is not False and not options["barebones"],
        )
        trainer = super().instantiate_trainer(**arguments)
        if TorchElasticEnvironment.detect():  # Lightning compares only where it starts the processes itself
            TorchElasticEnvironment().validate_settings(trainer.num_devices, trainer.num_nodes)
        self.journal.attach(trainer)
        for curves in callbacks_in(trainer, Curves):
            curves.stop_on_nan = curves.stop_on_nan or self.config["stop_on_nan"]
        return trainer

    def run(self) -> None:
        """Runs the command."""
        if self.command == "fit":
            self.before_fit()
        elif self.trainer.is_global_zero and self.trainer.loggers and self.trainer.log_dir is not None:
            self.start.leftovers.watch(Path(self.trainer.log_dir))  # a command that is refused leaves no logs behind
        if self.trainer.is_global_zero:
            refuse_linked_logs(self.trainer)
        predictions = None
        if self.command == "predict" and self.trainer.is_global_zero:
            predictions = Path(self.trainer.log_dir or self.trainer.default_root_dir) / "predictions.pt"
            refuse_output("the predictions", predictions, {})  # before hours of work
        answer = getattr(self.trainer, self.command)(**self.command_arguments())
        if self.command == "fit":
            self.after_fit()
        if predictions is not None and answer:
            predictions.parent.mkdir(parents=True, exist_ok=True)
            with replacing(predictions) as stream:
                torch.save(answer, stream)
            print(f"predictions of {len(answer)} batches: {predictions}")

    def command_arguments(self) -> dict[str, Any]:
        """What the method of the trainer gets."""
        names = inspect.signature(getattr(Trainer, self.command)).parameters
        own = {name: self.config_init[name] for name in names if name in self.config_init}
        return {**own, "datamodule": self.datamodule}

    def before_fit(self) -> None:
        trainer = self.trainer
        if not trainer.is_global_zero or is_trial_run(trainer):
            return
        claimed = self.start.claim(trainer, takes_next=self._takes_next_version())
        for callback in callbacks_in(trainer, ExactResume):
            callback.run = {**claimed, "config": self.journal.config, "log_folders": log_folders(trainer)}
        keep_tables(trainer.loggers)

    def after_fit(self) -> None:
        if self.trainer.is_global_zero and self.journal.folder is not None:
            for line in after_fit(self.trainer, self.model, self.journal.folder):
                print(line, flush=True)

    def _takes_next_version(self) -> bool:
        """Whether the first logger finds its version itself."""
        first = next(iter(configuration.listed(self.config["trainer"]["logger"])), None)
        own = isinstance(next(iter(self.trainer.loggers), None), TensorBoardLogger | CSVLogger)
        return own and self.folder is None and getattr(first, "init_args", {}).get("version") is None


def main(command: str, arguments: list[str]) -> None:
    """fit, validate, test and predict."""
    run_cli(arguments, command)


def run_cli(arguments: list[str] | Config, command: str = "", **options: Any) -> CLI:
    """Parses a command line or a configuration, and runs its command, if there is one. For options see `open_cli`."""
    with open_cli(arguments, command, **options) as cli:
        if command:
            cli.run()
    return cli


def load_configuration(arguments: list[str], command: str) -> tuple[Config, CLI]:
    """The whole configuration of a command line with all defaults, and the objects that were made of it.

    They are made so that a class that refuses its arguments does so now.
    """
    cli = run_cli(arguments, parser_kwargs={"prog": f"python -m mupscale {command}"})
    return as_plain(cli.parser, cli.config), cli


def as_plain(parser: LightningArgumentParser, config: Any) -> Config:
    # it was validated as it was parsed
    return cast(Config, yaml.load(parser.dump(config, skip_none=False, skip_validation=True), LOADER))


def refuse_optimizer(module: Growable, trainer: Trainer) -> None:
    """Raises a UserError for an optimizer, or a schedule, of the configuration that cannot train the module."""
    parameters = module.network(*module.size, meta=True).parameters()
    with prefix_errors("model.optimizer", ValueError):  # torch judges most numbers
        optimizer = module.optimizer_callable(parameters)
    refuse_bad_hyperparameters(optimizer, trainer)
    apply_mup(optimizer)
    if module.lr_scheduler_callable is not None:
        refuse_absolute_rates(module.lr_scheduler_callable(optimizer))


def refuse_linked_logs(trainer: Trainer) -> None:
    """Raises a UserError for a link where a logger of Lightning opens a file, because it would write through it."""
    for folder in (getattr(logger, "log_dir", None) for logger in trainer.loggers):
        if folder is not None and not is_remote(folder):
            refuse_links(Path(folder), "hparams.yaml", "metrics.csv")


def refuse_growths(module: Growable, trainer: Trainer) -> None:
    """Raises a UserError for growths of the configuration that a new run cannot make."""
    before = module.size
    for callback in swaps_of(trainer):
        after = callback.size_after(before)
        if after != before:
            plan_growth(callback, module, before)
        before = after


@contextmanager
def open_cli(
    arguments: list[str] | Config,
    command: str = "",
    *,
    parser_kwargs: dict[str, Any] | None = None,
    folder: Path | None = None,
) -> Iterator[CLI]:
    """A command line, or a whole configuration, parsed, with its model, data and trainer.

    Its command, if any, is run inside of the context. A mistake in the configuration is a UserError. An error after the
    first step is raised unchanged.
    """
    import_classes()
    quieten()
    # such as the default of Timer's `interval`
    yaml.SafeDumper.add_multi_representer(LightningEnum, lambda dumper, value: dumper.represent_str(str(value.value)))
    texts = {
        "prog": f"python -m mupscale {command}",
        "usage": f"python -m mupscale {command} --config FILE [--config FILE …] [options]",
        "description": DESCRIPTION.format(purpose=PURPOSES.get(command)),
    }
    journal = RunJournal(resumed=folder is not None)
    start = RunStart(folder)
    try:
        with journal.explained() if command else nullcontext():
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
                parser_kwargs=parser_kwargs or texts,
                args=arguments,
                run=False,
                command=command,
                folder=folder,
                journal=journal,
                start=start,
            )
    except Exception as error:
        from mupscale.commands._jsonargparse import key_and_problem

        is_mistake = isinstance(error, MisconfigurationException if journal.has_begun else MISTAKES)
        if journal.has_stepped and not is_mistake:
            error.add_note(IN_TRAINING)
        line = (key_and_problem(str(error))[1] or one_line(error)) if is_mistake else line_about(error)
        if line is not None and not journal.has_stepped:
            start.leftovers.remove()
        if line is None or isinstance(error, UserError):
            raise
        raise UserError(line) from error
    finally:
        start.release()


def import_classes() -> None:
    """Imports the classes that a configuration can name without their import path."""
    with without_collections():
        for package in (models, datamodules, callbacks):
            for path in sorted(Path(package.__path__[0]).glob("*.py")):
                if path.stem not in ("__init__", "stacked"):  # which sweeps make themselves
                    importlib.import_module(f"{package.__name__}.{path.stem}")


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
    answer = [callback.as_dict() for callback in configuration.listed(config["trainer"]["callbacks"])]
    for name, arguments in config["callback_args"].items():
        named = [callback for callback in answer if callback["class_path"].rpartition(".")[2] == name]
        if not named and answer:  # of a run without callbacks, such as one from scratch, nothing is changed
            raise UserError(f"callback_args.{name}: there is no {name} in trainer.callbacks")
        of_each = arguments if isinstance(arguments, list) else [arguments] * len(named)
        if named and len(of_each) != len(named):
            raise UserError(
                f"callback_args.{name}: a list for {len(of_each)} callbacks, but trainer.callbacks has {len(named)}; "
                "give one entry for each"
            )
        for callback, own in zip(named, of_each, strict=False):
            callback["init_args"] = callback.get("init_args", {}) | own
    return answer


def make_dirpaths_absolute(config: Any) -> None:
    """Replaces relative folders for checkpoints, in config.yaml as well: `resume` and `report` may be started
    elsewhere."""
    callbacks = [callback.get("init_args") for callback in configuration.listed(config["trainer"]["callbacks"])]
    for arguments in (config["checkpoint"], *(each for each in callbacks if each is not None)):
        dirpath = arguments.get("dirpath")
        if isinstance(dirpath, str) and not is_remote(dirpath):
            arguments["dirpath"] = os.path.abspath(os.path.expanduser(dirpath))


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
