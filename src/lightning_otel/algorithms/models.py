"""Models and their weights: loaded, adapted, saved, published; torch is imported on use."""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_otel.algorithms.checkpoint import replace_folder
from lightning_otel.errors import ConfigError, NotFoundError, NotInstalledError, install_command
from lightning_otel.types import Resource

if TYPE_CHECKING:
    from lightning_otel.algorithms.run import Run

EXTRA: Final = "train"
_WEIGHTS: Final = "weights.pt"


def library(name: str) -> Any:
    """Import a library that the extra installs."""
    try:
        return import_module(name)
    except ImportError as exc:
        raise NotInstalledError(
            f"training of weights needs {name}, which cannot be imported ({exc}); "
            f"{install_command(EXTRA)}"
        ) from exc


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """Restore Python's random state, which trainers seed anew.

    Else tracer providers that draw ids from it repeat those of the step before.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def hide_bars() -> Iterator[None]:
    """Show no progress bars for work of a moment."""
    bars = library("datasets").utils.logging
    was_shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            bars.enable_progress_bar()


def precision_settings() -> dict[str, bool]:
    """Return what a CPU needs; TRL asks for bfloat16 on an accelerator."""
    if library("torch").accelerator.is_available():
        return {}
    return {"use_cpu": True, "bf16": False}


def load_model(model: Any, settings: Mapping[str, Any]) -> Any:
    """Load a causal language model by its folder or name; return a loaded one as it is.

    In float32 unless ``dtype`` says otherwise: at common learning rates most updates of a bfloat16
    weight are smaller than its last bit. Source: TRL 1.16's ``create_model_from_path``.
    """
    if not isinstance(model, str | os.PathLike):
        return model
    causal = library("transformers").AutoModelForCausalLM
    try:
        return causal.from_pretrained(os.fspath(model), **{"dtype": "float32", **settings})
    except Exception as exc:  # damaged files raise errors that are of no kind
        raise ConfigError(
            f"the model {os.fspath(model)!r} cannot be loaded: {_first_line(exc)}; name a folder "
            "with config.json and weights, or a model that was downloaded before"
        ) from exc


def load_tokenizer(model: Any, tokenizer: Any) -> Any:
    """Load the tokenizer that belongs to a model, unless another one is given."""
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    place = tokenizer if tokenizer is not None else model.config._name_or_path
    try:
        return library("transformers").AutoTokenizer.from_pretrained(os.fspath(place))
    except Exception as exc:  # as above
        raise ConfigError(
            f"the tokenizer {os.fspath(place)!r} cannot be loaded: {_first_line(exc)}; give one as "
            "tokenizer="
        ) from exc


def add_adapter(model: Any, peft_config: Any) -> Any:
    """Return the model with an adapter to train, all else frozen; None adds none."""
    if peft_config is None:
        return model
    peft = library("peft")
    try:
        if isinstance(peft_config, Mapping):
            peft_config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **peft_config})
        return peft.get_peft_model(model, peft_config)
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"no adapter can be made of peft_config {peft_config!r:.200}: {_first_line(exc)}; see "
            "peft.LoraConfig"
        ) from exc


def unwrap(model: Any) -> Any:
    """Return the model without what an earlier trainer put around its forward pass."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for candidate in (model, base):
        for name in ("forward", "_original_forward"):
            vars(candidate).pop(name, None)
    return model


def save(model: Any, optimizer: Any, folder: Path) -> None:
    """Write all that training changes: trained parameters, and the state of the optimizer."""
    state = {
        "parameters": {name: item.detach().cpu() for name, item in _trained_parameters(model)},
        "optimizer": None if optimizer is None else optimizer.state_dict(),
    }
    library("torch").save(state, folder / _WEIGHTS)


def load(model: Any, folder: Path) -> Any:
    """Read what :func:`save` wrote into the model; return the optimizer's state."""
    torch = library("torch")
    path = folder / _WEIGHTS
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        parameters = dict(_trained_parameters(model))
        missing = parameters.keys() ^ state["parameters"].keys()
        if missing:
            raise ValueError(f"other parameters, such as {min(missing)}")
        with torch.no_grad():
            for name, values in state["parameters"].items():
                parameters[name].copy_(values)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError) as exc:
        raise ConfigError(
            f"the checkpoint {path} is not of this model: {_first_line(exc)}; resume with the "
            "model, peft_config and dtype that it was made with"
        ) from exc
    return state["optimizer"]


def _trained_parameters(model: Any) -> list[tuple[str, Any]]:
    return [(name, item) for name, item in model.named_parameters() if item.requires_grad]


def publish(model: Any, tokenizer: Any, folder: Path) -> str:
    """Write the weights, or the adapter's, atomically; return their SHA-256 in hex."""
    digest = hashlib.sha256()
    with replace_folder(folder, "weights") as writing:
        model.save_pretrained(writing)
        if not hasattr(model, "peft_config"):
            tokenizer.save_pretrained(writing)
        for path in sorted(writing.glob("*.safetensors")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def remove_old(run: "Run", resource: str, count: int) -> None:
    """Delete a run's weights but the newest and those that something names."""
    used = json.dumps([version.body for version in _list_used(run)])
    for folder in sorted((run.run_dir / "weights").iterdir())[:-count]:
        if str(folder) not in used and f"{resource}-{folder.name}-" not in used:
            shutil.rmtree(folder, ignore_errors=True)


def _list_used(run: "Run") -> list[Resource]:
    used = {
        (name, version)
        for name in run.resources.names()
        for version in run.resources.aliases(name).values()
    }
    for checkpoint in run.config.runs.checkpoints(run.run.run_id):
        used.update(checkpoint.versions.items())
    for rollout in run.queue.rollouts("running"):
        used.update(rollout.resources.items())
    running = run.store.sql("SELECT resources FROM rollouts WHERE status = 'running'").rows()
    for row in running:
        for name, versions in json.loads(row["resources"] or "{}").items():
            used.update((name, int(version)) for version in versions if str(version).isdigit())
    return [version for name, number in used for version in _find_version(run, name, number)]


def _find_version(run: "Run", name: str, version: int) -> list[Resource]:
    try:
        return [run.resources.get(name, version)]
    except NotFoundError:  # stamped by an agent that has another state
        return []


def weigh_rows(trainer: Any) -> Any:
    """Return the class of a trainer whose loss is a mean over the rows of each optimizer step.

    TRL's is a mean over each micro-batch, so that rows of a small one count for more. Source: TRL
    1.16, ``dpo_trainer.py`` and ``kto_trainer.py``.
    """

    class RowMeanTrainer(trainer):  # type: ignore[misc]  # not installed everywhere
        def get_batch_samples(self, *args: Any) -> Any:
            batches, items = super().get_batch_samples(*args)
            self._row_count = sum(len(batch["input_ids"]) for batch in batches)
            return batches, items

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Any:
            part = len(inputs["input_ids"]) / self._row_count
            loss = super().compute_loss(model, inputs, *args, **keywords)
            return loss * part * self.current_gradient_accumulation_steps

    return RowMeanTrainer


def _first_line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__
