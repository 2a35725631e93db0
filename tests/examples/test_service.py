"""The example service over real HTTP: what users say makes its answers measurably better."""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import wait_until

from lightning_otel.testing import scripted_server

pytest.importorskip("fastapi", reason="the service needs fastapi")
SERVICE = Path(__file__).parents[2] / "examples" / "service"
WISHES = {"light": "Say what the light is like.", "lens": "Name a lens."}
ADDED = {"light": "golden evening light", "lens": "35 mm lens"}


def model(body: Mapping[str, Any]) -> str:
    """Does what its instructions name and no more; as a writer, adds what users wished for."""
    system, asked = (message["content"] for message in body["messages"])
    if system.startswith("You improve instructions"):
        current, said = asked.removeprefix("Instructions:\n").split("\nUsers said:\n")
        if "video" in current:
            return "JUNK"
        wished = [wish for wish in WISHES.values() if wish in said and wish not in current]
        return " ".join([current, *wished])
    added = [ADDED[key] for key, wish in WISHES.items() if wish in system]
    return ", ".join([asked, *added])


class Service:
    """A running service, as its users reach it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: object = None, *, method: str = "POST") -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, json.load(exc)

    def use(self, prompt: str, category: str = "image") -> float:
        """Ask for a better prompt and say how good it is; gives the stars."""
        _, found = self.ask("/optimize", {"prompt": prompt, "category": category})
        missed = [
            wish for key, wish in WISHES.items() if ADDED[key] not in found["optimized_prompt"]
        ]
        stars = 5.0 - 2 * len(missed)
        said = {"task_id": found["task_id"], "feedback_text": " ".join(missed) or None}
        code, _ = self.ask("/feedback", {**said, "metadata": {"rating": stars}})
        assert code == 200
        return stars

    def trained(self) -> str:
        """What a training run came to, once it is over."""
        code, _ = self.ask("/training/trigger")
        assert code == 202
        wait_until(lambda: self.training() != "running")
        return self.training()

    def training(self) -> str:
        """What a training run came to so far."""
        return str(self.ask("/training/status", method="GET")[1]["training"])


@contextlib.contextmanager
def run_service(folder: Path) -> Iterator[Service]:
    """Run the service in a process of its own, in a folder, with the scripted model."""
    with scripted_server(model) as server:
        environment = {
            **{key: value for key, value in os.environ.items() if key != "LIGHTNING_OTEL_STORE"},
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "none",
        }
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"]
        with subprocess.Popen(
            [*command, "--app-dir", str(SERVICE), "--no-access-log"],
            cwd=folder, env=environment, stderr=subprocess.PIPE, text=True,
        ) as running:  # fmt: skip
            assert running.stderr is not None
            told = ""
            while (found := re.search(r"http://127\.0\.0\.1:\d+", told)) is None:
                line = running.stderr.readline()
                assert line, told
                told += line
            yield Service(found[0])
            running.terminate()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """The service, in a fresh folder."""
    with run_service(tmp_path) as running:
        yield running


def test_service_gets_better_by_what_users_say(service: Service) -> None:
    """Four stars more after a run that writes and one that decides, on prompts it never saw."""
    before = [service.use(prompt) for prompt in ("a sunset", "a harbour", "a forest", "a street")]

    written = service.trained()
    meanwhile = [service.use(f"scene {number}") for number in range(44)]
    decided = service.trained()
    after = [service.use(prompt) for prompt in ("a desert", "a river", "a market", "a face")]

    _, status = service.ask("/training/status", method="GET")
    assert written == "system_prompt[image]@2 is the canary"
    assert decided == "system_prompt[image]@2 is better"
    assert (before, set(meanwhile), after) == ([1.0] * 4, {1.0, 5.0}, [5.0] * 4)
    assert status["answers"] >= 52
    earned = status["average_rewards"]
    assert earned["system_prompt[image]@1"] == pytest.approx(-0.6)
    assert earned["system_prompt[image]@2"] == pytest.approx(1.0)
    service.trained()  # on what was said after it
    assert service.trained().startswith("failed: ")  # as there is nothing new


def test_service_never_makes_junk_live(service: Service) -> None:
    """What a writer answers is tried on a share, and stays there while it is not better."""
    service.use("a dance", "video")
    written = service.trained()
    for number in range(24):
        service.use(f"clip {number}", "video")
    decided = service.trained()

    assert written == "system_prompt[video]@2 is the canary"
    assert decided.startswith("system_prompt[video]@2 is not significantly different, and no end")


def test_service_refuses_what_cannot_be(service: Service) -> None:
    """Unknown tasks, categories and stars get a clear 4xx; a reward alone counts as it is."""
    assert service.ask("/optimize", {"prompt": "x", "category": "smell"})[0] == 422
    assert service.ask("/optimize", {"prompt": ""})[0] == 422
    _, found = service.ask("/optimize", {"prompt": "x"})
    nothing = {"task_id": found["task_id"]}
    assert service.ask("/feedback", nothing)[0] == 422
    assert service.ask("/feedback", {**nothing, "metadata": {"rating": 6}})[0] == 422
    code, refused = service.ask("/feedback", {"task_id": "none", "reward": 1})
    assert (code, "holds no rollout 'none'" in refused["detail"]) == (404, True)

    assert service.ask("/feedback", {**nothing, "reward": 0.5})[0] == 200
    _, status = service.ask("/training/status", method="GET")
    assert status["average_rewards"]["text"] == pytest.approx(0.5)


def test_service_is_short() -> None:
    """It fits on a screen or two."""
    assert len((SERVICE / "app.py").read_text().splitlines()) <= 140
