"""``captured``: what an agent did in a block, whole and isolated; docs/testing.md as it stands."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.pages import DOCS, blocks, part, python, ran

import lightning_otel as lo
from lightning_otel.errors import ConfigError
from lightning_otel.testing import ScriptedServer, captured, failure, scripted_server, tool_call

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def ask(server: ScriptedServer, question: str, **more: object) -> str | None:
    """One request by a real client."""
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question}]
        reply = client.chat.completions.create(model="m", messages=messages, **more)  # type: ignore[call-overload]  # any keyword
    content: str | None = reply.choices[0].message.content
    return content


def test_captured_calls_read_as_tests_ask() -> None:
    """Model, messages, text, tool calls, tokens and reward of each call are there by name."""
    script = [tool_call("add", a=2, b=2), "It is 4."]

    with scripted_server(script) as server, captured(agent="adder") as got:
        ask(server, "2+2?", tools=TOOLS)
        ask(server, "and?")
        lo.emit_reward(1.0)

    first, second = got.calls
    assert (first.model, first.agent, first.tools) == ("m", "adder", ("add",))
    assert first.tool_calls == (("add", {"a": 2, "b": 2}),)
    assert first.messages[-1] == {"role": "user", "content": "2+2?"}
    assert second.text == "It is 4."
    assert second.reward == 1.0
    assert first.reward is None
    assert second.output_tokens == 3
    assert second.input_tokens is not None
    assert [step.reward for step in got.transitions] == [None, 1.0]
    assert got.rewards == [{"primary": 1.0}]
    assert "'It is 4.'" in repr(got)
    assert got.spans[0].span_id == got.recording.span_id
    got.assert_complete()


def test_captured_blocks_do_not_see_each_other() -> None:
    """Blocks one after the other, nested, in threads and in tasks keep what is theirs."""

    def block(name: str) -> list[str]:
        with captured() as got:
            lo.emit_action(name)
        return [str(step.action) for step in got.transitions]

    async def task(name: str) -> list[str]:
        async with captured() as got:
            await asyncio.sleep(0)
            lo.emit_action(name)
            await asyncio.sleep(0)
        return [str(step.action) for step in got.transitions]

    async def tasks() -> list[list[str]]:
        return await asyncio.gather(*(task(f"task {n}") for n in range(4)))

    with captured() as outer:
        inner = block("inner")
        lo.emit_action("outer")
    with ThreadPoolExecutor(4) as pool:
        threads = list(pool.map(block, [f"thread {n}" for n in range(4)]))
    found = [*threads, *asyncio.run(tasks()), inner]

    assert all(len(each) == 1 for each in found)
    for n in range(4):
        assert f"thread {n}" in found[n][0]
        assert f"task {n}" in found[4 + n][0]
    assert [("outer" in str(step.action)) for step in outer.transitions] == [True]


def test_captured_sees_threads_that_were_there_before() -> None:
    """What a server's thread does, which knows nothing of the block, is captured all the same."""
    go, done = threading.Event(), threading.Event()

    def serve() -> None:
        go.wait(10)
        lo.emit_action("from a server")
        done.set()

    threading.Thread(target=serve, daemon=True).start()
    with captured() as got:
        go.set()
        assert done.wait(10)

    assert "from a server" in str(got.transitions)
    assert lo.emit_action("outside") is None


def test_captured_says_what_is_missing() -> None:
    """A failed call is a call with its error; ``assert_complete`` names it, and why."""
    with (
        scripted_server([failure(404, "no such model")]) as server,
        captured() as got,
        pytest.raises(openai.NotFoundError),
    ):
        ask(server, "anybody?")

    (call,) = got.calls
    assert call.error == "openai.NotFoundError"
    assert call.left_out == "failed: openai.NotFoundError"
    with pytest.raises(AssertionError, match=r"1 × failed: openai\.NotFoundError"):
        got.assert_complete()
    with captured() as nothing:  # a test whose agent called no model does not pass by accident
        pass
    with pytest.raises(AssertionError, match="no call was captured"):
        nothing.assert_complete()
    assert [*nothing.calls, *nothing.tools, *nothing.rewards, *nothing.transitions] == []


