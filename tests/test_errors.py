"""The error for a user's mistake, and what turns other errors into it."""

from pathlib import Path

import pytest
from paths import ROOT

from mupscale.errors import UserError, as_user_errors, needs_extra, pip_requirement, prefix_errors


def test_errors_of_the_given_kinds_become_user_errors():
    def read() -> None:
        with as_user_errors(OSError, KeyError):
            raise FileNotFoundError("there is no file x")

    with pytest.raises(UserError, match=r"^there is no file x$") as caught:
        read()
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_other_errors_and_user_errors_pass():
    def fail(error: Exception) -> None:
        with as_user_errors(OSError, ValueError):
            raise error

    for error in (TypeError("a bug"), UserError("a mistake")):
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert caught.value is error


def test_a_prefix_stands_before_every_message():
    for error in (UserError("it is 0"), ValueError("it is 0")):
        with pytest.raises(UserError, match=r"^data\.seed: it is 0$"), prefix_errors("data.seed", ValueError):
            raise error


def test_a_package_that_is_missing_names_its_extra():
    def load() -> None:
        with needs_extra("data"):
            import not_installed.inside  # noqa: F401

    with pytest.raises(UserError) as caught:
        load()
    assert str(caught.value) == f"not_installed is not installed. Install it with: pip install -e '{ROOT}[data]'"


def test_an_installed_package_names_its_extra_on_the_index(tmp_path: Path):
    assert pip_requirement("data", tmp_path / "mupscale") == "'mupscale[data]'"
