"""fit, validate, test and predict: a LightningCLI with short class names and sensible defaults."""

import importlib
import logging
import os
import pkgutil
import warnings
from argparse import ArgumentError
from copy import deepcopy
from pathlib import Path
from traceback import walk_tb
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
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
from mupscale.models.base import WidthScalable
from mupscale.widening import noise as noise

LOGGER = {
    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
    "init_args": {"save_dir": "runs", "name": "default", "default_hp_metric": False},
}

LOOPS = ("training_epoch_loop.py", "evaluation_loop.py", "prediction_loop.py")
"""Where Lightning handles batches."""

GENERIC = (
    "- Expected a path but",
    "- Does not validate against",
    "Does not validate against",
    "- Expected a <class 'NoneType'>",
    "- Not a valid subclass of",
    "Subclass types expect one of",
    "- a class path (str)",
    "- a dict with",
    "Subtypes:",
    "Errors:",
    "Given value",
)
"""What jsonargparse says of every class that it cannot make."""

DESCRIPTION = """{what} Options override the files, and later files earlier ones; in YAML, `callbacks+:` adds to a list.
--print_config shows the result; --model.help MLP (or --data.help, --trainer.callbacks.help, with a class) shows what a
class takes."""

WHAT = {
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
                raise ValueError(
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
        if "JSONARGPARSE_DEBUG" in os.environ or not self.exit_on_error:
            super().error(message, ex)
        text = in_a_line(message)
        key, quoted, rest = text.removeprefix('Parser key "').partition('":')
        text = f"{key}: {rest.strip()}" if quoted else text
        kind = {"model": WidthScalable, "data": LightningDataModule}.get(key)
        if kind is not None and "import path" in text:
            text += f". There are {', '.join(sorted(short_names(kind)))}; other classes go by their import path"
        raise SystemExit(f"error: {text}")


class CLI(LightningCLI):
    """`folder` is that of the run to resume."""

    def __init__(self, *args: Any, folder: Path | None = None, **kwargs: Any) -> None:
        self.folder = folder
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

    def _parse_ckpt_path(self) -> None:
        """The configuration stays what was given: Lightning would put the checkpoint's class and arguments over it.

        A checkpoint of another width is no reason, for the module rebuilds itself, unless it is sharded, which loads
        too late.
        """
        self.given = deepcopy(self.config)
        path = self.config.get(self.config.get("subcommand", ""), {}).get("ckpt_path")
        if path is None:
            return
        if path in ("last", "best", "hpc") or not Path(path).exists():
            raise ValueError(
                f"ckpt_path: there is no checkpoint {path}. Name one, or go on with a run: python -m mupscale resume "
                "RUN"
            )
        if Path(path).is_dir() and not (Path(path) / "meta.pt").is_file():
            raise ValueError(
                f"ckpt_path: {path} is not a checkpoint. If it is the folder of a run: python -m mupscale resume {path}"
            )
        if Path(path).is_dir():
            saved = torch.load(Path(path) / "meta.pt", map_location="cpu", weights_only=True)
            self.config[f"{self.config.subcommand}.model.init_args.width"] = saved["hyper_parameters"]["width"]

    def before_instantiate_classes(self) -> None:
        if self.folder is None:
            return
        loggers = self._get(self.config, "trainer")["logger"]
        for logger in loggers if isinstance(loggers, list) else [loggers]:
            arguments = getattr(logger, "init_args", {})
            if all(name in arguments for name in ("save_dir", "name", "version")):
                # where it is now, from where we are now
                arguments["save_dir"], arguments["name"], arguments["version"] = (
                    str(self.folder.parent),
                    "",
                    self.folder.name,
                )

    def _instantiate_trainer(self, config: Any, callbacks: list[Callback]) -> Trainer:
        given = config["callbacks"] or []
        given = given if isinstance(given, list) else [given]
        self.trainer_defaults["callbacks"] = default_callbacks(given, config)
        if self.subcommand is not None:
            self.given[f"{self.subcommand}.ckpt_path"] = None
            self.given[f"{self.subcommand}.seed_everything"] = self._get(self.config, "seed_everything")
            config["callbacks"] = [
                *given,
                SaveConfig(self._parser(self.subcommand), self.given[self.subcommand], **self.save_config_kwargs),
            ]
        return super()._instantiate_trainer(config, callbacks)

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


def main(command: str, arguments: list[str]) -> None:
    parsed([command, *arguments])


def parsed(
    arguments: list[str], *, run: bool = True, parser_kwargs: dict[str, Any] | None = None, folder: Path | None = None
) -> CLI:
    """Parses a command line and runs its command; without `run`, only makes its model, data and trainer."""
    import_classes()
    quieten()
    texts = {
        command: {
            "description": DESCRIPTION.format(what=what),
            "usage": f"python -m mupscale {command} --config FILE [--config FILE …] [options]",
        }
        for command, what in WHAT.items()
    }
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
        )
    except (ValueError, OSError, MisconfigurationException, ArgumentError) as error:
        # a mistake in the configuration is told in a line; what fails on a batch is not one, and keeps its traceback
        if (
            any(Path(frame.f_code.co_filename).name in LOOPS for frame, _ in walk_tb(error.__traceback__))
            or "JSONARGPARSE_DEBUG" in os.environ
        ):
            raise
        raise SystemExit(f"error: {in_a_line(str(error))}") from error


def in_a_line(message: str) -> str:
    """A message without what jsonargparse says of every class that it cannot make."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line.removeprefix("- ") for line in lines if line and not line.startswith(GENERIC))


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
            raise ValueError(f"callback_args.{name}: there is no {name} in trainer.callbacks for it")
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
