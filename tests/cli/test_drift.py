"""``drift`` with real tokenizers, built here: what is found, and what people and machines see."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra drift is not installed")
pytest.importorskip("jinja2", reason="the extra drift is not installed")

from tests.bytepairs import CHATML, POLITE, PROMPT, REFUSING, Engine, built, record, spelled
from tests.cli.conftest import Cli, lines_of_error

from lightning_otel import Store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("engine"), CHATML)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder)


def test_drift_command_tells_people_and_machines(
    store: Store, engine: Engine, folder: Path, cli: Cli
) -> None:
    """A line for each model and part, with the reasons; the same as JSON."""
    prompt = engine.encode(PROMPT)
    record(
        store,
        [prompt, prompt, []],
        [engine.encode("the answer"), spelled(engine, "the answer"), [1]],
    )
    where = ("--tokenizer", folder, "--store", store.name)

    text = cli("drift", *where)
    found = json.loads(cli("drift", *where, "--rollout", "r1", "--json").stdout)
    lines = cli("drift", *where, "--jsonl").stdout.splitlines()

    assert text.returncode == 0
    header, prompts, responses = text.stdout.splitlines()
    assert header.split("\t") == [
        "model", "template", "part", "count", "exact", "prefix", "length", "why",
    ]  # fmt: skip
    assert prompts.split("\t")[2:5] == ["prompt", "2", "2 (100%)"]
    assert responses.split("\t")[2:5] == ["response", "2", "1 (50%)"]
    assert responses.endswith("1 × retokenisation")
    assert "1 transition without token ids to compare with" in text.stderr
    assert found["skipped"] == 1
    assert [each["exact_rate"] for each in found["drift"]] == [1.0, 0.5]
    assert [json.loads(line) for line in lines] == found["drift"]


def test_drift_command_without_ids_says_how_to_get_them(
    store: Store, folder: Path, cli: Cli
) -> None:
    """A store of text has nothing to compare, which is no error and not silent."""
    record(store, [[]], [[]])

    done = cli("drift", "--tokenizer", folder, "--store", store.name)

    assert done.returncode == 0
    assert "--enable-retokenization-fix" in done.stderr


@pytest.fixture
def measure(store: Store, cli: Cli) -> Callable[[Path], list[dict[str, Any]]]:
    """Measures the store with the tokenizer in a folder: the prompts, then the responses."""

    def run(tokenizer: Path) -> list[dict[str, Any]]:
        done = cli("drift", "--tokenizer", tokenizer, "--json", "--store", store.name)
        return list(json.loads(done.stdout)["drift"])

    return run


Measure = Callable[[Path], list[dict[str, Any]]]


TOLD = [{
    "role": "assistant",
    "parts": [{"type": "tool_call", "id": "1", "name": "f", "arguments": {"a": 1}}],
}]  # fmt: skip
CALLED = '<|im_start|>assistant\n<tool>{"a": 1}</tool><|im_end|>\n<|im_start|>assistant\n'
CASES: dict[str, tuple[Callable[[Engine], list[Any]], str, list[dict[str, int]]]] = {
    # The ids of a prompt and of its answer, the template, and the causes of what drifts in each.
    "its own engine": (
        lambda engine: [engine.encode(PROMPT), engine.encode("the answer<|im_end|>")], CHATML,
        [{}, {}],
    ),
    "a template that refuses, and foreign ids": (
        lambda _: [[1, 2], [150_000]], REFUSING, [{"other": 1}, {"other": 1}],
    ),
    # Half of an é comes back as another character, which is no retokenisation.
    "an answer cut in a character": (
        lambda engine: [engine.encode(PROMPT), spelled(engine, "é")[:1]], CHATML,
        [{}, {"other": 1}],
    ),
    # Templates write arguments by ``tojson``: of a text they would make a quoted text.
    "calls of tools, whose arguments are objects": (
        lambda engine: [engine.encode(CALLED), engine.encode("the answer"), TOLD], CHATML, [{}, {}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_drifts_has_a_cause(
    case: str, store: Store, engine: Engine, measure: Measure, tmp_path: Path
) -> None:
    """Nothing drifts where template, tokenizer and spelling are the engine's."""
    recorded, template, causes = CASES[case]
    prompt, response, *asked = recorded(engine)
    record(store, [prompt], [response], *asked)

    found = measure(built(tmp_path / "template", template))

    assert [(row["model"], row["part"]) for row in found] == [
        ("tiny", "prompt"), ("tiny", "response"),
    ]  # fmt: skip
    assert [row["causes"] for row in found] == causes
    assert [row["exact_rate"] for row in found] == [0.0 if cause else 1.0 for cause in causes]


def test_a_model_that_spells_otherwise_drifts_by_retokenisation(
    store: Store, engine: Engine, folder: Path, measure: Measure
) -> None:
    """Letter by letter is the same text, and no token of it comes back but the last."""
    sampled = [*spelled(engine, "the answer"), *engine.encode("<|im_end|>")]
    record(store, [engine.encode(PROMPT)], [sampled])

    _, response = measure(folder)

    assert (response["exact"], response["causes"]) == (0, {"retokenisation": 1})
    assert response["prefix_share"] < 0.5
    assert response["length_delta"] < 0


def test_another_template_drifts_by_template(
    store: Store, folder: Path, measure: Measure, tmp_path: Path
) -> None:
    """A system prompt that the engine's template adds in silence is found."""
    place = built(tmp_path / "polite", POLITE)
    polite = Engine(place)
    prompts = [polite.encode(polite.render("what is the question"))]
    record(store, prompts, [polite.encode("the answer")])

    prompt, response = measure(folder)
    own, _ = measure(place)

    assert prompt["causes"] == {"template": 1}
    assert prompt["length_delta"] < 0
    assert response["exact"] == 1
    assert own["exact"] == 1
    assert own["template"] != prompt["template"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "missing", "no tokenizer at"),
        (lambda folder: built(folder / "bare", ""), "has no chat template"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    make: Callable[[Path], Path], reason: str, store: Store, cli: Cli, tmp_path: Path
) -> None:
    """The error names the place, what is wrong with it and what to do."""
    place = make(tmp_path)
    record(store, [[1]], [[2]])

    done = cli("drift", "--tokenizer", place, "--store", store.name)

    *words, remedy = lines_of_error(done)
    assert reason in " ".join(words)
    assert str(place) in " ".join(words)
    assert remedy
