"""Makes the span fixtures: what each instrumentor really records of one and the same conversation.

    python tests/data/make_spans.py [SOURCE …] [--env DIR]

Each source is installed into an environment of its own and runs `conversation.py` against a demo
server with a policy that depends on nothing but the last message; its spans are written to
`tests/data/spans/SOURCE.jsonl`. What differs from one machine or run to the next (ids of responses,
ports, host, user, paths, times of day) is replaced, everything else is as it was recorded.
"""

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_otel.demo.policy import Reply, ToyPolicy
from lightning_otel.demo.server import DemoServer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SPANS = HERE / "spans"
_BEGAN_NS = 1_760_000_000_000_000_000
_KEPT_RESOURCE = ("service.name", "telemetry.sdk.", "agentlightning.")
_OPENAI = ("openai==3.52.0", "httpx<1")
_SDK = (
    "opentelemetry-api==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-instrumentation==0.66b2",
    "opentelemetry-semantic-conventions==0.66b2",
)


class Source(NamedTuple):
    """What a source needs.

    Attributes:
        bare: Installed last and without what they ask for.
    """

    requirements: Sequence[str]
    settings: Mapping[str, str] = {}
    bare: Sequence[str] = ()


_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
SOURCES: Mapping[str, Source] = {
    "lightning": Source((*_OPENAI, *_SDK, "-e", str(ROOT))),
    "current": Source(
        (
            *_OPENAI,
            *_SDK,
            "opentelemetry-util-genai==1.3b0",
            "opentelemetry-instrumentation-genai-openai==1.3b0",
        ),
        {_CONTENT: "SPAN_ONLY"},
    ),
    "legacy": Source(
        (
            "openai==1.66.5",
            "httpx<0.28",
            "opentelemetry-sdk==1.31.1",
            "opentelemetry-instrumentation-openai-v2==2.1b0",
        ),
        {_CONTENT: "true"},
    ),
    "openinference": Source((*_OPENAI, *_SDK, "openinference-instrumentation-openai==0.1.66")),
    "openllmetry": Source(
        (
            *_OPENAI,
            *_SDK,
            "opentelemetry-instrumentation-openai==0.62.4",
            "opentelemetry-instrumentation-logging==0.66b2",
            "opentelemetry-exporter-otlp-proto-grpc==1.45.2",
            "opentelemetry-exporter-otlp-proto-http==1.45.2",
            "opentelemetry-semantic-conventions-ai==0.5.1",
            *("aiohttp", "colorama", "cuid", "deprecated", "jinja2", "tenacity"),
        ),
        {"TRACELOOP_TRACE_CONTENT": "true"},
        # The SDK asks for every instrumentor of the family, which no one set of versions satisfies.
        bare=("traceloop-sdk==0.62.4", "opentelemetry-instrumentation-threading==0.66b1"),
    ),
    "flattened": Source(
        (
            "openai==1.66.5",
            "httpx<0.28",
            "opentelemetry-sdk==1.31.1",
            "opentelemetry-instrumentation-openai==0.40.14",
        ),
        {"TRACELOOP_TRACE_CONTENT": "true"},
    ),
    "agentops": Source((*_OPENAI, *_SDK, "agentops==0.4.21")),
    "litellm": Source(
        (
            "litellm==1.106.2",
            "mcp==2.3.0",  # without it LiteLLM cannot take tools
            "openai==2.54.0",
            "opentelemetry-sdk==1.45.2",
            "opentelemetry-exporter-otlp==1.45.2",
        ),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "USE_OTEL_LITELLM_REQUEST_SPAN": "true"},
    ),
    "agentlightning": Source(
        (
            "agentlightning==0.3.0",
            "agentops==0.4.21",
            "openai==2.54.0",
            "httpx<1",
            "opentelemetry-api==1.44.0",
            "opentelemetry-sdk==1.44.0",
            "opentelemetry-exporter-otlp==1.44.0",
        ),
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "AGENTOPS_LOG_LEVEL": "CRITICAL"},
    ),
}


