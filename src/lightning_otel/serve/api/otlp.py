"""The API document's entries for the routes of ``serve/otlp.py``."""

from typing import Final

from lightning_otel.serve import answers, otlp
from lightning_otel.serve.api.operation import Answer, Operation

_BYTES: Final = {"type": "string"}
OPERATIONS: Final = (
    Operation(
        "POST", "/v1/traces", otlp.traces, "Take spans by OTLP/HTTP; 200 says that they are kept.",
        {200: Answer(
            "They are kept, but for those counted as rejected.",
            {answers.PROTOBUF: _BYTES, answers.JSON: {"type": "object"}},
        )},
        bodies={answers.PROTOBUF: _BYTES, answers.JSON: {"type": "object"}},
        is_open=True,
    ),
)  # fmt: skip
