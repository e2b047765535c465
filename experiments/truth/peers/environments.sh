#!/bin/sh
# Makes the environments of the peers, or does nothing where they stand as required: sh environments.sh [PLACE]
#   PLACE (default .venv-truth) has captum, kronfluence, TRAK and dattri-LLM; PLACE-bergson has bergson.
# Needs Python 3.11 or newer (PYTHON=...), a network and 2.7 GB.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
place=${1:-.venv-truth}

make_environment() { # place, requirements
    if cmp -s "$2" "$1/.ready"; then return; fi
    echo "Making $1."
    "${PYTHON:-python3}" -m venv --clear "$1"
    "$1/bin/python" -m pip install -qq --disable-pip-version-check torch==2.13.0
    "$1/bin/python" -m pip install -qq --disable-pip-version-check --no-deps -r "$2"
    cp "$2" "$1/.ready"
}

make_environment "$place" "$here/requirements.txt"
make_environment "$place-bergson" "$here/requirements-bergson.txt"
