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
        keep: How many adapters stay loaded, with all that agents may still request.
        timeout_s: Limit of loading, seconds.
        """
        if keep < 2:
            raise ConfigError(f"keep is {keep}; while agents move to new weights both are needed")
        self._base_url = base_url.rstrip("/")
        self._endpoint = endpoint
        self._sampling = {**NEUTRAL, **(sampling or {})}
        self._keep = keep
        self._timeout_s = timeout_s
        self._loaded: list[str] = []

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
        self._loaded = [*(name for name in self._loaded if name != weights.name), weights.name]
        while len(self._loaded) > self._keep:
            self._post_action("unload_lora_adapter", {"lora_name": self._loaded.pop(0)})
        body = {"base_url": self._base_url, "model": weights.name, "sampling": self._sampling}
        return {self._endpoint: body}

    def _post_action(self, action: str, body: Mapping[str, Any]) -> None:
        url = f"{self._base_url}/{action}"
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as exc:
            body_text = exc.read().decode("utf-8", "replace")
            # Loaded before a kill, or gone with a restart of the server: as it should be.
            if "already been loaded" in body_text or (action[:2] == "un" and exc.code == 404):
                return
            raise TrainingError(
                f"{url} answered {exc.code}: {body_text[:300]}; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from exc
        except OSError as exc:
            raise TrainingError(
                f"{url} does not answer: {exc}; is the engine running there?"
            ) from exc
