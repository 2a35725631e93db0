"""Attempts that plainly go straight on, told from others by SQL over narrow rows alone.

One call comes after the other, each continues the last of its agent, and every span lies within its
parent and beside its siblings. Then nothing is left to decide: the adapter's general way gives the
same, which is a test. Here no Python object stands for a span; what the attributes of many calls
say alike is read once. Whatever is not plainly so is not decided here.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from lightning_otel.adapter import facts
from lightning_otel.adapter.exactness import LENGTH, NO_IDS
from lightning_otel.dataset.exact import FETCH, check_tokens
from lightning_otel.formats.transition_rows import NARROW_COLUMNS
from lightning_otel.store.gist import CALL, KIND, ODD, OTHER, RECEIVED, REWARD
from lightning_otel.store.layout import Layout
from lightning_otel.store.reader import Reader
from lightning_otel.store.sql import quoted
from lightning_otel.types import Report, Transition

if TYPE_CHECKING:
    pass

_ROUNDS: Final = 16
"""How far up a step's agent is looked for, beyond the first ancestors."""
_NO_ID: Final = quoted("0" * 16)

_JUDGED: Final = f"""
CREATE OR REPLACE TABLE judged AS
SELECT number, count(*) AS spans, any_value(attempt) AS attempt, any_value(trace_id) AS trace_id,
  coalesce(min(home) = max(home) AND min(sequence) >= 0 AND min(end_sequence) >= 0
    AND count(process) = count(*) AND count(end_ns) = count(*)
    AND count(end_sequence) = count(*), false) AS is_sound,
  is_sound AND coalesce(bool_and({KIND} <> {ODD}
      AND (gist_kind & {RECEIVED} = 0 OR {{are_received}})
      AND ({KIND} = {OTHER} OR gist_facts IS NOT NULL)
      AND sequence <= end_sequence AND span_id <> '' AND span_id <> {_NO_ID}), false) AS is_plain
FROM (SELECT *, hash(trace_id, process, attempt) AS home FROM chosen) GROUP BY number"""

_APART: Final = """
UPDATE judged SET is_sound = false, is_plain = false WHERE number IN (FROM apart)"""

# Where each span stands under its parent, if it has one.
_UNDER: Final = f"""
CREATE OR REPLACE TABLE under AS
SELECT one.spot, one.number, one.key, one.began, one.ended, one.kind, one.agent, one.is_tool,
  above.spot AS above, one.parent IS NULL
    OR coalesce(above.began < one.began AND one.ended < above.ended, false) AS is_within
FROM (
    SELECT rowid AS spot, number, sequence AS began, end_sequence AS ended, {KIND} AS kind, agent,
      is_tool, hash(span_id) AS key,
      CASE WHEN parent_span_id <> '' THEN hash(parent_span_id) END AS parent
    FROM chosen SEMI JOIN (FROM judged WHERE is_plain) AS judged USING (number)
  ) AS one
  LEFT JOIN (SELECT rowid AS spot, number, sequence AS began, end_sequence AS ended,
    hash(span_id) AS key FROM chosen) AS above
    ON above.number = one.number AND above.key = one.parent"""

_TANGLED: Final = f"""
SELECT number FROM under GROUP BY number, key HAVING count(*) > 1
UNION ALL SELECT number FROM under WHERE NOT is_within
UNION ALL SELECT number FROM (SELECT number, began,
  lag(ended) OVER (PARTITION BY number, above ORDER BY began) AS last_ended FROM under)
  WHERE last_ended >= began
UNION ALL SELECT number FROM (SELECT number, kind, began,
    max(CASE WHEN is_tool THEN ended END) OVER (PARTITION BY number ORDER BY began) AS tool_ended
    FROM under WHERE is_tool OR kind = {CALL})
  WHERE kind = {CALL} AND tool_ended > began"""

