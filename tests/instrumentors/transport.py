"""The HTTP library that the installed ``openai`` sends by: ``httpx2`` from its third release on."""

import openai

if int(openai.__version__.partition(".")[0]) >= 3:
    import httpx2 as http
else:
    import httpx as http

__all__ = ["http"]
