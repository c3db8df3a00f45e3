"""Messages of jsonargparse as one line. They are recognised by their wording; a test triggers each of them."""

import inspect
import re
import sys

GENERIC = (
    "Expected a path but",
    "Does not validate against",
    "Expected a <class 'NoneType'>",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict with",
    "Subtypes:",
    "Errors:",
)
"""Lines that jsonargparse adds for every class that it cannot make."""

INTERNALS = r"Type typing\.Callable\S* \S+ expects a function or a callable class: |\. Got value: Namespace\(.*"
"""Parts that are removed from a line: a type that the user did not write, and the text of a whole value."""

PLAIN = r"<class '(?:str|int|float|bool)'>\s+Given value: (.*)"


def key_and_problem(message: str) -> tuple[str, str]:
    """The key of the configuration that a message is about, if it names one, and in a line what it says of that."""
    keys = re.findall(r'Parser key "([\w.]+)":', message)
    inner = re.sub(r'(?s).*Parser key "[\w.]+":', "", message)
    about, _, value = inner.partition("Given value type:")
    lines = [re.sub(INTERNALS, "", line).strip().removeprefix("- ") for line in about.splitlines()]
    problems = dict.fromkeys(line for line in lines if line and not line.startswith(GENERIC))
    text = "; ".join(problems).replace(":; ", ": ").replace("Expected a dot import path string:", "there is no class")
    text = text.replace("Not a valid subclass of", "give class_path and init_args of a")
    text = re.sub(r"; Expected a typing\.Literal\[([^\]]*)\]", r", or \1", text)
    given = re.search(rf"^ {PLAIN}", value)
    if given:
        text += f"; got {re.sub(INTERNALS, '', given[1])}"
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    key = ".".join(keys)
    return key, f"{key}: {text}" if key else text


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


def unknown_class(message: str) -> str | None:
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
