#!/usr/bin/env bash
# RL with a reward that is right (docs/results/real_model.md): SFT of SmolLM2-135M-Instruct on 160 demonstrations,
# then PPO, GRPO, rejection sampling and iterative DPO, each with the check of the answer as its scorer, by their
# recipes `base`; then all of them answer the same held-out prompts. Each step says how long it took; what is
# finished is not run again:
#
#     bash docs/results/real_reward.sh                                       seed 0
#     SEEDS="14 15 16" MODEL=path/to/SmolLM2-135M-Instruct TASKS=upper+extract bash docs/results/real_reward.sh
#     STEPS="data sft ppo answers table" bash docs/results/real_reward.sh    these steps alone, in the order below
#     PAIRS="100 400 1600" bash docs/results/real_reward.sh    also PPO with reward models of so many labelled pairs
#     DTYPE=1 bash docs/results/real_reward.sh                 also PPO in bfloat16, with and without --importance-cap
#     OPTIONS="--compute-dtype float32" bash docs/results/real_reward.sh     options of all scripts, on a GPU for example
#     ROUNDED=offsets bash docs/results/real_reward.sh         with tests/benchmarks/rounding.py; not PPO and GRPO
set -euo pipefail
cd "$(dirname "$0")/../.."
model=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct} tasks=${TASKS:-upper+extract}
seeds=${SEEDS:-0} steps=${STEPS:-all} pairs=${PAIRS:-} folder=${FOLDER:-runs/real_reward}/$tasks
task=tests/benchmarks/real_task.py
python=(python ${ROUNDED:+tests/benchmarks/rounding.py "$ROUNDED"})
export PYTHONPATH=$PWD  # for grpo.py
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the page's figures are of one thread

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
    step "$name" "$out/$name/summary.json" "${python[@]}" "$script" base --max-length 64 --seed "$seed" \
        --save-dtype float32 --save-every 0 --output-dir "$out/$name" --resume ${OPTIONS:-} "$@"
}

for seed in $seeds; do
    out=$folder/$seed sft=$folder/$seed/sft && mkdir -p "$out"
    step data "$out/test.jsonl" python $task data "$tasks" "$seed" "$out"
    run sft sft.py --model "$model" --chat-template "$out/chat.jinja" --dataset "$out/sft.jsonl" \
        --no-packing --batch-size 16 --micro-batch-size 16 --lr 3e-5 --epochs 2 --sample-prompts 0 --eval-every 0

    # each method samples 1,024 responses, 4 to a prompt (DPO 1,536, 8 to a prompt: it learns from the best and the
    # worst of them only)
    sample=(--model "$sft" --scorer $task:correct --dataset "$out/prompts.jsonl" --max-new-tokens 13)
    sample+=(--slots 64 --score-batch-size 64 --eval-prompts 0)
    online=("${sample[@]}" --iterations 16 --prompts-per-iteration 16 --n-samples 4 --epochs 1)
    online+=(--minibatch-size 16 --micro-batch-size 16 --lora-rank 16 --lr 5e-5 --kl-coef 0.02)
    online+=(--missing-eos-penalty 0.5 --eval-every 0)
    run ppo ppo.py "${online[@]}"
    patch -s -o "$out/grpo.py" ppo.py docs/learn/grpo.patch
    run grpo "$out/grpo.py" "${online[@]}" --epochs 2 --minibatch-size 32
    run rejection_sampling rejection_sampling.py "${sample[@]}" --iterations 1 --prompts-per-iteration 256 \
        --n-samples 4 --threshold 1 --temperatures 1 --sweep-prompts 0
    run dpo dpo_iterative.py "${sample[@]}" --iterations 3 --prompts-per-iteration 64 --epochs 3

    ask=(--dataset "$out/test.jsonl" --max-length 64 --max-new-tokens 13 --seed "$seed" ${OPTIONS:-})
    policies=()
    for name in sft ppo grpo rejection_sampling dpo; do
        if [ -f "$out/$name/summary.json" ]; then policies+=("$name=$out/$name"); fi
    done
    step answers "$out/answers/summary.json" "${python[@]}" -m common.programs.evaluate --policies "${policies[@]}" \
        --scorer $task:correct "${ask[@]}" --output-dir "$out/answers"

    # the same PPO with learned reward models: from 8 answers of SFT to each of 800 other prompts, the right one is
    # labelled as better than each different wrong one. Fewer pairs are repeated more often
    if [ -n "$pairs" ]; then
        step labels "$out/labels_test.jsonl" python $task compare "$sft" "$out" "$seed" "$pairs"
    fi
    for n in $pairs; do
        epochs=$((n < 200 ? 8 : n < 800 ? 4 : 2))
        run reward_"$n" reward.py --model "$sft" --dataset "$out/labels_$n.jsonl" \
            --eval-dataset "$out/labels_test.jsonl" --batch-size 16 --micro-batch-size 16 --lr 3e-5 --epochs $epochs \
            --eval-every 0 --length-prompts 0
        run ppo_"$n" ppo.py "${online[@]}" --scorer "$out/reward_$n"
        step answers_"$n" "$out/answers_$n/summary.json" python -m common.programs.evaluate "${ask[@]}" \
            --policies "sft=$sft" "ppo=$out/ppo_$n" --scorer "$out/reward_$n" --output-dir "$out/answers_$n"
    done

    # the sampler's probabilities against the trainer's; then PPO in bfloat16 with the weights that correct for it
    # (their cap is 2 unless given) and without
    if [ -n "${DTYPE:-}" ]; then
        for p in 1.0 0.9; do
            for dtype in float32 bfloat16; do
                run ratios_${dtype}_$p ppo.py "${online[@]}" --iterations 2 --compute-dtype $dtype --top-p $p
            done
        done
        run ppo_bfloat16 ppo.py "${online[@]}" --compute-dtype bfloat16
        run ppo_bfloat16_uncorrected ppo.py "${online[@]}" --compute-dtype bfloat16 --importance-cap 0
        step answers_bfloat16 "$out/answers_bfloat16/summary.json" python -m common.programs.evaluate "${ask[@]}" \
            --policies "sft=$sft" "ppo_float32=$out/ppo" "ppo_bfloat16=$out/ppo_bfloat16" \
            "ppo_bfloat16_uncorrected=$out/ppo_bfloat16_uncorrected" --compute-dtype bfloat16 \
            --scorer $task:correct --output-dir "$out/answers_bfloat16"
    fi
done
if [[ $steps = all || " $steps " == *" table "* ]]; then
    python tests/benchmarks/real_reward.py "$folder" "$seeds"
fi
