#!/usr/bin/env bash
# Prints a Python that Outrider runs on, 3.11 to 3.13: $PYTHON if it is set, else the first that works and is not slow.
# A build without profile-guided optimisation, as pyenv's are, takes 1.4 times as long for everything between kernels,
# and does not say so reliably: each is timed.
set -euo pipefail
candidates=${PYTHON:-python3.12 python3.11 python3.13 python3 /usr/bin/python3}
probe='
import sys, venv, ensurepip
from timeit import repeat

def work():
    counts = {}
    for number in range(2000):
        key = str(number % 97)
        counts[key] = max(counts.get(key, 0), number)
    return sorted(counts.items(), key=lambda pair: -pair[1])

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(1)
print(int(1e6 * min(repeat(work, number=1, repeat=50))))'

version='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
names=() times=() bare=()
for candidate in $candidates; do
    us=$("$candidate" -c "$probe" 2>/dev/null) || {
        "$candidate" -c "$version" 2>/dev/null && bare+=("$candidate")
        continue
    }
    names+=("$candidate") times+=("$us")
done
if ((${#names[@]} == 0 && ${#bare[@]} > 0)); then
    echo "setup: ${bare[0]} has no venv module. Install it (Debian: apt install python3-venv), or set PYTHON." >&2
    exit 1
fi
if ((${#names[@]} == 0)); then
    echo "setup: no usable Python from 3.11 to 3.13 among: $candidates." \
        "Install one with its venv module (Debian: apt install python3-venv), or set PYTHON." >&2
    exit 1
fi
best=$(printf '%s\n' "${times[@]}" | sort -n | head -n 1)
for index in "${!names[@]}"; do
    if ((100 * times[index] <= 115 * best)); then
        echo "${names[index]}"
        exit
    fi
done
