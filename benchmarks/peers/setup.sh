#!/usr/bin/env bash
# Makes an environment for each peer that needs one of its own: benchmarks/peers/setup.sh [FOLDER]
# FOLDER: default ~/.cache/llama-training-infra/peers. A peer that cannot be installed is named, and the others go on.
set -uo pipefail
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/llama-training-infra/peers}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}  # first, so that no peer brings another build with its CUDA libraries
failed=0

install() { # NAME IMPORT PACKAGE...
    local name=$1 module=$2
    shift 2
    local environment=$folder/$name log=$folder/$name.log
    if [[ -x $environment/bin/python ]] && "$environment/bin/python" -c "import $module" 2>>"$log"; then
        echo "$name: there already"
        return
    fi
    echo "$name: installing into $environment"
    rm -rf "$environment"
    if "$python" -m venv "$environment" && "$environment/bin/pip" install -q "$torch" numpy &&
        "$environment/bin/pip" install -q "$torch" "$@" && "$environment/bin/python" -c "import $module"; then
        echo "$name: $("$environment/bin/pip" list --format=freeze | grep -i "^$name==")"
    else
        echo "$name: cannot be installed here; the benchmark leaves it out (see $log)"
        rm -rf "$environment"
        failed=1
    fi >>"$log" 2>&1
    tail -n 1 "$log"
}

mkdir -p "$folder"
install litgpt litgpt.model litgpt==0.5.13
install torchtitan torchtitan.models.llama3 torchtitan==0.2.2 triton  # it imports triton on a CPU too
exit $failed