# An agent acts in all that lies within it, until another one does.
_STEPS: Final = """
CREATE OR REPLACE TABLE steps AS
SELECT one.spot, one.number, one.began, one.ended, one.kind,
  coalesce(one.agent, a.agent, b.agent, c.agent) AS agent,
  CASE WHEN coalesce(one.agent, a.agent, b.agent, c.agent) IS NULL THEN c.above END AS above
FROM (FROM under WHERE kind > 0) AS one SEMI JOIN (FROM judged WHERE is_plain) USING (number)
  LEFT JOIN under AS a ON a.spot = one.above AND one.agent IS NULL
  LEFT JOIN under AS b ON b.spot = a.above AND a.agent IS NULL
  LEFT JOIN under AS c ON c.spot = b.above AND b.agent IS NULL"""
_UP: Final = """
UPDATE steps SET agent = further.agent,
  above = CASE WHEN further.agent IS NULL THEN further.above END
FROM under AS further WHERE further.spot = steps.above"""

_WALK: Final = f"""
CREATE OR REPLACE TABLE walk AS
SELECT number, spot, kind, agent, began, above,
  lag(ended) OVER (PARTITION BY number ORDER BY began) >= began AS is_inside,
  last_value(call IGNORE NULLS) OVER (PARTITION BY number ORDER BY began
    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS call_before,
  last_value(call IGNORE NULLS) OVER own AS own_before, count(call) OVER own AS step
FROM (SELECT number, spot, kind, coalesce(agent, '') AS agent, began, ended, above,
  CASE WHEN kind = {CALL} THEN spot END AS call FROM steps)
WINDOW own AS (PARTITION BY number, agent ORDER BY began
  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"""

# A reward judges the latest call of its agent before it, and of everyone where it has none.
_GIVEN: Final = f"""
CREATE OR REPLACE TABLE given AS
SELECT walk.number, CASE WHEN walk.agent = '' THEN call_before ELSE own_before END AS call,
  gist_facts AS facts
FROM (FROM walk WHERE kind = {REWARD}) AS walk JOIN chosen ON chosen.rowid = spot"""

_SAID: Final = f"""
CREATE OR REPLACE TABLE said AS
SELECT walk.number, spot, walk.agent, step, began, own_before, response_id, gist_facts AS facts,
  gist_before AS before, gist_after AS after
FROM (FROM walk WHERE kind = {CALL}) AS walk JOIN chosen ON chosen.rowid = spot"""

# Of a mixture of conversations begun and continued only the messages tell what happened.
_CROOKED: Final = """
SELECT number FROM walk WHERE is_inside OR above IS NOT NULL
UNION ALL SELECT number FROM given WHERE call IS NULL
UNION ALL SELECT any_value(number) FROM given GROUP BY call HAVING count(*) > 1
UNION ALL SELECT number FROM said GROUP BY number, response_id HAVING count(*) > 1
UNION ALL SELECT one.number FROM said AS one JOIN said AS last ON last.spot = one.own_before
  WHERE NOT CASE WHEN one.before IS NULL THEN last.before IS NULL
    ELSE one.before = last.after AND (one.step = 1 OR last.before IS NOT NULL) END"""

_EXCLUDE: Final = """
UPDATE judged SET is_plain = false WHERE is_plain AND number IN ({odd})"""

_MADE: Final = f"""
SELECT part.rollout, judged.attempt, said.agent, said.step, next.spot IS NULL AS done,
  said.response_id, judged.trace_id, chosen.span_id, chosen.start_ns, chosen.end_ns,
  chosen.input_tokens, chosen.output_tokens, coalesce(tokens.capture, 'text') AS capture,
  coalesce(tokens.inexact, {quoted(NO_IDS)}) AS inexact, call_facts.place AS facts,
  reward_facts.place AS rewards, said.number, said.began
FROM said JOIN (FROM judged WHERE is_plain) AS judged USING (number)
  JOIN part ON part.number = said.number
  JOIN chosen ON chosen.rowid = said.spot
  JOIN call_facts ON call_facts.agent = said.agent AND call_facts.facts = said.facts
  LEFT JOIN said AS next ON next.own_before = said.spot
  LEFT JOIN tokens ON tokens.spot = said.spot
  LEFT JOIN given ON given.call = said.spot
  LEFT JOIN reward_facts ON reward_facts.facts = given.facts"""
