"""The OTLP receiver: how fast it takes small spans, and what hostile bodies cost it.

    python benchmarks/receiver.py [--spans N] [--rounds N]

Each round sends the same batches, one sender over one connection, to a server of its own process:
to ``lightning-otel serve`` as protobuf, as gzip and as JSON; and to a peer of stock parts that does
the same job as a Collector's file exporter: stdlib HTTP, the same decoder, protobuf's own JSON, one
line a request. The spans a second (of the wall clock, and of the server's own processor time, which
other work on the machine does not change) and the ratio to that peer are printed; then what hostile
bodies cost, which are row S1 of the fault suite.
"""

import argparse
import gzip
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import orjson
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PROTOBUF, JSON = "application/x-protobuf", "application/json"
PER_BATCH = 512
PEER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
out = open(sys.argv[1], "ab", buffering=0)
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest.FromString(body)
        out.write(MessageToJson(request, indent=None).encode() + b"\\n")
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
"""


def batch() -> ExportTraceServiceRequest:
    """512 small spans of an HTTP library: four attributes, 165 bytes each."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "bench"
    scope = resource.scope_spans.add()
    scope.scope.name = "some.library"
    now = time.time_ns()
    for index in range(PER_BATCH):
        span = scope.spans.add(
            trace_id=os.urandom(16), span_id=os.urandom(8), parent_span_id=os.urandom(8),
            name="GET /x", kind=3, start_time_unix_nano=now + index,
            end_time_unix_nano=now + index + 1000,
        )  # fmt: skip
        for key, value in (("http.method", "GET"), ("http.url", "http://x/y"), ("peer", "1.2.3.4")):
            span.attributes.add(key=key).value.string_value = value
        span.attributes.add(key="http.status_code").value.int_value = 200
    return request


