"""Which changes a run that goes on accepts; test_resume.py makes them in runs."""

from typing import Any

import pytest

from mupscale.commands.continued import refuse_changes
from mupscale.errors import UserError


def config(seed: int | None, seed_everything: Any, class_path: str = "mupscale.datamodules.Covertype") -> dict:
    data = {"class_path": class_path, "init_args": {"batch_size": 8, "seed": seed}}
    return {"seed_everything": seed_everything, "trainer": {"callbacks": None}, "data": data}


@pytest.mark.parametrize(("then", "now"), [(0, None), (None, 0), (None, None), (0, 0)])
def test_with_the_seed_0_a_data_seed_of_null_is_0(then: int | None, now: int | None):
    saved, here = config(then, 0), config(now, 0)
    refuse_changes(saved, here, 3, same_place=False)
    assert (saved, here) == (config(then, 0), config(now, 0))


@pytest.mark.parametrize(
    ("then", "now", "seed_everything"),
    [(0, None, 5), (5, None, 5), (None, 5, 5), (1, 0, 0), (0, None, False), (0, None, True)],
)
def test_with_another_seed_a_data_seed_of_null_is_none(then: int | None, now: int | None, seed_everything: Any):
    with pytest.raises(UserError, match=f"data.seed is {then} in the run and {now} here"):
        refuse_changes(config(then, seed_everything), config(now, seed_everything), 3, same_place=False)


def test_the_seed_of_a_users_data_module_is_compared_as_it_is():
    with pytest.raises(UserError, match=r"data\.seed is 0 in the run and None here"):
        refuse_changes(config(0, 0, "mine.Data"), config(None, 0, "mine.Data"), 3, same_place=False)


def test_a_data_seed_of_null_is_not_any_number():
    with pytest.raises(UserError, match=r"data\.seed is 5 in the run and 0 here"):
        refuse_changes(config(5, 0), config(None, 0), 3, same_place=False)
