"""``reward``, ``apply-rewards``: rewards of what is stored."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_otel.cli.maintain import settle_pending_feedback
from lightning_otel.cli.names import ID, REWARD
from lightning_otel.cli.options import (
    Form,
    find_rollout_id,
    format_option,
    load_named,
    rollout_option,
    store_option,
    when_options,
)  # fmt: skip
from lightning_otel.cli.output import (
    count_noun,
    print_json,
    print_note,
    print_rows,
    progress_bar,
    suggest,
)  # fmt: skip
from lightning_otel.dataset import Store
from lightning_otel.types.values import check_finite

if TYPE_CHECKING:
    from lightning_otel.rewards import Applied, Judgement
    from lightning_otel.rewards.agreement import Agreement

_MOST_NAMED: Final = 5
_JUDGEMENT: Final = ("rollout_id", "attempt_id", "agent", "rewards", "failure")
_COUNTS: Final = (
    "version", "rewards", "mean", "attempts", "held", "changed", "none", "running", "crashed",
    "stepless", "failed",
)  # fmt: skip


# A negative number looks like an option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="ID", type=ID)
@click.argument("value", type=float, required=False)
@click.option(
    "--name", type=REWARD, default="primary", help="Name of the reward.", show_default=True
)
@click.option("--retract", is_flag=True, help="Retract the reward whose span ID names.")
@store_option
def reward(target: str, value: float | None, name: str, retract: bool, store: str | None) -> None:
    """Add a reward to a rollout, trace, span or response, by a prefix of its id or @last.

    For example: reward @last 1.0
    """
    from lightning_otel import rewards
    from lightning_otel.rewards.feedback import write_spans
    from lightning_otel.tracing.emitters import reward_span
    from lightning_otel.views.stored_trace import read_trace

    if retract is (value is not None):
        raise click.UsageError(
            "--retract takes no VALUE." if retract else "Missing argument 'VALUE'."
        )
    if value is None:
        retracted = rewards.retract(Store(store), target)
        print_note(
            f"retracted {retracted['name']} = {retracted['value']:g}, span {retracted['span_id']}"
        )
        suggest(f"show {retracted['rollout_id']} --transitions", store)
        return
    check_finite("the reward", value)
    opened = Store(store)
    noun, whole = opened.find(target)
    rollout_id = opened.rollout_of(noun, whole)
    links = {"span": "span_id", "response": "response_id"}
    link = {links[noun]: whole} if noun in links else {}
    span = reward_span({name: value}, rollout_id=rollout_id, **link)
    write_spans(opened, [span])
    print_note(f"{name} = {value:g} on {noun} {whole}")
    for row in read_trace(opened, "rollout", rollout_id).rows:
        if row.span.span_id == span.span_id and row.left_out:
            print_note(f"  it is kept and counts for no step: {row.left_out}")
    suggest(f"show {rollout_id} --transitions", store)


@click.command("apply-rewards")
@click.argument("function", metavar="FILE.py:FUNCTION|JUDGE")
@click.option("--model", metavar="NAME", help="The chat model that judges by a rubric.")
@click.option("--base-url", metavar="URL", help="That model's server, if it is not OpenAI's.")
@click.option(
    "--labels",
    "label",
    metavar="NAME",
    type=REWARD,
    help="Compare with this reward, which people gave.",
)
@click.option("--with-failed", is_flag=True, help="Score rollouts that failed, too.")
@rollout_option
@when_options
@click.option("--version", "version", default="", metavar="NAME",
              help="Score all rollouts again, as FUNCTION@NAME.")  # fmt: skip
@click.option("--dry-run", "is_dry_run", is_flag=True,
              help="Print the scores and store nothing.")  # fmt: skip
@format_option
@store_option
def apply_rewards(
    function: str, model: str | None, base_url: str | None, label: str | None,
    rollout: str | None, is_dry_run: bool, form: Form | None, store: str | None, **keywords: Any,
) -> int:  # fmt: skip
    """Score every ended rollout that FUNCTION or JUDGE has not scored yet.

    \b
    JUDGE is one of
      exact:PATH              1 if the answer is what stands in the task at PATH
      regex:PATTERN           1 if the pattern matches in the answer
      json-schema:FILE.json   1 if the answer is JSON that the schema allows
      rubric:FILE.md          0 to 1, by a chat model (--model)

    FUNCTION declares what it needs as parameters: task, answer, trajectory, trajectories, rewards,
    rollout. It returns a number, a dict of named numbers, or None. A module name works in place of
    FILE.py. The exit code is 1 if it failed for any rollout; the other rewards are stored.
    """  # noqa: D301  # click takes the character, which leaves the lines below it as they are
    from lightning_otel.rewards import agreement, judges
    from lightning_otel.rewards import apply_rewards as apply

    rows: list[Mapping[str, Any]] = []
    failures: list[str] = []

    def take(judgement: "Judgement") -> None:
        if judgement.failure and len(failures) < _MOST_NAMED:
            failures.append(f"  rollout {judgement.rollout_id}: {judgement.failure}")
        if is_dry_run:
            row = judgement._asdict()
            rows.append({"rewards": row.pop("values"), **row})

    judge = judges.read_judge(function, model=model, base_url=base_url) or load_named(function)
    opened = Store(store)
    rollout_id = find_rollout_id(opened, rollout)
    if not is_dry_run:
        settle_pending_feedback(opened)
    with progress_bar("attempts") as progress:
        applied = apply(
            opened, judge, is_dry_run=is_dry_run, told=take, progress=progress,
            rollout_id=rollout_id, **keywords,
        )  # fmt: skip
    compared = agreement.read_agreement(opened, applied.reward_name, label) if label else None
    if form == "json":
        counts = {name: getattr(applied, name) for name in _COUNTS}
        more = {"agreement": asdict(compared)} if compared else {}
        print_json({
            "function": applied.name, **counts, "dry_run": is_dry_run, "judgements": rows, **more,
        })  # fmt: skip
    elif is_dry_run:
        print_rows(rows, _JUDGEMENT, form=form)
    for line in (*_word_results(applied, is_dry_run=is_dry_run), *failures):
        print_note(line)
    if compared:
        print_note(_word_agreement(compared))
    if applied.rewards and not is_dry_run:
        suggest("export triplets", store)
    return 1 if applied.failed else 0


def _word_agreement(compared: "Agreement") -> str:
    if not compared.rollouts:
        return f"  no rollout has both this reward and {compared.label}"
    numbers = {
        "κ": compared.kappa,
        "rank correlation": compared.correlation,
        "mean difference": compared.difference,
    }
    words = (f"{name} {value:.2f}" for name, value in numbers.items() if value is not None)
    of = f"{compared.same} of {count_noun(compared.rollouts, 'rollout')}"
    return ", ".join([f"  agrees with {compared.label} on {of}", *words])


def _word_results(applied: "Applied", *, is_dry_run: bool) -> Iterator[str]:
    mean = "" if applied.mean is None else f", mean {applied.mean:.3g}"
    where = " (dry run: nothing was kept)" if is_dry_run else ""
    yield (
        f"⚡ {applied.reward_name}: {count_noun(applied.rewards, 'reward')}{mean}, of "
        f"{count_noun(applied.attempts, 'attempt')}{where}"
    )
    for count, words in (
        (applied.held, "judged by it before"),
        (
            applied.changed,
            "of them when its text was another; --version 2 judges all anew, beside those",
        ),
        (applied.none, "of which it said nothing"),
        (applied.running, "still running; do it again later"),
        (applied.crashed, "that failed, left alone; --with-failed judges them"),
    ):
        if count:
            yield f"  {count} {words}"
    for kind, number in applied.failed.most_common():
        yield f"  failed: {number} × {kind}"
    if applied.stepless:
        yield (
            f"  {applied.stepless} without a step, and so not judged; emit_observation and "
            "emit_action make one"
        )
    if not applied.attempts:
        yield "  no rollout here has a transition; see: lightning-otel stats"
