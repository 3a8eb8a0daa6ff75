#!/usr/bin/env bash
# Prints a Python that Outrider runs on, 3.11 or 3.12: $PYTHON if it is set, else the first that works.
set -euo pipefail
check='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
    if "$candidate" -c "$check" 2>/dev/null; then
        echo "$candidate"
        exit
    fi
done
echo "setup: no usable Python 3.11 or 3.12 among: ${PYTHON:-python3.12 python3.11 python3}." \
    "Install one with its venv module (Debian: apt install python3-venv), or set PYTHON." >&2
exit 1
