"""Who optimises: what is installed decides, and whatever is not done is said."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_otel import Hook, Store, Trainer
from lightning_otel.algorithms.exchange import choose_backend
from lightning_otel.errors import ConfigError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package of that name before any other: its real one is 470 MB."""

    def put(version: str, code: str = "") -> None:
        (tmp_path / "agentlightning").mkdir()
        (tmp_path / "agentlightning" / "__init__.py").write_text(code)
        info = tmp_path / f"agentlightning-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: agentlightning\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "agentlightning", raising=False)

    yield put
    sys.modules.pop("agentlightning", None)


@pytest.mark.parametrize("wanted", ["auto", "microsoft"])
def test_release_that_fits_is_used(install: Install, wanted: str) -> None:
    """Where 0.3 is installed and can be imported, it is taken."""
    install("0.3.1")

    assert choose_backend(wanted) == "microsoft"  # type: ignore[arg-type]  # parametrized


def test_hooks_are_refused(install: Install, store: Store) -> None:
    """Its runners call none of ours, and no rollout is run as if they did."""
    install("0.3.1")
    trainer = Trainer(
        lambda task: 1.0, "baseline", backend="microsoft", store=store, hooks=[Hook()]
    )

    with pytest.raises(ConfigError, match="do not call hooks"):
        trainer.fit(["task"])


@pytest.mark.parametrize(
    ("version", "code", "reason"),
    [
        ("0.4.0", "", "agentlightning 0.4.0 is installed, and 0.3 is what fits"),
        (
            "0.3.0",
            "import no_such_gateway",
            "agentlightning 0.3.0 cannot be imported: ModuleNotFoundError",
        ),
    ],
)
def test_release_that_does_not_fit_is_named(
    install: Install, caplog: pytest.LogCaptureFixture, version: str, code: str, reason: str
) -> None:
    """Asked for by name it is an error; ``auto`` falls back and warns with the reason."""
    install(version, code)

    with pytest.raises(ConfigError, match="backend microsoft cannot be used") as raised:
        choose_backend("microsoft")
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto") == "builtin"

    assert reason in raised.value.what
    assert "pip install 'agentlightning==0.3.0'" in raised.value.remedy
    assert f"backend 'auto' is 'builtin' here: {reason}" in caplog.text


def test_builtin_asks_nobody(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """Ours need no reason, and nothing is imported for them."""
    install("0.3.0", "raise RuntimeError('imported')")

    assert choose_backend("builtin") == "builtin"
    assert caplog.text == ""


def test_what_it_cannot_do_is_a_reason(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    """Though installed it may lack what is asked for; an unknown backend is no backend."""
    install("0.3.0")

    assert choose_backend("auto", unfit="it has no SFT") == "builtin"
    assert "backend 'auto' is 'builtin' here: it has no SFT" in caplog.text
    with pytest.raises(ConfigError, match="it has no SFT"):
        choose_backend("microsoft", unfit="it has no SFT")
    with pytest.raises(ConfigError, match="backend is 'azure'; it must be one of auto, builtin"):
        choose_backend("azure")  # type: ignore[arg-type]  # that is what is tried
