"""Secrets out of text: every known shape, wherever it stands, and nothing else."""

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
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace

from lightning_otel import Span, Store, auto_trace, emit_object
from lightning_otel.redact import Scrubbed, scrub, scrub_error

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nAAAA==\n-----END RSA PRIVATE KEY-----"
SECRETS = {
    "api_key": ["sk-" + "a1B2" * 5, "sk-proj-" + "a_B-" * 12],
    "aws_key": ["AKIA" + "A1B2C3D4E5F6G7H8"],
    "google_key": ["AIza" + "a1_-B" * 7],
    "github_token": ["ghp_" + "aB1" * 12, "ghs_" + "aB1" * 13],
    "slack_token": ["xoxb-1234567890-abc"],
    "hf_token": ["hf_" + "aB1" * 10],
    "jwt": ["eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK"],
    "bearer": ["Bearer " + "a1._~+/-" * 3 + "==", "bearer " + "a1b2" * 5],
    "private_key": [KEY],
}
CASES = [(name, secret) for name, secrets in SECRETS.items() for secret in secrets]
HARMLESS = [
    "",
    "the right light might be bright, through and through",
    "task-0123456789abcdef0123456789",
    "risk-based-assessment-of-everything",
    "sk-learn",
    "AKIAshort",
    "myAKIAA1B2C3D4E5F6G7H8",
    "hf_hub_download(repo_id)",
    "ghp_short",
    "eyJ.a.b",
    "bearer of bad news",
    "-----BEGIN PUBLIC KEY-----\nabc\n-----END PUBLIC KEY-----",
    "xoxo-hugs-and-kisses",
]


@pytest.mark.parametrize(("name", "secret"), CASES)
@pytest.mark.parametrize("around", ["%s", "key: %s!", '"%s"', "(%s)", "a\n%s\nb", "a\t%s", "é%s"])
def test_scrub_redacts_every_kind_of_secret(name: str, secret: str, around: str) -> None:
    """Bare, quoted or on a line of its own, a secret's place says what stood there."""
    text = around % secret

    assert scrub(text) == around % f"[redacted:{name}]"


@pytest.mark.parametrize(("name", "secret"), CASES)
@pytest.mark.parametrize("around", ["%s", "key:\n%s", "key:\t%s end", "a\r\n%s", '"%s"'])
def test_scrub_redacts_inside_json_text(name: str, secret: str, around: str) -> None:
    """In JSON a line break is two letters, and the secret after it still starts a word."""
    text = json.dumps({"content": around % secret})

    found = json.loads(scrub(text))

    assert found == {"content": around % f"[redacted:{name}]"}


@pytest.mark.parametrize("text", HARMLESS)
def test_scrub_leaves_other_text_alone(text: str) -> None:
    """What only resembles a secret stays, the very same object."""
    assert scrub(text) is text


def test_scrub_redacts_several_at_once() -> None:
    """Each of many secrets in one text is gone."""
    text = " ".join(secret for _, secret in CASES)

    found = scrub(text)

    assert not [secret for _, secret in CASES if secret in found]
    assert found.count("[redacted:") == len(CASES)


@given(st.text(), st.sampled_from(CASES), st.text())
def test_scrub_never_leaves_a_secret_that_stands_by_itself(
    before: str, case: tuple[str, str], after: str
) -> None:
    """Whatever stands around it, apart from it by a space, it is gone; twice is as good as once."""
    name, secret = case

    found = scrub(f"{before} {secret} {after}")

    assert secret not in found
    assert f"[redacted:{name}]" in found
    assert scrub(found) == found


EVIL = ["sk-", "-eyJ", "-eyJaaaaaaaa.", "eyJaaaaaaaa.", "/bearer ", "-ghp_", " -----BEGIN A"]
EVIL += ["-----BEGIN PRIVATE KEY-----a", "-hf_", "/AKIA", "xoxb-"]


@pytest.mark.parametrize("evil", EVIL)
def test_scrub_never_goes_back_and_forth(evil: str) -> None:
    """Endless beginnings of secrets are done with at once; else the time limit would end it."""
    found = scrub(evil * 200_000)

    assert found


@pytest.mark.parametrize("rare", ["-", "_", "K", "b", ""])
@pytest.mark.parametrize("secret", [f"sk-{'a1B2' * 8}", f"ghp_{'a1B2' * 10}", f"AKIA{'Q7' * 8}"])
def test_scrub_finds_a_secret_wherever_it_stands_in_a_long_text(secret: str, rare: str) -> None:
    """Many rare characters before it, a few, or none: a long text hides nothing."""
    for filling in (f"word {rare} ", f"{'word ' * 200}{rare} "):
        padding = filling * (100_000 // len(filling))

        for text in (f"{secret} {padding}", f"{padding}{secret}", f"{padding} {secret} {padding}"):
            assert secret not in scrub(text)
            assert scrub(text).count("[redacted:") == 1


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("GET https://me:pass@host/v1?key=abc&x=1 failed", "GET https://[redacted]@host/v1"),
        ("401 for url 'http://h/v1?api-version=2&sig=a%2Bb'", "401 for url 'http://h/v1?"),
        ("refused /v1/chat?key=abc", "refused /v1/chat?key=[redacted]"),
        ("redis://:pass@host:6379/0", "redis://[redacted]@host:6379/0"),
        ("postgres://u:p%40ss@[::1]/db", "postgres://[redacted]@[::1]/db"),
    ],
)
def test_scrub_error_empties_addresses(text: str, kept: str) -> None:
    """No value of a query, no user and no password of an address stays in what an error says."""
    found = scrub_error(text)

    assert found.startswith(kept)
    assert not {"pass", "abc", "a%2Bb", "p%40ss"} & set(re.split(r"[@:=&'/ ]", found))


@pytest.mark.parametrize(
    "text", ["mail a@b.example", "a = b", "x == 1 ? y : z", "f(a=1, b=2)", "http://h/a@b", "a&b=c"]
)
def test_scrub_error_leaves_other_text(text: str) -> None:
    """What is no address stays, but for a value behind ``&`` or ``?``."""
    assert scrub_error(text) == text.replace("&b=c", "&b=[redacted]")


@pytest.mark.parametrize("part", ["://", "?a=", "://a", "&", "@", "?a", "://x@"])
def test_scrub_error_is_linear(part: str) -> None:
    """Endless beginnings of addresses are done with at once; else the time limit would end it."""
    assert scrub_error(part * 200_000)


def test_scrub_looks_at_a_text_once() -> None:
    """What was scrubbed piece by piece is taken as it is, and is a plain text afterwards."""
    text = Scrubbed("sk-" + "a1B2" * 5)

    found = scrub(text)

    assert (found, type(found)) == (text, str)


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
    store: Store, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Of names, attributes, events and statuses, messages and marks: no secret stays."""
    secrets = [draw(shape, 1) for shape in KINDS]
    tracer = trace.get_tracer("theirs")
    with auto_trace(store=store):
        for secret in secrets:
            facts = {"note": secret, "list": [secret]}
            with tracer.start_as_current_span(secret, attributes=facts) as span:
                span.add_event(secret, facts)
                span.set_status(trace.StatusCode.ERROR, secret)
            emit_object({"arguments": {"text": secret}})
            asked: Any = [{"role": "user", "content": secret}]
            client.chat.completions.create(model="toy", messages=asked)
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
