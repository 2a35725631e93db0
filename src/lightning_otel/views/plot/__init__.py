"""Curves: how reward, success, length, tokens and metrics of training runs develop."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.errors import ConfigError, NotInstalledError, install_command
from lightning_otel.views.plot.characters import bar, chart_lines
from lightning_otel.views.plot.curves import Axis, Chart, Split
from lightning_otel.views.plot.progress import Progress
from lightning_otel.views.plot.queries import PlotQuery, read_charts
from lightning_otel.views.plot.svg import svg

if TYPE_CHECKING:
    import os

    from lightning_otel.dataset import Store
    from lightning_otel.types.instants import Instant

__all__ = [
    "Axis", "Chart", "Curves", "PlotQuery", "Progress", "bar", "chart_lines", "check_picture",
    "plot_training_metrics", "read_charts", "svg",
]  # fmt: skip


def _draw_png(charts: Sequence[Chart]) -> bytes:
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError as exc:
        raise NotInstalledError(
            f"a PNG needs resvg-py; {install_command('png')}, or name one .svg"
        ) from exc
    return bytes(svg_to_bytes(svg_string=svg(charts), zoom=2, monospace_family="DejaVu Sans Mono"))


_FORMS: Final[Mapping[str, Any]] = {".svg": svg, ".png": _draw_png}


class Curves(tuple[Chart, ...]):
    """Charts, one a metric; a picture in a notebook, characters where printed."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(line for chart in self for line in chart_lines(chart))

    def _repr_html_(self) -> str:
        return svg(self)

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write a picture, the user's alone as the store is: ``.svg`` or ``.png``.

        Raises:
            ConfigError: The name ends otherwise, or no file can be made there.
            NotInstalledError: A PNG needs the extra ``png``.
        """
        from lightning_otel.store.files import private_file

        picture = check_picture(path)(self)
        with private_file(path) as temporary:
            temporary.write_bytes(picture if isinstance(picture, bytes) else picture.encode())


def check_picture(path: "str | os.PathLike[str]") -> Any:
    """Return the function that draws the kind of picture that a path names.

    Raises:
        ConfigError: The path ends neither in ``.svg`` nor in ``.png``.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMS:
        raise ConfigError(f"{Path(path).name} is no picture; name one {' or '.join(_FORMS)}")
    return _FORMS[suffix]


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
    split: Split | None = None,
) -> Curves:
    """Draw curves of rollouts and training runs.

    Args:
        store: By default the store that is used where none is named.
        metrics: ``reward``, ``success_rate``, ``length``, ``tokens``, ``input_tokens``,
            ``output_tokens``, ``duration``, or a metric of a training run, such as ``loss``. By
            default the usual ones that there are.
        save_path: A file to write as well: ``curves.svg`` or ``.png``.
        by: ``rollout``, in the order they began; ``time``; ``step`` of a training run; or
            ``version`` of a resource.
        runs: Prefixes of the ids of training runs whose metrics are drawn, or ``@last``.
        mode: Only rollouts of this mode, such as ``val``.
        since: Only rollouts that began at this time or later, as ``Store.transitions()`` takes it.
        until: Only rollouts that began before this time.
        success: The reward from which on a rollout has succeeded.
        window: Values in a moving mean; by default a tenth of them.
        split: ``agent`` draws a line each, of the rollouts in which the agent took part.

    Raises:
        ConfigError: Something cannot be drawn like this, or a library is missing.
        NotFoundError: A named run logged nothing.
        StoreMissingError: There is no store.
    """
    from lightning_otel.adapter.selection import StepSelection
    from lightning_otel.dataset import Store

    if save_path is not None:
        check_picture(save_path)  # before anything is read
    query = PlotQuery(
        (metrics,) if isinstance(metrics, str) else tuple(metrics),
        by,
        (runs,) if isinstance(runs, str) else tuple(runs),
        StepSelection.of({"since": since, "until": until, "mode": mode}),
        success,
        window,
        split,
    )
    curves = Curves(read_charts(store if isinstance(store, Store) else Store(store), query))
    if save_path is not None:
        curves.save(save_path)
    return curves
