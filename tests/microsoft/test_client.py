"""Without Agent Lightning: what is sent of a call, who is no such store, and who optimises."""

import logging
from collections.abc import Callable

import pytest
from tests.conftest import Install

from lightning_otel import Store, auto_trace, emit_action
from lightning_otel.adapter.readers.chat import dump
from lightning_otel.adapter.tokens import encode_ids, encode_logprobs
from lightning_otel.algorithms.exchange import choose_backend, hand_over, read_back
from lightning_otel.algorithms.exchange.calls import CALL_NAME, to_agentlightning
from lightning_otel.demo.server import DemoServer
from lightning_otel.errors import ConfigError, StoreError
from lightning_otel.messages import message, text_part, tool_call_part
from lightning_otel.types import Span
from lightning_otel.types import conventions as c

CALL = Span(
    trace_id="a" * 32, span_id="b" * 16, parent_span_id=None, name="chat toy",
    start_ns=1, end_ns=2, kind="CLIENT",
    attributes={
        c.OPERATION: c.CHAT,
        c.RESPONSE_ID: "chatcmpl-1",
        c.SYSTEM_INSTRUCTIONS: dump([text_part("be brief")]),
        c.INPUT_MESSAGES: dump([message("user", [text_part("17*23?")])]),
        c.OUTPUT_MESSAGES: dump(
            [message("assistant", [tool_call_part("c1", "calculator", {"e": "17*23"})])]
        ),
        c.PROMPT_TOKEN_IDS: encode_ids([[1, 2, 3]]),
        c.RESPONSE_TOKEN_IDS: encode_ids([[4, 5]]),
        c.RESPONSE_LOGPROBS: encode_logprobs([[-0.5, -0.25]]),
        c.AGENT_NAME: "calc",
    },
)  # fmt: skip


def test_call_is_told_as_their_adapters_read_it() -> None:
    """Messages lie flat, token ids are lists, logprobs are JSON, and the name is theirs."""
    found = to_agentlightning(CALL, with_content=True)

    added = {key: found.attributes[key] for key in found.attributes.keys() - CALL.attributes.keys()}
    assert found.name == CALL_NAME
    assert added == {
        "gen_ai.prompt.0.role": "system",
        "gen_ai.prompt.0.content": "be brief",
        "gen_ai.prompt.1.role": "user",
        "gen_ai.prompt.1.content": "17*23?",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "",
        "gen_ai.completion.0.tool_calls.0.id": "c1",
        "gen_ai.completion.0.tool_calls.0.type": "function",
        "gen_ai.completion.0.tool_calls.0.name": "calculator",
        "gen_ai.completion.0.tool_calls.0.arguments": '{"e": "17*23"}',
        "prompt_token_ids": [1, 2, 3],
        "response_token_ids": [4, 5],
        "logprobs.content": '[{"logprob": -0.5}, {"logprob": -0.25}]',
    }


def test_call_without_content_is_named_alone() -> None:
    """Where content stays here, nothing of it is repeated under another key."""
    found = to_agentlightning(CALL, with_content=False)

    assert (found.name, found.attributes) == (CALL_NAME, CALL.attributes)


def test_agent_around_calls_is_named_as_they_name_it() -> None:
    """Their adapters find an agent by ``agent.name`` of the span around its calls."""
    agent = Span(
        "a" * 32, "c" * 16, None, "invoke_agent calc", 1, 2,
        attributes={c.OPERATION: c.INVOKE_AGENT, c.AGENT_NAME: "calc"},
    )  # fmt: skip

    assert to_agentlightning(agent, with_content=False).attributes["agent.name"] == "calc"


@pytest.fixture
def held(store: Store) -> Store:
    with auto_trace(store=store, rollout_id="r1"):
        emit_action("say", "hi")
    return store


Act = Callable[..., object]


@pytest.mark.parametrize("act", [hand_over, read_back])
def test_store_that_does_not_answer_is_named(held: Store, act: Act) -> None:
    """What to start is said."""
    with pytest.raises(StoreError, match=r"answers at http://127.0.0.1:9 .*; start one: agl store"):
        act(held, "http://127.0.0.1:9")


@pytest.mark.parametrize("act", [hand_over, read_back])
def test_server_that_is_no_such_store_is_refused(held: Store, server: DemoServer, act: Act) -> None:
    """Another server is not sent anything, and its answer is told."""
    with pytest.raises(StoreError, match=r"is it a store of Agent Lightning 0\.3"):
        act(held, server.base_url)


@pytest.mark.parametrize("url", ["127.0.0.1:4747", "ftp://host", "http://"])
def test_address_that_is_none_is_refused(held: Store, url: str) -> None:
    """An address says how to speak to whom."""
    with pytest.raises(ConfigError, match="is no store of Agent Lightning's; name one like"):
        hand_over(held, url)


@pytest.mark.parametrize("wanted", ["auto", "microsoft"])
def test_release_that_fits_is_used(install_agentlightning: Install, wanted: str) -> None:
    """Where 0.3 is installed and can be imported, it is taken."""
    install_agentlightning("0.3.1")

    assert choose_backend(wanted) == "microsoft"  # type: ignore[arg-type]  # parametrized


@pytest.mark.parametrize(
    ("version", "code", "reason"),
    [
        ("0.4.0", "", "agentlightning 0.4.0 is installed, and 0.3 is what fits"),
        (
            "0.3.0",
            "import no_such_gateway",
            "agentlightning 0.3.0 cannot be imported: ModuleNotFoundError",
        ),
    ],
)
def test_release_that_does_not_fit_is_named(
    install_agentlightning: Install,
    caplog: pytest.LogCaptureFixture,
    version: str,
    code: str,
    reason: str,
) -> None:
    """Asked for by name it is an error; ``auto`` falls back and warns with the reason."""
    install_agentlightning(version, code)

    with pytest.raises(ConfigError, match="backend microsoft cannot be used") as raised:
        choose_backend("microsoft")
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto") == "builtin"

    assert reason in raised.value.what
    assert "pip install 'agentlightning==0.3.0'" in raised.value.remedy
    assert f"backend 'auto' is 'builtin' here: {reason}" in caplog.text


def test_builtin_asks_nobody(
    install_agentlightning: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """Ours need no reason, and nothing is imported for them."""
    install_agentlightning("0.3.0", "raise RuntimeError('imported')")

    assert choose_backend("builtin") == "builtin"
    assert caplog.text == ""


def test_what_it_cannot_do_is_a_reason(
    install_agentlightning: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """Though installed it may lack what is asked for; an unknown backend is no backend."""
    install_agentlightning("0.3.0")

    assert choose_backend("auto", unfit="it has no SFT") == "builtin"
    assert "backend 'auto' is 'builtin' here: it has no SFT" in caplog.text
    with pytest.raises(ConfigError, match="it has no SFT"):
        choose_backend("microsoft", unfit="it has no SFT")
    with pytest.raises(ConfigError, match="backend is 'azure'; it must be one of auto, builtin"):
        choose_backend("azure")  # type: ignore[arg-type]  # that is what is tried
