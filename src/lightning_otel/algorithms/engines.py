"""Load new weights into serving engines: an adapter becomes a model of its own name.

Running requests finish on the old weights; canary and rollback are names of models.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from lightning_otel.algorithms.gradients import Weights
from lightning_otel.errors import ConfigError, TrainingError

NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling from the model's own distribution; vLLM fills gaps from ``generation_config.json``."""


class VLLM:
    """Loads adapters into a vLLM server, and publishes where they answer; give it as ``announce``.

    The server must allow it: ``--enable-lora`` with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``, a
    ``--max-lora-rank`` no less than the adapter's, and ``--max-loras`` no less than ``keep``. It
    must see the run's folder under the same path.

    Source: vLLM's documentation of dynamic LoRA serving.
    """

    def __init__(
        self,
        base_url: str,
        *,
        endpoint: str = "llm",
        sampling: Mapping[str, Any] | None = None,
        keep: int = 4,
        timeout_s: float = 120.0,
    ) -> None:
        """Args:
        base_url: With the ``/v1``.
        endpoint: The resource that names the server of the weights.
        sampling: Sampling of its requests besides the model's own distribution, so that
            log-probabilities are comparable. With the openai client, pass all as ``extra_body``.
        keep: How many of a resource's adapters stay loaded; older ones are unloaded. Those that
            agents may still request must be among them: ``max_staleness + 1`` or more.
        timeout_s: Limit of loading, seconds.
        """
        if keep < 2:
            raise ConfigError(f"keep is {keep}; while agents move to new weights both are needed")
        self._base_url = base_url.rstrip("/")
        self._endpoint = endpoint
        self._sampling = {**NEUTRAL, **(sampling or {})}
        self.keep = keep
        self._timeout_s = timeout_s

    def __call__(self, weights: Weights) -> dict[str, Any]:
        """Load weights; return the endpoint that serves them.

        Raises:
            TrainingError: They are no adapter, or the server does not load them.
        """
        if not weights.is_adapter:
            raise TrainingError(
                "vLLM takes adapters while it serves, and these are whole weights; train one: "
                "peft_config={'r': 16}, or give a function of your own as announce="
            )
        self._post_action(
            "load_lora_adapter", {"lora_name": weights.name, "lora_path": str(weights.folder)}
        )
        for name in self._list_adapters(weights)[: -self.keep]:
            self._post_action("unload_lora_adapter", {"lora_name": name})
        body = {"base_url": self._base_url, "model": weights.name, "sampling": self._sampling}
        return {self._endpoint: body}

    def _list_adapters(self, weights: Weights) -> list[str]:
        # As the server has them: none is forgotten when the trainer is started again.
        resource = weights.name.rsplit("-", 2)[0]
        models = json.loads(self._send(f"{self._base_url}/models"))["data"]
        names = [str(model["id"]) for model in models]
        return sorted(
            (name for name in names if name.rsplit("-", 2)[0] == resource),
            key=lambda name: (name == weights.name, name),
        )

    def _post_action(self, action: str, body: Mapping[str, Any]) -> None:
        url = f"{self._base_url}/{action}"
        try:
            self._send(url, json.dumps(body).encode())
        except urllib.error.HTTPError as exc:
            body_text = exc.read().decode("utf-8", "replace")
            # Loaded before a kill, or gone with a restart of the server: as it should be.
            if "already been loaded" in body_text or (action[:2] == "un" and exc.code == 404):
                return
            raise TrainingError(
                f"{url} answered {exc.code}: {body_text[:300]}; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from exc

    def _send(self, url: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                content: bytes = answer.read()
        except urllib.error.HTTPError:
            raise
        except OSError as exc:
            raise TrainingError(
                f"{url} does not answer: {exc}; is the engine running there?"
            ) from exc
        return content
