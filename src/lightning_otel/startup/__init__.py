"""The folder that `lightning-otel run` puts on `PYTHONPATH`; its `sitecustomize` is for that alone."""
