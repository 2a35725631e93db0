"""The OTLP receiver: how fast it takes small spans.

Each round sends the same batches over one connection: to ``serve`` as protobuf, gzip and JSON, and
to a peer of stock parts that does the job of a Collector's file exporter.
"""

import argparse
import base64
import gzip
import http.client
import os
import sys
import time
from statistics import median

import harness
import orjson
from google.protobuf.json_format import MessageToDict
from harness import spread
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PROTOBUF, JSON, PER_BATCH = "application/x-protobuf", "application/json", 512
PEER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
out = open("spans.jsonl", "ab", buffering=0)
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
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
COMMANDS = {
    "peer": (sys.executable, "-c", PEER),
    "serve": (sys.executable, "-m", "lightning_otel", "serve", "--store", "t.duckdb", "--port"),
}


def batch() -> ExportTraceServiceRequest:
    spans, now = harness.Requests(PER_BATCH, "some.library"), time.time_ns()
    for index in range(PER_BATCH):
        spans.add(
            "GET /x", (now + index, now + index + 1000), *map(os.urandom, (16, 8, 8)), kind=3,
            http__method="GET", http__url="http://x/y", peer="1.2.3.4", http__status_code=200,
        )  # fmt: skip
    (request,) = spans.made
    return request


def json_of(request: ExportTraceServiceRequest) -> bytes:
    found = MessageToDict(request)
    for span in found["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for key in ("traceId", "spanId", "parentSpanId"):
            span[key] = base64.b64decode(span[key]).hex()
    return orjson.dumps(found)


def main(options: argparse.Namespace) -> None:
    count, rounds = (5_000, 1) if options.quick else (50_000, 5)
    requests = [batch() for _ in range(max(1, count // PER_BATCH))]
    plain = [request.SerializeToString() for request in requests]
    zipped = [gzip.compress(body) for body in plain]
    ways: dict[str, tuple[str, list[bytes], str, dict[str, str]]] = {
        "peer, protobuf": ("peer", plain, PROTOBUF, {}),
        "serve, protobuf": ("serve", plain, PROTOBUF, {}),
        "serve, gzip": ("serve", zipped, PROTOBUF, {"Content-Encoding": "gzip"}),
        "serve, JSON": ("serve", [json_of(request) for request in requests], JSON, {}),
    }
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for at, (way, (kind, bodies, form, encoding)) in enumerate(ways.items()):
            port = 18_300 + 10 * number + at
            with harness.Server([*COMMANDS[kind], str(port)], port) as server:
                connection = http.client.HTTPConnection(f"127.0.0.1:{port}", timeout=60)
                headers = {"Content-Type": form, **encoding}
                for sent, body in enumerate([bodies[0], *bodies]):  # the first is not timed
                    if sent == 1:
                        began, used = time.perf_counter(), server.cpu_s()
                    connection.request("POST", "/v1/traces", body, headers)
                    with connection.getresponse() as answer:
                        answer.read()
                    assert answer.status == 200
                wall, cpu = time.perf_counter() - began, server.cpu_s() - used
                found[way].append((len(plain) * PER_BATCH / wall, len(plain) * PER_BATCH / cpu))
                connection.close()
    base = median(cpu for _, cpu in found["peer, protobuf"])
    rows = []
    for way, rates in found.items():
        walls, cpus = zip(*rates, strict=True)
        rows.append((way, spread(walls), spread(cpus), f"{median(cpus) / base:.2f}"))
    head = ["way", "of the clock", "of the server's CPU", "CPU, × peer"]
    harness.table("Spans a second: median (range)", head, rows)
    harness.finish(options, found, "lightning-otel", "protobuf")


if __name__ == "__main__":
    harness.run(main)
