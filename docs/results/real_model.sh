#!/usr/bin/env bash
# The whole chain on SmolLM2-135M-Instruct (docs/results/real_model.md), on tasks whose answers can be checked. Each
# step prints how long it took; finished steps are not repeated:
#
#     bash docs/results/real_model.sh                                       seed 0
#     SEEDS="3 4 5" MODEL=path/to/SmolLM2-135M-Instruct bash docs/results/real_model.sh
#     STEPS="data sft labels dpo" bash docs/results/real_model.sh           only these steps, in the order below
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} tasks=${TASKS:-upper+extract}
seeds=${SEEDS:-0} steps=${STEPS:-all} folder=${FOLDER:-runs/real_model}
task=tests/benchmarks/real_task.py
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the page's figures are of one thread

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

label() { # NAME POLICY PROMPTS FLIPPED: pairs of its answers, one right and one wrong; a share reversed
    step "$1" "$out/$1.jsonl" python $task label "$2" "$out/$3.jsonl" "$4" "$seed" "$out/$1.jsonl"
}

for seed in $seeds; do
    out=$folder/$seed sft=$folder/$seed/sft && mkdir -p "$out"
    step data "$out/test.jsonl" python $task data "$tasks" "$seed" "$out"
    batch=(--batch-size 16 --micro-batch-size 16)
    run sft sft.py "${batch[@]}" --model "$model" --chat-template "$out/chat.jinja" --no-packing \
        --dataset "$out/sft.jsonl" --lr 3e-5 --epochs 2 --sample-prompts 0 --eval-every 0

    # labels, and what learns from them alone
    label labels "$sft" pairs 0.1
    label labels_test "$sft" test 0
    scorer=("${batch[@]}" --epochs 2 --lr 3e-5 --eval-every 0 --length-prompts 0)
    run reward reward.py "${scorer[@]}" --model "$sft" --dataset "$out/labels.jsonl"
    run advantage advantage_model.py "${scorer[@]}" --model "$sft" --dataset "$out/labels.jsonl"
    step scorers "$out/scorers/summary.json" python -m common.programs.evaluate --dataset "$out/labels_test.jsonl" \
        --scorers "reward=$out/reward" "advantage=$out/advantage" --output-dir "$out/scorers"

    sample=(--dataset "$out/prompts.jsonl" --max-new-tokens 13 --slots 64 --score-batch-size 64)
    policy=("${sample[@]}" --model "$sft" --eval-prompts 0)
    dpo=(dpo_iterative.py "${policy[@]}" "${batch[@]}" --lora-rank 16 --beta 0.1 --lr 1e-5 --epochs 2)
    dpo+=(--prompts-per-iteration 64 --n-samples 8)
    run dpo "${dpo[@]}" --iterations 0 --offline-data "$out/labels.jsonl"
    run dpo_beta "${dpo[@]}" --iterations 0 --offline-data "$out/labels.jsonl" --beta 0.3

    # policies that learn from the reward model's scores of their answers
    run best_of_n rejection_sampling.py "${policy[@]}" "${batch[@]}" --scorer "$out/reward" --iterations 1 \
        --prompts-per-iteration 160 --n-samples 8 --temperatures 1 --sweep-prompts 0 --no-packing \
        --epochs 2 --lr 3e-5
    run iterative "${dpo[@]}" --scorer "$out/reward" --iterations 3
    ppo=(ppo.py "${policy[@]}" --lora-rank 16 --iterations 8 --prompts-per-iteration 16 --n-samples 4)
    ppo+=(--minibatch-size 32 --micro-batch-size 32 --epochs 2 --lr 2e-5 --value-lr 1e-5)
    ppo+=(--value-warmup-steps 4 --eval-every 0)
    run ppo "${ppo[@]}" --scorer "$out/reward"
    step rehearsal "$out/rehearsal.jsonl" python -m common.programs.rehearsal "${sample[@]}" --max-length 64 \
        --model "$sft" --scorer "$out/advantage" --max-prompts 200 --clusters 4 --seed "$seed" \
        --output "$out/rehearsal.jsonl"
    run ppo_advantage "${ppo[@]}" --scorer "$out/advantage" --rehearsal-data "$out/rehearsal.jsonl"

    # a reward model that has seen the newest policy, and one more round with each of the two
    label labels_renewed "$out/iterative" renewed 0.1
    run reward_renewed reward.py "${scorer[@]}" --model "$out/reward" --sft-model "$sft" --epochs 1 \
        --dataset "$out/labels_renewed.jsonl,$out/labels.jsonl"
    again=("${dpo[@]}" --model "$out/iterative" --reference "$sft" --iterations 1 --seed $((seed + 100)))
    run first_again "${again[@]}" --scorer "$out/reward"
    run renewed_again "${again[@]}" --scorer "$out/reward_renewed"

    # every policy answers the same prompts; the score is the proxy, `table` adds the truth
    policies=()
    for name in sft dpo dpo_beta best_of_n iterative ppo ppo_advantage first_again renewed_again; do
        if [ -f "$out/$name/summary.json" ]; then policies+=("$name=$out/$name"); fi
    done
    step answers "$out/answers/summary.json" python -m common.programs.evaluate --policies "${policies[@]}" \
        --scorer "$out/reward" --dataset "$out/test.jsonl" --max-length 64 --max-new-tokens 13 \
        --seed "$seed" --output-dir "$out/answers"
    step likely "$out/likely.jsonl" python $task likely "$out" sft dpo dpo_beta
done
if [[ $steps = all || " $steps " == *" table "* ]]; then python $task table "$folder" "$seeds"; fi
