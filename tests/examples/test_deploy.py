"""The files of ``examples/deploy`` fit each other and the programs that they start.

No container runs here: the service's own command does, with another address and file of its token.
"""

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from tests.pages import environment
from tests.serve.serving import PROTOBUF, request_of

from lightning_otel import Store

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
TOKEN = "a-token-of-sixteen-letters-and-more"


def load(name: str) -> Any:
    """Return a YAML file of the folder."""
    return yaml.safe_load((FOLDER / name).read_text())


def ask(url: str, path: str, body: bytes | None, **headers: str) -> tuple[int, str]:
    headers = {"Content-Type": PROTOBUF, **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, ""


def read_instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, with continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (FOLDER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_what_is_copied_and_mounted_exists() -> None:
    """Files of the build and of volumes; named volumes and secrets are declared."""
    compose = load("compose.yaml")
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text()
    for instruction, words in read_instructions():
        if instruction == "COPY" and not words.startswith("--from"):
            for name in words.split()[:-1]:
                assert (ROOT / name).exists()
                assert f"!{name}\n" in ignored
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            is_file = source.startswith("./")
            assert (FOLDER / source).is_file() if is_file else source in compose["volumes"]
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        assert set(service.get("depends_on", ())) <= set(compose["services"])


def test_addresses_are_those_of_services() -> None:
    """The Collector, Prometheus and Grafana ask hosts of the compose file at their ports."""
    compose, collector = load("compose.yaml"), load("collector.yaml")
    addresses = [each["endpoint"] for each in collector["exporters"].values()]
    (job,) = load("prometheus.yaml")["scrape_configs"]
    addresses += [
        f"http://{target}" for each in job["static_configs"] for target in each["targets"]
    ]
    addresses += [each["url"] for each in load("grafana/datasource.yaml")["datasources"]]
    hosts = {re.sub(r"^http://(.*):\d+$", r"\1", address) for address in addresses}
    pipelines = collector["service"]["pipelines"].values()
    assert hosts == {"lightning", "phoenix", "prometheus"} <= set(compose["services"])
    for pipeline in pipelines:
        assert set(pipeline["exporters"]) <= set(collector["exporters"])
        assert set(pipeline["receivers"]) <= set(collector["receivers"])


def test_page_tells_each_service_and_its_ports() -> None:
    """The table of docs/deploy.md has the services of the compose file, and where they listen."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    ports = {
        name: [port.split(":")[1] for port in service.get("ports", ())]
        for name, service in load("compose.yaml")["services"].items()
    }
    assert {name: re.findall(r"\d{4,}", place) for name, place in rows.items()} == ports
    metrics = re.findall(r"`(lightning_otel_\w+)`", page)
    board = (FOLDER / "grafana" / "board.json").read_text()
    assert metrics
    assert all(name in board for name in metrics)


def test_the_service_takes_what_the_collector_sends(tmp_path: Path) -> None:
    """With the image's own arguments; the board asks for metrics that there are."""
    (secret := tmp_path / "secret").write_text(f"{TOKEN}\n")
    secret.chmod(0o444)
    header = load("collector.yaml")["exporters"]["otlphttp/lightning"]["headers"]["Authorization"]
    sender = {
        "Host": "lightning:4318",
        "Authorization": header.replace("${env:LIGHTNING_TOKEN}", TOKEN),
    }
    body = request_of(3).SerializeToString()
    command = [FOLDER / "start.sh", *json.loads(dict(read_instructions())["CMD"])]
    settings = {
        "LIGHTNING_TOKEN_FILE": str(secret), "LIGHTNING_OTEL_STORE": str(tmp_path / "t.duckdb"),
        "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0"], stdout=subprocess.PIPE, text=True,
        env=environment(**settings),
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            refused = ask(url, "/v1/traces", body, Host="lightning:4318")
            taken = ask(url, "/v1/traces", body, **sender)
            metrics = ask(url, "/metrics", None, **sender)
        finally:
            server.terminate()

    board = json.loads((FOLDER / "grafana" / "board.json").read_text())
    names = re.findall(
        r"lightning_otel_\w+", json.dumps([panel["targets"] for panel in board["panels"]])
    )
    assert (refused[0], taken[0], metrics[0]) == (401, 200, 200)
    assert len(Store(tmp_path / "t.duckdb").spans().rows()) == 3
    assert len(names) == len(board["panels"]) == 10
    assert all(f"# TYPE {name} " in metrics[1] for name in names)