class Steady(ToyPolicy):
    """The toy policy made independent of how a client words its request."""

    def __init__(self) -> None:
        super().__init__({"copy": 100.0})

    def reply(self, body: Mapping[str, Any], rng: random.Random) -> Reply:
        """The same answer, with the same ids, to the same last message."""
        last = json.dumps((body.get("messages") or [{}])[-1].get("content"))
        return super().reply(body, random.Random(last))


def environment(folder: Path, name: str, source: Source) -> Path:
    """The Python of a virtual environment that holds a source; made if it is not there."""
    home = folder.resolve() / name
    python, stamp = home / "bin" / "python", home / "requirements.sha256"
    wanted = "\n".join([sys.version, *source.requirements, *source.bare])
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        sys.stderr.write(f"making the environment {home}\n")
        venv.create(home, clear=True, with_pip=True)
        install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, *source.requirements], check=True)
        if source.bare:
            subprocess.run([*install, "--no-deps", *source.bare], check=True)
        stamp.write_text(digest)
    return python


def record(name: str, python: Path, scratch: Path) -> list[dict[str, Any]]:
    """The spans of one conversation under one source, cleaned."""
    written = scratch / f"{name}.jsonl"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "LIGHTNING_"))}
    store = {"FIXTURE_STORE": str(scratch / "store" / "traces.duckdb")}
    with DemoServer(Steady()) as server:
        subprocess.run(
            [python, HERE / "conversation.py", name, server.base_url, written],
            env={**inherited, **SOURCES[name].settings, **store},
            cwd=scratch,
            check=True,
            timeout=300,
        )
        answers = [str(exchange.response_id) for exchange in server.log]
        address = server.base_url.removeprefix("http://").removesuffix("/v1")
    text = written.read_text(encoding="utf-8")
    for number, response_id in enumerate(answers):
        text = text.replace(response_id, f"chatcmpl-{number + 1:024d}")
    text = text.replace(address, "127.0.0.1:8000").replace(str(ROOT), "/project")
    text = text.replace(str(python.parent.parent), "/environment")
    port = address.rpartition(":")[2]
    text = re.sub(rf'("server\.port": ){port}\b', r"\g<1>8000", text)
    text = re.sub(r"(created\W{1,5}\s*)\d{10}\b", r"\g<1>1760000000", text)
    text = re.sub(r"\w{3}, \d\d \w{3} \d{4} [\d:]{8} GMT", "Thu, 09 Oct 2025 08:53:20 GMT", text)
    return _shifted([json.loads(line) for line in text.splitlines()])


def _shifted(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The spans as if they had begun at a fixed instant, without what tells of the machine."""
    spans.sort(key=lambda span: (span["start_ns"], span["span_id"]))
    offset = _BEGAN_NS - spans[0]["start_ns"]
    for span in spans:
        span["start_ns"] += offset
        span["end_ns"] += offset
        for event in span["events"]:
            event["time_ns"] += offset
        span["otel_resource"] = {
            key: value
            for key, value in sorted(span["otel_resource"].items())
            if key.startswith(_KEPT_RESOURCE)
        }
    return spans


def main() -> None:
    """Record the sources named, or all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=", ".join(SOURCES))
    parser.add_argument(
        "--env",
        type=Path,
        default=Path(tempfile.gettempdir()) / "lightning-otel-fixtures",
        help="where the environments are made and kept (default: %(default)s)",
    )
    options = parser.parse_args()
    SPANS.mkdir(exist_ok=True)
    for name in options.sources or SOURCES:
        python = environment(options.env, name, SOURCES[name])
        with tempfile.TemporaryDirectory() as scratch:
            spans = record(name, python, Path(scratch))
        lines = [json.dumps(span, ensure_ascii=False) for span in spans]
        (SPANS / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sys.stderr.write(f"{name}: {len(spans)} spans\n")


if __name__ == "__main__":
    main()
