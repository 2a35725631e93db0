"""A store of any number of spans, written straight as settled files: what a year of agents leaves.

Each trace is a rollout of ten spans: a root, an agent, four calls of one growing conversation with
a tool's work between them, and a reward. Eight processes take turns. The texts of a trace are its
own; a call's bodies have 2.3 KB on average.
"""

import os
import secrets
from pathlib import Path
from typing import Any

SPANS_A_TRACE = 10
SPANS_A_FILE = 200_000

_TEXTS = """
CREATE OR REPLACE MACRO words(number, name, times) AS
  repeat(md5(name || number) || ' ' || md5(number || name) || ' words of it ', times);
CREATE OR REPLACE MACRO said(speaker, text) AS
  '{"role":"' || speaker || '","parts":[{"type":"text","content":"' || text || '"}]}';
CREATE OR REPLACE MACRO asked(trace, turn) AS
  '{"role":"assistant","parts":[{"type":"tool_call","id":"call_' || trace || '_' || turn
  || '","name":"search","arguments":{"query":"' || words(trace, 'q' || turn, 2) || '"}}]';
CREATE OR REPLACE MACRO told(trace, turn) AS
  '{"role":"tool","parts":[{"type":"tool_call_response","id":"call_' || trace || '_' || turn
  || '","response":"' || words(trace, 'r' || turn, 4) || '"}]}';
CREATE OR REPLACE MACRO past(trace, turn) AS
  CASE WHEN turn > 0 THEN ',' || asked(trace, 0) || '},' || told(trace, 0) ELSE '' END
  || CASE WHEN turn > 1 THEN ',' || asked(trace, 1) || '},' || told(trace, 1) ELSE '' END
  || CASE WHEN turn > 2 THEN ',' || asked(trace, 2) || '},' || told(trace, 2) ELSE '' END;
"""

