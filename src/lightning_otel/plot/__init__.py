"""Curves: how reward, success, length, tokens and what training runs log go on over time.

Belongs here: what is asked of the store's views and of the runs, always binned by the database, and
how it is drawn: in characters, as SVG, as one HTML page.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import ConfigError, NotInstalledError
from lightning_otel.plot.asking import Asked, charts
from lightning_otel.plot.characters import Look, bar, chart_lines, sparkline
from lightning_otel.plot.curves import Axis, Chart
from lightning_otel.plot.page import page
from lightning_otel.plot.progress import Progress
from lightning_otel.plot.svg import svg

if TYPE_CHECKING:
    import os

    from lightning_otel.instants import Instant
    from lightning_otel.store import Store

__all__ = [
    "Asked", "Axis", "Chart", "Curves", "Look", "Progress", "bar", "chart_lines", "charts",
    "check_picture", "page", "plot_training_metrics", "sparkline", "svg",
]  # fmt: skip


def png(charts: Sequence[Chart]) -> bytes:
    """The picture that :func:`svg` draws, in dots; its text is in a font of this machine.

    Raises:
        NotInstalledError: The extra ``png`` is not installed.
    """
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            "a PNG needs resvg-py; pip install 'lightning-otel[png]', or name one .svg"
        ) from exc
    return bytes(svg_to_bytes(svg_string=svg(charts), zoom=2, monospace_family="DejaVu Sans Mono"))


_FORMS: Final[Mapping[str, Any]] = {".svg": svg, ".png": png, ".html": page, ".htm": page}


class Curves(tuple[Chart, ...]):
    """Charts, one a metric; in a notebook their picture, printed the same in characters."""

    __slots__ = ()

    def __str__(self) -> str:
        """The charts in characters, 80 cells wide."""
        lines = (line for chart in self for line in chart_lines(chart, Look()))
        return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        """The charts as SVG, for notebooks."""
        return svg(self)

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write a picture, the user's alone as the store is: ``.svg``, ``.png`` or ``.html``.

        Raises:
            ConfigError: The name ends otherwise, or no file can be made there.
            NotInstalledError: A PNG needs the extra ``png``.
        """
        from lightning_otel.store.table import private_file

        drawn = _form_of(path)(self)
        with private_file(path) as made:
            made.write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())


def _form_of(path: "str | os.PathLike[str]") -> Any:
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMS:
        raise ConfigError(f"{Path(path).name} is no picture; name one {' or '.join(_FORMS)}")
    return _FORMS[suffix]


def check_picture(path: "str | os.PathLike[str]") -> None:
    """Say at once if no picture can have that name.

    Raises:
        ConfigError: It ends otherwise than ``.svg``, ``.png`` or ``.html``.
    """
    _form_of(path)


def plot_training_metrics(
    store: "Store | str | None" = None,
    metrics: str | Sequence[str] = (),
    save_path: "str | os.PathLike[str] | None" = None,
    *,
    by: Axis | None = None,
    runs: str | Sequence[str] = (),
    mode: str | None = None,
    since: "Instant | None" = None,
    until: "Instant | None" = None,
    success: float = 0.5,
    window: int | None = None,
) -> Curves:
    """Curves of rollouts and training runs; printed, shown in a notebook, or saved.

    Args:
        store: Where they are; by default the one that is used where none is named.
        metrics: ``reward``, ``success_rate``, ``length``, ``tokens``, ``input_tokens``,
            ``output_tokens``, ``duration``, or what a training run logged, such as ``loss``. By
            default the usual ones that there are.
        save_path: Where to write them as well: ``curves.svg``, ``.png`` or ``.html``.
        by: ``rollout``, in the order they began; ``time``; ``step`` of a training run; or
            ``version`` of a resource.
        runs: Beginnings of the ids of training runs, or ``@last``; the metrics are then what these
            logged.
        mode: Only rollouts of this mode, such as ``val``.
        since: Only rollouts that began at this time or later, as ``Store.transitions()`` takes it.
        until: Only rollouts that began before this time.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; by default a tenth of them.

    Raises:
        ConfigError: Something cannot be drawn like this, or a library is missing.
        NotFoundError: A run that was named logged nothing.
        StoreMissingError: There is no store.
    """
    from lightning_otel.adapter.selection import Selection
    from lightning_otel.store import Store

    if save_path is not None:
        check_picture(save_path)  # said before anything is read
    asked = Asked(
        (metrics,) if isinstance(metrics, str) else tuple(metrics),
        by,
        (runs,) if isinstance(runs, str) else tuple(runs),
        Selection.of({"since": since, "until": until, "mode": mode}),
        success,
        window,
    )
    found = Curves(charts(store if isinstance(store, Store) else Store(store), asked))
    if save_path is not None:
        found.save(save_path)
    return found
