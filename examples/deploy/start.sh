#!/bin/sh
# A mounted secret can be read by others, and serve takes none of those: it gets a private copy.
set -eu
umask 077
token="${TMPDIR:-/tmp}/lightning_token"
cat "${LIGHTNING_TOKEN_FILE:-/run/secrets/lightning_token}" >"$token"
exec lightning-otel serve --host 0.0.0.0 --port 4318 --token-file "$token" "$@"