_SPANS = """
SELECT lpad(to_hex(trace + 1), 32, '0') AS trace_id,
  lpad(to_hex(trace * 10 + place + 1), 16, '0') AS span_id,
  CASE WHEN place = 0 THEN NULL
    ELSE lpad(to_hex(trace * 10 + CASE WHEN place IN (1, 9) THEN 0 ELSE 1 END + 1), 16, '0')
    END AS parent_span_id,
  CASE WHEN place = 0 THEN 'agentlightning.rollout' WHEN place = 1 THEN 'invoke_agent planner'
    WHEN place = 9 THEN 'agentlightning.annotation' WHEN is_call THEN 'chat demo-1'
    ELSE 'execute_tool search' END AS name,
  CASE WHEN is_call THEN 'CLIENT' ELSE 'INTERNAL' END AS kind,
  begin_ns + opened * 100000000 AS start_ns, begin_ns + closed * 100000000 AS end_ns,
  'UNSET' AS status, '' AS status_message,
  CASE WHEN place = 1 THEN 'invoke_agent' WHEN is_call THEN 'chat'
    WHEN place IN (3, 5, 7) THEN 'execute_tool' END AS operation,
  CASE WHEN place = 1 THEN 'planner' END AS agent,
  CASE WHEN is_call THEN 'openai' END AS provider, CASE WHEN is_call THEN 'demo-1' END AS model,
  CASE WHEN is_call THEN 'chatcmpl-' || trace || '-' || turn END AS response_id,
  CASE WHEN is_call THEN 300 + 250 * turn END AS input_tokens,
  CASE WHEN is_call THEN 60 END AS output_tokens,
  'rollout-' || trace AS rollout_id, '1' AS attempt_id,
  CASE WHEN place = 9 THEN (trace % 11) / 10.0 END AS reward,
  '5f1e-1-' || (100 + trace % 8) AS process,
  (trace // 8) * 20 + opened AS sequence, (trace // 8) * 20 + closed AS end_sequence,
  'lightning_otel' AS scope,
  '{"agentlightning.rollout_id":"rollout-' || trace || '","agentlightning.attempt_id":"1"'
  || CASE WHEN is_call THEN ',"gen_ai.operation.name":"chat","gen_ai.provider.name":"openai",'
    || '"openai.api.type":"chat_completions","gen_ai.request.model":"demo-1",'
    || '"gen_ai.request.temperature":0.7,"gen_ai.request.top_p":1.0,'
    || '"gen_ai.request.max_tokens":512,"server.address":"127.0.0.1","server.port":8000,'
    || '"gen_ai.response.id":"chatcmpl-' || trace || '-' || turn
    || '","gen_ai.response.model":"demo-1","gen_ai.response.finish_reasons":["'
    || CASE WHEN turn < 3 THEN 'tool_calls' ELSE 'stop' END
    || '"],"gen_ai.usage.input_tokens":' || (300 + 250 * turn)
    || ',"gen_ai.usage.output_tokens":60,"lightning.resource.version":"prompt@v3"'
  WHEN place = 1 THEN ',"gen_ai.operation.name":"invoke_agent","gen_ai.agent.name":"planner"'
  WHEN place = 9 THEN ',"agentlightning.reward.0.name":"primary",'
    || '"agentlightning.reward.0.value":' || ((trace % 11) / 10.0)
  WHEN place > 1 THEN ',"gen_ai.operation.name":"execute_tool","gen_ai.tool.name":"search"'
  ELSE '' END || '}' AS attributes,
  '[]' AS events, '[]' AS links, '{"service.name":"agent","host.name":"one"}' AS otel_resource,
  CASE WHEN is_call THEN '[' || said('system', 'You plan. ' || words(7, 'rules', 4)) || ','
    || said('user', words(trace, 'task', 4)) || past(trace, turn) || ']' END AS input_messages,
  CASE WHEN is_call THEN '[' || CASE WHEN turn < 3 THEN asked(trace, turn)
    || ',"finish_reason":"tool_calls"}]' ELSE left(said('assistant', words(trace, 'end', 4)), -1)
    || ',"finish_reason":"stop"}]' END END AS output_messages,
  NULL::VARCHAR AS system_instructions,
  CASE WHEN is_call THEN '[{"type":"function","name":"search","description":"Look it up."}]' END
    AS tool_definitions,
  NULL::VARCHAR AS prompt_token_ids, NULL::VARCHAR AS response_token_ids,
  NULL::VARCHAR AS response_logprobs
FROM (
  SELECT *, place IN (2, 4, 6, 8) AS is_call, (place - 2) // 2 AS turn,
    1700000000000000000 + trace * 250000000 AS begin_ns,
    CASE place WHEN 0 THEN 0 WHEN 1 THEN 1 WHEN 9 THEN 17 ELSE 2 * (place - 1) END AS opened,
    CASE place WHEN 0 THEN 19 WHEN 1 THEN 16 WHEN 9 THEN 18 ELSE 2 * place - 1 END AS closed
  FROM (SELECT unnest(range({low}, {high})) AS trace), (SELECT unnest(range(10)) AS place)
)
"""


def write_store(path: Path, spans: int) -> int:
    """Make a store of about so many spans, unless it stands there; gives how many bytes it has."""
    import duckdb

    from lightning_otel.store.gist import with_gist
    from lightning_otel.store.layout import Layout, Manifest
    from lightning_otel.store.parquet import described
    from lightning_otel.store.schema import COLUMNS
    from lightning_otel.store.source import ensure_catalogue

    layout = Layout(path)
    if not layout.exists():
        layout.create()
        files: list[Any] = []
        with duckdb.connect() as con:
            con.execute("SET memory_limit = '2GB'")
            con.execute("SET enable_progress_bar = false")
            con.execute(_TEXTS)
            traces = max(1, spans // SPANS_A_TRACE)
            step = SPANS_A_FILE // SPANS_A_TRACE
            for low in range(0, traces, step):
                high = min(low + step, traces)
                made = layout.data / f"spans-{low:019d}-{secrets.token_hex(4)}.parquet"
                query = _SPANS.replace("{low}", str(low)).replace("{high}", str(high))
                spans = with_gist(f"({query})", COLUMNS)
                con.execute(
                    f"COPY (SELECT * FROM ({spans}) ORDER BY trace_id, agent, start_ns) "
                    f"TO '{made}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 3, "
                    "ROW_GROUP_SIZE 20480, KV_METADATA {schema: '1'})"
                )
                os.chmod(made, 0o600)
                found = con.execute(
                    f"SELECT count(*), min(start_ns), max(start_ns) FROM '{made}'"
                ).fetchone()
                assert found is not None
                files.append(described(made, *found))
        layout.write_manifest(Manifest(files=tuple(files)))
        ensure_catalogue(layout)
    return sum(file.size_bytes for file in layout.read_manifest().files)
