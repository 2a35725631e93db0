"""The settings page: the doctor's findings and the settings."""

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.config import list_settings
from lightning_otel.dataset import Store
from lightning_otel.doctor import examine
from lightning_otel.serve.viewer import page

_RANKS: Final = ("problem", "note", "ok")


async def show(request: Request) -> Response:
    """The page."""
    return await page.answer(request, "settings.html", _read_settings, title="Settings")


def _read_settings(store: Store) -> Mapping[str, object]:
    findings = examine(store)
    return {
        "findings": sorted(findings, key=lambda finding: _RANKS.index(finding.level)),
        "problems": sum(finding.level == "problem" for finding in findings),
        "settings": list_settings(),
    }


ROUTES: Final[list[Route]] = [Route("/settings", show, methods=["GET"])]
