"""Trials that are trained as one program: the numbers of separate runs, ordinary runs, kills, and what goes apart."""

from pathlib import Path
from typing import Any

import pytest
from command_line import LR, NOISE, small, upscale
from extensions import Counting
from sweeps import changed, numbers_of, swept, unlike

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

ADAMW = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01, "weight_decay": 0.1}}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
COSINE = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 200}}


def long(path: Path, optimizer: dict[str, Any], **trainer: Any) -> str:
    """A configuration of 200 steps with clipping and a growth in the middle, in float64."""
    settings = {
        "max_steps": 200,
        "val_check_interval": 1.0,
        "precision": "64-true",
        "gradient_clip_val": 0.3,
        "log_every_n_steps": 4,
    }
    config = small(path, upscale(100, 16), **settings | trainer)
    return changed(config, optimizer=optimizer, checkpoint={"every_n_train_steps": 70})


# --- stacked = separate


def test_two_trials_as_one_program(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(5, 16), max_steps=9, precision="64-true", gradient_clip_val=0.3)
    options = ["--sweep", f"{LR}=0.01,0.02", "--stack"]
    stacked, apart = (swept(name, config, *options, size) for name, size in (("stacked", "auto"), ("apart", "off")))
    assert unlike(stacked, apart)
    assert not unlike(stacked, apart, within=1e-12)


SEARCHES: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "AdamW": (
        ADAMW,
        ["model.optimizer.weight_decay=0.01:0.5", "model.optimizer.betas=[0.9, 0.99],[0.8, 0.95]"],
        {},
    ),
    "SGD and a schedule": (SGD, ["model.optimizer.momentum=0.5:0.95"], {"lr_scheduler": COSINE}),
}


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES)
def test_a_search_is_that_of_separate_runs(search: str, tmp_path: Path) -> None:
    optimizer, axes, model = SEARCHES[search]
    config = long(tmp_path / "c.yaml", optimizer)
    axes = [f"{LR}=0.001:0.01", f"{NOISE}=0.05:1", *axes]
    options = [part for axis in axes for part in ("--sweep", axis)]
    options += ["--sampler", "random", "--trials", "2", "--seeds", "3,4", "--metric", "last_50%"]
    options += [f"--model.{key}={value['class_path']}" for key, value in model.items()]
    options += [f"--model.{key}.{k}={v}" for key, value in model.items() for k, v in value["init_args"].items()]
    stacked, apart = (
        swept(name, config, *options, "--stack", size) for name, size in (("stacked", "auto"), ("apart", "off"))
    )
    found = numbers_of(apart)
    assert numbers_of(stacked) == [pytest.approx(row, rel=1e-12) for row in found]
    assert len({value for row in found for value in row}) == 6
    best = [(out / "best.yaml").read_text().partition("\n")[2] for out in (stacked, apart)]
    assert best[0] == best[1]
    assert not unlike(stacked, apart, within=1e-12)


# --- what goes apart


def model(name: str) -> list[str]:
    return [f"--model=extensions.{name}"]


EMA = "lightning.pytorch.callbacks.EMAWeightAveraging"
LRS = [f"{LR}=0.01,0.02"]
APART = "runs are made one after another: "
KINDS = "has no step for many models at once"

CASES: dict[str, tuple[list[str], list[str], str | None]] = {
    "an optimizer without a rule": (LRS, ["--model.optimizer=torch.optim.Adagrad"], f"{APART}Adagrad {KINDS}"),
    "accumulation": (
        LRS, ["--trainer.accumulate_grad_batches=2"], f"{APART}trainer.accumulate_grad_batches is 2"),
    "an operation that vmap does not know": (
        LRS, [*model("Recurrent"), "--trainer.precision=32-true"], f"{APART}lstm has no rule for many models"),
    "a training step": (LRS, model("OwnStep"), f"{APART}OwnStep has a training_step of its own"),
    "widths": (["model.width=8,16", f"{LR}=0.01,0.02"], [], None),
    "batch sizes": (["data.batch_size=500,1000"], ["--metric=last_50%"], None),
    "a moving average": (LRS, [f"--trainer.callbacks+={EMA}"], None),
    "a callback": (LRS, ["--trainer.callbacks+=extensions.Counting"], None),
}  # fmt: skip
"""Axes, options, and the one line that says why the trials are not trained together."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
@pytest.mark.parametrize("case", CASES)
def test_what_does_not_stack_is_trained_all_the_same(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes, options, line = CASES[case]
    config = small(tmp_path / "c.yaml", max_steps=8, precision="64-true", log_every_n_steps=4)
    options = [*(part for axis in axes for part in ("--sweep", axis)), *options]
    Counting.steps.clear()
    stacked = swept("stacked", config, *options)
    output = capsys.readouterr().out
    if case == "a callback":
        assert sorted(Counting.steps) == sorted([*range(1, 9)] * 2)
    said = [text for text in output.splitlines() if "one after another" in text or "by themselves" in text]
    assert len(said) == (line is not None), output
    assert line is None or line in said[0]
    apart = swept("apart", config, *options, "--stack", "off")
    assert not unlike(stacked, apart, within=1e-12)
    assert bool(unlike(stacked, apart)) == (line is None)
