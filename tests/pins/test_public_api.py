"""The public API: its names and signatures, as they are written down beside this test.

python -m tests.pins.test_public_api    # write them down anew
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_otel
from lightning_otel import agl

SNAPSHOT = Path(__file__).parent / "public_api.json"


def signature_of(found: Any) -> str:
    """Return names, kinds and defaults of the parameters; mypy has their types."""
    try:
        signature = inspect.signature(found)
    except ValueError:  # an exception's
        return "(...)"
    bare = [
        each.replace(annotation=each.empty, default=getattr(each.default, "__name__", each.default))
        if inspect.isfunction(each.default)
        else each.replace(annotation=each.empty)
        for each in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def members_of(cls: type) -> Iterator[tuple[str, str]]:
    """Yield public methods and values of a class and of those of ours that it inherits from."""
    for name in sorted(dir(cls)):
        home = next(each for each in cls.__mro__ if name in vars(each) or each is object)
        if name.startswith("_") or not home.__module__.startswith("lightning_otel"):
            continue
        found = inspect.getattr_static(cls, name)
        plain = getattr(found, "__func__", found)
        yield name, signature_of(plain) if callable(plain) else "value"


def public_api() -> dict[str, Any]:
    """Return every public name with its signature, classes with their members."""
    api: dict[str, Any] = {}
    for name in lightning_otel.__all__:
        found = getattr(lightning_otel, name)
        is_class = inspect.isclass(found)
        api[name] = {"": signature_of(found), **(dict(members_of(found)) if is_class else {})}
    theirs = set(agl.__all__) - set(lightning_otel.__all__)
    api["agl"] = {name: type(getattr(agl, name)).__name__ for name in sorted(theirs)}
    return api


def test_public_api_is_what_it_was() -> None:
    """Nothing comes, goes or changes its signature unless it is written down."""
    assert public_api() == json.loads(SNAPSHOT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(public_api(), indent=1) + "\n", encoding="utf-8")
