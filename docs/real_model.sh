#!/usr/bin/env bash
# The whole chain on SmolLM2-135M-Instruct (docs/real_model.md), on tasks whose answers can be checked. Each
# step says how long it took; what is finished is not run again:
#
#     bash docs/real_model.sh                                       seed 0
#     SEEDS="1 2 3" MODEL=path/to/SmolLM2-135M-Instruct bash docs/real_model.sh
#     STEPS="sft labels dpo truth" bash docs/real_model.sh          these steps alone, in the order below
set -euo pipefail
cd "$(dirname "$0")/.."
model=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} tasks=${TASKS:-add+subtract+extract}
seeds=${SEEDS:-${SEED:-0}} steps=${STEPS:-all} folder=${FOLDER:-runs/real_model}
task=tests/benchmarks/real_task.py

step() { # NAME FILE COMMAND...: unless it is left out, or the file that it ends with is there
    local name=$1 file=$2 begin=$SECONDS
    shift 2
    if [[ -f $file || $steps != all && " $steps " != *" $name "* ]]; then return; fi
    if ! "$@" >>"$out/log.txt" 2>&1; then tail -n 3 "$out/log.txt"; exit 1; fi
    echo "seed $seed, $name: $((SECONDS - begin)) s" | tee -a "$folder/times.txt"
}

run() { # NAME SCRIPT OPTIONS...: a script, whose run is $out/NAME
    local name=$1 script=$2
    shift 2
    step "$name" "$out/$name/summary.json" python "$script" base --max-length 64 --seed "$seed" \
        --save-dtype float32 --save-every 0 --output-dir "$out/$name" --resume "$@"
}

label() { # NAME POLICY PROMPTS: pairs of its answers, one right and one wrong; 10 % reversed
    step "$1" "$out/$1.jsonl" python $task label "$2" "$out/$3.jsonl" "$seed" "$out/$1.jsonl"
}

judge() { # NAME SCORER POLICIES...
    local name=$1 scorer=$2
    shift 2
    step "$name" "$out/$name/summary.json" python -m common.evaluate --policies "$@" --scorer "$scorer" \
        --dataset "$out/test.jsonl" --max-length 64 --max-new-tokens 8 --seed "$seed" \
        --output-dir "$out/$name"
}

for seed in $seeds; do
    out=$folder/$seed && mkdir -p "$out"
    step data "$out/test.jsonl" python $task data "$tasks" "$seed" "$out"
    run sft sft.py --model "$model" --chat-template "$out/chat.jinja" --dataset "$out/sft.jsonl" \
        --lora-rank 16 --lr 3e-5 --epochs 2 --no-packing --batch-size 16 --micro-batch-size 16 \
        --sample-prompts 0 --eval-every 0
    sft=$out/sft
    label labels "$sft" pairs
    label labels_test "$sft" test

    pairs=(--model "$sft" --dataset "$out/labels.jsonl" --epochs 2 --lr 3e-5 --batch-size 16 --eval-every 0)
    pairs+=(--micro-batch-size 16 --length-prompts 0)
    run reward reward.py "${pairs[@]}"
    run advantage advantage_model.py "${pairs[@]}"
    step scorers "$out/scorers/summary.json" python -m common.evaluate --dataset "$out/labels_test.jsonl" \
        --scorers "reward=$out/reward" "advantage=$out/advantage" --output-dir "$out/scorers"

    policy=(--model "$sft" --lora-rank 16 --dataset "$out/prompts.jsonl" --eval-prompts 0 --max-new-tokens 8)
    policy+=(--slots 64 --score-batch-size 64)
    dpo=(dpo_iterative.py "${policy[@]}" --beta 0.1 --lr 1e-5 --epochs 2 --batch-size 16)
    dpo+=(--micro-batch-size 16)
    ppo=(ppo.py "${policy[@]}" --iterations 15 --prompts-per-iteration 16 --n-samples 4 --minibatch-size 64)
    ppo+=(--micro-batch-size 64 --epochs 2 --lr 1e-5 --value-lr 1e-5 --value-warmup-steps 4 --eval-every 0)
    run dpo "${dpo[@]}" --iterations 0 --offline-data "$out/labels.jsonl"
    run iterative "${dpo[@]}" --scorer "$out/reward" --iterations 3 --prompts-per-iteration 100 --n-samples 8
    run best_of_n rejection_sampling.py --model "$sft" --scorer "$out/reward" --dataset "$out/prompts.jsonl" \
        --iterations 1 --prompts-per-iteration 300 --n-samples 8 --temperatures 1 --sweep-prompts 0 \
        --eval-prompts 0 --max-new-tokens 8 --slots 64 --score-batch-size 64 --epochs 2 --lr 3e-5 \
        --no-packing --batch-size 16 --micro-batch-size 16
    run ppo "${ppo[@]}" --scorer "$out/reward"
    step rehearsal "$out/rehearsal.jsonl" python -m common.rehearsal --model "$sft" \
        --scorer "$out/advantage" --dataset "$out/prompts.jsonl" --max-prompts 200 --clusters 4 \
        --max-new-tokens 8 --max-length 64 --seed "$seed" --output "$out/rehearsal.jsonl"
    run ppo_advantage "${ppo[@]}" --scorer "$out/advantage" --rehearsal-data "$out/rehearsal.jsonl"

    label labels_renewed "$out/iterative" pairs # a reward model that has seen the newest policy, and one more round
    run reward_renewed reward.py "${pairs[@]}" --model "$out/reward" --sft-model "$sft" \
        --dataset "$out/labels_renewed.jsonl,$out/labels.jsonl"
    again=("${dpo[@]}" --model "$out/iterative" --reference "$sft" --iterations 1 --seed $((seed + 100))
        --prompts-per-iteration 100 --n-samples 8)
    run first_again "${again[@]}" --scorer "$out/reward"
    run renewed_again "${again[@]}" --scorer "$out/reward_renewed"

    policies=()
    for name in sft dpo iterative best_of_n ppo ppo_advantage first_again renewed_again; do
        if [ -f "$out/$name/summary.json" ]; then policies+=("$name=$out/$name"); fi
    done
    judge truth $task:correct "${policies[@]}"
    judge proxy "$out/reward" "${policies[@]}" --eval-prompts 250
done
if [[ $steps == all ]]; then python $task table "$folder" "$seeds"; fi
