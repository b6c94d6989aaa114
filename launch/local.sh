#!/usr/bin/env bash
# Starts a run of several processes on this machine; --help explains how.
exec python3 -I "${0%.sh}.py" "$@"
