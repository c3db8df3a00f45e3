"""What a user installs: the files of the wheel, the core without any extra, and commands that need one."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from core_only import EXTRAS
from paths import ROOT
from programs import SHARED_CODE, run_program

import mupscale
from mupscale.__main__ import main
from mupscale.errors import pip_requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = PROJECT["project"]["dependencies"]
OPTIONAL = PROJECT["project"]["optional-dependencies"]
VERSION = PROJECT["project"]["version"]

FOLDERS = {"mupscale": "mupscale"} | {
    folder: package.replace(".", "/") for package, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()
}
"""The folders of the source, and where the wheel has them."""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "google": "tensorboard",  # protobuf, in which tensorboard writes its files
    "triton": "torch",  # whose builds for CUDA bring it
    "yaml": "pyyaml",
}
"""The distributions of modules that have another name."""

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


# ---- the wheel and the sdist


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of a copy of the source."""
    source, out = tmp_path_factory.mktemp("source") / "mupscale", tmp_path_factory.mktemp("sdist")
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", *ignored))
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    run_program("-c", build, cwd=source)
    return out / f"mupscale-{VERSION}.tar.gz"


@pytest.fixture(scope="module")
def built(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that is built from the sdist."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out)]
    run_program("-m", "pip", "wheel", *options, sdist)
    return zipfile.ZipFile(out / f"mupscale-{VERSION}-py3-none-any.whl")


@pytest.fixture(scope="module")
def wheel(built: zipfile.ZipFile) -> set[str]:
    """The names of the files in the wheel."""
    return set(built.namelist())


def source_files() -> dict[str, Path]:
    """The files of the packages, by their names in the wheel."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT / folder).parts
            if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
                found["/".join((package, *parts))] = path
    return found


@pytest.mark.slow
def test_every_file_of_the_packages_is_in_the_wheel(wheel: set[str]):
    files = {name for name in wheel if ".dist-info/" not in name}
    assert sorted(source_files().keys() - files) == []  # [tool.setuptools] packages or package-data lacks them
    assert sorted(files - source_files().keys()) == []
    assert {name.partition("/")[0] for name in wheel} == {"mupscale", f"mupscale-{VERSION}.dist-info"}
    assert {"mupscale/py.typed", "mupscale/configs/quickstart.yaml"} <= wheel
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


@pytest.mark.slow
def test_the_sdist_is_the_repository(sdist: Path):
    made = {"PKG-INFO", "setup.cfg", "mupscale.egg-info"}
    folders = {*FOLDERS, "benchmarks", "docs", "examples", "experiments", "tests"}
    files = {
        "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
        "mkdocs.yml", "pyproject.toml",
    }  # fmt: skip
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert {name.partition("/")[0] for name in packed} == made | folders | files
    for folder in sorted(folders):
        source = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        expected = {name for name in source if "__pycache__" not in name}
        assert {name for name in packed if name.startswith(f"{folder}/")} == expected


# ---- the version, and what an index shows


@pytest.mark.slow
def test_one_version(built: zipfile.ZipFile):
    assert mupscale.__version__ == VERSION
    assert metadata(built)["Version"] == VERSION
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited == VERSION


def test_the_changelog_has_the_version():
    """Unreleased, then the versions, the newest first: with their dates, but for the first."""
    unreleased, *released = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert unreleased == "Unreleased"
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+)( \(\d{4}-\d\d-\d\d\))?", heading) for heading in released]
    assert all(versions), released
    numbers = [tuple(map(int, match.groups()[:3])) for match in versions if match]
    assert numbers == sorted(set(numbers), reverse=True)
    assert ".".join(map(str, numbers[0])) == VERSION
    assert all(match[4] for match in versions[:-1] if match)


def metadata(built: zipfile.ZipFile) -> Message:
    return message_from_bytes(built.read(f"mupscale-{VERSION}.dist-info/METADATA"))


# ---- dependencies


def distribution(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def imported(path: Path) -> Iterator[str]:
    """The packages that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_the_core_is_small():
    assert {distribution(requirement) for requirement in CORE} == {
        "torch", "torchvision", "lightning", "jsonargparse", "mup", "torchmetrics", "tensorboard", "numpy",
    }  # fmt: skip


def test_every_dependency_has_bounds():
    optional = [requirement for extra in OPTIONAL.values() for requirement in extra]
    for requirement in [*CORE, *optional]:
        if not requirement.startswith("mupscale["):
            assert re.fullmatch(r"[\w-]+(\[\w+\])?>=[\d.]+,<[\d.]+", requirement), requirement


@pytest.mark.slow
def test_whatever_is_imported_is_declared():
    optional = [requirement for extra in OPTIONAL.values() for requirement in extra]
    declared = {distribution(requirement) for requirement in [*CORE, *optional]}
    for name, path in source_files().items():
        if path.suffix == ".py":
            foreign = {*imported(path)} - sys.stdlib_module_names - {"mupscale"}
            names = {DISTRIBUTIONS.get(module, module.replace("_", "-")) for module in foreign}
            assert names <= declared, name


def test_all_has_every_extra_and_test_has_all():
    assert "mupscale[all]" in OPTIONAL["test"]
    composed = {"all"}
    while more := {name for extra in composed for name in extras_in(OPTIONAL[extra])} - composed:
        composed |= more
    assert composed == OPTIONAL.keys() - {"docs", "test", "dev", "release"}


def extras_in(requirements: list[str]) -> list[str]:
    """The extras of mupscale itself among requirements."""
    listed = [re.fullmatch(r"mupscale\[(.*)\]", requirement) for requirement in requirements]
    return [name for match in listed if match for name in match[1].split(",")]


# ---- with the core only


def run_with_the_core_only(statement: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a statement in a fresh interpreter that finds no package of an extra."""
    statement = f"import core_only; core_only.hide(); {statement}"
    return run_program("-c", statement, cwd=folder, variables=SHARED_CODE, status=None)


def commands(*lines: list[str]) -> str:
    return f"from mupscale.__main__ import main; [main(line) for line in {list(lines)}]"


@pytest.mark.slow
def test_the_library_the_quickstart_and_every_model_need_the_core_only(tmp_path: Path):
    rooms = ("commands/lab", "commands/reporting", "hf")
    # triton comes with torch's builds for CUDA; what imports it is imported where it is there
    needs_more = (*(f"mupscale/{room}/" for room in rooms), "mupscale/readout_kernel.py")
    files = [name for name in source_files() if name.endswith(".py") and not name.startswith(needs_more)]
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    assert {"mupscale.datamodules.fineweb", "mupscale.models.gpt2", "mupscale.callbacks.upscale"} <= {*modules}
    public = "[getattr(mupscale, name) for name in mupscale.__all__]"
    everything = f"[importlib.import_module(name) for name in {sorted(modules)}]"

    config = ["--config", str(QUICKSTART)]
    folder = "runs/quickstart/version_0"
    checkpoint = f"{folder}/checkpoints/last.ckpt"
    short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
    early = '--callback_args={"UpscaleCallback": {"at_step": 1}}'
    images, labels = np.zeros((8, 32, 32, 3), np.uint8), np.arange(8)
    np.savez(tmp_path / "cifar100.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    sizes = ["--model.width=16", "--model.base_width=16"]
    sgd = ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1", "--trainer.accelerator=cpu"]
    gpt2 = ["--model.layers=1", "--model.heads=2", "--model.vocabulary=4096", "--model.context=8", "--data=FineWeb",
            "--data.context=8", "--data.batch_size=4"]  # fmt: skip
    resnet = ["--data=CIFAR100", "--data.data_dir=.", "--data.batch_size=4"]
    lines = [
        ["fit", *config, *short, early, "--checkpoint.every_n_train_steps=1"],
        ["resume", folder, "--trainer.max_steps=3"],
        ["plan", *config],
        ["upscale", checkpoint, "--width", "512", "--out", "wide.ckpt"],
        ["fit", "--model=GPT2", *sizes, *sgd, *gpt2, *short],
        ["fit", "--model=ResNet18", *sizes, *sgd, *resnet, *short],
    ]
    lines.append(COMMANDS["fit of transformers"])
    run = run_with_the_core_only(f"import importlib, mupscale; {public}; {everything}; {commands(*lines)}", tmp_path)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        f"error: transformers is not installed. Install it with: pip install {pip_requirement('hf')}"
    )
    assert (tmp_path / "wide.ckpt").is_file()
    assert len(list(tmp_path.glob("runs/*/*/config.yaml"))) == 3


# ---- without an extra

COMMANDS = {
    "sweep": ["sweep", "--config", str(QUICKSTART), "--sweep", "model.optimizer.lr=0.1,0.2", "--out", "out"],
    "random sweep": [
        "sweep", "--config", str(QUICKSTART), "--sweep", "model.optimizer.lr=0.1:0.2", "--out", "out",
        "--sampler", "random", "--trials", "2",
    ],
    "sweep on Ray": [
        "sweep", "--config", str(QUICKSTART), "--sweep", "model.optimizer.lr=0.1,0.2", "--out", "out", "--ray", "auto",
    ],
    "experiment": ["experiment", str(ROOT / "configs" / "experiments" / "quickstart.yaml"), "--out", "out"],
    "report": ["report", ".", "--out", "out"],
    "coord-check": ["coord-check", "--config", str(QUICKSTART), "--widths", "8,16,32", "--out", "out"],
    "prepare text": ["prepare", "text", "a.txt", "--vocab", "300", "--out", "out"],
    "prepare fineweb": [
        "prepare", "fineweb", "--subset", "sample-10BT", "--tokens", "1M", "--vocab", "gpt2", "--out", "out",
    ],
    "fit of transformers": [
        "fit", "--config", str(ROOT / "configs" / "hf" / "llama_tiny.yaml"), "--seed_everything=false",
    ],
    "upscale folder": ["upscale", "folder", "--factor", "2", "--out", "out"],
}  # fmt: skip

NEEDS = {
    "upscale folder": ("hf", ["safetensors", "transformers"]),
    "sweep": ("sweep", ["matplotlib"]),
    "random sweep": ("sweep", ["matplotlib", "optuna"]),
    "sweep on Ray": ("cluster", ["ray"]),
    "experiment": ("experiment", ["jinja2", "matplotlib", "pandas"]),
    "report": ("report", ["jinja2", "matplotlib", "pandas"]),
    "coord-check": ("plot", ["matplotlib"]),
    "prepare text": ("data", ["tokenizers"]),
    "prepare fineweb": ("data", ["datasets", "tokenizers"]),
    "fit of transformers": ("hf", ["transformers"]),
}
"""The extra of a command, and the packages without which it says so."""


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (command, package)
        for command, (_, packages) in NEEDS.items()
        for package in packages
        if package != "transformers"  # which torchmetrics imports where it is installed
    ],
)
def test_each_missing_package_is_named(
    command: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_an_empty_folder: None
):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        main(COMMANDS[command])
    extra = NEEDS[command][0]
    assert end.value.code == f"error: {package} is not installed. Install it with: pip install {pip_requirement(extra)}"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_packages_of_the_commands_are_hidden():
    assert {package for _, packages in NEEDS.values() for package in packages} <= EXTRAS
