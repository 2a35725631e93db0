"""A prompt edited in the browser: its text beside the version it began from, and its publication.

A published text is the canary of a share; its effect is what the page of the comparison shows.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.dataset import Store
from lightning_otel.errors import ConfigError, LightningOtelError
from lightning_otel.serve.bodies import form
from lightning_otel.serve.responses import refusal_of
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.resources import open_resources
from lightning_otel.serve.viewer.text_diff import compare_lines, fold_lines
from lightning_otel.serve.viewer.urls import resource_path
from lightning_otel.types import Prompt
from lightning_otel.types.values import parse_json
from lightning_otel.views.nouns import parse_version

if TYPE_CHECKING:
    from lightning_otel.resources import Resources
    from lightning_otel.types import Resource

_SHARE: Final = "0.1"
_REQUEST: Final = ("task", "system_prompt")
"""Names that are filled in where a prompt is put into an unchanged agent's requests."""
_TASKS: Final = """
SELECT DISTINCT task FROM (SELECT task, start_ns FROM rollouts ORDER BY start_ns DESC LIMIT 200)
WHERE task LIKE '{%'"""


async def edit(request: Request) -> Response:
    """Show a version's text to be edited; with a form, its difference, or publish it."""
    name = request.path_params["name"]
    fields = await form(request) if request.method == "POST" else {}
    fault: LightningOtelError | None = None
    if fields.get("act") == "publish":
        try:
            made = await page.run(
                request, lambda store: _publish(open_resources(request), name, fields, store)
            )
            compared = f"?a={made.parent}&b={made.version}"
            return page.see(resource_path(name, "diff") + compared)
        except LightningOtelError as exc:
            fault = exc
    version = fields.get("parent") or page.text(request, "version")

    def read(_: Store) -> Mapping[str, object]:
        opened = open_resources(request)
        last_change = opened.last_change(name)  # first: a form refuses what changes from now on
        parent = _pick_parent(opened, name, version)
        before = parent.prompt.template
        text = _read_text(fields, before) if "text" in fields else before
        lines = compare_lines(before.splitlines(), text.splitlines())
        return {
            "title": f"Edit {name}",
            "name": name,
            "parent": parent,
            "newest": opened.versions(name)[-1].version,
            "canary": opened.aliases(name).get("canary"),
            "last_change": last_change,
            "text": text,
            "placeholders": Prompt(text).placeholders,
            "share": fields.get("share", _SHARE),
            "fault": fault,
            "lines": fold_lines(lines) if text != before else [],
        }

    status = refusal_of(fault).status if fault else 200
    return await page.answer(request, "prompt_edit.html", read, status=status)


def _pick_parent(opened: "Resources", name: str, version: str) -> "Resource":
    """Return the version to begin from, by default what is live, else the newest.

    Raises:
        ConfigError: It is no prompt.
    """
    aliases = opened.aliases(name)
    number = parse_version(version) if version else aliases.get("live")
    parent = opened.versions(name)[-1] if number is None else opened.get(name, number)
    if parent.kind != "prompt":
        raise ConfigError(
            f"{parent} is {parent.kind}, and only prompts are edited here; "
            f"lightning-otel resources publish {name} --file FILE"
        )
    return parent


def _read_text(fields: Mapping[str, str], before: str) -> str:
    """Return the form's text with the ends of lines of the text before; browsers send CRLF."""
    text = fields.get("text", "")
    return text if "\r\n" in before else text.replace("\r\n", "\n")


def _publish(opened: "Resources", name: str, fields: Mapping[str, str], store: Store) -> "Resource":
    from lightning_otel.resources.bodies import check_body

    parent = _pick_parent(opened, name, fields.get("parent", ""))
    text = _read_text(fields, parent.prompt.template)
    body = {**parent.body, "template": text}
    content: Mapping[str, Any] = json.loads(check_body(name, body, "prompt")[1])
    for version in opened.versions(name):
        if version.body == content:
            raise ConfigError(f"this is the text of @{version.version}; change it to publish it")
    share = page.parse_number("share", fields.get("share", ""))
    if not 0 < share < 1:
        raise ConfigError(
            f"share is {share:g}; write one between 0 and 1, such as 0.1 for every tenth rollout"
        )
    _check_placeholders(parent, text, store)
    number = fields.get("last_change", "")
    last_change = int(number) if number.isdecimal() and len(number) < 19 else -1
    return opened.publish(
        name, body, parent=parent.version, alias="canary", weight=share, last_change=last_change
    )


def _check_placeholders(parent: "Resource", text: str, store: Store) -> None:
    """Refuse a placeholder that got lost, or that no recorded task has a value for."""
    prompt = parent.prompt
    others = _REQUEST if parent.name.rpartition("/")[2] == "system_prompt" else ()
    fault = prompt.compare_placeholders(text, others)
    if fault:  # tasks are read only where they may decide
        tasks = [parse_json(row["task"]) for row in store.sql(_TASKS)]
        keys = {str(key) for task in tasks if isinstance(task, dict) for key in task}
        fault = prompt.compare_placeholders(text, {*others, *keys})
    if fault:
        raise ConfigError(f"the text does not fit the tasks of {parent}: {fault}")


ROUTES: Final[list[Route]] = [
    Route("/resources/{name:path}@edit", edit, methods=["GET", "POST"]),
]
