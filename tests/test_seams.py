"""Private names of other libraries: each is there, and none is touched outside of the files for it."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar, WeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from paths import ROOT
from torch import nn
from torch.utils.data import DataLoader

from mupscale._torch import is_mapped, is_under_transform

PACKAGES = ("mupscale", "models", "callbacks", "datamodules", "benchmarks", "experiments")
LIGHTNING_SEAMS = [
    *sorted((ROOT / "models").glob("_lightning*.py")),
    ROOT / "callbacks/exact_resume.py",
    ROOT / "callbacks/run_checkpoint.py",
]
TORCH_SEAM = ROOT / "mupscale/_torch.py"

LIGHTNING = {
    LightningDataModule: {"_hparams_initial"},
    LightningModule: {
        "_trainer", "_current_fx_name", "_on_before_batch_transfer", "_compiler_ctx", "_hparams", "_device_mesh",
    },
    Trainer: {"_logger_connector", "_loggers", "_accelerator_connector", "_detect_anomaly"},
    _LoggerConnector: {"_callback_metrics", "_first_loop_iter"},
    LearningRateMonitor: {"_extract_stats"},
    _EvaluationLoop: {"_has_run", "_max_batches", "_combined_loader"},
    TensorBoardLogger: {"_experiment", "_version"},
    CSVLogger: {"_version"},
    WeightAveraging: {"_average_model", "_device", "_use_buffers", "_kwargs"},
    _FitLoop: {
        "_should_accumulate", "_restarting", "_data_fetcher", "_can_stop_early", "_combined_loader", "_data_source",
        "_resuming_from_checkpoint",
    },
    CombinedLoader: {"_mode", "_state_dicts", "_load_state_dicts"},
    _TrainingEpochLoop: {
        "_results", "_num_ready_batches_reached", "_build_kwargs", "_skip_next_val",
        "_batches_that_stepped", "_should_check_val_fx",
    },
    ModelCheckpoint: {
        "_defer_save_until_validation", "_every_n_epochs", "_every_n_train_steps", "_find_last_checkpoints",
        "_last_checkpoint_saved",
        "_last_global_step_saved", "_last_time_checked", "_link_checkpoint", "_monitor_candidates",
        "_remove_checkpoint", "_save_checkpoint", "_save_last_checkpoint", "_save_on_train_epoch_end",
        "_save_topk_checkpoint", "_should_remove_checkpoint", "_train_time_interval",
    },
    ModelParallelStrategy: {"_data_parallel_size"},
    TQDMProgressBar: {"_should_update"},
}  # fmt: skip
"""Every private attribute of Lightning that the seam touches, by the class that has it."""

LIGHTNING_IMPORTS = {
    "_configure_optimizers", "_TrainingEpochLoop", "_DataLoaderSource", "_Stateful",
    "_ResultCollection", "_ManualOptimization", "_call_callback_hooks", "_init_optimizers_and_lr_schedulers",
    "_call_lightning_module_hook", "_LoggerConnector", "_DataLoaderIterDataFetcher",
    "_MultiProcessingLauncher", "_AutomaticOptimization",
}  # fmt: skip

HOOKS = {"_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"}

TORCH = {nn.Module: {"_non_persistent_buffers_set", "_compiled_call_impl", *HOOKS}, torch.Tensor: {"_use_count"}}

FOREIGN = (
    LightningModule, LightningDataModule, Trainer, Callback, ModelCheckpoint, TQDMProgressBar, WeightAveraging,
    LightningCLI, TensorBoardLogger, CSVLogger, _FitLoop, _TrainingEpochLoop, _LoggerConnector, CombinedLoader,
)  # fmt: skip


def own_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def private_names(kind: type) -> set[str]:
    """The private attributes of a class, its instances and their trainers that its source and its bases' name."""
    names = {name for name in dir(kind) if re.match(r"_[a-z]", name)}
    for base in inspect.getmro(kind):
        if base.__module__.startswith(("lightning", "torch.nn", "torchmetrics")):
            names |= set(re.findall(r"self\.(?:trainer\.)?(_[a-z]\w*)", inspect.getsource(base)))
    return names