def as_json(request: ExportTraceServiceRequest) -> bytes:
    """OTLP's JSON of a request, whose ids are hex."""
    found = MessageToDict(request)
    spans = found["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for span, raw in zip(spans, request.resource_spans[0].scope_spans[0].spans, strict=True):
        span |= {"traceId": raw.trace_id.hex(), "spanId": raw.span_id.hex()}
        span["parentSpanId"] = raw.parent_span_id.hex()
    return orjson.dumps(found)


class Server:
    """A server process that prints its address."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.host = self.process.stdout.readline().strip().removeprefix("http://")
        self.connection = http.client.HTTPConnection(self.host, timeout=60)

    def post(self, body: bytes, kind: str, encoding: str = "") -> int:
        """Send a body; gives the status."""
        headers = {"Content-Type": kind, **({"Content-Encoding": encoding} if encoding else {})}
        self.connection.request("POST", "/v1/traces", body, headers)
        answer = self.connection.getresponse()
        answer.read()
        return answer.status

    def memory_mb(self) -> float:
        """The most memory it ever had."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) / 1024

    def processor_s(self) -> float:
        """Processor time it used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Stop it."""
        self.connection.close()
        self.process.terminate()
        self.process.wait(20)


def receiver(folder: Path) -> Server:
    """A ``lightning-otel serve`` with a store of its own."""
    store = folder / f"{time.time_ns()}.duckdb"
    command = ["-m", "lightning_otel", "serve", "--port", "0", "--store"]
    return Server([sys.executable, *command, str(store)])


def peer(folder: Path) -> Server:
    """A receiver of stock parts."""
    return Server([sys.executable, "-c", PEER, str(folder / f"{time.time_ns()}.pb")])


class Rate(NamedTuple):
    """Spans a second, of the wall clock and of the server's processor time."""

    wall: float
    processor: float


def rate(server: Server, bodies: list[bytes], kind: str, encoding: str = "") -> Rate:
    """Spans a second; each body is acknowledged before the next is sent."""
    server.post(bodies[0], kind, encoding)
    started, used_s = time.perf_counter(), server.processor_s()
    for body in bodies:
        status = server.post(body, kind, encoding)
        assert status == 200, status
    count = len(bodies) * PER_BATCH
    wall = time.perf_counter() - started
    return Rate(count / wall, count / (server.processor_s() - used_s))


def speed(folder: Path, count: int, rounds: int) -> None:
    """Print the table of rates."""
    requests = [batch() for _ in range(max(1, count // PER_BATCH))]
    plain = [request.SerializeToString() for request in requests]
    zipped = [gzip.compress(body) for body in plain]
    ways: dict[str, tuple[Callable[[Path], Server], list[bytes], str, str]] = {
        "peer, protobuf": (peer, plain, PROTOBUF, ""),
        "serve, protobuf": (receiver, plain, PROTOBUF, ""),
        "serve, gzip": (receiver, zipped, PROTOBUF, "gzip"),
        "serve, JSON": (receiver, [as_json(request) for request in requests], JSON, ""),
    }
    rates: dict[str, list[Rate]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (start, bodies, kind, encoding) in ways.items():
            server = start(folder)
            rates[way].append(rate(server, bodies, kind, encoding))
            server.end()
    base = statistics.median(found.processor for found in rates["peer, protobuf"])
    print(f"{'way':18}{'spans/s':>10}{'min':>10}{'max':>10}{'per cpu s':>11}{'× peer':>9}")
    for way, found in rates.items():
        walls = [each.wall for each in found]
        middle = statistics.median(each.processor for each in found)
        print(
            f"{way:18}{statistics.median(walls):10,.0f}{min(walls):10,.0f}{max(walls):10,.0f}"
            f"{middle:11,.0f}{middle / base:9.2f}"
        )


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes) -> bytes:
    """A message as a field of another."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def deep(levels: int) -> bytes:
    """A request with one attribute of so many lists within each other."""
    value = b""
    for _ in range(levels):
        value = field(5, field(1, value))
    span = field(9, field(1, b"k") + field(2, value))
    return field(1, field(2, field(2, span)))


def zeros(size: int) -> bytes:
    """A gzip of so many zeros, made without holding them."""
    import zlib

    made = zlib.compressobj(9, wbits=31)
    block = b"\0" * (1 << 20)
    return b"".join(made.compress(block) for _ in range(size >> 20)) + made.flush()


def bombs(folder: Path) -> None:
    """Print what each hostile body costs."""
    empty = gzip.compress(field(1, field(2, b"\x12\x00" * 5_000_000)), 9)
    braces = gzip.compress(b'{"resourceSpans":[' + b"{}," * 6_000_000 + b"{}]}", 9)
    hostile = {
        f"5M empty spans, gzip of {len(empty) / 1e3:.1f} kB": (empty, PROTOBUF),
        f"6M empty objects in JSON, gzip of {len(braces) / 1e3:.1f} kB": (braces, JSON),
        "1 GB of zeros in a gzip": (zeros(1 << 30), PROTOBUF),
        "47 lists deep": (gzip.compress(deep(47)), PROTOBUF),
        "10,000 lists deep": (gzip.compress(deep(10_000)), PROTOBUF),
        "10,000 lists deep in JSON": (gzip.compress(b"[" * 10_000 + b"]" * 10_000), JSON),
    }
    print(f"\n{'hostile body':48}{'status':>8}{'ms':>8}{'+ MB':>8}")
    for name, (body, kind) in hostile.items():
        server = receiver(folder)
        server.post(batch().SerializeToString(), PROTOBUF)
        before, started = server.memory_mb(), time.perf_counter()
        status = server.post(body, kind, "gzip")
        took = (time.perf_counter() - started) * 1e3
        print(f"{name:48}{status:8}{took:8.0f}{server.memory_mb() - before:8.0f}")
        server.end()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=50_000, help="in each way and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        speed(Path(folder), options.spans, options.rounds)
        bombs(Path(folder))


if __name__ == "__main__":
    main()
