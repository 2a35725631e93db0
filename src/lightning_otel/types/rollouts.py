"""Rollouts of an agent, and its resources: prompts, endpoints, weights."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from lightning_otel.errors import ConfigError

Mode: TypeAlias = Literal["train", "val", "test"]
"""What a rollout is for: to learn from, to choose by, or to judge by in the end."""
WorkerKind: TypeAlias = Literal["threads", "processes", "ray"]
RolloutStatus: TypeAlias = Literal["queuing", "running", "succeeded", "failed", "cancelled"]
"""Where a rollout stands; the last three are final."""
FINAL: Final = frozenset({"succeeded", "failed", "cancelled"})
ResourceKind: TypeAlias = Literal["prompt", "endpoint", "weights"]
"""Kind of a resource: a prompt with examples; a model's address and sampling; a model's files."""

_PLACEHOLDER: Final = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")


def brace_names(names: Iterable[str]) -> str:
    """Return placeholders as they are written in a template."""
    return ", ".join(f"{{{name}}}" for name in names)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One execution of an agent on one task.

    Attributes:
        task: The agent's task; any JSON value.
        mode: Its purpose.
        agent: The agent that takes it; None is any.
        group_id: The rollouts it is compared with, such as several of one task; empty if none.
        priority: A higher one is taken first; then the older.
        max_attempts: The most attempts.
        timeout_s: Limit of an attempt, seconds; None is none.
        resources: Versions by resource name that it is pinned to.
        attempts: The number of attempts so far.
        reward: The agent's or another reward; None if none is known.
        reason: Why it failed or was cancelled; empty otherwise.
        created_ns: When it was put into the queue.
        ended_ns: When it became final; None before.
    """

    rollout_id: str
    task: Any
    status: RolloutStatus = "queuing"
    mode: Mode = "train"
    agent: str | None = None
    group_id: str = ""
    priority: int = 0
    max_attempts: int = 1
    timeout_s: float | None = None
    resources: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    reward: float | None = None
    reason: str = ""
    created_ns: int = 0
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A template with few-shot examples.

    ``{task}`` is a placeholder, ``{{task}}`` the text ``{task}``; braces around anything but one
    name, such as those of JSON, are text.

    Attributes:
        examples: Chat messages between the template and the request.
        name: Its name in errors.
    """

    template: str
    examples: tuple[Mapping[str, Any], ...] = ()
    name: str = "the prompt"

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The names to be filled in, each once, in order."""
        names = (match[2] for match in _PLACEHOLDER.finditer(self.template))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def compare_placeholders(self, template: str, others: Collection[str] = ()) -> str:
        """Return the reason why another template does not fit the same task; empty if it does.

        Args:
            template: The other template.
            others: Names that are filled in besides those of this prompt.
        """
        old, new = set(self.placeholders), set(Prompt(template).placeholders)
        if old - new:
            return f"the placeholders {brace_names(sorted(old - new))} are gone"
        if unknown := new - old - set(others):
            names = brace_names(sorted(unknown))
            return f"nobody fills in {names}; double the braces of what is meant as text"
        return ""

    def format(self, /, **values: object) -> str:
        """The text with every placeholder filled in; values that it does not ask for are not used.

        Raises:
            ConfigError: A placeholder has no value.
        """
        missing = [name for name in self.placeholders if name not in values]
        if missing:
            raise ConfigError(
                f"{self.name} needs {', '.join(missing)}, and was given "
                f"{', '.join(sorted(values)) or 'nothing'}; format({missing[0]}=…), or write "
                f"{{{{{missing[0]}}}}} in it if that is meant as text"
            )
        return _PLACEHOLDER.sub(
            lambda match: f"{{{match[1]}}}" if match[1] else str(values[match[2]]), self.template
        )

    def messages(self, /, **values: object) -> list[dict[str, Any]]:
        """A system message with the text, then the examples, as the chat API takes them.

        Raises:
            ConfigError: A placeholder has no value.
        """
        system = {"role": "system", "content": self.format(**values)}
        return [system, *(dict(example) for example in self.examples)]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model behind an address, as an agent asks it.

    Attributes:
        base_url: Its address; empty leaves the client's own.
        model: Its name there; empty leaves the agent's own.
        sampling: Parameters of a request, by their names in the API.
    """

    base_url: str = ""
    model: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        """Its address, as Agent Lightning calls it."""
        return self.base_url

    @property
    def sampling_parameters(self) -> Mapping[str, Any]:
        """Its sampling, as Agent Lightning calls it."""
        return self.sampling

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return its address under Agent Lightning's name; without a proxy ids are ignored."""
        return self.base_url


@dataclass(frozen=True, slots=True)
class Resource:
    """One version of a named, tunable thing; it never changes.

    Attributes:
        name: Its name; that of one agent alone is ``agent/name``.
        version: From 1, without gaps.
        body: Its content as JSON: of a prompt ``{"template": str, "examples": [message, …]}``; of
            an endpoint ``{"base_url": str, "model": str, "sampling": {…}}``; of weights
            ``{"uri": str, "base_model": str}``.
        sha256: Of the body as canonical JSON, in hex.
        parent: The version it was made from; None if it is the first of its line.
        run_id: The training run that made it; empty if a person did.
        metrics: Measurements when it was made, such as ``{"reward": 0.7}``.
    """

    name: str
    version: int
    kind: ResourceKind
    body: Mapping[str, Any]
    sha256: str = ""
    parent: int | None = None
    run_id: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    created_ns: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def _repr_html_(self) -> str:
        from lightning_otel.types import html

        measured = ", ".join(f"{name} {value:g}" for name, value in self.metrics.items())
        pairs = [
            ("kind", self.kind),
            ("made from", None if self.parent is None else f"{self.name}@{self.parent}"),
            ("by", self.run_id or "hand"),
            ("measured", measured),
        ]
        body = {name: value for name, value in self.body.items() if name != "template"}
        pairs += [(name, value) for name, value in body.items() if value not in ((), [], {}, "")]
        text = self.body.get("template")
        block = html.render_block(text) if isinstance(text, str) else ""
        return html.render_facts(str(self), pairs) + block

    @property
    def prompt(self) -> Prompt:
        """Its template and examples.

        Raises:
            ConfigError: It is no prompt.
        """
        if self.kind != "prompt":
            raise ConfigError(f"{self} is no prompt but {self.kind}; read its body instead")
        return Prompt(str(self.body["template"]), tuple(self.body.get("examples", ())), str(self))

    @property
    def endpoint(self) -> Endpoint:
        """Its address, model and sampling.

        Raises:
            ConfigError: It is no endpoint.
        """
        if self.kind != "endpoint":
            raise ConfigError(f"{self} is no endpoint but {self.kind}; read its body instead")
        body = self.body
        return Endpoint(
            str(body.get("base_url", "")), str(body.get("model", "")), body.get("sampling", {})
        )

    def format(self, /, **values: object) -> str:
        """The prompt's text with every placeholder filled in, such as ``format(task="2+2")``.

        Raises:
            ConfigError: It is no prompt, or a placeholder has no value.
        """
        return self.prompt.format(**values)
