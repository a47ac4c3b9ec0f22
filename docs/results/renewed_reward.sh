#!/usr/bin/env bash
# Iterative DPO on the tiny world, 3 rounds, three reward models (docs/results/renewed_reward.md); finished runs
# are not repeated:
#   first     runs/reward in every round
#   once      trained further before the first round, on 6,000 labelled pairs of responses of runs/sft
#   renewed   trained further in every round, on 2,000 labelled pairs of responses of the newest policy
#
#     python sft.py && python reward.py
#     SEEDS=3 bash docs/results/renewed_reward.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=runs/renewed_reward seeds=${SEEDS:-3}

label() { # POLICY PAIRS SEED FILE
    [ -f "$4" ] || python tests/benchmarks/renewed_reward.py label "$@"
}

train_reward() { # FROM DATA SEED OUT
    python reward.py tiny --model "$1" --dataset "$2" --seed "$3" --epochs 1 --lr 5e-4 --eval-every 0 \
        --length-prompts 0 --sft-model runs/sft --output-dir "$4" --resume
}

for seed in $(seq 0 $((seeds - 1))); do
    out=$folder/$seed
    mkdir -p "$out"
    label runs/sft 6000 "$seed" "$out/labels_once.jsonl"
    train_reward runs/reward "tiny:1,$out/labels_once.jsonl:1" "$seed" "$out/reward_once"
    policies=(sft=runs/sft)
    for arm in first once renewed; do
        policy=runs/sft newest=runs/reward old=tiny:1
        for round in 1 2 3; do
            scorer=runs/reward
            if [ $arm = once ]; then
                scorer=$out/reward_once
            elif [ $arm = renewed ]; then # half of the pairs are new, the others from all that came before
                scorer=$out/reward_$round labels=$out/labels_$round.jsonl
                label "$policy" 2000 "$seed" "$labels"
                train_reward "$newest" "$old,$labels:$round" "$seed" "$scorer"
                newest=$scorer old=$old,$labels:1
            fi
            python dpo_iterative.py tiny --iterations 1 --model "$policy" --reference runs/sft \
                --scorer "$scorer" --seed $((10 * seed + round)) --eval-prompts 0 --save-every 0 \
                --output-dir "$out/${arm}_$round" --resume
            policy=$out/${arm}_$round
            policies+=("${arm}_$round=$policy")
        done
    done
    python -m common.programs.evaluate --policies "${policies[@]}" --scorer runs/reward --max-length 128 \
        --max-new-tokens 32 --seed "$seed" --output-dir "$out/evaluate" --resume
done
python tests/benchmarks/renewed_reward.py table $folder "$seeds"
