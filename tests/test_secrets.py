"""Secrets by the shapes of vendors: every kind, however it is spelled, and nothing else."""

import json
import random
import re
import string
import sysconfig
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry import trace

from lightning_otel import Store, auto_trace, emit_object
from lightning_otel.demo.server import DemoServer
from lightning_otel.redact import scrub, scrub_error
from lightning_otel.types import Span

_SHAPES = json.loads(files("lightning_otel.redact").joinpath("secrets.json").read_text())
_ALPHABETS = {
    "": string.ascii_letters + string.digits, "u": string.ascii_uppercase + string.digits,
    "h": string.digits + "abcdef", "d": string.digits,
}  # fmt: skip
_TEXTS = json.loads(Path(__file__).with_name("data").joinpath("secrets.json").read_text())
KINDS, SPELLINGS, ORDINARY = _TEXTS["kinds"], _TEXTS["spellings"], _TEXTS["ordinary"]


def draw(shape: str, seed: int) -> str:
    """A text of a shape: of each ``{n}`` so many characters by chance."""
    chance = random.Random(seed)
    return re.sub(
        r"\{(\d+)([uhd]?)\}",
        lambda hole: "".join(chance.choices(_ALPHABETS[hole[2]], k=int(hole[1]))),
        shape,
    )


def rest_of(secret: str) -> str:
    """The middle of its longest part, which must be gone."""
    longest = max(re.findall(r"[A-Za-z0-9]+", secret), key=len)
    return longest[4:-2]


@pytest.mark.parametrize("shape", KINDS)
def test_each_kind_is_masked_however_it_is_spelled(shape: str) -> None:
    """In sentences, headers, addresses, settings, JSON, and JSON in JSON."""
    for seed in range(10):
        secret = draw(shape, seed)
        texts = [spelling.format(secret) for spelling in SPELLINGS]
        once = json.dumps({"arguments": f"b\n{secret}"})
        for text in (*texts, once, json.dumps({"body": once})):
            assert rest_of(secret) not in scrub(text), text
            assert scrub(scrub(text)) == scrub(text)


def test_ordinary_text_stays() -> None:
    """Of the words of Python's library and of ids, hashes and images hardly any are masked."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8") for path in library.glob("*.py")]
    messages = [text[at : at + 600] for text in texts for at in range(0, len(text), 600)]
    messages += [draw(shape, seed) for shape in ORDINARY for seed in range(100)]
    messages += [f'{{"id":"{draw(shape, seed)}"}}' for shape in ORDINARY for seed in range(100)]

    masked = [message for message in messages if scrub(message) != message]

    assert len(messages) > 12_000
    assert len(masked) <= len(messages) / 10_000, masked


def test_no_text_is_slow() -> None:
    """A megabyte of the beginnings of any shape takes a bounded time."""
    starts = [start for shape in _SHAPES["tokens"] for start in shape["starts"]]
    parts = {f"{before}{start}" for start in starts for before in ("", "-")}
    parts |= {f"{start}{'a' * 20}." for start in starts} | {f"{name}=" for name in _SHAPES["named"]}
    parts |= {"-----BEGIN PRIVATE KEY-----A", "://a:b", "password=", "a/", "aB1+", "12345678:AA"}
    for part in sorted(parts):
        began = time.process_time()
        scrub_error(part * (200_000 // len(part)))
        assert time.process_time() - began < 2, part


def test_spans_of_the_program_are_masked_before_they_are_written(
    store: Store, server: DemoServer, tmp_path: Path
) -> None:
    """Of names, attributes, events and statuses, messages and marks: no secret stays."""
    secrets = [draw(shape, 1) for shape in KINDS]
    tracer = trace.get_tracer("theirs")
    client = openai.OpenAI(base_url=server.base_url, api_key="k")
    with auto_trace(store=store):
        for secret in secrets:
            facts = {"note": secret, "list": [secret]}
            with tracer.start_as_current_span(secret, attributes=facts) as span:
                span.add_event(secret, facts)
                span.set_status(trace.StatusCode.ERROR, secret)
            emit_object({"arguments": {"text": secret}})
            asked: Any = [{"role": "user", "content": secret}]
            client.chat.completions.create(model="toy", messages=asked)
    client.close()
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    written = files.decode(errors="replace")

    assert "[redacted:github_token]" in written
    assert [secret for secret in secrets if rest_of(secret) in written] == []


def test_stored_secrets_are_masked_by_redact(store: Store) -> None:
    """What stood there already, in whatever text, goes by ``redact --secrets``."""
    secrets = [draw(shape, 2) for shape in KINDS]
    store.add(
        Span(f"{n:032x}", f"{n:016x}", None, secret, n, n + 1, status_message=secret,
             attributes={"k": secret, "arguments": json.dumps({"x": [secret]})})
        for n, secret in enumerate(secrets, 1)
    )  # fmt: skip
    store.redact(secrets=True)

    rows = str(store.sql("SELECT * FROM spans").dicts())
    assert [secret for secret in secrets if rest_of(secret) in rows] == []
