"""The law of every export, in every engine: steps that came = steps in rows + left out."""

from pathlib import Path

from tests.adapter.forest import draw
from tests.formats.test_formats import OURS
from tests.store.conftest import Rollout
from tests.store.contract.conftest import Held

from lightning_otel.dataset.certificate import verify

# Branches that share steps, a compaction, two agents, retries, rewards for some, token ids.
DRAWINGS = (
    "calc[ one<same two<more !1 ]",
    "calc[ one<same other<more !.25 ]",
    "plan[ go@exact on<next@exact !.5 ] +side[ x@exact -side ask !ok=1,short=.5",
    "A[ q<w a<q|q|m b<q|q|n !1 ] c",
    "#attempt=2 one@error two !0",
)


def test_every_format_accounts_for_every_step(held: Held, rollout: Rollout, tmp_path: Path) -> None:
    """Each in one place; the certificate says so, and the store agrees."""
    for number, text in enumerate(DRAWINGS):
        ids = {"rollout_id": f"d{number}", "trace_id": f"{number + 90:032x}"}
        held.write(draw(text, **ids, process=f"p{number}", tick=90 * number).spans)
    held.write([span for number in range(2) for span in rollout(number)])
    total = len(held.store.transitions().rows())

    for name in OURS:
        path = tmp_path / f"{name}.jsonl"
        done = held.store.export(name, path, certificate=True)

        assert done.steps == total
        assert done.in_rows == total - sum(done.left_out.values())
        verdicts = verify(path, held.store if name in ("sft", "grpo", "openai-sft") else None)
        assert {verdict.is_right for verdict in verdicts} == {True}, (name, verdicts)
