"""Without their libraries the algorithms say which extra to install, and cost nothing to make."""

import subprocess
import sys

import pytest

from lightning_otel import algorithms
from lightning_otel.algorithms import models, verl
from lightning_otel.algorithms.base import Batch
from lightning_otel.errors import ConfigError


@pytest.mark.parametrize("name", ["sft", "kto", "dpo", "grpo", "ppo"])
def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The error says what cannot be imported and what to install, before anything is read."""
    monkeypatch.setitem(sys.modules, "trl", None)
    algorithm = algorithms.make_algorithm(name, model="anything")

    with pytest.raises(ConfigError, match=r"needs trl, .*pip install 'lightning-otel\[train\]'"):
        algorithm.train_step(Batch([], number=1, rewards={}, groups={}))

    assert algorithm.extra == models.EXTRA == "train"


def test_names_that_users_know_are_there() -> None:
    """By their classes' names, in any case."""
    assert algorithms.PPO is algorithms.get("PPO") is algorithms.get("ppo")
    assert algorithms.GRPO is algorithms.get("grpo")
    assert algorithms.SFT is algorithms.get("sft")
    assert algorithms.PPO(model="anything", learning_rate=3e-4).name == "ppo"
    with pytest.raises(AttributeError, match="no attribute 'Anything'"):
        _ = algorithms.Anything


def test_a_missing_verl_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is registered where there is nobody to register with."""
    monkeypatch.setitem(sys.modules, "verl.experimental.agent_loop.agent_loop", None)

    with pytest.raises(ConfigError, match=r"pip install 'lightning-otel\[verl\]'"):
        verl.register("nobody")


def test_algorithms_are_looked_at_without_their_libraries() -> None:
    """To name and to make one imports neither torch nor a trainer."""
    code = (
        "import sys; from lightning_otel import algorithms\n"
        "for name in ('sft', 'kto', 'dpo', 'grpo', 'ppo'):\n"
        "    algorithms.make_algorithm(name, model='any')\n"
        "import lightning_otel.algorithms.verl, lightning_otel.algorithms.engines\n"
        "assert not {'torch', 'transformers', 'trl', 'verl', 'ray'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
