"""``demo``: the whole way from an agent to transitions, offline, in seconds."""

import sys
import time
from typing import TYPE_CHECKING

import click

from lightning_otel.cli.options import COUNT, store_option
from lightning_otel.cli.output import count_noun, print_table, printable, program_command, suggest
from lightning_otel.dataset import Store
from lightning_otel.types.text import step_row

if TYPE_CHECKING:
    from lightning_otel.demo import Lesson

_SHOWN_STEPS = 6
_STORE = ".lightning/demo.duckdb"
_OWN_AGENT = """\
Your own agent, unchanged:
  {0} run -- python your_agent.py
  {0} reward @last 1.0          # or lightning_otel.emit_reward(1.0) in its code
  {0} export triplets -o triplets.jsonl"""


@click.command()
@click.option(
    "--rollouts", type=COUNT, default=240, show_default=True,
    help="Number of tasks the agent works on.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the random numbers.")
@click.option("--shuffle", is_flag=True, help="As a control: assign the rewards at random.")
@click.option("--plot", "picture", metavar="FILE", help="Write the curve: FILE.svg or FILE.png.")
@store_option
def demo(
    rollouts: int, seed: int, shuffle: bool, picture: str | None, store: str | None
) -> None:  # fmt: skip
    """Watch an agent learn, offline: a simulated model, a real agent, a policy trained on spans.

    It writes .lightning/demo.duckdb unless --store or LIGHTNING_OTEL_STORE names another store.
    """
    from lightning_otel.demo import train
    from lightning_otel.views.plot import check_picture

    if picture is not None:
        check_picture(picture)
    started_ns = time.time_ns()
    store = store or _STORE
    opened = Store(store)
    click.echo("1. An OpenAI-compatible server with a toy policy starts on this machine.")
    click.echo("2. A plain openai agent with a calculator works on tasks, inside auto_trace():")
    with click.progressbar(
        length=rollouts, label="   rollouts", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as progress:
        lesson = train(
            opened,
            rollouts=rollouts,
            seed=seed,
            is_shuffled=shuffle,
            progress=lambda outcome: progress.update(1),
        )
    _show_spans(opened, started_ns)
    _show_transitions(opened, started_ns, lesson)
    _show_rewards(opened, started_ns, lesson, picture)
    click.echo(f"\n{(time.time_ns() - started_ns) / 1e9:.1f} s, no key, no network.\n")
    click.echo(_OWN_AGENT.format(program_command()))
    suggest("plot --by version", store)


def _show_spans(opened: Store, started_ns: int) -> None:
    (row,) = opened.sql(
        "SELECT count(*) AS spans, count(DISTINCT trace_id) AS traces, "
        "count(*) FILTER (operation = 'chat') AS calls FROM spans WHERE start_ns >= ?",
        [started_ns],
    )
    click.echo(
        f"3. Each span was kept as it ended: {count_noun(row['spans'], 'span')}, "
        f"{count_noun(row['calls'], 'call')}, {count_noun(row['traces'], 'trace')} "
        f"→ {opened.name}"
    )


def _show_transitions(opened: Store, started_ns: int, lesson: "Lesson") -> None:
    ours = {outcome.rollout_id for outcome in lesson.outcomes}
    transitions = opened.transitions(since=started_ns)
    steps = [step for step in transitions if step.rollout_id in ours]
    exact = sum(step.capture == "exact" for step in steps)
    click.echo(
        f"4. Spans became {count_noun(len(steps), 'transition')}, {exact} with the server's own "
        "token ids; the last few:\n"
    )
    rows = [
        {
            **step_row(step),
            "done": "yes" if step.done else "no",
            "tokens": f"{len(step.prompt_ids)}→{len(step.response_ids)}",
        }
        for step in steps[-_SHOWN_STEPS:]
    ]
    columns = ("step", "observation", "action", "reward", "done", "tokens")
    print_table(rows, columns, texts=("observation", "action"))


def _show_rewards(opened: Store, started_ns: int, lesson: "Lesson", picture: str | None) -> None:
    from lightning_otel.cli.look import print_charts
    from lightning_otel.views.plot import bar, plot_training_metrics

    rounds = count_noun(len(lesson.versions), "time")
    dealt = ", dealt out at random" if lesson.is_shuffled else ""
    click.echo(
        f"\n5. The policy learnt {rounds} from such transitions, read back from DuckDB; what "
        f"{lesson.steps} answers earned{dealt}:\n"
    )
    curves = plot_training_metrics(opened, "reward", picture, since=started_ns)
    print_charts(curves)
    size = max(1, len(lesson.outcomes) // len(lesson.versions))
    click.echo()
    for label, part in (("first", lesson.outcomes[:size]), ("last", lesson.outcomes[-size:])):
        share = sum(outcome.reward for outcome in part) / len(part)
        click.echo(f"   {label:<5} {len(part)}  {bar(share)} {share:.0%} right")
    if picture is not None:
        click.echo(f"   curve → {printable(picture)}")
    wrong = next((outcome for outcome in lesson.outcomes if not outcome.reward), None)
    if wrong is not None:
        click.echo(f"   at first, e.g. {printable(wrong.question)} → {printable(wrong.answer)}")
