"""What jsonargparse says, in a line: it is known by its wording, so a test provokes each of these messages."""

import os

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
"""What jsonargparse says of every class that it cannot make."""


def debugging() -> bool:
    """Whether jsonargparse itself was asked to show tracebacks."""
    return "JSONARGPARSE_DEBUG" in os.environ


def in_a_line(message: str) -> str:
    """A message without what jsonargparse says of every class that it cannot make."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line.removeprefix("- ") for line in lines if line and not line.startswith(GENERIC))


def key_and_problem(message: str) -> tuple[str, str]:
    """The key of the configuration that a message is about, if it names one, and the whole message in a line."""
    text = in_a_line(message)
    key, quoted, problem = text.removeprefix('Parser key "').partition('":')
    if not quoted:
        return "", text
    if not problem.strip():  # all of it was said of every class
        value = next((line.strip() for line in message.splitlines() if line.strip().startswith("Given value: ")), "")
        problem = f"give a class, as class_path: NAME; got {value.removeprefix('Given value: ')}"
    return key, f"{key}: {problem.strip()}"
