#!/usr/bin/env bash
# Claims of the papers on the tiny world (docs/claims.md); what is finished is not run again:
#
#     python sft.py && python reward.py
#     SEEDS=3 bash docs/claims.sh          # all groups, or some: bash docs/claims.sh pool ppo
#
# A group's arms differ in one thing, and answer the same held-out prompts.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=runs/claims seeds=${SEEDS:-3}
mkdir -p $folder

run() { # SCRIPT ARM FLAGS...: a run of this seed by the recipe tiny
    python "$1.py" tiny "${@:3}" --seed "$seed" --output-dir "$out/$2" --resume
}

policies() { # ARMS...: their answers, compared with the first one's
    python -m common.evaluate --policies sft=runs/sft "${@/#/$out/}" --reference sft --scorer runs/reward \
        --max-length 128 --max-new-tokens 32 --seed "$seed" --output-dir "$out/evaluate" --resume
}

scorers() { # ARMS...: their accuracies
    python -m common.evaluate --scorers "${@/#/$out/}" --dataset tiny --output-dir "$out/evaluate" --resume
}

pool() { # the same 500 prompts, 500 rows and the same steps in every iteration: do old responses help?
    local flags=(--dataset "$folder/prompts.jsonl" --eval-dataset tiny --model runs/sft --scorer runs/reward)
    python tests/benchmarks/claims.py prompts $folder/prompts.jsonl
    run rejection_sampling all "${flags[@]}"
    run rejection_sampling last "${flags[@]}" --candidates last
    policies last all
}

ppo() { # Llama 2's whitening, Qwen's warm-up of the value, two responses to a prompt
    run ppo recipe --eval-every 0
    run ppo whiten --eval-every 0 --reward-norm whiten
    run ppo no_warmup --eval-every 0 --value-warmup-steps 0
    run ppo one_response --eval-every 0 --prompts-per-iteration 128 --n-samples 1
    policies recipe whiten no_warmup one_response
}

margin() { # Llama 2's margins, and 3,200 pairs so that there is something left to learn
    for arm in none small large; do
        run reward $arm --margin $arm --length-prompts 0 --eval-every 0
        run reward few_$arm --margin $arm --length-prompts 0 --eval-every 0 --max-steps 100
    done
    scorers none small large few_none few_small few_large
}

pmp() { # Qwen: many pairs of worse annotators (length counts six times), then 1,024 good ones
    local flags=(--length-prompts 0 --eval-every 0 --eval-dataset tiny)
    run reward pretrained --dataset tiny:length_bias=0.6 "${flags[@]}"
    run reward then_tuned --dataset tiny:seed=1 --model "$out/pretrained" --max-steps 32 "${flags[@]}"
    run reward tuned_alone --dataset tiny:seed=1 --max-steps 32 "${flags[@]}"
    scorers tuned_alone pretrained then_tuned
}

enhancer() { # RLHF Workflow's second policy; and all pairs so far, from SFT
    run dpo_iterative recipe
    run dpo_iterative enhancer --enhancer previous
    run dpo_iterative from_sft --start-from sft
    policies recipe enhancer from_sft
}

temperature() { # the best one before each iteration, by the reward model and by the true reward
    local grid=(0.2 0.4 0.6 0.8 1.0 1.3 1.6 2.0)
    run rejection_sampling model --temperatures "${grid[@]}" --sweep-prompts 200
    run rejection_sampling truth --temperatures "${grid[@]}" --sweep-prompts 200 --scorer common.tiny:gold_scorer
    policies model truth
}

student() { # a model of half the size learns from the larger one's responses, or from its own
    [ -e $folder/half ] || python tests/benchmarks/claims.py half $folder/half
    run sft student --model $folder/half --sample-prompts 0
    run rejection_sampling teacher
    run rejection_sampling own --model "$out/student"
    run rejection_sampling distilled --model "$out/student" --pool "$out/teacher/pool.jsonl" --n-samples 0 \
        --iterations 1
    policies student own distilled teacher
}

groups=("$@")
for group in "${groups[@]:-pool ppo margin enhancer temperature pmp student}"; do
    for name in $group; do
        for seed in $(seq 0 $((seeds - 1))); do
            out=$folder/${name}_$seed
            mkdir -p "$out"
            $name
        done
        python tests/benchmarks/claims.py table $folder "$name" "$seeds"
    done
done
