#!/usr/bin/env bash
# Makes the virtual environment $1 with the Python that scripts/python.sh finds. One that works, with its pip, stays,
# unless $PYTHON is another Python than it was made with; of any other nothing is kept.
set -euo pipefail
venv=$1

works() { PYTHON=$venv/bin/python scripts/python.sh && "$venv/bin/python" -m pip --version; }
base() { "$1" -c 'import os, sys; print(os.path.realpath(sys._base_executable))'; }

kept=false
works &>/dev/null && kept=true
if $kept && [[ -z ${PYTHON:-} ]]; then exit; fi
python=$(scripts/python.sh)
if $kept && [[ $(base "$python") == "$(base "$venv/bin/python")" ]]; then exit; fi
if [[ -d $venv && ! -f $venv/pyvenv.cfg && -n $(ls -A "$venv") ]]; then
    echo "$venv is no virtual environment, and is not emptied to become one; name another folder by VENV" >&2
    exit 1
fi
"$python" -m venv --clear "$venv"
