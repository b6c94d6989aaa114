#!/usr/bin/env bash
# A run of several processes on this machine; --help says how.
exec python3 -I "${0%.sh}.py" "$@"
