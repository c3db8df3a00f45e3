"""The LightningCLI behind every command that takes a configuration: short class names, sensible defaults."""

import importlib
import logging
import os
import pkgutil
import warnings
from argparse import ArgumentError
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mupscale import callbacks, datamodules, models
from mupscale.atomic import replacing
from mupscale.callbacks import log_files
from mupscale.callbacks.curves import Curves
from mupscale.callbacks.exact_resume import ExactResume
from mupscale.callbacks.fast_loop import FastLoop
from mupscale.callbacks.run_checkpoint import RunCheckpoint
from mupscale.callbacks.summary import Summary, WidthBar
from mupscale.commands._jsonargparse import debugging, in_a_line, key_and_problem
from mupscale.errors import UserError
from mupscale.models._lightning import OpenCLI
from mupscale.models.base import WidthScalable
from mupscale.widening import noise as noise

LOGGER = {
    "class_path": "mupscale.callbacks.tensorboard.LossFirstLogger",
    "init_args": {"save_dir": "runs", "name": "default", "default_hp_metric": False},
}

DESCRIPTION = """{purpose} Options override the files, and later files earlier ones; in YAML, `callbacks+:` adds to
a list. --print_config shows the result; --model.help MLP (or --data.help, --trainer.callbacks.help, with a class)
shows what a class takes."""

PURPOSES = {
    "fit": "Train, upscaling on the way, as a configuration says.",
    "validate": "Evaluate a checkpoint (--ckpt_path), narrow or wide, on the validation set.",
    "test": "Evaluate a checkpoint (--ckpt_path), narrow or wide, on the test set.",
    "predict": "Predict with a checkpoint (--ckpt_path), narrow or wide; writes predictions.pt.",
}


class SaveConfig(SaveConfigCallback):
    """Saves config.yaml in the run's folder, and its text in TensorBoard. A run that is resumed has both."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.folder = trainer.log_dir  # which all ranks must ask for, and only the first one saves
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = log_files.folder(trainer, self.folder)
        if stage != "fit" or folder is None:
            return
        path = folder / self.config_filename
        if path.exists() and not self.overwrite:
            if any(path.parent.rglob("*.ckpt")):
                raise UserError(
                    f"trainer.logger: {path.parent} has a run already; go on with it: python -m mupscale resume "
                    f"{path.parent}"
                )
            log_files.delete(
                trainer
            )  # of an attempt that died before its first checkpoint, or its curves would lie under ours
        text = self.parser.dump(self.config, skip_none=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            new.write_text(text)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not self.overwrite:
                logger.experiment.add_text("config", f"```yaml\n{text}\n```")


class Parser(LightningArgumentParser):
    """One that tells what is wrong in a line, and not after two hundred of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if debugging() or not self.exit_on_error:
            super().error(message, ex)
        key, text = key_and_problem(message)
        kind = {"model": WidthScalable, "data": LightningDataModule}.get(key)
        if kind is not None and "import path" in text:
            text += f". There are {', '.join(sorted(short_names(kind)))}; other classes go by their import path"
        raise UserError(text) from ex


