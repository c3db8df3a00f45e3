"""Messages of jsonargparse as one line. They are recognised by their wording; a test triggers each of them."""

import difflib
import inspect
import re
import sys
from collections.abc import Iterable

GENERIC = (
    "- Expected a path but",
    "Does not validate against",
    "- Expected a <class 'NoneType'>",
    "- Not a valid subclass of",
    "Subclass types expect one of",
    "- a class path (str)",
    "- a dict with",
    "Subtypes:",
    "Errors:",
    "Given value",
)
"""Lines that jsonargparse adds for every class that it cannot make."""

INTERNALS = r"-? ?Does not validate against any of the Union subtypes|\. Got value: Namespace\(.*"
"""Parts that are removed from a line: a type that the user did not write, and the text of a whole value."""


OF_CALLABLES = r"Type typing\.Callable\S* \S+ expects a function or a callable class: "

INNER_KEY = rf"\": (?:Problem with given class_path '[\w.]+': |{OF_CALLABLES})Parser key \"([\w.]+)\":"
"""What stands between a key and one inside of its value."""

KINDS = {
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "str": "a text",
    "tuple": "a list",
}
"""Types as a YAML file has them."""


def in_a_line(message: str) -> str:
    """A message without what jsonargparse says of every class that it cannot make."""
    lines = [re.sub(INTERNALS, "", line).strip() for line in message.splitlines()]
    text = " ".join(line.removeprefix("- ") for line in lines if line and not line.startswith(GENERIC))
    return text.replace(": - ", ": ")


def key_and_problem(message: str) -> tuple[str, str]:
    """The key of the configuration that a message is about, if it names one, and the whole message in a line."""
    if message.startswith("Unexpected config:"):
        given = in_a_line(message.removeprefix("Unexpected config:"))
        return "config", f"config: give a YAML file with keys (model:, data:, trainer:), got {given or 'an empty file'}"
    said = _plainly(in_a_line(message))
    value = "" if "there is no class" in said else _value(message)
    text = said + _form_of_noise(message) + value
    key, quoted, problem = text.removeprefix('Parser key "').partition('":')
    if not quoted:
        return "", text
    if not problem.strip():  # all of it was said of every class
        value = next((line.strip() for line in message.splitlines() if line.strip().startswith("Given value: ")), "")
        problem = f"give a class, as class_path: NAME; got {value.removeprefix('Given value: ')}"
    return key, f"{key}: {problem.strip()}"


def unknown_key(message: str) -> tuple[str, str | None] | None:
    """The key that nothing accepts, and the class that does not, None for the parser itself; None for another mistake.

    >>> unknown_key("Group 'trainer' does not accept option 'max_stps'")
    ('trainer.max_stps', None)
    """
    group = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    if group:
        return f"{group[1]}.{group[2]}", None
    unrecognised = re.search(r"unrecognized arguments: (?:--)?([\w.-]+)", message)
    if unrecognised:
        return unrecognised[1], None
    option = re.search(r"Option '([\w.]+)' is not accepted", message)
    if not option:
        return None
    before = re.findall(r"class_path '([\w.]+)'", message[: option.start()])
    after = re.match(r"\. Got value: Namespace\(class_path='([\w.]+)'", message[option.end() :])
    return option[1], after[1] if after else before[-1] if before else None


def is_incomplete(message: str) -> bool:
    """Whether a whole section, such as the model, is missing."""
    return message.startswith("the following arguments are required")


def lacks_class(message: str) -> bool:
    """Whether a model has arguments, and no class: jsonargparse then takes that of which all models are kinds."""
    return "class_path 'mupscale.models.base.Growable'" in message


def unknown_class(message: str) -> str | None:
    """The short name of a class that is not known."""
    found = re.search(r"Expected a dot import path string: (\w+)$", message, re.MULTILINE)
    return found[1] if found else None


def arguments_of(class_path: str) -> list[str]:
    """The names of a class' arguments, those of the classes it inherits from among them. Imports nothing."""
    module, _, name = class_path.rpartition(".")
    made = getattr(sys.modules.get(module), name, None)
    if not isinstance(made, type):
        return []
    makers = [vars(kind).get("__init__") for kind in made.__mro__]
    names = [key for maker in makers if inspect.isfunction(maker) for key in inspect.signature(maker).parameters]
    return [name for name in dict.fromkeys(names) if name not in ("self", "args", "kwargs")]


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The nearest of the names, as the end of a message; nothing where none is near."""
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)
    return f". Did you mean {' or '.join(near)}?" if near else ""


def _plainly(text: str) -> str:
    """A line in the words of the configuration: keys with dots, and kinds of values."""
    text = re.sub(INNER_KEY, r'.\1":', text)
    text = re.sub(INNER_KEY, r'.\1":', text)  # and one inside of that
    text = re.sub(OF_CALLABLES, "", text)
    text = re.sub(r"Problem with given class_path '(?:\w+\.)*(\w+)': Option", r"\1: Option", text)
    text = re.sub(r"Problem with given class_path '([\w.]+)'", r"class \1", text)
    class_name = r"Expected a dot import path string: (\w+)"
    expected = [*re.finditer(r" ?Expected a <class '(\w+)'>\.?", text)]
    if expected and all(found[1] in KINDS for found in expected):
        kinds = " or ".join(dict.fromkeys(KINDS[found[1]] for found in expected))
        rest = re.sub(rf" ?{class_name}", "", re.sub(r" ?Expected a <class '\w+'>\.?", "", text[expected[0].end() :]))
        text = f"{text[: expected[0].start()]} wanted {kinds}{rest.rstrip()}".replace(" Got value: ", ", got ")
    return re.sub(class_name, r"there is no class \1", text)


def _form_of_noise(message: str) -> str:
    if "Not a valid subclass of Noise" not in message:
        return ""
    return " give a class, as noise: {class_path: mupscale.AdditiveNoise, init_args: {std: 0.1}}"


def _value(message: str) -> str:
    """The innermost value that does not fit, where it is a plain one."""
    given = re.search(r"Given value type: <class '(\w+)'>\s+Given value: (.*)", message)
    plain = given is not None and given[1] in ("str", "int", "float", "bool")
    if given is None or not plain or "Parser key" not in message[1:]:
        return ""
    return f"; got {re.sub(INTERNALS, '', given[2]).strip()}"
