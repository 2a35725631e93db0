"""A picture of a rollout for docs and notebooks: spans over time, and where credit went, as SVG.

Whatever is drawn is escaped; there is no script, link or handler.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from lightning_otel.adapter.rewards import reward_words
from lightning_otel.types import conventions as c
from lightning_otel.types.html import escape, render_svg_text
from lightning_otel.types.text import count_noun, format_number
from lightning_otel.views.folding import Gap, children_of, select_rows
from lightning_otel.views.trace import Row, Trace

_WIDTH: Final = 960
_NAMES: Final = 320
_RIGHT: Final = 150
_TOP: Final = 52
_ROW: Final = 22
_CELL: Final = 6.7
_INDENT: Final = 12
_DEEPEST: Final = 14
_COLOURS: Final = 6
_LEGEND: Final = 8
_STYLE: Final = """
svg.lo .bg{fill:#fff}svg.lo text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;
fill:#1f2328}svg.lo .dim{fill:#656d76}svg.lo .big{font-size:13px;font-weight:600}
svg.lo .bad{fill:#cf222e}svg.lo .good{fill:#1a7f37}svg.lo .on{fill:#fff;font-weight:600}
svg.lo .line{stroke:#d0d7de;fill:none}svg.lo .work{fill:#d8dee4}svg.lo .agent{fill:#b6e3ff}
svg.lo .tool{fill:#e0c9f7}svg.lo .out{fill:none;stroke:#8c959f}svg.lo .credit{stroke:#1a7f37;
fill:none;stroke-width:1.5}svg.lo .tip{fill:#1a7f37}svg.lo .hollow{fill:none;stroke:#8c959f}
svg.lo .open{stroke:#bf8700;stroke-width:1.5;stroke-dasharray:4 3}svg.lo .failed{stroke:#cf222e;
stroke-width:1.5}svg.lo .b0{fill:#0969da}svg.lo .b1{fill:#bc4c00}svg.lo .b2{fill:#8250df}
svg.lo .b3{fill:#0a7070}svg.lo .b4{fill:#bf3989}svg.lo .b5{fill:#6e5a00}
@media(prefers-color-scheme:dark){svg.lo .bg{fill:#0d1117}svg.lo text{fill:#e6edf3}
svg.lo .dim{fill:#8d96a0}svg.lo .bad{fill:#ff7b72}svg.lo .good{fill:#56d364}svg.lo .on{fill:#fff}
svg.lo .line{stroke:#3d444d}svg.lo .work{fill:#343b44}svg.lo .agent{fill:#0c3a63}
svg.lo .tool{fill:#46306b}svg.lo .credit{stroke:#56d364}svg.lo .tip{fill:#56d364}
svg.lo .open{stroke:#e3b341}svg.lo .failed{stroke:#ff7b72}svg.lo .b0{fill:#1f6feb}
svg.lo .b1{fill:#bd561d}svg.lo .b2{fill:#8957e5}svg.lo .b3{fill:#1b7c83}svg.lo .b4{fill:#bf4b8a}
svg.lo .b5{fill:#9e6a03}}
"""


class _Bar(NamedTuple):
    start: float
    end: float
    middle: float
    is_late: bool


def draw_trace(trace: Trace, *, limit: int = 120) -> str:
    """Return the tree of spans over time as SVG: steps by number, arrows from rewards to theirs.

    Spans beyond the limit are counted where they would stand.
    """
    return "".join(_Picture(trace, limit).draw())


class _Picture:
    def __init__(self, trace: Trace, limit: int) -> None:
        self._trace, self._nodes = trace, trace.rows
        nodes = trace.rows
        paths = [
            (trajectory.attempt_id, trajectory.agent, trajectory.branch)
            for trajectory in trace.trajectories
        ]
        self._colours = {path: rank % _COLOURS for rank, path in enumerate(paths)}
        is_shown = select_rows(nodes, limit)
        self._shown = sum(is_shown)
        times = [(n.span.start_ns, n.span.end_ns or 0) for n in nodes if n.kind != "reward"]
        times = times or [(n.span.start_ns, n.span.end_ns or 0) for n in nodes]
        self._start_ns = min((start for start, _ in times), default=0)
        self._end_ns = max((max(pair) for pair in times), default=0)
        children = children_of(nodes, is_shown)
        self._rows: list[tuple[int | Gap, int]] = []
        self._bars: dict[int, _Bar] = {}
        stack: list[tuple[int | Gap, int]] = [(item, 0) for item in reversed(children.get(-1, ()))]
        while stack:
            item, depth = stack.pop()
            if isinstance(item, int):
                self._bars[item] = self._place_bar(nodes[item], len(self._rows))
                stack += [(child, depth + 1) for child in reversed(children.get(item, ()))]
            self._rows.append((item, depth))

    def _x_of(self, time_ns: int) -> float:
        length = max(1, self._end_ns - self._start_ns)
        share = min(1.0, max(0.0, (time_ns - self._start_ns) / length))
        return _NAMES + 20 + share * (_WIDTH - _NAMES - 20 - _RIGHT)

    def _place_bar(self, node: Row, row: int) -> _Bar:
        span = node.span
        start = self._x_of(span.start_ns)
        end = self._x_of(self._end_ns if span.end_ns is None else span.end_ns)
        slack = (self._end_ns - self._start_ns) // 10
        is_late = node.kind == "reward" and span.start_ns > self._end_ns + slack
        return _Bar(start, max(start + 2, end), _TOP + row * _ROW + _ROW / 2, is_late)

    def draw(self) -> Iterator[str]:
        legend = self._legend_items()
        foot = _TOP + len(self._rows) * _ROW + 8
        height = foot + 20 * len(legend) + 10
        report = self._trace.report
        ids = list(dict.fromkeys(node.span.rollout_id for node in self._nodes))
        names = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
        title = (
            f"{names or 'nothing recorded'} · {count_noun(len(self._nodes), 'span')} · "
            f"{count_noun(report.transitions, 'step')} · "
            f"{report.rewards_placed:,} of {count_noun(report.rewards, 'reward')} credited"
        )
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="lo" role="img" width="{_WIDTH}" '
            f'height="{height}" viewBox="0 0 {_WIDTH} {height}" '
            f'style="max-width:100%;height:auto"><style>{_STYLE}</style>'
            f"<title>{escape(title, 200)}</title>"
            f'<rect class="bg" width="{_WIDTH}" height="{height}" rx="6"/>'
        )
        yield render_svg_text(14, 20, title, "big", 130)
        length = self._end_ns - self._start_ns
        for quarter in range(5) if length > 0 else ():
            x = self._x_of(self._start_ns + length * quarter // 4)
            text = _duration_text(length * quarter // 4)
            yield f'<path class="line" d="M{x:.1f} {_TOP - 6}V{foot - 4}" stroke-dasharray="2 4"/>'
            yield render_svg_text(x, _TOP - 12, text, "dim", 12, anchor="middle")
        for row, (item, depth) in enumerate(self._rows):
            y, x = _TOP + row * _ROW + _ROW / 2, 14 + min(depth, _DEEPEST) * _INDENT
            if isinstance(item, Gap):
                yield render_svg_text(x, y + 4, str(item), "dim", int((_NAMES - x) / _CELL) + 60)
            else:
                yield from self._draw_node(item, depth, x, y)
        for item, bar in self._bars.items():
            for target in self._nodes[item].credited:
                if target in self._bars:
                    yield _draw_arrow(bar, self._bars[target], _half_width(self._nodes[target]))
        for line, (words, style) in enumerate(legend):
            y = foot + 14 + 20 * line
            if style.startswith("b"):
                yield f'<circle class="{style}" cx="20" cy="{y - 4}" r="6"/>'
            yield render_svg_text(34 if style.startswith("b") else 14, y, words, "dim", 140)
        yield "</svg>"

    def _legend_items(self) -> list[tuple[str, str]]:
        items: list[tuple[str, str]] = []
        paths = self._trace.trajectories
        for path in paths[:_LEGEND] if len(paths) > 1 else ():
            cause = "" if path.cause == "start" else f" ({path.cause.replace('_', ' ')})"
            words = f"{path.agent or 'nobody named'}, branch {path.branch}{cause}"
            items.append((words, f"b{self._colours[path.attempt_id, path.agent, path.branch]}"))
        if len(paths) > _LEGEND:
            items.append((f"and {len(paths) - _LEGEND:,} more branches", "dim"))
        if self._shown < len(self._nodes):
            items.append((f"{self._shown:,} of {len(self._nodes):,} spans are drawn", "dim"))
        return items

    def _draw_node(self, item: int, depth: int, x: float, y: float) -> Iterator[str]:
        node, bar = self._nodes[item], self._bars[item]
        span, label, above = node.span, node.label, self._bars.get(node.parent)
        if node.depth and above is not None and node.depth <= _DEEPEST:
            margin, top = x - _INDENT + 4, above.middle + _ROW / 2 - 4
            yield f'<path class="line" d="M{margin:.0f} {top:.0f}V{y:.0f}H{x - 3:.0f}"/>'
        name = " ".join(filter(None, (label, node.name, node.subject)))
        if node.kind == "rollout" and not node.subject:
            name = f"{name} {span.rollout_id}"
        elif node.kind == "reward":
            name = f"{node.name} {reward_words(span)}".rstrip()
        style = "dim" if node.kind in ("work", "plumbing") else ""
        cells = int((_NAMES - x) / _CELL)
        yield render_svg_text(x, y + 4, f"{'· ' * (depth > _DEEPEST)}{name}", style, cells)
        lasted = "" if span.end_ns is None else _duration_text(span.end_ns - span.start_ns)
        details = (span.name, label, lasted, span.status_message, f"span {span.span_id}")
        yield f"<g><title>{escape(' · '.join(filter(None, details)), 600)}</title>"
        yield from (
            self._draw_diamond(node, bar) if node.kind == "reward" else self._draw_bar(node, bar)
        )
        yield "</g>"

    def _draw_bar(self, node: Row, bar: _Bar) -> Iterator[str]:
        step, span, half = node.step, node.span, 0.0
        height = {"call": 14, "tool": 10, "agent": 10}.get(node.kind, 5)
        style = {"agent": "agent", "tool": "tool", "call": "out", "mark": "out"}.get(
            node.kind, "work"
        )
        if step is not None:
            style = f"b{self._colours.get((step.attempt_id, step.agent, node.branch), 0)}"
        kinds = [style]
        kinds += ["open"] if span.is_incomplete else []
        kinds += ["failed"] if span.status == "ERROR" else []
        opacity = ' fill-opacity="0.45"' if step is not None else ""
        top = bar.middle - height / 2
        yield (
            f'<rect class="{" ".join(kinds)}" x="{bar.start:.1f}" y="{top:.1f}" '
            f'width="{bar.end - bar.start:.1f}" height="{height}" rx="2"{opacity}/>'
        )
        if step is not None:
            half = _half_width(node)
            place = f'x="{bar.start - half:.1f}" y="{bar.middle - 9:.1f}" width="{2 * half:.1f}"'
            yield f'<rect class="{style}" {place} height="18" rx="9"/>'
            yield render_svg_text(
                bar.start, bar.middle + 4, str(step.step), "on", 9, anchor="middle"
            )
        words, style = self._outcome_text(node)
        if words:
            yield _draw_words(words, style, bar.start - half, max(bar.end, bar.start + half), bar)

    def _outcome_text(self, node: Row) -> tuple[str, str]:
        step, span = node.step, node.span
        words = []
        if node.cause:
            words.append(node.cause.replace("_", " "))
        if step is not None and step.reward is not None:
            words.append(f"reward {format_number(step.reward, 6)}")
        if span.is_incomplete and not node.left_out.startswith("incomplete"):
            words.append("incomplete")
        if node.repair:
            words.append(f"moved: {node.repair}")
        if node.left_out:
            words.append(f"left out: {node.left_out}")
        elif node.is_fault:
            words.append(f"error: {span.attributes.get(c.ERROR_TYPE) or span.status_message}")
        is_good = step is not None and step.reward is not None
        return " · ".join(words), "bad" if span.status == "ERROR" else "good" if is_good else "dim"

    def _draw_diamond(self, node: Row, bar: _Bar) -> Iterator[str]:
        x, y = bar.start, bar.middle
        style = "tip" if node.credited else "hollow"
        yield f'<path class="{style}" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
        words = reward_words(node.span)
        if node.credited:
            steps = [self._nodes[target].label for target in node.credited]
            words += f" → {', '.join(steps[:3])}" + " …" * (len(steps) > 3)
        if bar.is_late:
            words += f" · {_duration_text(node.span.start_ns - self._end_ns)} later"
        if node.left_out:
            words += f" · left out: {node.left_out}"
        if node.credited:  # its arrow leaves to the left
            yield render_svg_text(x + 10, y + 4, words, "good", int((_WIDTH - x - 20) / _CELL))
        else:
            yield _draw_words(words, "dim", x - 6, x + 6, bar)


def _half_width(node: Row) -> float:
    return max(9.0, 5 + _CELL * len(str(node.step.step if node.step else "")) / 2)


def _draw_arrow(reward: _Bar, step: _Bar, half: float) -> str:
    side = 1 if reward.middle > step.middle else -1
    x, y = reward.start - 6, reward.middle
    start = f'<path class="credit" d="M{x:.1f} {y:.1f}C'
    if reward.start - step.start < 30:
        end, bend = step.start - half - 8, min(x, step.start - half) - 30
        return (
            f"{start}{bend:.1f} {y:.1f} {bend:.1f} {step.middle:.1f} {end:.1f} {step.middle:.1f}"
            f'"/><path class="tip" d="M{end + 7:.1f} {step.middle:.1f}l-7 4v-8z"/>'
        )
    foot = step.middle + side * 16
    bend = x - max(30.0, (x - step.start) / 3)
    return (
        f"{start}{bend:.1f} {y:.1f} {step.start:.1f} {foot + side * 14:.1f} {step.start:.1f} "
        f'{foot:.1f}"/><path class="tip" '
        f'd="M{step.start:.1f} {step.middle + side * 10:.1f}l4 {side * 7}h-8z"/>'
    )


def _draw_words(words: str, style: str, start: float, right: float, bar: _Bar) -> str:
    after, before = int((_WIDTH - right - 14) / _CELL), int((start - _NAMES - 28) / _CELL)
    if len(words) > after and before > after:
        return render_svg_text(start - 6, bar.middle + 4, words, style, before, anchor="end")
    return render_svg_text(right + 6, bar.middle + 4, words, style, after)


def _duration_text(duration_ns: int) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (120, "min")):
        if duration_ns >= size * 10**9:
            return f"{duration_ns / 1e9 / (60 if unit == 'min' else size):.3g} {unit}"
    duration_s = duration_ns / 1e9
    return f"{duration_s:.3g} s" if duration_s >= 1 else f"{duration_s * 1e3:.3g} ms"
