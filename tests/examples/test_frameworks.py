"""Agents of frameworks that no instrumentor of ours patches, against the model server's log."""

from collections import Counter
from pathlib import Path

import pytest
from tests import facts
from tests.examples.frameworks import check, run_mode
from tests.examples.programs import FRAMEWORKS

MODES = (("off", "whole", "R"), ("on", "streamed", "O"))


@pytest.mark.timeout(300)  # two programs, whose imports take seconds each
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_request_is_a_step_of_its_agent(
    name: str, mode: tuple[str, str, str], tmp_path: Path
) -> None:
    """One rollout, a trajectory an agent, the closing reward on the last step."""
    pytest.importorskip(FRAMEWORKS[name])

    *_, wrong = check(name, mode, tmp_path)

    assert wrong == "–"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_program_does_the_same_recorded(name: str, tmp_path: Path) -> None:
    """Same output, same requests, as by itself."""
    pytest.importorskip(FRAMEWORKS[name])

    (plain, log), (recorded, own_log) = (
        run_mode(name, None, False, door, tmp_path) for door in ("", "R")
    )

    assert plain.returncode == 0, plain.stderr
    assert (plain.returncode, plain.stdout) == (recorded.returncode, recorded.stdout)
    assert Counter(map(facts.sent, log)) == Counter(map(facts.sent, own_log))
