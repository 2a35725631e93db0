"""``demo``: the whole way from an agent to transitions, offline, in seconds."""

import sys
import time
from typing import TYPE_CHECKING

import click

from lightning_otel.cli.output import print_rows, shown

if TYPE_CHECKING:
    from lightning_otel.demo import Outcome
    from lightning_otel.store import Store

_OWN_AGENT = """\
Your own agent, unchanged:
  lightning-otel run -- python your_agent.py
  lightning-otel reward @last 1.0          # or lightning_otel.emit_reward(1.0) in its code
  lightning-otel export triplets -o triplets.jsonl"""


@click.command()
@click.option(
    "--store", metavar="PATH", default=".lightning/demo.duckdb", show_default=True,
    help="Store to write.",
)  # fmt: skip
@click.option("--rollouts", default=24, show_default=True, help="How many tasks the agent solves.")
@click.option("--seed", default=0, show_default=True, help="Decides tasks and luck.")
def demo(store: str, rollouts: int, seed: int) -> None:
    """Run the offline demo: a simulated model, a real agent, real spans, real transitions."""
    from lightning_otel.demo import run_agent
    from lightning_otel.store import Store

    started = time.monotonic()
    opened = Store(store)
    click.echo("1. An OpenAI-compatible server with a toy policy starts on this machine.")
    click.echo("2. A plain openai agent with a calculator works on tasks, inside auto_trace():")
    with click.progressbar(length=rollouts, label="   rollouts", file=sys.stderr) as progress:
        outcomes = run_agent(
            opened, rollouts=rollouts, seed=seed, progress=lambda outcome: progress.update(1)
        )
    _show_spans(opened)
    _show_transitions(opened)
    _show_rewards(outcomes)
    click.echo(f"\n{time.monotonic() - started:.1f} s, no key, no network.\n")
    click.echo(_OWN_AGENT)


def _show_spans(opened: "Store") -> None:
    counts = next(
        iter(
            opened.sql(
                "SELECT count(*) AS spans, count(DISTINCT trace_id) AS traces, "
                "count(*) FILTER (operation = 'chat') AS calls FROM spans"
            )
        )
    )
    click.echo(
        f"3. Each span was kept as it ended: {counts['spans']} spans, {counts['calls']} calls, "
        f"{counts['traces']} traces → {opened.name}"
    )


def _show_transitions(opened: "Store") -> None:
    from lightning_otel.adapter.messages import plain_text

    steps = list(opened.transitions())
    exact = sum(step.capture == "exact" for step in steps)
    click.echo(
        f"4. Spans became {len(steps)} transitions, {exact} with the server's own token ids:\n"
    )
    rows = [
        {
            "step": step.step,
            "observation": plain_text(step.observation[-1:]),
            "action": plain_text(step.action[:1]),
            "reward": step.reward,
            "done": step.done,
            "tokens": f"{len(step.prompt_ids)}→{len(step.response_ids)}",
        }
        for step in steps[-6:]
    ]
    columns = ("step", "observation", "action", "reward", "done", "tokens")
    print_rows(rows, columns, as_table=True, widths={"observation": 20, "action": 38})


def _show_rewards(outcomes: "list[Outcome]") -> None:
    from lightning_otel.plot import bar, running_mean, sparkline

    rewards = [outcome.reward for outcome in outcomes]
    mean = sum(rewards) / max(1, len(rewards))
    click.echo("\n5. Rewards, one character a rollout, and the mean so far:\n")
    click.echo(f"   reward  {sparkline(rewards)}")
    click.echo(f"   mean    {sparkline(running_mean(rewards))}  {mean:.2f}")
    for label, share in (("right", mean), ("wrong", 1 - mean)):
        click.echo(f"   {label}   {bar(share)} {share:.0%}")
    wrong = next((outcome for outcome in outcomes if not outcome.reward), None)
    if wrong is not None:
        click.echo(f"   e.g. {shown(wrong.question)} → {shown(wrong.answer, 60)}")
