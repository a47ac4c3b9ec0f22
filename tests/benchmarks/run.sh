#!/usr/bin/env bash
# Us against TRL and transformers: time and peak memory as ratios from one run, and cost against size, as one table.
# About an hour on two cores.
#
#     bash tests/benchmarks/run.sh FOLDER PAIRS RANKINGS [TOKENIZER]
#
# FOLDER gets TRL's environments and benchmarks.log. PAIRS, RANKINGS: HH-RLHF pairs and rankings of six responses or
# more, as reward.py takes them. TOKENIZER: HuggingFaceTB/SmolLM2-135M-Instruct unless given. Run it in our own
# environment; set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL if torch is to come as a CPU build, and REPEATS for other than
# three turns of each.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit 2
fi
folder=$(mkdir -p "$1" && cd "$1" && pwd)
pairs=$2 rankings=$3 tokenizer=${4:-HuggingFaceTB/SmolLM2-135M-Instruct}
here=$(dirname "$0")
log=$folder/benchmarks.log
: > "$log"

environment() { # FOLDER PACKAGES...
    if [ ! -e "$1/installed" ]; then
        python -m venv "$1"
        "$1/bin/pip" install -q "${@:2}"
        touch "$1/installed"
    fi
}

# The same torch on both sides: the one that runs this script, without the name of its build (+cpu, +cu130)
torch=torch==$(python -c 'from importlib.metadata import version; print(version("torch").partition("+")[0])')
environment "$folder/trl" "$torch" trl==1.16.0 accelerate
environment "$folder/trl_ppo" "$torch" trl==1.9.2 accelerate

turns() { # METHOD ENVIRONMENT FLAGS...
    echo "== $1" | tee -a "$log"
    python "$here/trl_$1.py" --tokenizer "$tokenizer" --trl-python "$folder/$2/bin/python" \
        --repeats "${REPEATS:-3}" "${@:3}" | tee -a "$log"
}

turns sft trl --dataset "$rankings"
turns reward trl --dataset "$pairs" --rankings "$rankings"
turns dpo trl --dataset "$pairs"
turns ppo trl_ppo --dataset "$pairs"
echo "== consolidated" | tee -a "$log"
torchrun --standalone --nproc-per-node 2 "$here/consolidated.py" | tee -a "$log"
for name in sampler size; do
    echo "== $name" | tee -a "$log"
    python "$here/$name.py" | tee -a "$log"
done

echo
echo "Ratios, ours to theirs: median (least to largest) of runs that took turns"
grep -E '^==| against |of consolidated|of the first' "$log"
