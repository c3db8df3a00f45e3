"""The imports of all packages: no cycle, no arrow that points upward, and no command that imports another command."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from paths import ROOT

from mupscale.__main__ import COMMANDS

FOLDERS = {
    "mupscale": "mupscale",
    "mupscale.models": "models",
    "mupscale.callbacks": "callbacks",
    "mupscale.datamodules": "datamodules",
}
"""Packages, and where the checkout has them."""

LEAVES = {
    f"mupscale.{name}"
    for name in (
        "_imports", "_torch", "atomic", "cuda_graph", "data_files", "errors", "flops",
        "readout", "readout_kernel", "seeds", "sharding", "spectral", "text_tables",
    )
}  # fmt: skip
"""Anybody may import these."""

LAYERS = (
    "leaves", "widening", "methods", "stacking", "root", "checks", "discovery", "growing", "hf", "models",
    "callbacks", "commands",
)  # fmt: skip
"""From the bottom to the top: a module imports from its own layer and from those below it."""

ABOVE_DATA = ("datamodules", "callbacks", "commands")
"""Data modules stand beside the models: they import leaves, and only these import them."""


def modules() -> dict[str, Path]:
    """Every module of the project, by name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def imported_names(name: str, source: str) -> Iterator[str]:
    """What the code of the module `name` imports, at any depth; `from a import b` yields `a.b`.

    Imports for type checkers alone do not count in `mupscale` itself, which lists all public names.
    """
    tree = ast.parse(source)
    if name == "mupscale":
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(name: str) -> str | None:
    """The module that an imported name is, or is defined in; None for other packages."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def imports() -> dict[str, set[str]]:
    """The modules of the project that each of them imports."""
    answer = {}
    for name, path in MODULES.items():
        found = {module_of(imported) for imported in imported_names(name, path.read_text())}
        answer[name] = {module for module in found if module is not None} - {name}
    return answer


IMPORTS = imports()
ARROWS = [(importer, imported) for importer, found in IMPORTS.items() for imported in sorted(found)]


def layer(module: str) -> str:
    if module in LEAVES:
        return "leaves"
    if module in ("mupscale", "mupscale.__main__"):  # from which everything can be reached
        return "commands"
    _, *parts = module.split(".")
    return parts[0] if parts[0] in (*LAYERS, "datamodules") else "root"


def allowed(importer: str, imported: str) -> bool:
    """Whether a module of one layer may import a module of another one."""
    if imported == "datamodules":
        return importer in ABOVE_DATA
    if importer == "datamodules":
        return imported == "leaves"
    return LAYERS.index(imported) <= LAYERS.index(importer)


COMMAND_FILES = {file for file, _ in COMMANDS.values()} - {"cli"}


def command_of(module: str) -> str | None:
    """The command whose file, or folder, the module is; None for what commands share, and for everything else.

    cli.py is shared, and has `fit` and its like besides.
    """
    parts = module.split(".")
    is_command = parts[:2] == ["mupscale", "commands"] and len(parts) > 2
    return parts[2] if is_command and parts[2] in COMMAND_FILES else None


def test_all_modules_are_found():
    assert {layer(module) for module in MODULES} == {*LAYERS, "datamodules"}
    assert {command_of(module) for module in MODULES} == {None, *COMMAND_FILES}
    assert MODULES.keys() >= LEAVES


def test_reports_know_nothing_of_the_lab_that_writes_them():
    lab, reporting = (f"mupscale.commands.{room}" for room in ("lab", "reporting"))
    wrong = [arrow for arrow in ARROWS if arrow[0].startswith(reporting) and arrow[1].startswith(lab)]
    assert wrong == []
    assert any(arrow[0] == "mupscale.commands.experiment" and arrow[1].startswith(reporting) for arrow in ARROWS)


def test_imports_inside_functions_count():
    source = "def f():\n    from mupscale.widening import plan\n    import mupscale.checks.verify\n"
    found = {module_of(name) for name in imported_names("mupscale.errors", source)}
    assert found == {"mupscale.widening.plan", "mupscale.checks.verify"}


def test_no_cycle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(reversed(error.args[1])))


def test_no_upward_arrow():
    upward = [
        f"{importer} → {imported}" for importer, imported in ARROWS if not allowed(layer(importer), layer(imported))
    ]
    assert upward == []


def test_no_command_imports_another():
    """What several commands share stands beside them, and does not import a command either.

    `experiment` may import `sweep`: it is a list of sweeps.
    """
    inside = []
    for importer, imported in ARROWS:
        commands = command_of(importer), command_of(imported)
        if commands[1] is not None and commands[0] != commands[1] and commands != ("experiment", "sweep"):
            inside.append(f"{importer} → {imported}")
    assert inside == []


# --- the powers of width factors

OTHER_POWERS = {
    "mupscale/base_shapes.py": {"math.sqrt(table.clip(width.scale))"},
    "mupscale/hf/config.py": {"math.sqrt(len(sources) / old)"},  # of numbers of layers
    "mupscale/hf/experts.py": {
        "config.head_dim ** (-0.5)",  # what Granite multiplies the products of queries by
        "tensor.shape[-1] ** (-0.5)",  # the size of random weights
    },
    "mupscale/methods/base.py": {"10 ** (-self.decibels / 20)"},
    "mupscale/methods/ligo.py": {"math.sqrt(group.units)"},  # the size of random numbers
    "mupscale/widening/growth.py": {"math.sqrt(1 - 1 / count)"},  # the variance that centring leaves
    "mupscale/widening/optimizers.py": {  # torch's own adjustment of Muon's rate, and bias corrections
        "math.sqrt(max(rows, columns))", "math.sqrt(max(1, rows / columns))",
        *(f"{beta} ** {count}" for beta in ("beta1", "beta2") for count in ("count", "age", "step")),
    },
    "mupscale/widening/plan_text.py": {"10 ** 6"},
}  # fmt: skip
"""Powers and roots that are not those of a width factor, by file."""


def powers_in(source: str) -> set[str]:
    """The powers and roots of numbers in some code."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        is_root = isinstance(node, ast.Call) and ast.unparse(node.func) in ("math.sqrt", "math.pow", "pow", "sqrt")
        if is_root or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)):
            found.add(ast.unparse(node))
    return found


def test_every_power_of_a_width_factor_is_in_the_table():
    assert powers_in("a = k**-0.5 + math.sqrt(k)") == {"k ** (-0.5)", "math.sqrt(k)"}
    rooms = [ROOT / "mupscale" / room for room in ("widening", "methods", "growing", "hf")]
    files = [path for room in rooms for path in sorted(room.glob("*.py"))]
    files += [ROOT / "mupscale" / name for name in ("base_shapes.py",)]
    elsewhere = {}
    for path in files:
        name = str(path.relative_to(ROOT))
        found = {text for text in powers_in(path.read_text()) if not text.startswith(("2 ** ", "10 ** 9"))}
        if name != "mupscale/widening/table.py" and found - OTHER_POWERS.get(name, set()):
            elsewhere[name] = found - OTHER_POWERS.get(name, set())
    assert elsewhere == {}
    assert powers_in((ROOT / "mupscale/widening/table.py").read_text()) >= {"scale.gradient ** m", "fan_in ** (-0.5)"}