def test_captured_tools_have_what_went_in_and_came_out() -> None:
    """A tool that a framework runs is there with arguments, result and error."""
    from langchain_core.tools import tool

    @tool
    def divide(a: int, b: int) -> float:
        """Divide."""
        return a / b

    with captured() as got:
        divide.invoke({"a": 6, "b": 3})
        with pytest.raises(ZeroDivisionError):
            divide.invoke({"a": 1, "b": 0})

    good, bad = got.tools
    assert (good.name, good.arguments, good.error) == ("divide", {"a": 6, "b": 3}, "")
    assert good.result == 2
    assert bad.error == "ZeroDivisionError"


@pytest.mark.parametrize("setting", ["LIGHTNING_OTEL", "OTEL_SDK_DISABLED"])
def test_captured_refuses_where_recording_is_off(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Switched off, a test is told so, and what to do, instead of finding nothing."""
    monkeypatch.setenv(setting, "0" if setting == "LIGHTNING_OTEL" else "true")

    with pytest.raises(ConfigError, match=f"unset .*{setting}"):
        captured()


def test_captured_is_kept_where_the_test_says(tmp_path: Path) -> None:
    """In a named store, on disk; else no file comes to be. The very exception goes on."""

    @lo.auto_trace
    def agent() -> None:
        lo.emit_action("hello")
        raise exc

    exc = ValueError("mine")
    for store in (None, tmp_path / "kept.duckdb"):
        with pytest.raises(ValueError, match="mine") as caught, captured(store=store) as got:
            agent()
        assert caught.value is exc
        assert got.spans[0].status == "ERROR"
        assert len(got.transitions) == 1
        assert lo.emit_action("outside") is None

    assert not (tmp_path / "default").exists()
    assert len(lo.Store(tmp_path / "kept.duckdb").transitions().rows()) == 1


def test_script_is_answered_in_order_and_no_further() -> None:
    """Texts, several tool calls, functions, streamed too; then 400, which no client tries again."""
    both = [tool_call("add", a=1), tool_call("add", a=2)]
    script = ["one", both, lambda body: body["messages"][-1]["content"].upper(), "two three"]

    with scripted_server(script) as server, captured() as got:
        assert ask(server, "?") == "one"
        assert server.unused == 3
        assert ask(server, "?", tools=TOOLS) is None
        assert ask(server, "echo") == "ECHO"
        with openai.OpenAI(base_url=server.base_url, api_key="x") as client:
            messages: Any = [{"role": "user", "content": "?"}]
            stream = client.chat.completions.create(model="big", messages=messages, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with pytest.raises(openai.BadRequestError, match="the script has 4 answers"):
            ask(server, "more")

    assert said == got.calls[3].text == "two three"
    assert [len(each["messages"]) for each in server.requests] == [2, 2, 2, 1, 2]


def test_script_as_one_function_answers_all() -> None:
    """A function alone is asked every time; a failure is a status from 400 to 599."""
    server = scripted_server(lambda body: "yes" if len(server.requests) < 2 else failure(403))
    with server:
        assert [ask(server, "?"), ask(server, "?")] == ["yes", "yes"]
        with pytest.raises(openai.PermissionDeniedError):
            ask(server, "?")
    with pytest.raises(ConfigError, match="from 400 to 599"):
        failure(200)


PAGE = part(DOCS / "testing.md", __file__)


def test_testing_page_runs(tmp_path: Path) -> None:
    """The block's own assertions hold, and it leaves no file behind."""
    done = ran(python(PAGE), tmp_path)

    assert done.stdout.splitlines()[0] == "<Captured 2 calls, 2 transitions"
    assert list(tmp_path.iterdir()) == []


def test_fixtures_isolate_tests_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's tests pass under pytest-xdist with the plugin named."""
    (tests,) = blocks(PAGE, "pytest")
    (conftest,) = blocks(PAGE, "py")
    (tmp_path / "conftest.py").write_text(conftest)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(tests)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of no concern here, and slow

    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = ran([*command, "-p", "xdist", "-n", "2"], tmp_path)

    assert "2 passed" in done.stdout
    assert not (tmp_path / ".lightning").exists()


def test_no_fixture_is_there_unasked() -> None:
    """Pytest finds no plugin of ours by itself: nothing is imported that nobody named."""
    assert not [
        point
        for point in entry_points(group="pytest11")
        if point.value.startswith("lightning_otel")
    ]
