"""``python -m lightning_otel``: the command line."""

from lightning_otel.cli import main

if __name__ == "__main__":
    main()
