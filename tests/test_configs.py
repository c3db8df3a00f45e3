"""The paper's runs: the files under configs/mlp, configs/resnet and configs/gpt2 hold its numbers, and the commands in
them train.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tiers import slow_except
from torch import nn

from mupscale.__main__ import main
from mupscale.callbacks.upscale import UpscaleCallback
from mupscale.commands import prepare
from mupscale.commands.cli import CLI, run_cli
from mupscale.commands.resume import newest_checkpoint
from mupscale.datamodules.covertype import SAMPLE
from mupscale.datamodules.fineweb import JARGON
from mupscale.methods.noise import AdditiveNoise, RecordedNoise, SignalNoise, save_constants
from mupscale.schedules import WarmupStableDecay

CONFIGS = Path(__file__).parent.parent / "configs"


class PaperRun(NamedTuple):
    """One file: the width it starts with and the base learning rate; of an upscale also the target width, the noise and
    its base.
    """

    width: int
    lr: float
    target: int | None = None
    noise: tuple[type, Any] | None = None
    base: str | None = None


class PaperExperiment(NamedTuple):
    """What all runs of a folder share, and the runs in the order in which they can be made."""

    name: str
    model: dict[str, Any]
    optimizer: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    data: dict[str, Any]
    rows_per_step: int
    length: dict[str, int]
    precision: str
    clip: float | None
    runs: dict[str, PaperRun]
    tiny: tuple[int, int]
    """Base and target width of a test."""
    overrides: list[str]


def paper_runs(
    large: tuple[int, int], small: tuple[int, int], lr: float, grown_lr: float, std: float, *, small_scratch: bool
) -> dict[str, PaperRun]:
    """A base, a run from scratch and one that grows, of the paper's sizes and of the small ones."""
    runs = {}
    for prefix, (narrow, wide), has_scratch in (("", large, True), ("small_", small, small_scratch)):
        base = f"{prefix}base"
        runs[base] = PaperRun(narrow, lr)
        if has_scratch:
            runs[f"{prefix}scratch"] = PaperRun(wide, lr)
        runs[f"{prefix}upscale"] = PaperRun(narrow, grown_lr, wide, (AdditiveNoise, std), base)
    return runs


MLP = {"base_width": 1, "hidden_layers": 3, "inputs": 54, "outputs": 7}
COVERTYPE = {"data_dir": "data/covertype", "batch_size": 2000}

RECIPE = {"tied": False, "readout_zero_init": True, "gain": 0.5, "embedding_std": 0.1, "output_mult": 4.0}

GPT2_PAPER = PaperExperiment(
    "gpt2-paper",
    {"base_width": 24, "layers": 12, "heads": 12, "vocabulary": 50304, "context": 1024, "tied": True, "compile": True},
    torch.optim.AdamW,
    {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    {"data_dir": "data/fineweb", "context": 1024},
    512,
    {"max_epochs": None, "max_steps": 10_000},
    "bf16-mixed",
    1.0,
    paper_runs((1920, 3840), (192, 384), 0.0039, 0.002, 0.05, small_scratch=False),
    (24, 48),
    ["--model.layers=1", "--trainer.accumulate_grad_batches=1"],
)

MLP_ADAMW = PaperExperiment(
    "mlp-adamw",
    MLP,
    torch.optim.AdamW,
    {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4},
    COVERTYPE,
    2000,
    {"max_epochs": 500, "max_steps": -1},
    "32-true",
    None,
    paper_runs((500, 2000), (100, 400), 0.1, 0.013, 1.0, small_scratch=True),
    (4, 16),
    [],
)

GPT2_REDUCED = GPT2_PAPER._replace(
    name="gpt2-reduced",
    model={"base_width": 64, "layers": 8, "heads": 8, "vocabulary": 8192, "context": 512, "compile": True, **RECIPE},
    data={"data_dir": "data/fineweb-8192", "context": 512},
    rows_per_step=128,
    length={"max_epochs": None, "max_steps": 1500},
    runs=paper_runs((256, 512), (64, 128), 0.0078, 0.0078, 0.24, small_scratch=False),
    tiny=(64, 128),
    overrides=["--model.layers=1"],
)

EXPERIMENTS = {
    "mlp/adamw": MLP_ADAMW,
    "mlp/sgd": MLP_ADAMW._replace(
        name="mlp-sgd",
        optimizer=torch.optim.SGD,
        settings={"momentum": 0, "weight_decay": 1e-4},
        runs=paper_runs((500, 2000), (100, 400), 0.4, 0.1, 1.25, small_scratch=True),
    ),
    "resnet": PaperExperiment(
        "resnet",
        {"base_width": 64, "outputs": 100, "compile": True},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 1e-4},
        {"data_dir": "data/cifar100", "batch_size": 128},
        128,
        {"max_epochs": 100, "max_steps": -1},
        "bf16-mixed",
        None,
        {
            "base": PaperRun(128, 0.01),
            "scratch": PaperRun(256, 0.01),
            "small_base": PaperRun(32, 0.01),
            "small_scratch": PaperRun(64, 0.01),
            "small_upscale": PaperRun(32, 0.003, 64, (SignalNoise, 0.4), "small_base"),
            "upscale": PaperRun(128, 0.003, 256, (RecordedNoise, Path("runs/resnet/noise.json")), "base"),
        },
        (4, 8),
        ["--data.batch_size=2"],
    ),
    "gpt2": GPT2_PAPER._replace(
        name="gpt2",
        model={**GPT2_PAPER.model, "base_width": 96, **RECIPE},
        runs=paper_runs((1920, 3840), (192, 384), 0.0078, 0.0078, 0.24, small_scratch=False),
        tiny=(96, 192),
    ),
    "gpt2/paper": GPT2_PAPER,
    "gpt2/reduced": GPT2_REDUCED,
    "gpt2/by_heads": GPT2_REDUCED._replace(
        name="gpt2-by-heads",
        model={**GPT2_REDUCED.model, "heads": None, "head_dim": 32},
        runs={name: GPT2_REDUCED.runs[name] for name in ("base", "scratch", "upscale")},
    ),
}