class CLI(OpenCLI):
    """`folder` is that of the run to resume; `started` learns when batches are handled."""

    def __init__(self, *args: Any, started: "Started", folder: Path | None = None, **kwargs: Any) -> None:
        self.folder = folder
        self.started = started
        super().__init__(*args, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(FastLoop, "loop")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        # a link, because the copy of a large model costs time; no version counter, because the folder is the run's own
        parser.set_defaults(
            {
                "checkpoint.save_last": "link",
                "checkpoint.every_n_train_steps": 500,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.add_argument(
            "--callback_args",
            type=dict[str, dict[str, Any]] | None,
            default=None,
            help="arguments laid over those of the callbacks in trainer.callbacks, by class (best.yaml uses it)",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert isinstance(args, list)
        self.config = parser.parse_args(args)  # without Lightning's warning that there is a command line, too
        command = self.config.get("subcommand")
        config = self.config[command] if command else self.config
        if config["callback_args"]:
            # the same as if the callbacks had been given so: in the run's config.yaml, too
            values = {"trainer": {"callbacks": with_callback_args(config)}, "callback_args": None}
            self.config = parser.parse_object({command: values} if command else values, cfg_base=self.config)

    def on_checkpoint_path(self) -> None:
        """The configuration stays what was given: Lightning would put the checkpoint's class and arguments over it.

        A checkpoint of another width is no reason, for the module rebuilds itself, unless it is sharded, which loads
        too late.
        """
        self.given = deepcopy(self.config)
        path = self.config.get(self.config.get("subcommand", ""), {}).get("ckpt_path")
        if path is None:
            return
        if path in ("last", "best", "hpc") or not Path(path).exists():
            raise UserError(
                f"ckpt_path: there is no checkpoint {path}. Name one, or go on with a run: python -m mupscale resume "
                "RUN"
            )
        if Path(path).is_dir() and not (Path(path) / "meta.pt").is_file():
            raise UserError(
                f"ckpt_path: {path} is not a checkpoint. If it is the folder of a run: python -m mupscale resume {path}"
            )
        if Path(path).is_dir():
            saved = torch.load(Path(path) / "meta.pt", map_location="cpu", weights_only=True)
            self.config[f"{self.config.subcommand}.model.init_args.width"] = saved["hyper_parameters"]["width"]

    def before_instantiate_classes(self) -> None:
        if self.folder is None:
            return
        loggers = self.section("trainer")["logger"]
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            arguments = getattr(logger, "init_args", {})
            if all(name in arguments for name in ("save_dir", "name", "version")):
                # where it is now, from where we are now
                arguments["save_dir"], arguments["name"], arguments["version"] = (
                    str(self.folder.parent),
                    "",
                    self.folder.name,
                )

    def on_trainer_config(self, config: Any) -> None:
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        self.trainer_defaults["callbacks"] = default_callbacks(given, config)
        if self.subcommand is not None:
            self.given[f"{self.subcommand}.ckpt_path"] = None
            self.given[f"{self.subcommand}.seed_everything"] = self.section("seed_everything")
            saver = SaveConfig(self.parser_of(self.subcommand), self.given[self.subcommand], **self.save_config_kwargs)
            config["callbacks"] = [self.started, *given, saver]

    def before_fit(self) -> None:
        if self.trainer.is_global_zero:
            log_files.keep_tables(self.trainer)

    def predict(self, **arguments: Any) -> None:
        predictions = self.trainer.predict(**arguments)
        path = Path(self.trainer.log_dir or self.trainer.default_root_dir) / "predictions.pt"
        if predictions and self.trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(predictions, path)
            print(f"predictions of {len(predictions)} batches: {path}")


def parsed(
    arguments: list[str], *, run: bool = True, parser_kwargs: dict[str, Any] | None = None, folder: Path | None = None
) -> CLI:
    """Parses a command line and runs its command; without `run`, only makes its model, data and trainer.

    A mistake in the configuration is a UserError. What fails once batches are handled is not one, and stays what it is.
    """
    import_classes()
    quieten()
    texts = {
        command: {
            "description": DESCRIPTION.format(purpose=purpose),
            "usage": f"python -m mupscale {command} --config FILE [--config FILE …] [options]",
        }
        for command, purpose in PURPOSES.items()
    }
    started = Started()
    try:
        return CLI(
            WidthScalable,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # constructor arguments as they are do for that
            seed_everything_default=0,
            save_config_callback=None,
            save_config_kwargs={"overwrite": folder is not None, "save_to_log_dir": False},
            trainer_defaults={"logger": LOGGER, "log_every_n_steps": 10, "enable_model_summary": False},
            parser_class=Parser,
            parser_kwargs={"prog": "python -m mupscale", **(texts if run else {}), **(parser_kwargs or {})},
            args=arguments,
            run=run,
            folder=folder,
            started=started,
        )
    except (ValueError, OSError, MisconfigurationException, ArgumentError) as error:
        if isinstance(error, UserError) or started.batches or debugging():
            raise
        raise UserError(in_a_line(str(error))) from error


class Started(Callback):
    """Notes when a run begins to handle batches."""

    def __init__(self) -> None:
        self.batches = False

    def _note(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.batches = True

    on_sanity_check_start = on_train_epoch_start = _note
    on_validation_epoch_start = on_test_epoch_start = on_predict_epoch_start = _note


def import_classes() -> None:
    """Imports what goes by short names in a configuration."""
    for package in (models, datamodules, callbacks):
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


def short_names(kind: type[Any]) -> set[str]:
    """The classes of ours that a configuration can name, of a kind."""
    deeper = (name for child in kind.__subclasses__() for name in short_names(child))
    ours = (c for c in kind.__subclasses__() if c.__module__.startswith("mupscale."))
    return {
        *deeper,
        *(c.__name__ for c in ours if not getattr(getattr(c, "build", None), "__isabstractmethod__", False)),
    }


def with_callback_args(config: Any) -> list[dict[str, Any]]:
    """The configured callbacks, as plain values, with `callback_args` laid over their arguments."""
    given = config["trainer"]["callbacks"] or []
    answer = [callback.as_dict() for callback in (given if isinstance(given, list) else [given])]
    for name, arguments in config["callback_args"].items():
        named = [callback for callback in answer if callback["class_path"].rpartition(".")[2] == name]
        if not named:
            raise UserError(f"callback_args.{name}: there is no {name} in trainer.callbacks for it")
        for callback in named:
            callback["init_args"] = callback.get("init_args", {}) | arguments
    return answer


def default_callbacks(given: list[Callback], trainer: Any) -> list[Callback]:
    """What every run has, unless it brings one of the kind along or has switched it off."""
    answer: list[tuple[type, Callback]] = [(Curves, Curves()), (Summary, Summary()), (ExactResume, ExactResume())]
    if trainer["logger"]:
        answer.append((LearningRateMonitor, LearningRateMonitor(logging_interval="step")))
    if trainer["enable_progress_bar"] is not False and not trainer["barebones"]:
        answer.append((ProgressBar, WidthBar()))
    return [default for kind, default in answer if not any(isinstance(callback, kind) for callback in given)]


def quieten() -> None:
    """Drops what Lightning says that is advertising, or about its own internals."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(no_tips)
    logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector").setLevel(logging.WARNING)
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's calls
    warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings(
        "ignore", r"(Checkpoint|Experiment logs) directory .* exists and is not empty"
    )  # it is the run's own


def no_tips(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(("💡", "You are using a CUDA device"))  # the latter is what loop.tf32 is for
