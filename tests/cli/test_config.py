"""``config``: every setting, and what is wrong with those that are set."""

import csv
import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from lightning_otel import config

Cli = Callable[..., CompletedProcess[str]]


def test_config_says_value_and_source(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, an option or nowhere; a secret is said to be set."""
    monkeypatch.setenv("LIGHTNING_OTEL_TRAIN", "0")
    monkeypatch.setenv("LIGHTNING_OTEL_TOKEN", "very-secret")

    done = cli("config", "--json", "--store", "/somewhere/t.duckdb")

    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["LIGHTNING_OTEL_TRAIN"]["value"] == "no"
    assert rows["LIGHTNING_OTEL_TRAIN"]["source"] == "LIGHTNING_OTEL_TRAIN"
    assert rows["LIGHTNING_OTEL_STORE"]["source"] == "--store"
    assert rows["LIGHTNING_OTEL_COLLECT"]["source"] == "default"
    assert "very-secret" not in done.stdout
    assert all(row["meaning"] for row in rows.values())


def test_every_variable_a_person_may_set_is_listed() -> None:
    """Those that ``run`` sets for its child are nobody's to set."""
    inner = {config.RUN.name, config.RUN_AGENT.name, config.ROLLOUT.name, config.ATTEMPT.name}

    assert set(config.OURS) - inner <= {each["name"] for each in config.list_settings()}


def test_check_names_what_is_meant(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name and a value that is not understood; without, nothing is wrong."""
    good = cli("config", "check")
    monkeypatch.setenv("LIGHTNING_OTEL_SOTRE", "secret-place")
    monkeypatch.setenv("LIGHTNING_OTEL_MAX_SIZE", "much")

    bad = cli("config", "check", "--csv")

    assert (good.returncode, bad.returncode) == (0, 1)
    assert "nothing wrong" in good.stdout
    rows = {row["name"]: row for row in csv.DictReader(bad.stdout.splitlines())}
    assert rows["LIGHTNING_OTEL_SOTRE"]["remedy"] == "did you mean LIGHTNING_OTEL_STORE?"
    assert "10GB" in rows["LIGHTNING_OTEL_MAX_SIZE"]["text"]
    assert "secret-place" not in bad.stdout
