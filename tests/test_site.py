"""The documentation as a site: it builds strictly, no link of it is dead, and nothing public is missing."""

import re
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from paths import ROOT
from programs import run_program

import mupscale
import mupscale.hf
from mupscale.__main__ import COMMANDS

pytestmark = pytest.mark.slow

PAGES = [
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md", "examples/README.md")),
]
CONFIGURED = {"fit", "resume", "validate", "test", "predict", "plan", "verify", "coord-check", "sweep", "experiment"}
"""Commands that take the options of `fit`."""


class Html(HTMLParser):
    """The anchors, the links, the files that are loaded, and the text outside of code of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.code = ""
        self._open: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("img", "script") and "src" in values:
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(values["href"])
        if tag in ("code", "pre", "script", "style", "math"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not self._open:
            self.text += data
        elif self._open[0] in ("code", "pre"):
            self.code += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the site needs the extra docs, pip install 'mupscale[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    run_program(*command, cwd=ROOT, variables={"NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_the_site(site: Path):
    """One test, so that workers of pytest do not build the site several times."""
    pages = {path: Html(path) for path in site.rglob("*.html") if path.name != "404.html"}
    written_by_us = {path: page for path, page in pages.items() if "reference" not in path.parts}
    problems = [
        *dead_links(site, pages),
        *loaded_from_elsewhere(pages),
        *left_over_markup(written_by_us),
        *missing_names(pages[site / "reference/mupscale.html"], "mupscale", mupscale.__all__),
        *missing_names(pages[site / "reference/hf.html"], "mupscale.hf", mupscale.hf.__all__),
        *missing_commands(site, pages),
        *unknown_options({name: pages[command_page(site, name)].code for name in COMMANDS}),
    ]
    assert not problems, "\n".join(problems)
    assert [path for path in site.rglob("*") if path.name == "__pycache__" or path.suffix in (".py", ".pyc")] == []
    assert "their search needs a server: make docs-serve" in pages[site / "index.html"].code


def dead_links(site: Path, pages: dict[Path, Html]) -> list[str]:
    problems = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists():
                problems.append(f"{path.relative_to(site)}: no file for {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                problems.append(f"{path.relative_to(site)}: no anchor for {link}")
    return problems


def loaded_from_elsewhere(pages: dict[Path, Html]) -> list[str]:
    return [
        f"{path.name} loads {link}"
        for path, page in pages.items()
        for link in page.loaded
        if urlsplit(link).scheme in ("http", "https") or link.startswith("//")
    ]


def left_over_markup(pages: dict[Path, Html]) -> list[str]:
    """Signs of Markdown that was not converted: fences, formulas, list items inside of a paragraph, tables."""
    found = [(path, re.search(r"```|\$`|FORMULA\d|\n- |\n\|.*\|\n|\]\(", page.text)) for path, page in pages.items()]
    return [f"{path.name}: {match.string[match.start() - 40 : match.end() + 40]!r}" for path, match in found if match]


def missing_names(page: Html, package: str, names: list[str]) -> list[str]:
    return [f"{package}.{name} has no entry" for name in names if f"{package}.{name}" not in page.anchors]


def missing_commands(site: Path, pages: dict[Path, Html]) -> list[str]:
    overview = pages[site / "reference/commands.html"]
    problems = []
    for name in COMMANDS:
        if f"usage: python -m mupscale {name} " not in pages[command_page(site, name)].code:
            problems.append(f"the page of {name} does not have its help")
        if f"commands/{name}.html" not in overview.links:
            problems.append(f"{name} is not among the commands")
    return problems


def command_page(site: Path, name: str) -> Path:
    return site / f"reference/commands/{name}.html"


def unknown_options(help_texts: dict[str, str]) -> list[str]:
    """Command lines in the pages whose command, or one of whose options, does not exist."""
    options = {name: {*re.findall(r"--[a-z][\w.-]*", text)} for name, text in help_texts.items()}
    problems = []
    for page, line in command_lines():
        name = re.match(r"[\w-]*", line)[0]
        if name not in COMMANDS:
            problems.append(f"{page.name}: there is no command {name!r}: {line}")
            continue
        known = options[name] | (options["fit"] if name in CONFIGURED else set())
        for option in re.findall(r"(?<=\s)--[a-zA-Z][\w.-]*", line):
            if option not in known and not option.startswith(("--model.", "--data.", "--trainer.callbacks.")):
                problems.append(f"{page.name}: {name} has no option {option}: {line}")
    return problems


def command_lines() -> list[tuple[Path, str]]:
    """What follows `python -m mupscale` in the blocks of shell commands, and inline."""
    lines = []
    for page in PAGES:
        text = page.read_text()
        blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
        inline = "\n".join(re.findall(r"`(python -m mupscale [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
        for line in re.findall(r"^.*python -m mupscale (.*)$", f"{blocks}\n{inline}", flags=re.MULTILINE):
            command = line.partition(" #")[0]
            if not command.startswith(("COMMAND", "$COMMAND", "--help")):
                lines.append((page, command))
    return lines


def test_command_lines_are_found():
    lines = command_lines()
    assert len(lines) > 40
    assert {"README.md", "growing.md", "sweeps.md"} <= {page.name for page, _ in lines}
    help_texts = dict.fromkeys(COMMANDS, "--config")
    assert any("has no option" in problem for problem in unknown_options(help_texts))
