"""Every function of ours at HTTP clients fails, one at a time: the program gets what it gets."""

from typing import Any

import pytest
from tests.instrumentors.conftest import broken, list_places
from tests.instrumentors.contract.drivers import DRIVERS, count_pieces

from lightning_otel import Store, auto_trace, dialects, uninstrument
from lightning_otel.demo.server import DemoServer
from lightning_otel.instrumentors import body, http, model_requests, token_ids
from lightning_otel.instrumentors.http import aiohttp, changes, httpx, retries, urllib3

MODULES: list[Any] = [
    http, httpx, aiohttp, urllib3, retries, changes, model_requests, token_ids, dialects,
]  # fmt: skip
CLASSES: list[Any] = [
    http.HttpExchange, http.HttpRequest, http.SdkCall, httpx._HttpxExchange,
    aiohttp._AiohttpExchange, urllib3._Urllib3Exchange, model_requests.ModelRequest,
    body.BodyRecorder, changes.Changes,
]  # fmt: skip
LEFT = {"read", "read_async", "__del__", "register_dialect", "__getattribute__", "__new__"}
"""What the program's own bytes run through, and what is no call's."""
CLIENTS = ("httpx", "requests", "aiohttp")

PLACES = list_places([*MODULES, *CLASSES], LEFT)


def use(server: DemoServer) -> list[object]:
    """What a program gets of each client, whole, streamed and refused."""
    found: list[object] = []
    for driver in DRIVERS:
        if driver.name not in CLIENTS:
            continue
        found.append(driver.ask_somehow(server.base_url))
        stream: Any = (driver.stream or driver.stream_async)(server.base_url, "toy")  # type: ignore[misc]  # one there is
        found.append(count_pieces(stream))
        try:
            driver.ask_somehow(server.base_url, "fail-400")
        except Exception as exc:  # noqa: BLE001  # each library has its own
            found.append(type(exc))
    return found


@pytest.mark.parametrize(
    "place", PLACES, ids=lambda place: f"{place[0].__name__.rpartition('.')[2]}.{place[1]}"
)
@pytest.mark.pain(16)
def test_fault_in_any_function_stays_with_us(
    place: tuple[Any, str], server: DemoServer, store: Store, faults_allowed: None
) -> None:
    """With one function of ours broken, every client gives what it gives without us."""
    for module in CLIENTS:
        pytest.importorskip(module)
    uninstrument()
    untraced = use(server)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, broken)
        with auto_trace(store=store, apply=True, enable_retokenization_fix=True):
            assert use(server) == untraced
