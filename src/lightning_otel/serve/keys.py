"""The token of a server that listens beyond this machine, and the key of a store's pages.

Each is a file that only its owner can read.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from lightning_otel.errors import ConfigError
from lightning_otel.store.layout import write_private

KEY_FILE: Final = "viewer.key"
"""In a store's folder; the key is made once, so that links to its pages go on working."""
_SHORTEST: Final = 16


def read_token(path: Path) -> tuple[str, bool]:
    """The token in a file, and whether it was made just now because there was no file.

    Raises:
        ConfigError: The file cannot be read or made, others can read it, or it holds no token.
    """
    try:
        if is_new := not path.exists():
            # Another server may make it in this moment.
            with contextlib.suppress(FileExistsError):
                write_private(path, f"{secrets.token_urlsafe(32)}\n".encode())
        with path.open() as file:
            status = os.fstat(file.fileno())
            token = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"cannot use the token file {path}: {why}; name another one") from exc
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise ConfigError(f"others can read the token file {path}; run: chmod 600 {path}")
    if len(token) < _SHORTEST or not token.isascii() or any(map(str.isspace, token)):
        raise ConfigError(
            f"{path} holds no token of at least {_SHORTEST} characters; remove it, and a new one "
            "is made"
        )
    return token, is_new
