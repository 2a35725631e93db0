"""An engine with vLLM's contract and a tiny real model, on loopback.

Chat completions, whole or streamed, with the token ids and log-probabilities of what was sampled;
and adapters that are loaded and unloaded while it serves, each a model of its own name.

    python examples/closed_loop/engine.py MODEL_FOLDER PORT_FILE

Source: vLLM 0.33's OpenAI-compatible server (``return_token_ids``, ``return_tokens_as_token_ids``,
``/v1/load_lora_adapter``, ``/v1/unload_lora_adapter`` with runtime updating allowed).
Log-probabilities are those after temperature, as with ``--logprobs-mode processed_logprobs``.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BASE = "base"
DEFAULT_TOKENS = 16


class RefusedError(Exception):
    """A request that is answered with an error, as vLLM answers it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Sampled:
    """What the model answered: ids and log-probabilities, [R], and why it ended."""

    model: str
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


class Engine:
    """The model, its adapters, and the server before them."""

    def __init__(self, folder: Path, *, port: int = 0) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.adapters: dict[str, str] = {}
        # Guards that one answer is of one adapter, which is active while it is sampled.
        self.lock = threading.Lock()
        self.http = Server(("127.0.0.1", port), Handler)
        self.http.engine = self
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> "Engine":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def load(self, name: str, path: str, *, in_place: bool) -> None:
        from peft import PeftModel

        if name in self.adapters and not in_place:
            raise RefusedError(400, f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").exists():
            raise RefusedError(404, f"Loading lora {name} failed: No adapter found for {path}")
        with self.lock:
            if name in self.adapters:
                self.model.delete_adapter(name)
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(path, adapter_name=name)
            else:
                self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name).eval()
            self.adapters[name] = path

    def unload(self, name: str) -> None:
        if name not in self.adapters:
            raise RefusedError(404, f"The lora adapter '{name}' cannot be found.")
        with self.lock:
            # peft keeps one adapter at least; its name is unknown from here on all the same.
            if len(self.adapters) > 1:
                self.model.delete_adapter(name)
            del self.adapters[name]

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        found = self.tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_dict=True
        )
        return list(found["input_ids"])

    def sample(self, body: dict[str, Any]) -> Sampled:
        name = body.get("model") or BASE
        if name != BASE and name not in self.adapters:
            raise RefusedError(404, f"The model `{name}` does not exist.")
        for key, neutral in (("top_p", 1), ("min_p", 0), ("n", 1)):
            if body.get(key) not in (None, neutral):
                raise RefusedError(400, f"{key} other than {neutral} is not supported here")
        if body.get("top_k") not in (None, 0, -1):
            raise RefusedError(400, "top_k is not supported here")
        found = Sampled(name, self.prompt_ids(body))
        with self.lock:
            # Between the check and here it may have been unloaded.
            if name == BASE and hasattr(self.model, "disable_adapter"):
                with self.model.disable_adapter():
                    self._sample(found, body)
            else:
                if name != BASE:
                    if name not in self.adapters:
                        raise RefusedError(404, f"The model `{name}` does not exist.")
                    self.model.set_adapter(name)
                self._sample(found, body)
        return found

    def _sample(self, found: Sampled, body: dict[str, Any]) -> None:
        import torch

        temperature = float(body.get("temperature") if body.get("temperature") is not None else 1)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_TOKENS
        chance = torch.Generator().manual_seed(body["seed"]) if "seed" in body else None
        ids, past = torch.tensor([found.prompt_ids]), None
        with torch.inference_mode():
            while len(found.ids) < most:
                out = self.model(input_ids=ids, past_key_values=past, use_cache=True)
                past = out.past_key_values
                scores = out.logits[0, -1]
                logprobs = torch.log_softmax(scores / temperature if temperature else scores, -1)
                token = int(
                    torch.multinomial(logprobs.exp(), 1, generator=chance)
                    if temperature
                    else logprobs.argmax()
                )
                found.ids.append(token)
                found.logprobs.append(min(0.0, float(logprobs[token])))
                if token == self.tokenizer.eos_token_id:
                    found.finish_reason = "stop"
                    return
                ids = torch.tensor([[token]])


