"""Addresses of pages about one thing, whatever its id is made of."""

from urllib.parse import quote


def path_of(noun: str, *parts: object) -> str:
    """The path of a page, such as ``/rollouts/r1``.

    Args:
        noun: The first part, ours.
        *parts: Ids and the like, each of which becomes one part.
    """
    return "/" + "/".join([noun, *(_quote_part(each) for each in parts)])


def resource_page(name: str, page: str) -> str:
    """The path of a page about a resource, such as ``/resources/planner/prompt@diff``.

    A name may be ``planner/diff``, but none holds an ``@``: what follows one is never its part.

    Args:
        name: The resource.
        page: Which page: ``diff``, ``uses`` or ``change``.
    """
    return f"{path_of('resources', name)}@{page}"


def _quote_part(part: object) -> str:
    return quote(str(part).encode("utf-8", "replace"), safe="")