def attributes_read(tree: ast.AST) -> set[str]:
    """The private attributes that code reads or sets, `self` of classes of our own aside."""
    own = {id(node) for kind in own_classes(tree) for node in ast.walk(kind) if is_of_self(node)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and id(node) not in own
    }


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def own_classes(tree: ast.AST) -> list[ast.ClassDef]:
    """Classes without a base, or with bases that are such classes of the same file."""
    answer: list[ast.ClassDef] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            known = {"ABC", "NamedTuple", *(kind.name for kind in answer)}
            if all(isinstance(base, ast.Name) and base.id in known for base in node.bases):
                answer.append(node)
    return answer


def overridden(tree: ast.AST) -> set[str]:
    """The private methods of classes that may have a foreign base."""
    own = {id(kind) for kind in own_classes(tree)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and id(node) not in own]
    methods = [node for kind in classes for node in kind.body if isinstance(node, ast.FunctionDef)]
    return {method.name for method in methods if re.match(r"_[a-z]", method.name)}


@pytest.mark.parametrize("kind", LIGHTNING, ids=lambda kind: kind.__name__)
def test_lightning_still_has_what_the_seam_touches(kind: type) -> None:
    assert LIGHTNING[kind] <= private_names(kind)


@pytest.mark.parametrize("kind", TORCH, ids=lambda kind: kind.__name__)
def test_torch_still_has_what_the_seam_touches(kind: type) -> None:
    assert TORCH[kind] <= private_names(kind) | set(dir(kind))


def test_a_module_still_keeps_the_name_of_its_one_argument() -> None:
    class Module(LightningModule):
        def __init__(self, config: dict[str, int]) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    assert vars(Module({"width": 8}))["_hparams_name"] == "config"


def test_a_data_loader_still_keeps_its_iterator() -> None:
    assert vars(DataLoader([0]))["_iterator"] is None


def test_the_list_names_everything_the_lightning_seam_touches() -> None:
    """A touch that is added to the seam without an entry above would not be noticed when a release moves it."""
    tree = ast.parse("\n".join(path.read_text() for path in LIGHTNING_SEAMS))
    listed = set().union(*LIGHTNING.values())
    assert attributes_read(tree) | overridden(tree) == listed
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {name for name in imported if name.startswith("_")} == LIGHTNING_IMPORTS


def test_private_names_stay_behind_the_seams() -> None:
    foreign = set().union(*map(private_names, FOREIGN)) | {"_foreach_norm", "_foreach_mul", "_use_count"}
    for path in own_files():
        tree = ast.parse(path.read_text())
        if path not in (*LIGHTNING_SEAMS, TORCH_SEAM):
            assert not (attributes_read(tree) | overridden(tree)) & foreign, path
        for module, name in imports(tree):
            package = module.partition(".")[0]
            is_private = name.startswith("_") or any(part.startswith("_") for part in module.split("."))
            if package == "lightning" and path not in LIGHTNING_SEAMS:
                assert not is_private, f"{path}: {module}.{name} belongs into models/_lightning.py"
            if package == "torch" and path != TORCH_SEAM:
                assert not is_private, f"{path}: {module}.{name} belongs into mupscale/_torch.py"


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node.module, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""


def test_the_scan_sees_a_private_attribute() -> None:
    tree = ast.parse("def f(trainer):\n    return trainer._logger_connector\n")
    assert attributes_read(tree) & private_names(Trainer) == {"_logger_connector"}
    tree = ast.parse("class C(Callback):\n    def f(self):\n        return self._trainer\n")
    assert attributes_read(tree) & private_names(LightningModule) == {"_trainer"}


def test_a_tensor_inside_a_transform_is_known() -> None:
    seen = []
    torch.vmap(lambda row: seen.extend((is_under_transform(row), is_mapped(row))) or row)(torch.ones(2, 3))
    assert seen == [True, True]
    assert not is_under_transform(torch.ones(2))
    assert not is_mapped(torch.ones(2))
    double = torch.compile(lambda row: row if is_mapped(row) else 2 * row, backend="eager", fullgraph=True)
    assert double(torch.ones(2)).tolist() == [2, 2]