_PLACES: Final = (
    "rollout, attempt, agent, step, done, response_id, trace_id, span_id, start_ns, end_ns, "
    "input_tokens, output_tokens, capture, inexact, facts, rewards"
)
_VALUES: Final[Mapping[str, str]] = {
    "rollout_id": "rollout",
    "attempt_id": "attempt",
    "branch": "0",
    "reward": "reward_facts.reward",
    "rewards": "coalesce(reward_facts.rewards, '{}')",
    "is_shared": "false",
    "resource_version": "call_facts.resource_version",
    "resources": "call_facts.resources",
    "model": "call_facts.model",
    "finish_reason": "call_facts.finish_reason",
    "sampling": "call_facts.sampling",
    "group_id": "''",
    "advantage": "NULL",
    "weight": "1.0",
    "mode": "call_facts.mode",
}
"""Columns of the rows that are not fetched as they are."""


class StepCount(NamedTuple):
    """Transitions of a rollout that were made with the same resources.

    Attributes:
        rollout_id: The rollout.
        resources: Version of each resource, by its name.
        steps: How many they are.
        rewarded: How many of them have a reward.
    """

    rollout_id: str
    resources: Mapping[str, str]
    steps: int
    rewarded: int


class Plain:
    """The plain attempts of the table ``chosen``, which has the rows of ``part``."""

    def __init__(self, con: Reader, layout: Layout, *, received: bool) -> None:
        """Tell them from the others: the table ``judged`` says which they are.

        Args:
            con: The connection with the tables.
            layout: The store's paths.
            received: Whether spans count that came over the network or were imported.
        """
        self._con = con
        self._calls: list[facts.CallFacts] = []
        self._rewards: list[Mapping[str, float]] = []
        con.execute(_JUDGED.format(are_received=str(received).lower()))
        con.execute(_APART)
        con.execute(_UNDER)
        con.execute(_EXCLUDE.format(odd=_TANGLED))
        con.execute(_STEPS)
        for _ in range(_ROUNDS):
            if not con.execute("SELECT 1 FROM steps WHERE above IS NOT NULL LIMIT 1").fetchall():
                break
            con.execute(_UP)
        for statement in (_WALK, _GIVEN, _SAID, _EXCLUDE.format(odd=_CROOKED)):
            con.execute(statement)
        self._read_calls()
        self._read_rewards()
        self._tally = check_tokens(con, layout, self._calls)
        con.execute(_EXCLUDE.format(odd="SELECT number FROM few ANTI JOIN tokens USING (spot)"))

    def _read_calls(self) -> None:
        """Read what calls say: the table ``call_facts``."""
        rows = self._con.execute("SELECT DISTINCT agent, facts FROM said").fetchall()
        known, odd = [], []
        for agent, text in rows:
            found = facts.call_facts(text, agent)
            if found is None:
                odd.append((agent, text))
                continue
            known.append((agent, text, len(self._calls), found))
            self._calls.append(found)
        columns = [
            [each[0] for each in known],
            [each[1] for each in known],
            [each[2] for each in known],
            *([getattr(each[3], name) for each in known] for name in _TEXTS),
            *([_json(getattr(each[3], name)) for each in known] for name in _OBJECTS),
        ]
        self._hold("call_facts", ("agent", "facts", "place", *_TEXTS, *_OBJECTS), columns)
        if odd:
            agents, texts = zip(*odd, strict=True)
            query = (
                "SELECT number FROM said JOIN (SELECT unnest(?::VARCHAR[]) AS agent, "
                "unnest(?::VARCHAR[]) AS facts) AS odd USING (agent, facts)"
            )
            self._con.execute(_EXCLUDE.format(odd=query), [list(agents), list(texts)])

    def _read_rewards(self) -> None:
        """Read what rewards say: the table ``reward_facts``."""
        rows = self._con.execute("SELECT DISTINCT facts FROM given").fetchall()
        texts, odd = [], []
        for (text,) in rows:
            found = facts.reward_facts(text)
            if found is None:
                odd.append(text)
                continue
            texts.append(text)
            self._rewards.append(found)
        columns = [
            texts,
            list(range(len(texts))),
            [_json(each) for each in self._rewards],
            [next(iter(each.values())) for each in self._rewards],
        ]
        self._hold("reward_facts", ("facts", "place", "rewards", "reward"), columns)
        if odd:
            query = "SELECT number FROM given WHERE facts IN (SELECT unnest(?::VARCHAR[]))"
            self._con.execute(_EXCLUDE.format(odd=query), [odd])

    def _hold(self, name: str, columns: tuple[str, ...], values: list[list[Any]]) -> None:
        kinds = {"place": "BIGINT", "reward": "DOUBLE"}
        lists = ", ".join(
            f"unnest(?::{kinds.get(column, 'VARCHAR')}[]) AS {column}" for column in columns
        )
        self._con.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT {lists}", values)

    def report(self) -> Report:
        """The funnel of the plain attempts."""
        spans, rollouts = self._one("SELECT sum(spans), count(*) FROM judged WHERE is_plain")
        only = "SEMI JOIN (FROM judged WHERE is_plain) AS judged USING (number)"
        (calls,) = self._one(f"SELECT count(*) FROM said {only}")
        # Of those with tokens all is tallied.
        texts, cut = self._one(
            "SELECT count(*), count(*) FILTER (finish_reason = 'length') FROM said "
            f"JOIN call_facts USING (agent, facts) {only} ANTI JOIN few USING (spot)"
        )
        (rewarded,) = self._one(f"SELECT count(*) FROM given {only}")
        exact, inexact, notes = self._tally
        return Report(
            spans=int(spans or 0),
            rollouts=rollouts,
            calls=calls,
            transitions=calls,
            exact=exact,
            rewards=rewarded,
            rewards_placed=rewarded,
            rewarded=rewarded,
            inexact=_counted(inexact, NO_IDS, texts),
            notes=_counted(notes, LENGTH, cut),
        )

    def _one(self, query: str) -> tuple[Any, ...]:
        row = self._con.execute(query).fetchone()
        assert row is not None
        return tuple(row)

    def transitions(self) -> Iterator[Transition]:
        """Their transitions, in the order of the rollouts and then of the calls."""
        calls, rewards = self._calls, self._rewards
        cursor = self._con.cursor()
        cursor.execute(f"SELECT {_PLACES} FROM ({_MADE}) ORDER BY number, began")
        while rows := cursor.fetchmany(FETCH):
            for row in rows:
                given = row[15]
                named = None if given is None else rewards[given]
                yield facts.transition(row, calls[row[14]], named)

    def counted(self) -> Iterator[StepCount]:
        """How many they are, by rollout and what they were made with, in the order of both."""
        rows = self._con.execute(
            "SELECT rollout, facts, count(*), count(rewards) "
            f"FROM ({_MADE}) GROUP BY number, rollout, facts ORDER BY number, min(began)"
        ).fetchall()
        for rollout, place, steps, rewarded in rows:
            yield StepCount(rollout, self._calls[place].resources, steps, rewarded)

    def put(self, table: str) -> None:
        """Append their rows to a table with the columns of transitions without bodies."""
        values = ", ".join(_VALUES.get(name, f"made.{name}") for name in NARROW_COLUMNS)
        self._con.execute(
            f"INSERT INTO {table} SELECT {values} FROM ({_MADE}) AS made "
            "JOIN call_facts ON call_facts.place = made.facts "
            "LEFT JOIN reward_facts ON reward_facts.place = made.rewards ORDER BY number, began"
        )


_TEXTS: Final = ("resource_version", "mode", "model", "finish_reason")
_OBJECTS: Final = ("resources", "sampling")


def _counted(counts: Mapping[str, int], name: str, more: int) -> dict[str, int]:
    """The counts with more of one of them."""
    return {**counts, name: counts.get(name, 0) + more} if more else dict(counts)


def _json(found: Mapping[str, Any]) -> str:
    return orjson.dumps(found).decode()
