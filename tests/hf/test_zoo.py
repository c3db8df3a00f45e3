"""Models nobody prepared, widened in the middle of training without a hint, followed in float64 and loaded again.

The families that must come out exact run in `make test`. All others, about two hundred, run with `--all`: each is
exact, or refused with a reason.
"""

import re

import pytest

import mupscale

pytest.importorskip("transformers")
pytest.importorskip("timm")

from hf_zoo import ENTRIES, NAMED
from paths import ROOT
from tiers import slow_except
from zoo_trial import depth_trials, tiled, trial

THREEFOLD = ["gpt2", "phi3", "gemma2", "falcon_multi_query", "t5_1_0", "timm_regnety"]
OFTEN = [name for name in NAMED if name not in (*THREEFOLD, "mamba")][::8]
"""Without `--all`, beside those at three times their width."""
REST = [name for name in ENTRIES if name not in NAMED]

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries' models are not ours to mend


@pytest.fixture(autouse=True)
def quiet():
    """No progress bars while weights are saved and loaded."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(NAMED, "llama_tied", kept=OFTEN))
def test_exact_without_a_hint(name):
    outcome = trial(ENTRIES[name])
    assert outcome.verdict == "exact", str(outcome)


@pytest.mark.parametrize("name", slow_except(THREEFOLD, kept=["phi3"]))
def test_exact_at_three_times_the_width(name):
    outcome = trial(ENTRIES[name], 3)
    assert outcome.verdict == "exact", str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_exact_to_rounding_as_shipped(name):
    """These cast to float32 inside."""
    outcome = trial(ENTRIES[name], as_shipped=True)
    assert outcome.verdict == "exact", str(outcome)


@pytest.mark.parametrize("name", slow_except(NAMED, kept=["llama_tied", "gemma2"]))
def test_twice_as_many_layers_without_a_hint(name):
    """Those with a norm over the sum of their branches are refused."""
    outcomes = list(depth_trials(ENTRIES[name]))
    wanted = "refused" if name in ("bert", "roberta", "bart") else "exact"
    assert outcomes
    assert all(outcome.verdict == wanted for outcome in outcomes), "\n".join(map(str, outcomes))
    assert wanted == "exact" or all("(post-norm)" in outcome.reason for outcome in outcomes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REST)
def test_twice_as_many_layers_or_refused(name):
    if not name.startswith("timm"):
        outcomes = list(depth_trials(ENTRIES[name]))
        assert all(outcome.verdict in ("exact", "refused") for outcome in outcomes), "\n".join(map(str, outcomes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REST)
@pytest.mark.parametrize("factor", [2, 3])
def test_exact_or_refused(name, factor):
    outcome = trial(ENTRIES[name], factor)
    assert outcome.verdict in ("exact", "refused"), str(outcome)
    assert not ENTRIES[name].refused or ENTRIES[name].refused in outcome.reason


@pytest.mark.slow
def test_a_trial_finds_what_is_wrong(monkeypatch):
    """Tiling alone, without the units that Gemma needs, and without the pieces of Phi-3's fused projection."""
    monkeypatch.setattr(mupscale, "discover", lambda narrow, wide, call: mupscale.Hints(blocks=tiled(narrow, wide)))
    for name in ("gemma2_untied", "phi3"):
        outcome = trial(ENTRIES[name])
        assert outcome.verdict == "WRONG", str(outcome)
        assert outcome.drift > 1e-6


def test_the_page_has_every_family_once():
    text = (ROOT / "docs/families.md").read_text()
    tables = text.partition("## Deeper")[0].partition("\n| ")[2]
    listed = [name for name in re.findall(r"\w+", tables) if name in ENTRIES]
    assert sorted(listed) == sorted(ENTRIES)
