"""The experiments that compare growth methods: each is tuned by itself, and each grows the bases of the target size."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import LR, NOISE, refused
from experiments import file, finish, upscale
from paths import ROOT

from mupscale.commands.lab.file import read
from mupscale.commands.lab.protocols import Experiment, RunPart, trials_of
from mupscale.commands.lab.run import Trial
from mupscale.commands.lab.sweep import Sweep
from mupscale.methods import METHODS

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

METHOD = "UpscaleCallback.method"

FILES = sorted((ROOT / "configs/experiments").glob("methods_*.yaml"))

THREE = {
    "duplication": {"class_path": "mupscale.methods.Duplication"},
    "net2net": {"class_path": "mupscale.methods.Net2Net"},
    "diagonal": {"class_path": "mupscale.methods.HyperCloning", "init_args": {"variant": "diagonal"}},
}


def class_of(described: dict[str, Any]) -> str:
    return str(described["class_path"]).rpartition(".")[2]


def compared(**keys: Any) -> str:
    """An experiment of three methods, each with two trials."""
    return file(upscale(**{"methods": THREE, "sweep_1": None, "sweep_2": {LR: [0.005, 0.01], NOISE: [0.0]}, **keys}))


# --- the files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_method_is_in_the_file(path: Path) -> None:
    """With rates and noise levels to tune, the same for all; a second HyperCloning is the diagonal one."""
    content = yaml.safe_load(path.read_text())
    listed = Counter(class_of(method) for method in content["methods"].values())
    refused = {"AKI"} if path.stem == "methods_resnet" else set()  # no layer has a next one of the same shape
    assert set(listed) == {type(make()).__name__ for make in METHODS.values()} - refused
    assert {name: count for name, count in listed.items() if count > 1} == {"HyperCloning": 2}
    for name, method in content["methods"].items():
        assert type(METHODS[name]()).__name__ == class_of(method)
    sweep = content["sweep_2"]
    assert sweep.keys() == {LR, NOISE}
    assert len(sweep[LR]) > 1
    assert sweep[NOISE][0] == 0 < max(sweep[NOISE])
    assert len(content["seeds"]) == 2


# --- the protocol


def test_all_methods_are_tuned_alike_and_seeds_are_whole() -> None:
    whole = Experiment(Path("o"), read(Path(compared()), []))
    names = [part.name for part in whole.parts]
    assert names == [
        "small_base, seed 3", "base, seed 3", "base, seed 4",
        "sweep_2/duplication", "sweep_2/net2net", "sweep_2/diagonal",
        "scratch, seed 3", "upscale/duplication, seed 3", "upscale/net2net, seed 3", "upscale/diagonal, seed 3",
        "scratch, seed 4", "upscale/duplication, seed 4", "upscale/net2net, seed 4", "upscale/diagonal, seed 4",
    ]  # fmt: skip
    sweeps = [part for part in whole.parts if isinstance(part, Sweep)]
    assert [sweep.total for sweep in sweeps] == [2] * 3
    assert [len(stage) for stage in whole.stages] == [1, 5, 8]
    record = whole._record(["command"])
    assert record["runs"][-1] == {
        "role": "upscale", "seed": 4, "folder": "upscale/diagonal/seed=4", "method": "diagonal",
    }  # fmt: skip
    assert list(record["sweeps"]) == ["small_base", *names[3:6]]


def swap_of(trial: Trial) -> dict[str, Any]:
    (swap,) = (c for c in trial.runs[0].config["trainer"]["callbacks"] if class_of(c) == "UpscaleCallback")
    return dict(swap["init_args"])


@pytest.mark.slow
def test_each_method_grows_the_target_with_its_own_best_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained. All trials of one method diverge, and so it has no runs at the target size."""
    monkeypatch.setattr("mupscale.commands.lab.protocols.check", lambda description: None)
    whole = Experiment(Path("o"), read(Path(compared()), []))
    whole.begin(["command"])
    for part in whole.parts[:3]:
        assert isinstance(part, RunPart)
        finish(part.folder, 0.5)
    losses = {"duplication": [0.3, 0.2], "net2net": [math.inf, math.inf], "diagonal": [0.1, 0.2]}
    values = [(name, value) for name, both in losses.items() for value in both]
    for trial, (name, value) in zip(trials_of(whole.stages[1]).values(), values, strict=True):
        assert trial.name.startswith(f"sweep_2/{name}, lr=")
        assert class_of(swap_of(trial)["method"]) == class_of(THREE[name])
        assert trial.runs[0].config["model"]["init_args"]["init_from"] == "o/small_base/seed=3/checkpoints/last.ckpt"
        finish(trial.runs[0].folder, value)
    for part in whole.stages[1]:
        part.conclude()
    assert Path("o/sweep_2/net2net/no_best.txt").read_text() == "none: all 2 trials diverged\n"
    assert len(list(Path("o/sweep_2").glob("*/best.yaml"))) == 2
    taken = {trial.name: trial for trial in trials_of(whole.stages[2]).values()}
    assert list(taken) == [
        "scratch, seed 3", "upscale/duplication, seed 3", "upscale/diagonal, seed 3",
        "scratch, seed 4", "upscale/duplication, seed 4", "upscale/diagonal, seed 4",
    ]  # fmt: skip
    assert list(trials_of(whole.stages[2])) == [0, 1, 3, 4, 5, 7]  # by which parts share them
    assert whole.left == (6, 17)
    for name, lr in (("duplication", 0.01), ("diagonal", 0.005)):
        for seed in (3, 4):
            trial = taken[f"upscale/{name}, seed {seed}"]
            model, swap = trial.runs[0].config["model"]["init_args"], swap_of(trial)
            assert model["optimizer"]["init_args"]["lr"] == lr
            assert model["init_from"] == f"o/base/seed={seed}/checkpoints/last.ckpt"
            assert (swap["width"], class_of(swap["method"])) == (32, class_of(THREE[name]))
    assert swap["method"]["init_args"]["variant"] == "diagonal"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sweep_2": {METHOD: [THREE["net2net"]]}}, f"sweep_2.{METHOD}: the key methods names"),
        ({"sweep_2": {f"{METHOD}.seed": [1, 2]}}, f"sweep_2.{METHOD}.seed: the key methods names"),
        ({"methods": []}, "methods: give a mapping by name"),
        ({"methods": {"a/b": THREE["net2net"]}}, "methods: a name is made of letters"),
        ({"methods": {"a": {"init_args": {}}}}, "methods.a: give the class_path of a growth method"),
        ({"methods": {"a": THREE["net2net"], "A": THREE["diagonal"]}}, "methods: a and A are the same"),
        ({"methods": {"a": THREE["net2net"], "b": THREE["net2net"]}}, "methods: a and b are the same"),
    ],
)
def test_mistakes_name_their_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        read(Path(compared(**keys)), [])


@pytest.mark.slow
def test_methods_that_cannot_grow_the_model_are_refused_before_the_first_run() -> None:
    noisy = {"class_path": "mupscale.methods.HyperCloning", "init_args": {"variant": "noisy"}}
    forced = {"callback_args": {"UpscaleCallback": {"method": THREE["net2net"]}}}
    for keys, parts in (
        ({"methods": {"a": {"class_path": "mupscale.Cloning"}}}, ["methods.a:", "Cloning"]),
        ({"methods": {"a": noisy}}, ["methods.a:", "has noise of its own"]),
        ({"methods": {"a": THREE["duplication"]}, "upscaled": forced}, ["upscaled:", METHOD]),
        ({"protocol": "transfer"}, ["protocol transfer has no key"]),
    ):
        message = refused("experiment", compared(**keys), "--out", "o")
        assert all(part in message for part in parts), message
    assert not Path("o").exists()