class Server(ThreadingHTTPServer):
    daemon_threads = True
    engine: Engine


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        engine = self.server.engine
        if self.path == "/health":
            return self._answer(200, {})
        if self.path == "/v1/models":
            names = [BASE, *engine.adapters]
            return self._answer(200, {"object": "list", "data": [{"id": each} for each in names]})
        return self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            if self.path == "/v1/load_lora_adapter":
                name, path = body["lora_name"], body["lora_path"]
                engine.load(name, path, in_place=bool(body.get("load_inplace")))
                return self._answer(200, f"Success: LoRA adapter '{name}' added successfully.")
            if self.path == "/v1/unload_lora_adapter":
                engine.unload(body["lora_name"])
                return self._answer(200, "Success: LoRA adapter removed successfully.")
            if self.path == "/v1/chat/completions":
                found = engine.sample(body)
                stream = self._stream if body.get("stream") else self._whole
                return stream(body, found)
        except RefusedError as refused:
            error = {"message": str(refused), "type": "BadRequestError", "code": refused.status}
            return self._answer(refused.status, {"error": error, "object": "error", **error})
        return self._answer(404, {"detail": "Not Found"})

    def _answer(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _tokens(self, body: dict[str, Any], found: Sampled) -> list[dict[str, Any]]:
        decode = self.server.engine.tokenizer.decode
        is_named = body.get("return_tokens_as_token_ids")
        return [
            {
                "token": f"token_id:{token}" if is_named else decode([token]),
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(found.ids, found.logprobs, strict=True)
        ]

    def _whole(self, body: dict[str, Any], found: Sampled) -> None:
        text = self.server.engine.tokenizer.decode(found.ids, skip_special_tokens=True)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": found.finish_reason,
            "logprobs": {"content": self._tokens(body, found)} if body.get("logprobs") else None,
        }
        answer = {**self._head("chat.completion", found), "choices": [choice]}
        if body.get("return_token_ids"):
            choice["token_ids"] = found.ids
            answer["prompt_token_ids"] = found.prompt_ids
        self._answer(200, {**answer, "usage": self._usage(found)})

    def _stream(self, body: dict[str, Any], found: Sampled) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        head, asked = self._head("chat.completion.chunk", found), body.get("return_token_ids")
        first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}, "index": 0}
        start = {"prompt_token_ids": found.prompt_ids} if asked else {}
        self._event({**head, "choices": [first], **start})
        for place, token in enumerate(self._tokens(body, found)):
            is_last = place == len(found.ids) - 1
            text = self.server.engine.tokenizer.decode(
                found.ids[place : place + 1], skip_special_tokens=True
            )
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}}
            choice["finish_reason"] = found.finish_reason if is_last else None
            if body.get("logprobs"):
                choice["logprobs"] = {"content": [token]}
            if asked:
                choice["token_ids"] = found.ids[place : place + 1]
            self._event({**head, "choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({**head, "choices": [], "usage": self._usage(found)})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())

    def _head(self, kind: str, found: Sampled) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{time.time_ns():x}",
            "object": kind,
            "created": int(time.time()),
            "model": found.model,
        }

    def _usage(self, found: Sampled) -> dict[str, int]:
        given, made = len(found.prompt_ids), len(found.ids)
        counts = {"prompt_tokens": given, "completion_tokens": made}
        return {**counts, "total_tokens": given + made}


def main() -> None:
    folder, port_file = Path(sys.argv[1]), Path(sys.argv[2])
    with Engine(folder) as engine:
        # Whoever waits for the file finds all of it.
        port_file.with_suffix(".new").write_text(engine.base_url)
        os.replace(port_file.with_suffix(".new"), port_file)
        threading.Event().wait()


if __name__ == "__main__":
    main()
