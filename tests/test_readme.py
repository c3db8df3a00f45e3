"""What the README and the pages show runs, and does what they say; their links lead somewhere."""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from programs import run_program
from result_rows import read_rows, take
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mupscale
from mupscale.__main__ import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
MODULE = ROOT / "docs/grow_your_module.md"
GROWING, LIBRARY, HF, OWN_MODEL = (
    ROOT / "docs" / name for name in ("growing.md", "library.md", "hf.md", "own_model.md")
)
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def block(page: Path, language: str, holding: str = "") -> str:
    """The first code block of a page in a language that holds a text."""
    return next(text for text in blocks(page, language) if holding in text)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture
def _modules_from_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `mine` be imported from the working directory; it is forgotten afterwards."""
    monkeypatch.syspath_prepend(Path.cwd())
    yield
    sys.modules.pop("mine", None)


def test_the_library_in_ten_lines():
    narrow, wide = (nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2)) for n in (4, 8))
    narrow_opt = torch.optim.AdamW(narrow.parameters())
    code = block(LIBRARY, "python", "report.optimizer").replace("batch: ...", "batch: model(batch).square().mean()")
    names = {"torch": torch, "narrow": narrow, "wide": wide, "narrow_opt": narrow_opt, "batches": [torch.randn(4, 3)]}
    exec(code, names)
    assert names["verdict"].passed
    assert isinstance(names["optimizer"], torch.optim.AdamW)


@pytest.mark.usefixtures("in_an_empty_folder", "_modules_from_here")
@pytest.mark.parametrize(("page", "growth"), [(README, "64 → 256"), (OWN_MODEL, "32 → 128")], ids=["README", "guide"])
def test_a_model_of_ones_own(page: Path, growth: str, capsys: pytest.CaptureFixture[str]):
    """As a new user does it: mine.py, the YAML of the guide, or that of the README with its class_paths replaced."""
    Path("mine.py").write_text(block(OWN_MODEL, "python", "class Tagger"))
    configuration = block(page, "yaml")
    if page is README:
        for ours, mine in (("class_path: MLP", "class_path: mine.Tagger"), ("Covertype", "mine.Points")):
            assert configuration.count(ours) == 1
            configuration = configuration.replace(ours, mine)
    Path("mine.yaml").write_text(configuration)
    shorter = ["--trainer.max_steps=6", "--trainer.callbacks.at_step=3", "--trainer.enable_progress_bar=false"]
    main(["fit", "--config", "mine.yaml", "--trainer.accelerator=cpu", *shorter])
    assert f"step 3: width {growth}" in capsys.readouterr().out


@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_configuration_of_the_readme(capsys: pytest.CaptureFixture[str]):
    configuration = block(README, "yaml")
    assert yaml.safe_load(configuration) == yaml.safe_load(block(GROWING, "yaml", "max_steps"))
    Path("mlp.yaml").write_text(configuration)
    main(["plan", "--config", "mlp.yaml", "--trainer.accelerator=cpu"])
    assert capsys.readouterr().out.startswith("width 64 → 256")


@pytest.mark.slow
def test_a_loop_of_ones_own_as_the_page_shows_it():
    """The three blocks before the LightningModule, one after another: the loop, the check, and discover."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for code in blocks(OWN_MODEL, "python")[:3]:
        exec(code, names)
    assert names["model"][0].out_features == 128
    assert {group["initial_lr"] for group in names["optimizer"].param_groups} == {3e-3, 3e-3 / 4}
    assert {group["lr"] / group["initial_lr"] for group in names["optimizer"].param_groups} == {0.0}  # after 200 steps
    assert names["verdict"].passed
    assert names["hints"].blocks["0.weight"] == {0: 32}


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_the_guide_for_the_module_you_have(monkeypatch: pytest.MonkeyPatch):
    """All its Python, and its YAML with the module that it shows."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of Lightning's calls
    monkeypatch.setattr(sys, "argv", ["train.py"])
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    plain, module, transformers = blocks(MODULE, "python")
    exec(plain, names)
    assert names["report"].exact
    assert names["model"][0].out_features == 256
    exec(module, names)
    growth = names["growth"]
    assert growth.summary["loss_after"] == pytest.approx(growth.summary["loss_before"], rel=1e-5)
    assert names["trainer"].lightning_module.net[0].out_features == 256
    assert Path("runs/mine/checkpoints/last.ckpt").exists()
    exec(transformers, names)
    assert names["report"].check.startswith("exact")
    Path("growth.yaml").write_text(block(MODULE, "yaml"))
    args = ["--config", "growth.yaml"]
    cli = LightningCLI(names["Classifier"], args=args, run=False, save_config_callback=None, seed_everything_default=0)
    data = DataLoader(TensorDataset(names["points"], names["labels"]), batch_size=64)
    cli.trainer.fit(cli.model, data)
    assert cli.model.net[0].out_features == 256


def test_a_loop_resumes_after_the_growth_as_the_page_shows_it():
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        mupscale.clip_grad_norm_(model, 1e-2)
        optimizer.step()
        return loss.item()

    torch.manual_seed(0)
    batch, narrow, wide = torch.randn(8, 3), build(64), build(256)
    narrow_opt = make_optimizer(narrow)
    step(narrow, narrow_opt)
    optimizer = mupscale.upscale(narrow, wide, narrow_opt, call=lambda model: model(batch), noise="auto").optimizer
    step(wide, optimizer)
    saved = {"model": deepcopy(wide.state_dict()), "optimizer": deepcopy(optimizer.state_dict())}
    names: dict[str, Any] = {"mupscale": mupscale, "build": build, "make_optimizer": make_optimizer}
    exec(block(LIBRARY, "python", 'saved["optimizer"]'), {**names, "saved": saved, "batch": batch}, names)
    uninterrupted = [step(wide, optimizer) for _ in range(3)]
    assert [step(names["wide"], names["report"].optimizer) for _ in range(3)] == uninterrupted


def test_mup_as_the_page_shows_it():
    def build(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.ReLU(), mupscale.Readout(width, 2))

    names: dict[str, Any] = {"torch": torch, "mupscale": mupscale, "build": build}
    exec(block(LIBRARY, "python", "set_base_shapes"), names)
    assert names["model"][2].multiplier == 64 / 2048
    rates = {group["lr"] for group in names["optimizer"].param_groups}
    assert rates == {1e-3}  # AdamW scales the rate of matrices only, and this model has none


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_there_is(page: Path):
    text = page.read_text()
    for name in re.findall(r"(?<![\w/])mupscale\.(\w+)\(", text):
        assert hasattr(mupscale, name), name
    if page.name in ("CONTRIBUTING.md", "CHANGELOG.md"):  # which also name files to be made, and files of old
        return
    folders = "mupscale|models|callbacks|datamodules|configs|docs|benchmarks|examples|experiments|tests"
    for path in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./]+\.(?:yaml|py|md|ipynb)\b", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_can_be_read(page: Path):
    for code in blocks(page, "python"):
        ast.parse(textwrap.dedent(code))
    for configuration in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(textwrap.dedent(configuration)), dict | list)


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 140


@pytest.mark.slow
def test_the_script_of_the_readme_prints_what_it_shows(tmp_path: Path):
    """Pasted into a file in an empty folder, as a new user does; times and the last digits may differ."""
    (tmp_path / "first.py").write_text(block(README, "python", "UpscaleCallback"))
    shown = block(README, "text", "just after")
    printed = run_program("first.py", cwd=tmp_path).stdout
    for line in shown.splitlines():
        words = re.split(r"(\d+\.\d\d+)", line)
        pattern = "".join(re.escape(word) if place % 2 == 0 else r"\d+\.\d+" for place, word in enumerate(words))
        assert re.search(rf"^{pattern}$", printed, flags=re.MULTILINE), line
    before, after = map(float, re.findall(r"(\d\.\d+) just", printed))
    assert after == pytest.approx(before, rel=1e-4)


def test_the_sentence_under_the_figure_of_results_is_that_of_the_runs():
    def mean(column: str, budget: str, **wanted: str) -> float:
        gpt2 = {"width": "256", "layers": "8", "lr": "0.0078", "base_layers": "", "budget": budget, **wanted}
        return fmean(take(read_rows("ladder/runs.csv"), column, **gpt2))

    grown = mean("loss", "0", from_width="256", from_layers="2", grown_at="-2")
    scratch, longer = (mean("loss", budget, from_width="", grown_at="") for budget in ("0", "0.5"))
    more = mean("flops", "0.5", from_width="", grown_at="") / mean("flops", "0", from_width="", grown_at="")
    wanted = (
        f"it ends at {grown:.3f}, where training from scratch ends at {scratch:.3f}; that ends at {longer:.3f} with "
        f"{more:.2f} times the compute"
    )
    assert wanted in " ".join(README.read_text().split())


def quickstart(command: str) -> None:
    main([command, "--config", str(ROOT / "configs/quickstart.yaml")])


def test_the_plan_of_the_quickstart(capsys: pytest.CaptureFixture[str]):
    quickstart("plan")
    told = capsys.readouterr().out
    assert told.startswith("width 64 → 256")
    assert re.search(r"layers.1.weight +matrix +64×64 → 256×256 +4 +4 +dup / 4", told)


@pytest.mark.slow
def test_the_quickstart_is_exact(capsys: pytest.CaptureFixture[str]):
    quickstart("verify")
    assert "width 64 → 256: exact" in capsys.readouterr().out


@pytest.mark.slow
def test_discover_as_the_page_shows_it():
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    exec(block(LIBRARY, "python", "mupscale.discover("), names)
    told = str(names["found"]).partition("\n")[2]  # without the number of passes, which may change
    assert told.startswith("rescale:")
    assert told in LIBRARY.read_text()
    narrow, wide, tokens = (names[name] for name in ("narrow", "wide", "tokens"))
    torch.testing.assert_close(wide(tokens), narrow(tokens), rtol=0, atol=1e-5)
    without = replace(names["found"].resolved(narrow, wide), rescale={})
    mupscale.upscale(narrow, wide, names["optimizer"], hints=without)
    assert not torch.allclose(wide(tokens), narrow(tokens), rtol=0, atol=1e-2), "rescale is not needed"


@pytest.mark.slow
@pytest.mark.usefixtures("in_an_empty_folder")
def test_models_of_transformers_as_the_page_shows_them(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    from model_folders import llama, load, save

    save(llama(), Path("narrow"))
    exec(block(HF, "python", "mupscale.hf.upscale("), {})
    assert load(Path("wide")).config.hidden_size == 64
    Path("wide").rename("with-noise")
    main(["upscale", "narrow", "--factor", "2", "--out", "wide"])
    assert "checked: outputs of both models differ by" in capsys.readouterr().out
    names: dict[str, Any] = {}
    exec(block(HF, "python", "parameter_groups"), names)
    rates = {(group["lr"], group["weight_decay"]) for group in names["optimizer"].param_groups}
    assert rates == {(3e-4, 0.1), (3e-4, 0.0), (1.5e-4, 0.2)}


def test_the_page_has_all_options_of_upscale_folder(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["upscale", "--factor", "2", "--help"])
    options = set(re.findall(r"--[a-z][\w-]+", capsys.readouterr().out)) - {"--help"}
    assert len(options) > 8
    assert options <= set(re.findall(r"--[a-z][\w-]+", HF.read_text()))
