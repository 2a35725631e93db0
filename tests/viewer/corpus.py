"""A store in which every field is an attack, and what shows that one of them came through."""

import json
from collections.abc import Iterator
from typing import Final

from lightning_otel import Queue, Resources, Store
from lightning_otel.state import State
from lightning_otel.types import Event, Link, Span
from lightning_otel.types import conventions as c

_SHOUT: Final = "window.__ran=1"
CORPUS: Final = (
    f"<script>{_SHOUT}</script>",
    f'"><img src=x onerror="{_SHOUT}" class=xss>',
    f"'><svg onload='{_SHOUT}' class=xss>",
    f"<a class=xss href='javascript:{_SHOUT}'>x</a>",
    "<iframe class=xss srcdoc='<script>parent.__ran=1</script>'></iframe>",
    "</textarea></title></style></script><b class=xss>x</b>",
    "![x](http://evil.example/x.png) [x](javascript:alert(1)) https://evil.example/",
    "{{7*7}} ${7*7} {% raw %}<%= 7*7 %>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'><base href=//evil.example/>",
    "\u202e\u2066right to left\u2069 \x00\x1b[31m\ufffe \ud800",
    "' onmouseover='window.__ran=1' x='",
    "<style class=xss>*{display:none}</style><link rel=stylesheet href=//evil.example/x.css>",
    "data:text/html,<script>alert(1)</script>",
    "../../../etc/passwd?x=1#y%00 & <form class=xss action=//evil.example>",
)
ALL: Final = "\n".join(CORPUS)
CLEAN: Final = "".join(each for each in ALL if each.isprintable() or each == "\n")
"""What a state can hold: it refuses half characters."""
START_NS: Final = 1_760_000_000_000_000_000
FOUND: Final = """() => ({
  ran: window.__ran ?? null,
  elements: document.querySelectorAll('.xss, iframe, object, embed, base, meta[http-equiv]').length,
  handlers: [...document.querySelectorAll('*')].filter((each) =>
    [...each.attributes].some((a) => a.name.startsWith('on') || a.name === 'style')).length,
  scripts: [...document.scripts].map((each) => each.getAttribute('src') ?? 'inline'),
  places: [...document.querySelectorAll('*')].flatMap((each) =>
    ['href', 'src', 'action', 'data-load', 'data-part', 'data-href'].map(
      (a) => each.getAttribute(a))
  ).filter((each) => each !== null && !/^[/?#](?![/\\\\])/.test(each) && each !== ''),
})"""
"""What is in a page: nothing ran, no element or handler is of the data's making, and every address
is of this server."""


def fill(store: Store) -> None:
    """Record rollouts whose every field is of the corpus."""
    for rank, text in enumerate((*CORPUS, ALL)):
        store.add(_rollout(rank, text))
    state = State.beside(store)
    resources = Resources(state)
    for text in (CLEAN, CLEAN.replace("7*7", "8*8")):
        resources.publish("system", text)
    queue = Queue(state)
    queue.put([{"question": CLEAN}])


def _rollout(rank: int, text: str) -> Iterator[Span]:
    """A root, a call, a tool, a reward: with the text wherever text can be."""
    trace = f"{rank + 1:032x}"
    # No address holds half a character or two lines: such an id is found by its trace alone.
    whole = "".join(filter(str.isprintable, text))
    own = {c.ROLLOUT_ID: f"r{rank} {whole}", c.AGENT_NAME: text, c.MODE: text}

    def span(number: int, name: str, **attributes: object) -> Span:
        start_ns = START_NS + rank * 10**9 + number * 10**6
        parent = None if number == 1 else f"{rank * 16 + 1:016x}"
        return Span(
            trace, f"{rank * 16 + number:016x}", parent, name, start_ns, start_ns + 10**6,
            status="ERROR" if number == 3 else "OK", status_message=text,
            attributes={**own, text: text, **attributes},
            events=(Event(text, start_ns, {text: text, c.EXCEPTION_MESSAGE: text}),),
            links=(Link(f"{rank + 2:032x}", f"{rank:016x}", {text: text}),),
            otel_resource={text: text, "service.name": text}, scope=text,
        )  # fmt: skip

    said = [{"type": "text", "content": text}, {"type": text, "uri": text, "content": text}]
    call = {
        c.OPERATION: c.CHAT, c.PROVIDER: text, c.REQUEST_MODEL: text, c.RESPONSE_MODEL: text,
        c.RESPONSE_ID: f"{text} {rank}", c.FINISH_REASONS: [text], c.CONVERSATION_ID: whole,
        c.INPUT_TOKENS: 3, c.OUTPUT_TOKENS: 2, c.ERROR_TYPE: text,
        c.SYSTEM_INSTRUCTIONS: json.dumps([{"type": "text", "content": text}]),
        c.INPUT_MESSAGES: json.dumps([{"role": role, "parts": said} for role in ("user", text)]),
        c.OUTPUT_MESSAGES: json.dumps(
            [{"role": "assistant", "finish_reason": text, "parts": [
                *said, {"type": "tool_call", "id": text, "name": text, "arguments": {text: text}}]}]
        ),
        c.TOOL_DEFINITIONS: json.dumps([{"type": "function", "name": text, "description": text}]),
        c.PROMPT_TOKEN_IDS: [1, 2, 3], c.RESPONSE_TOKEN_IDS: [4, 5],
        c.RESPONSE_LOGPROBS: [-0.1, -0.2], c.RESOURCE_VERSION: text,
        c.RESOURCES: json.dumps({text: {text: 1}}),
    }  # fmt: skip
    tool = {c.OPERATION: c.EXECUTE_TOOL, c.TOOL_NAME: text, c.TOOL_ARGUMENTS: text,
            c.TOOL_RESULT: text, c.TOOL_DESCRIPTION: text}  # fmt: skip
    reward = {c.REWARD_VALUE: 0.5, c.REWARD_NAME: text, c.FEEDBACK_TEXT: text,
              c.REWARD_FUNCTION: text, c.FEEDBACK_METADATA: text}  # fmt: skip
    yield span(1, c.SPAN_ROLLOUT, **{c.TASK: json.dumps({text: text}), c.TASK_ID: text})
    yield span(2, text, **call)
    yield span(3, text, **tool)
    yield span(4, c.SPAN_ANNOTATION, **reward)