RUNS = [(folder, name) for folder, experiment in EXPERIMENTS.items() for name in experiment.runs]
GPT2_OVERRIDES = ["--model.context=8", "--data.context=8", "--data.batch_size=2"]
ONE_STEP = [
    "--trainer.max_steps=1",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.accelerator=cpu",
    "--trainer.precision=32-true",  # bfloat16 takes many times as long on some CPUs
    "--trainer.enable_progress_bar=false",
    "--trainer.log_every_n_steps=1",
]


@pytest.fixture(autouse=True)
def _with_the_files(in_an_empty_folder: None) -> None:
    """The folder of a user: our configurations, and data where they say."""
    Path("configs").symlink_to(CONFIGS)
    for folder in ("data/covertype", "data/cifar100"):
        Path(folder).mkdir(parents=True)
    shutil.copy(SAMPLE, "data/covertype/covertype.npz")
    for folder in ("data/fineweb", "data/fineweb-8192"):
        shutil.copytree(JARGON, folder)
    draw = np.random.default_rng(0)
    images = {f"x_{part}": draw.integers(256, size=(16, 32, 32, 3), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": draw.integers(100, size=16) for part in ("train", "test")}
    np.savez("data/cifar100/cifar100.npz", **images, **labels)


def commands(text: str) -> list[list[str]]:
    """The commands that a comment or a page tells, without `python -m mupscale`."""
    return [
        shlex.split(line)
        for line in re.findall(r"^#? *python -m mupscale (.*)$", re.sub(r"\\\n#? *", "", text), flags=re.MULTILINE)
    ]


def text_of(folder: str, name: str) -> str:
    return (CONFIGS / folder / f"{name}.yaml").read_text()


def told(folder: str, name: str, command: str) -> list[str]:
    """The one such command in the comment of a file."""
    found = [c for c in commands(text_of(folder, name)) if c[0] == command]
    assert len(found) == 1
    return found[0][1:]


def test_every_file_is_in_the_table() -> None:
    files = {
        path.relative_to(CONFIGS) for folder in ("mlp", "resnet", "gpt2") for path in (CONFIGS / folder).rglob("*.yaml")
    }
    assert files == {Path(folder) / f"{name}.yaml" for folder, name in RUNS}


def test_the_page_tells_what_the_files_tell() -> None:
    page, files = (
        commands((CONFIGS / "README.md").read_text()),
        [c for folder, name in RUNS for c in commands(text_of(folder, name))],
    )
    protocol = [
        told("mlp/adamw", name, "fit") for name in ("small_base", "base", "scratch", "small_upscale", "upscale")
    ]
    assert [c[1:] for c in page if c[0] == "fit"] == protocol
    assert sorted(c for c in page if c[0] in ("prepare", "upscale")) == sorted(c for c in files if c[0] != "fit")


@pytest.mark.parametrize(
    ("folder", "tokens", "held_out", "vocabulary"), [("gpt2", 11.8e9, 5.5e6, None), ("gpt2/reduced", 1e8, 1e6, 8192)]
)
def test_preparation_of_the_text(folder: str, tokens: float, held_out: float, vocabulary: int | None) -> None:
    options = prepare.parser().parse_args(told(folder, "base", "prepare"))
    assert (options.kind, options.subset, options.tokens, options.vocab) == (
        "fineweb",
        "CC-MAIN-2013-20",
        tokens,
        vocabulary,
    )
    assert options.tokens * options.val_fraction == pytest.approx(held_out, rel=0.01)
    assert options.out == Path(EXPERIMENTS[folder].data["data_dir"])


@pytest.mark.parametrize(("folder", "name"), slow_except(RUNS, *((folder, "upscale") for folder in EXPERIMENTS)))
def test_the_papers_numbers(folder: str, name: str) -> None:
    experiment = EXPERIMENTS[folder]
    run = experiment.runs[name]
    Path("runs/resnet").mkdir(parents=True)
    save_constants({}, "runs/resnet/noise.json")
    cli = run_cli([*told(folder, name, "fit"), "--trainer.accelerator=cpu"])
    model, trainer, data = cli.model, cli.trainer, cli.datamodule
    assert {key: model.hparams[key] for key in experiment.model} == experiment.model
    assert model.width == run.width
    optimizer = model.optimizer_callable([nn.Parameter(torch.zeros(1))])
    assert (model.lr_scheduler_callable is None) == ("gain" not in experiment.model)
    assert type(optimizer) is experiment.optimizer
    assert {key: optimizer.defaults[key] for key in experiment.settings} == experiment.settings
    assert optimizer.defaults["lr"] == run.lr
    if model.lr_scheduler_callable is not None:
        schedule = model.lr_scheduler_callable(optimizer)
        assert isinstance(schedule, WarmupStableDecay)
        assert (schedule.warmup > 0, schedule.decay) == (True, 0)
    assert {key: getattr(data, key) for key in experiment.data} == experiment.data
    assert data.batch_size * trainer.accumulate_grad_batches == experiment.rows_per_step
    assert {key: getattr(trainer, key) for key in experiment.length} == experiment.length
    assert (trainer.precision, trainer.gradient_clip_val) == (experiment.precision, experiment.clip)
    assert Path(trainer.log_dir) == Path("runs") / experiment.name / name
    upscales = [callback for callback in callbacks(cli) if isinstance(callback, UpscaleCallback)]
    assert [(0, run.target)] * bool(run.target) == [(callback.at_step, callback.width) for callback in upscales]
    if run.target:
        assert run.noise == noise_level(upscales[0].noise)
        assert model.hparams["init_from"] == f"runs/{experiment.name}/{run.base}/checkpoints/last.ckpt"
        assert experiment.runs[str(run.base)].width == run.width
    else:
        assert model.hparams["init_from"] is None


TRAINED_OFTEN = ("resnet", "gpt2/by_heads")
"""Beside mlp/adamw: one of each model and of each way in which it grows."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", slow_except(EXPERIMENTS, "mlp/adamw", kept=TRAINED_OFTEN))
def test_one_step_of_every_run(folder: str) -> None:
    """The commands as the files tell them, one after the other, at a tiny size: an upscale starts from the base before
    it.
    """
    experiment = EXPERIMENTS[folder]
    narrow, wide = experiment.tiny
    overrides = [*ONE_STEP, *experiment.overrides, *(GPT2_OVERRIDES if "gpt2" in folder else [])]
    if "compile" in experiment.model:
        overrides.append("--model.compile=false")
    for name, run in experiment.runs.items():
        if run.noise is not None and run.noise[0] is RecordedNoise:
            main(["upscale", *told(folder, name, "upscale"), "--width", str(wide)])
        sizes = [f"--trainer.callbacks.width={wide}"] if run.target else []
        starts_wide = name.endswith("scratch")
        width = wide if starts_wide else narrow
        cli = run_cli([*told(folder, name, "fit"), *overrides, f"--model.width={width}", *sizes])
        cli.trainer.fit(cli.model, cli.datamodule)
        path, checkpoint = newest_checkpoint(Path("runs") / experiment.name / name)
        assert path is not None
        assert checkpoint["global_step"] == 1
        assert checkpoint["hyper_parameters"]["width"] == (wide if run.target or starts_wide else narrow)
        assert torch.isfinite(cli.model.train_loss)
        groups = cli.trainer.optimizers[0].param_groups
        assert any(group["initial_lr"] == pytest.approx(run.lr) for group in groups)
        if run.target:  # what was widened is the base of that name, to the last weight
            before, base = (
                saved(experiment.name, *file) for file in ((name, "pre-upscale-0.ckpt"), (str(run.base), "last.ckpt"))
            )
            assert before["state_dict"].keys() == base["state_dict"].keys()
            assert all(torch.equal(before["state_dict"][key], tensor) for key, tensor in base["state_dict"].items())


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
OF_TRANSFORMERS = {"llama_tiny": (64, 128), "llama": (256, 512)}
"""The widths of each file in configs/hf."""


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(OF_TRANSFORMERS, "llama_tiny"))
def test_models_of_transformers(name: str) -> None:
    """The files grow the model to twice its width, and a tiny one of the same kind trains so."""
    assert {path.stem for path in (CONFIGS / "hf").glob("*.yaml")} == OF_TRANSFORMERS.keys()
    fit = told("hf", name, "fit")
    cli = run_cli([*fit, "--trainer.accelerator=cpu"])
    (swap,) = (callback for callback in callbacks(cli) if isinstance(callback, UpscaleCallback))
    assert (cli.model.width, swap.width) == OF_TRANSFORMERS[name]
    assert cli.model.hparams["base_width"] == cli.model.width
    sizes = [f"--model.config.{key}={value}" for key, value in LLAMA.items()]
    sizes += ["--trainer.callbacks.at_step=0", f"--trainer.callbacks.width={2 * LLAMA['hidden_size']}"]
    sizes += ["--model.compile=false", "--data.context=8", "--data.batch_size=2"]
    cli = run_cli([*fit, *ONE_STEP, *sizes])
    cli.trainer.fit(cli.model, cli.datamodule)
    assert cli.model.width == 2 * LLAMA["hidden_size"]
    assert torch.isfinite(cli.model.train_loss)


DEEPER = {"mlp": (2, 8, "identity"), "gpt2": (4, 8, "interleave")}
"""The layers of each file in configs/depth, and how they are added."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEPER)
def test_models_that_become_deeper(name: str) -> None:
    """Tiny ones of the same kind train so; new layers that add nothing keep the loss."""
    assert {path.stem for path in (CONFIGS / "depth").glob("*.yaml")} == DEEPER.keys()
    fit = told("depth", name, "fit")
    cli = run_cli([*fit, "--trainer.accelerator=cpu"])
    (swap,) = (callback for callback in callbacks(cli) if isinstance(callback, UpscaleCallback))
    assert (cli.model.size.layers, swap.layers, swap.depth) == DEEPER[name]
    assert cli.model.hparams["base_layers"] == cli.model.size.layers
    sizes = ["--trainer.callbacks.at_step=0"]
    if name == "gpt2":
        sizes += ["--model.width=16", "--model.base_width=16", "--model.compile=false", "--model.context=8"]
        sizes += ["--data.context=8", "--data.batch_size=2"]
    cli = run_cli([*fit, *ONE_STEP, *sizes])
    cli.trainer.fit(cli.model, cli.datamodule)
    (swap,) = (callback for callback in callbacks(cli) if isinstance(callback, UpscaleCallback))
    assert cli.model.size.layers == DEEPER[name][1]
    if swap.depth == "identity":
        assert swap.summary["loss_after"] == pytest.approx(swap.summary["loss_before"], rel=1e-6)
    assert torch.isfinite(cli.model.train_loss)


def callbacks(cli: CLI) -> list[Callback]:
    found: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    return found


def noise_level(noise: Any) -> tuple[type, Any]:
    return type(noise), getattr(noise, {AdditiveNoise: "std", SignalNoise: "t", RecordedNoise: "path"}[type(noise)])


def saved(experiment: str, run: str, file: str) -> dict[str, Any]:
    return torch.load(f"runs/{experiment}/{run}/checkpoints/{file}", weights_only=True)
