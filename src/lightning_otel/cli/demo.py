"""``demo``: the whole way from an agent to transitions, offline, in seconds."""

import sys
import time
from typing import TYPE_CHECKING

import click

from lightning_otel.cli.output import counted, print_table, program, shown, suggest

if TYPE_CHECKING:
    from lightning_otel.demo import Outcome
    from lightning_otel.store import Store

_SHOWN_STEPS = 6
_OWN_AGENT = """\
Your own agent, unchanged:
  {0} run -- python your_agent.py
  {0} reward @last 1.0          # or lightning_otel.emit_reward(1.0) in its code
  {0} export triplets -o triplets.jsonl"""


@click.command()
@click.option(
    "--store", metavar="PATH", envvar="LIGHTNING_OTEL_STORE", default=".lightning/demo.duckdb",
    show_default=True, help="Store to write.",
)  # fmt: skip
@click.option(
    "--rollouts", type=click.IntRange(min=1), default=24, show_default=True,
    help="How many tasks the agent works on.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Decides tasks and luck.")
def demo(store: str, rollouts: int, seed: int) -> None:
    """Run the offline demo: a simulated model, a real agent, real spans, real transitions."""
    from lightning_otel.demo import run_agent
    from lightning_otel.store import Store

    started_ns = time.time_ns()
    opened = Store(store)
    click.echo("1. An OpenAI-compatible server with a toy policy starts on this machine.")
    click.echo("2. A plain openai agent with a calculator works on tasks, inside auto_trace():")
    with click.progressbar(
        length=rollouts, label="   rollouts", file=sys.stderr, hidden=not sys.stderr.isatty()
    ) as progress:
        outcomes = run_agent(
            opened, rollouts=rollouts, seed=seed, progress=lambda outcome: progress.update(1)
        )
    _show_spans(opened, started_ns)
    _show_transitions(opened, outcomes)
    _show_rewards(outcomes)
    click.echo(f"\n{(time.time_ns() - started_ns) / 1e9:.1f} s, no key, no network.\n")
    click.echo(_OWN_AGENT.format(program()))
    suggest("ls", store)


def _show_spans(opened: "Store", started_ns: int) -> None:
    (found,) = opened.sql(
        "SELECT count(*) AS spans, count(DISTINCT trace_id) AS traces, "
        "count(*) FILTER (operation = 'chat') AS calls FROM spans WHERE start_ns >= ?",
        [started_ns],
    )
    click.echo(
        f"3. Each span was kept as it ended: {counted(found['spans'], 'span')}, "
        f"{counted(found['calls'], 'call')}, {counted(found['traces'], 'trace')} → {opened.name}"
    )


def _show_transitions(opened: "Store", outcomes: "list[Outcome]") -> None:
    from lightning_otel.adapter.messages import plain_text

    ours = {outcome.rollout_id for outcome in outcomes}
    steps = [step for step in opened.transitions() if step.rollout_id in ours]
    exact = sum(step.capture == "exact" for step in steps)
    click.echo(
        f"4. Spans became {counted(len(steps), 'transition')}, {exact} with the server's own token "
        "ids; the last few:\n"
    )
    rows = [
        {
            "step": step.step,
            "observation": plain_text(step.observation[-1:]),
            "action": plain_text(step.action[:1]),
            "reward": step.reward,
            "done": "yes" if step.done else "no",
            "tokens": f"{len(step.prompt_ids)}→{len(step.response_ids)}",
        }
        for step in steps[-_SHOWN_STEPS:]
    ]
    columns = ("step", "observation", "action", "reward", "done", "tokens")
    print_table(rows, columns, texts=("observation", "action"))


def _show_rewards(outcomes: "list[Outcome]") -> None:
    from lightning_otel.plot import bar, running_mean, sparkline

    rewards = [outcome.reward for outcome in outcomes]
    mean = sum(rewards) / len(rewards)
    click.echo("\n5. Rewards, one character a rollout, and the mean so far:\n")
    click.echo(f"   reward  {sparkline(rewards)}")
    click.echo(f"   mean    {sparkline(running_mean(rewards))}  {mean:.2f}")
    for label, share in (("right", mean), ("wrong", 1 - mean)):
        click.echo(f"   {label}   {bar(share)} {share:.0%}")
    wrong = next((outcome for outcome in outcomes if not outcome.reward), None)
    if wrong is not None:
        click.echo(f"   e.g. {shown(wrong.question)} → {shown(wrong.answer)}")
