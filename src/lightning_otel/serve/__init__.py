"""The web door: spans in by OTLP/HTTP, and whatever reads the store from elsewhere.

Only this room imports the web framework (extra ``serve``). Every request passes :mod:`guard` first;
a route decides nothing about who may come in.
"""
