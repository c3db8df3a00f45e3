"""What MkDocs needs beyond the files of docs/: pages from elsewhere, the help of the commands, links, and formulas.

The pages of docs/ are written for GitHub and for the site. `mkdocs.yml` names this file as a hook.
"""

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from mupscale.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "configs/README.md": "configs.md",
    "examples/README.md": "examples.md",
}
"""Pages that are not in docs/, and where they are on the site."""
CODE = {".py": "python", ".yaml": "yaml", ".toml": "toml"}
"""Files that become pages where a page links to them, as notebooks do; files of other kinds are copied."""
NOTEBOOK = ".ipynb"
FORMS = {"upscale": (("--factor", "2"),), "prepare": (("fineweb",), ("text",))}
"""Commands with several help texts: the arguments that select the others."""
PACKAGES = tempfile.TemporaryDirectory(prefix="mupscale-site-")
"""mupscale with models/, callbacks/ and datamodules/ inside, which mkdocstrings reads. It ends with the process."""

LINK = re.compile(r"(\[[^\[\]]*)\]\((?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"^```math\n(.*?)^```$|\$`([^`]+)`\$", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"(<p>)?FORMULA(\d+)END(?(1)</p>)")


@event_priority(100)  # mkdocstrings reads its paths when its own turn comes
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copies the packages into one folder, as they are installed, and adds the commands to the navigation."""
    package = Path(PACKAGES.name) / "mupscale"
    for name in ("mupscale", "models", "callbacks", "datamodules"):
        folder = package if name == "mupscale" else package / name
        shutil.copytree(ROOT / name, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [PACKAGES.name]
    commands = next(entry["Commands"] for entry in reference_of(config.nav) if "Commands" in entry)
    commands.extend({name: command_page(name)} for name in COMMANDS)
    return config


def reference_of(nav: list) -> list:
    return next(entry["Reference"] for entry in nav if "Reference" in entry)


def command_page(name: str) -> str:
    return f"reference/commands/{name}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root, the commands, and the files outside of docs/ that a page links to."""
    for path, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    for name in COMMANDS:
        files.append(File.generated(config, command_page(name), content=help_page(name)))
    while missing := linked_files(files):
        for path in sorted(missing):
            files.append(source_file(path, config))
    return files


def linked_files(files: Files) -> set[Path]:
    """The files of the repository to which a page links, and which the site does not have yet."""
    linked = set()
    for page in files.documentation_pages():
        for target in targets(page.content_string, source_of(page.src_uri)):
            if target.is_file() and files.get_file_from_path(uri_of(target)) is None:
                linked.add(target)
    return linked


def source_file(path: Path, config: MkDocsConfig) -> File:
    """A file of the repository on the site: code as a page that shows it, others as they are."""
    text = path.read_text() if path.suffix in (*CODE, NOTEBOOK, ".md") else None
    if path.suffix == NOTEBOOK:
        text = notebook_page(json.loads(path.read_text()))
    if path.suffix in CODE:
        text = f"# {path.relative_to(ROOT)}\n\n```{CODE[path.suffix]}\n{text}```\n"
    if text is not None:
        return File.generated(config, uri_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
    return File.generated(config, uri_of(path), abs_src_path=str(path))


def notebook_page(notebook: dict) -> str:
    """The cells of a notebook one after another, with the outputs that it has stored."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
            picture = output.get("data", {}).get("image/png")
            if picture is not None:
                parts.append(f'<img alt="What the cell draws" src="data:image/png;base64,{picture.strip()}">')
    return "\n\n".join(parts) + "\n"


def targets(markdown: str, source: Path) -> Iterator[Path]:
    """The files and folders of the repository to which a page links."""
    for part in FENCE.split(markdown)[::2]:
        for _, path, _ in LINK.findall(part):
            target = (source.parent / path).resolve()
            if target.exists() and target.is_relative_to(ROOT):
                yield target


def source_of(uri: str) -> Path:
    """The file in the repository from which a page of the site is made."""
    outside = {site: path for path, site in ROOT_PAGES.items()}
    if uri.startswith("source/"):
        return ROOT / uri.removeprefix("source/")
    return ROOT / outside[uri] if uri in outside else DOCS / uri


def uri_of(path: Path) -> str:
    """Where a file of the repository is on the site."""
    relative = str(path.relative_to(ROOT))
    if relative in ROOT_PAGES:
        return ROOT_PAGES[relative]
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    return f"source/{relative}.md" if path.suffix in (*CODE, NOTEBOOK) else f"source/{relative}"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "reference/commands.md":
        rows = "\n".join(f"| [`{name}`](commands/{name}.md) | {text} |" for name, (_, text) in COMMANDS.items())
        markdown += f"\n| command | what it does |\n|---|---|\n{rows}\n"
    if page.file.src_uri.startswith("reference/"):
        return markdown
    page.formulas = []
    markdown = FORMULA.sub(lambda match: placeholder(match, page), markdown)
    parts = FENCE.split(markdown)
    parts[::2] = [with_site_links(with_deep_lists(part), page.file.src_uri) for part in parts[::2]]
    return "".join(parts)


def with_deep_lists(markdown: str) -> str:
    """Four spaces before what belongs to a list item, and an empty line after it: GitHub does with less."""
    markdown = re.sub(r"^ {2,3}(?=\S)", "    ", markdown, flags=re.MULTILINE)
    return re.sub(r"(\n\n(?: {4}.*\n)+)(?=[-*] |\d+\. )", r"\1\n", markdown)


def with_site_links(markdown: str, uri: str) -> str:
    """The same text with links that lead to the pages of the site. A folder without a page is no link."""
    source = source_of(uri)

    def link(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if not target.is_relative_to(ROOT):
            raise PluginError(f"{source.relative_to(ROOT)} links to {match[2]}, which is outside of the repository")
        page = target / "README.md" if target.is_dir() else target
        if target.is_dir() and not (
            page.is_file() and (page.is_relative_to(DOCS) or str(page.relative_to(ROOT)) in ROOT_PAGES)
        ):
            return match[1].removeprefix("[")
        return f"{match[1]}]({os.path.relpath(uri_of(page), Path(uri).parent)}{match[3] or ''})"

    return LINK.sub(link, markdown)


def placeholder(match: re.Match[str], page: Page) -> str:
    """Stands for a formula while Markdown is converted, which would read its signs as markup."""
    page.formulas.append(mathml(match[1], "block") if match[1] else mathml(match[2], "inline"))
    text = f"FORMULA{len(page.formulas) - 1}END"
    return f"\n{text}\n" if match[1] else text


def mathml(formula: str, display: str) -> str:
    """A formula of TeX as MathML, which browsers show without a script."""
    text = convert(formula.strip().replace("{aligned}", "{split}"), display=display)
    text = re.sub(r'<m([in]) mathvariant="(script|bold)">(\w)<', lambda m: f"<m{m[1]}>{letter(m[2], m[3])}<", text)
    if "\\" in text:
        raise PluginError(f"latex2mathml does not know a command of the formula {formula}")
    return text


def letter(style: str, character: str) -> str:
    """The character of Unicode for a letter or a digit in a style: browsers ignore the style itself."""
    kind = "DIGIT" if character.isdigit() else "CAPITAL"
    name = unicodedata.name(character).rpartition(" ")[2]
    for prefix in (f"MATHEMATICAL {style.upper()}", style.upper()):
        with contextlib.suppress(KeyError):
            return unicodedata.lookup(f"{prefix} {kind} {name}")
    raise PluginError(f"there is no {style} {character} in Unicode")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts the formulas in the place of their placeholders."""
    formulas = getattr(page, "formulas", [])
    return PLACEHOLDER.sub(lambda match: formulas[int(match[2])], html)


def help_page(name: str) -> str:
    """The help of a command, as `--help` prints it."""
    text = f"# {name}\n\n{sentence(COMMANDS[name][1])}\n"
    for form in ((), *FORMS.get(name, ())):
        text += f"\n```text\n{help_of([name, *form])}\n```\n"
    return text


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def help_of(arguments: list[str]) -> str:
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="100"),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([*arguments, "--help"])
    return with_short_usage(printed.getvalue().strip())


def with_short_usage(text: str) -> str:
    """The same help; a usage that repeats hundreds of options becomes one line."""
    usage, _, rest = text.partition("\n\n")
    if usage.count("\n") > 20:
        usage = re.sub(r" \[.*", " [options]", usage, flags=re.DOTALL)
    return f"{usage}\n\n{rest}"
