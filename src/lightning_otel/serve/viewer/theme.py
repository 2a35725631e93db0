"""Dark or light: the choice is kept by the browser, and works without the script."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_otel.serve.answers import RefusalError
from lightning_otel.serve.guard import form
from lightning_otel.serve.viewer import page
from lightning_otel.serve.viewer.templating import THEME_COOKIE, THEMES

_KEPT_S: Final = 365 * 86_400


async def choose(request: Request) -> Response:
    """Keep a choice, and go back to where it was made."""
    given = await form(request)
    theme = given.get("theme", "")
    if theme not in THEMES:
        raise RefusalError(400, f"theme is one of {', '.join(THEMES)}")
    answer = page.see(given.get("back", "/"))
    answer.set_cookie(THEME_COOKIE, theme, max_age=_KEPT_S, httponly=True, samesite="strict")
    return answer


ROUTES: Final[list[Route]] = [Route("/theme", choose, methods=["POST"])]
