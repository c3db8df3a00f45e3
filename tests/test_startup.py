"""What starting up loads, counted rather than timed: nothing that is not needed, no data, no CUDA."""

import json

import pytest
from paths import ROOT
from programs import run_program

HEAVY = {
    "datasets", "lightning", "matplotlib", "optuna", "pandas", "ray", "scipy", "sklearn",
    "tensorboard", "tokenizers", "torchmetrics", "torchvision", "transformers",
}  # fmt: skip

PROBE = """
import json, runpy, sys
opened = []
def watch(event, arguments):
    if event == "open" and not str(arguments[0]).endswith((".py", ".pyc", ".so")):
        opened.append(str(arguments[0]))
before = set(sys.modules)
sys.addaudithook(watch)
for statement in {statements}:
    code = None
    try:
        exec(statement)
    except SystemExit as end:
        code = end.code
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_initialized()
    print(json.dumps(dict(modules=sorted(set(sys.modules) - before), opened=opened, code=code, cuda=cuda)))
"""

EVERYTHING = "import mupscale; [getattr(mupscale, name) for name in mupscale.__all__]"


def started(*statements: str) -> list[dict]:
    """What a fresh interpreter has loaded and opened after each statement."""
    run = run_program("-c", PROBE.format(statements=statements))
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"modules"')]


def command(*arguments: str) -> str:
    return f"sys.argv[1:] = {list(arguments)}; runpy.run_module('mupscale', run_name='__main__')"


def packages(modules: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def data(opened: list[str]) -> list[str]:
    return [
        path
        for path in opened
        if path.endswith((".bin", ".ckpt", ".csv", ".gz", ".npy", ".npz", ".parquet", ".pt", ".yaml"))
    ]


def test_importing_the_package_loads_nothing():
    (after,) = started("import mupscale")
    ours = [name for name in after["modules"] if name.startswith("mupscale")]
    assert ours == ["mupscale", "mupscale._imports"]
    assert not packages(after["modules"]) & (HEAVY | {"torch", "numpy", "mup"})
    assert after["opened"] == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((), None), (("--help",), None), (("nonsense",), "error: there is no command"), (("resume", "--help"), 0),
     (("resume", "nowhere"), "error: nowhere is not the folder of a run"), (("sweep", "--help"), 0),
     (("experiment", "e.yaml", "--ray", "auto", "--workers", "2"), "error: --workers")],
)  # fmt: skip
def test_help_and_mistakes_need_no_torch(arguments: tuple[str, ...], code: str | int | None):
    (after,) = started(command(*arguments))
    assert str(after["code"]).startswith(str(code))
    assert not packages(after["modules"]) & (HEAVY | {"torch", "numpy", "mup"})
    assert after["opened"] == []


@pytest.mark.slow
def test_the_library_loads_torch_and_little_else_the_help_of_fit_no_data_and_a_fit_nothing_of_sweeps():
    options = ["--trainer.fast_dev_run=true", "--trainer.callbacks=null", "--trainer.enable_progress_bar=false"]
    fit = command("fit", "--config", str(ROOT / "configs/quickstart.yaml"), *options)
    library = f"import torch; before.update(sys.modules); {EVERYTHING}"
    everything, help, after = started(library, command("fit", "--help"), fit)
    assert not packages(everything["modules"]) & HEAVY
    added = [name for name in everything["modules"] if not name.startswith("mupscale")]
    assert len(added) <= 30  # mup and yaml
    assert not data(everything["opened"])
    assert not everything["cuda"]
    assert help["code"] == 0
    assert not data(help["opened"])
    assert not help["cuda"]
    assert after["code"] is None
    ours = [name for name in after["modules"] if name.startswith("mupscale.")]
    assert "mupscale.callbacks.captured_steps" in ours
    of_sweeps = ("mupscale.stacking", "mupscale.commands.lab", "mupscale.commands.sweep")
    assert not [name for name in ours if name.startswith(of_sweeps)]
