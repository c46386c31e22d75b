#!/usr/bin/env bash
# Rollout and update on an accelerator at the shapes of SmolLM2-135M and Qwen2.5-1.5B, random weights, bfloat16:
# tokens/s, MFU of the update, share of the memory bandwidth in decoding; then how both grow. JSON lines on stdout.
#   launch/bench_gpu.sh > bench.jsonl          SHAPES="smollm2 qwen25_1p5b" ATTENTION="xla cudnn" launch/bench_gpu.sh
# Minutes on one GPU. On a CPU, for the script's own sake: SHAPES=tiny SMALL=1 launch/bench_gpu.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
if [[ -n "${SMALL:-}" ]]; then
    load=(--prompt=8 --response=4 --prompts=2 --group=2 --rows=2 --repeats=1 --dtype=float32)
    groups=1,2
else
    load=(--prompt=256 --response=256 --prompts=32 --group=16 --rows=128 --token_chunk=4096)
    groups=4,16,64
fi
for shape in ${SHAPES:-smollm2 qwen25_1p5b}; do
    for attention in ${ATTENTION:-xla cudnn}; do
        "$PYTHON" launch/bench.py --shape="$shape" --dtype=bfloat16 --attention="$attention" "${load[@]}"
    done
    "$PYTHON" launch/bench.py --shape="$shape" --dtype=bfloat16 "${load[@]}" --vary="group:$groups"
done
