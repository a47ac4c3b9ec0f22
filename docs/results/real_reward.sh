#!/usr/bin/env bash
# RL with a reward that is right (docs/results/real_model.md): SFT of SmolLM2-135M-Instruct on 160 demonstrations,
# then PPO, GRPO, rejection sampling and iterative DPO, each with the check of the answer as its scorer, by their
# recipes `base`; then all of them answer the same held-out prompts. Each step says how long it took; what is
# finished is not run again:
#
#     bash docs/results/real_reward.sh                                       seed 0
#     SEEDS="12 13" MODEL=path/to/SmolLM2-135M-Instruct TASKS=upper+extract bash docs/results/real_reward.sh
#     STEPS="data sft ppo answers table" bash docs/results/real_reward.sh    these steps alone, in the order below
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} tasks=${TASKS:-upper+extract}
seeds=${SEEDS:-0} steps=${STEPS:-all} folder=${FOLDER:-runs/real_reward}/$tasks
task=tests/benchmarks/real_task.py
export PYTHONPATH=$PWD  # for grpo.py

step() { # NAME FILE COMMAND...: unless it is left out, or the file that it ends with is there
    local name=$1 file=$2 TIMEFORMAT="seed $seed, $1: %0R s, %0U s of CPU"
    shift 2
    if [[ -f $file || $steps != all && " $steps " != *" $name "* ]]; then return; fi
    if ! { time "$@" >>"$out/log.txt" 2>&1; } 2>"$out/time.txt"; then tail -n 3 "$out/log.txt"; exit 1; fi
    tee -a "$folder/times.txt" <"$out/time.txt"
}

run() { # NAME SCRIPT OPTIONS...: a script, whose run is $out/NAME
    local name=$1 script=$2
    shift 2
    step "$name" "$out/$name/summary.json" python "$script" base --max-length 64 --seed "$seed" \
        --save-dtype float32 --save-every 0 --output-dir "$out/$name" --resume "$@"
}

for seed in $seeds; do
    out=$folder/$seed sft=$folder/$seed/sft && mkdir -p "$out"
    step data "$out/test.jsonl" python $task data "$tasks" "$seed" "$out"
    run sft sft.py --model "$model" --chat-template "$out/chat.jinja" --dataset "$out/sft.jsonl" \
        --no-packing --batch-size 16 --micro-batch-size 16 --lr 3e-5 --epochs 2 --sample-prompts 0 --eval-every 0

    # each method: 192 prompts, to each 4 responses (DPO 8, for it learns from the best and the worst alone)
    sample=(--model "$sft" --scorer $task:correct --dataset "$out/prompts.jsonl" --max-new-tokens 13)
    sample+=(--slots 64 --score-batch-size 64 --eval-prompts 0)
    online=("${sample[@]}" --iterations 12 --prompts-per-iteration 16 --n-samples 4 --epochs 1)
    online+=(--minibatch-size 16 --micro-batch-size 16 --lora-rank 16 --lr 5e-5 --kl-coef 0.02)
    online+=(--missing-eos-penalty 0.5 --eval-every 0)
    run ppo ppo.py "${online[@]}"
    patch -s -o "$out/grpo.py" ppo.py docs/learn/grpo.patch
    run grpo "$out/grpo.py" "${online[@]}"
    run rejection_sampling rejection_sampling.py "${sample[@]}" --iterations 1 --prompts-per-iteration 192 \
        --n-samples 4 --threshold 1 --temperatures 1 --sweep-prompts 0
    run dpo dpo_iterative.py "${sample[@]}" --iterations 3 --prompts-per-iteration 64 --epochs 3

    policies=()
    for name in sft ppo grpo rejection_sampling dpo; do
        if [ -f "$out/$name/summary.json" ]; then policies+=("$name=$out/$name"); fi
    done
    step answers "$out/answers/summary.json" python -m common.programs.evaluate --policies "${policies[@]}" \
        --scorer $task:correct --dataset "$out/test.jsonl" --max-length 64 --max-new-tokens 13 \
        --seed "$seed" --output-dir "$out/answers"
done
if [[ $steps = all || " $steps " == *" table "* ]]; then
    python tests/benchmarks/real_reward.py "$folder" "$seeds"
fi
