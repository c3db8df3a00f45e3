"""What would change a run, waste it or keep a folder from use is refused or said, never silent."""

from pathlib import Path

import pytest
from command_line import refused, small, upscale

from mupscale.__main__ import main
from mupscale.commands.checkpoints import refuse_changes

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def of_workers(**arguments: int) -> dict:
    data = {"class_path": "mine.Data", "init_args": {"batch_size": 8, **arguments}}
    return {"seed_everything": 0, "trainer": {"callbacks": None}, "data": data}


def test_another_number_of_workers_is_said() -> None:
    with pytest.warns(UserWarning, match=r"data\.num_workers is 2 in the run and 3 here: random numbers"):
        refuse_changes(of_workers(num_workers=2), of_workers(num_workers=3), 3, same_place=False)
    refuse_changes(of_workers(prefetch_factor=2), of_workers(prefetch_factor=3), 3, same_place=False)


@pytest.mark.slow
def test_a_schedule_that_ends_long_before_the_run_is_said(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", max_steps=10, enable_progress_bar=False)
    decaying, constant = (
        f"--model.lr_scheduler={{class_path: mupscale.schedules.WarmupStableDecay, init_args: {{{arguments}}}}}"
        for arguments in ("steps: 4, decay: 0.5", "")
    )
    words = r"is zero from step 4 on, and the run has 10 steps: the last 6 change nothing"
    with pytest.warns(UserWarning, match=words):
        main(["fit", "--config", config, decaying])
    main(["fit", "--config", config, decaying, "--trainer.max_steps=4", "--trainer.val_check_interval=4"])
    main(["fit", "--config", config, constant])


@pytest.mark.parametrize("key", ["max_steps", "limit_train_batches"])
def test_a_run_that_would_train_nothing_is_refused(key: str, tmp_path: Path) -> None:
    message = refused("fit", "--config", small(tmp_path / "c.yaml", upscale(3, 16)), f"--trainer.{key}=0")
    assert f"trainer.{key} = 0: the run would train nothing" in message
    assert [path.name for path in Path().iterdir()] == ["c.yaml"]


@pytest.mark.slow
def test_a_sweep_that_is_refused_at_its_first_trial_leaves_its_folder_free(tmp_path: Path) -> None:
    config = small(tmp_path / "c.yaml", upscale(5, 16), enable_progress_bar=False)
    sweep = ["sweep", "--config", config, "--out", "s", "--sweep", "model.optimizer.lr=0.1"]
    assert "is never reached" in refused(*sweep, "--trainer.max_steps=3")
    assert not Path("s").exists()
    main([*sweep, "--trainer.max_steps=6"])
    assert Path("s/best.yaml").is_file()
