"""The closed loop of an engine, an agent and a trainer; and the contract of its engine."""

import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from examples.closed_loop import tiny

import lightning_otel as lo
from lightning_otel.errors import ConfigError, TrainingError

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from examples.closed_loop.__main__ import Loop, table  # noqa: E402
from examples.closed_loop.engine import BASE, Engine  # noqa: E402

from lightning_otel.algorithms import models  # noqa: E402
from lightning_otel.algorithms.engines import VLLM  # noqa: E402
from lightning_otel.algorithms.gradients import Weights  # noqa: E402
from lightning_otel.algorithms.grpo import GRPO  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_completion_tokens": 6,
    "logprobs": True,
    "seed": 7,
    "extra_body": {"return_token_ids": True},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A running engine with a tiny model."""
    with Engine(tiny.saved(tmp_path_factory.mktemp("model"), sharpness=8.0)) as running:
        yield running


@pytest.fixture
def client(engine: Engine) -> Iterator[openai.OpenAI]:
    """The openai client before it."""
    with openai.OpenAI(base_url=engine.base_url, api_key="none", max_retries=0) as made:
        yield made


def adapter(folder: Path, seed: int) -> Weights:
    """An adapter that changes what the model says."""
    model = models.add_adapter(tiny.model(sharpness=8.0), {"r": 2, "target_modules": ["down_proj"]})
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora_B" in name:
                each.normal_(std=2.0)
    digest = models.publish(model, None, folder)
    return Weights(folder, f"weights-{digest[:8]}", True, "tiny")


def test_the_engine_tells_what_it_sampled(engine: Engine, client: openai.OpenAI) -> None:
    """Ids and logprobs are the model's own; a stream adds up to the same; recorded, it is exact."""
    with lo.auto_trace() as recording:
        whole = client.chat.completions.create(model=BASE, temperature=0.7, **ASKED)
    chunks = list(client.chat.completions.create(model=BASE, temperature=0.7, stream=True, **ASKED))

    choice: Any = whole.choices[0]
    prompt_ids: list[int] = whole.model_extra["prompt_token_ids"]  # type: ignore[index]  # is there
    ids = choice.model_extra["token_ids"]
    told = [each.logprob for each in choice.logprobs.content]
    model = tiny.model(sharpness=8.0)
    with torch.no_grad():
        scores = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    wanted = torch.log_softmax(scores / 0.7, -1)
    assert told == pytest.approx([float(wanted[i, t]) for i, t in enumerate(ids)], abs=1e-4)
    streamed = [
        t for c in chunks for x in c.choices for t in (x.model_extra or {}).get("token_ids", [])
    ]
    assert streamed == ids
    assert chunks[0].model_extra["prompt_token_ids"] == prompt_ids  # type: ignore[index]  # is there
    (path,) = recording.trajectories()
    (step,) = path.transitions
    assert (list(step.prompt_ids), list(step.response_ids)) == (prompt_ids, ids)
    assert list(step.logprobs) == pytest.approx(told)


def test_weights_are_swapped_while_it_serves(
    engine: Engine, client: openai.OpenAI, tmp_path: Path
) -> None:
    """Each adapter answers under its own name at once; old ones go, and nobody waits."""
    announce = VLLM(engine.base_url, keep=2)
    stop, answered = threading.Event(), itertools.count()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not stop.is_set():
                client.chat.completions.create(model=BASE, **ASKED)
                next(answered)
        except BaseException as exc:  # noqa: BLE001  # looked at below
            failures.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    bodies = [announce(adapter(tmp_path / str(n), n)) for n in range(3)]
    first = announce(adapter(tmp_path / "2", 2))  # the same weights again, as after a kill
    stop.set()
    thread.join()

    names = [body["llm"]["model"] for body in bodies]
    with lo.auto_trace() as recording:
        asked = {**ASKED, "extra_body": bodies[2]["llm"]["sampling"]}
        client.chat.completions.create(model=names[2], **asked)
    assert recording.trajectories()[0].transitions[0].sampling.items() >= {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
    }.items()  # fmt: skip
    assert first == bodies[2]
    assert not failures
    assert next(answered) > 0
    listed = {each.id for each in client.models.list()}
    assert names[2] in listed
    assert names[0] not in listed
    said = [
        client.chat.completions.create(model=name, **ASKED).choices[0].model_extra["token_ids"]  # type: ignore[index]  # is there
        for name in (BASE, names[2])
    ]
    assert said[0] != said[1]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model=names[0], **ASKED)


def test_a_restarted_trainer_unloads_what_it_loaded_before(engine: Engine, tmp_path: Path) -> None:
    """The server lists what is loaded; adapters of other resources stay."""
    other = adapter(tmp_path / "other", 9)
    VLLM(engine.base_url)(replace(other, name="critic-000001-0a"))
    for number in range(4):
        weights = replace(adapter(tmp_path / str(number), number), name=f"policy-00000{number}-0a")
        VLLM(engine.base_url, keep=2)(weights)

    assert set(engine.adapters) >= {"critic-000001-0a", "policy-000002-0a", "policy-000003-0a"}
    assert not {"policy-000000-0a", "policy-000001-0a"} & set(engine.adapters)
    with pytest.raises(ConfigError, match=r"keeps 2 adapters, and with max_staleness=2"):
        GRPO("model", announce=VLLM(engine.base_url, keep=2), max_staleness=2)


def test_an_engine_that_does_not_load_is_told(engine: Engine, tmp_path: Path) -> None:
    """No adapter, nobody there, a folder that the engine does not see."""
    found = adapter(tmp_path / "one", 1)
    with pytest.raises(TrainingError, match="vLLM takes adapters while it serves"):
        VLLM(engine.base_url)(Weights(found.folder, "whole", False, "tiny"))
    with pytest.raises(TrainingError, match=r"answered 404: .*No adapter found"):
        VLLM(engine.base_url)(Weights(tmp_path / "nowhere", "lost", True, "tiny"))
    with pytest.raises(TrainingError, match=r"does not answer"):
        VLLM("http://127.0.0.1:9/v1")(found)


@pytest.mark.skipif(
    not os.environ.get("LIGHTNING_TEST_LOOP"), reason="LIGHTNING_TEST_LOOP runs it, a minute"
)
def test_the_loop_closes(tmp_path: Path) -> None:
    """Three processes; the trainer is killed and resumed, the agent never stops."""
    loop = Loop(tmp_path, steps=6, batch=16)

    loop.run()

    checks = loop.report().checks(6, -1.0)
    assert [each for each in checks if not each.holds] == [], table(checks)
