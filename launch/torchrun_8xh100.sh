#!/usr/bin/env bash
# From prompts to an exported head on one node with 8 GPUs (written for 8 x H100; not run on one yet).
#
#   TARGET=/models/my-llama RUN=mine SOURCES=my.jsonl launch/torchrun_8xh100.sh [key=value ...]
#
# Arguments go to every stage and have the last word. Start it again after an interruption: every stage goes on where it
# stopped, and finished ones do nothing. DRY_RUN=1 prints the commands and runs none.
#
#   RUN, ROOT     everything is written below $ROOT/$RUN (default: runs)
#   SOURCES       files, folders or built-in names, separated by commas
#   GPUS          ranks of the parallel stages (default: 8)
#   K             drafted tokens per step (default: 3)
#   CODEC         features: bf16 (default), fp8 or fp32
#   STORE         feature store, if not below $ROOT/$RUN (one fast local disk)
#   VLLM_PYTHON   interpreter of an environment with vLLM: the export is served there and compared
set -euo pipefail

: "${TARGET:?TARGET=/models/my-llama: the directory of the target model}"
: "${RUN:?RUN=mine: the name of the run}"
: "${SOURCES:?SOURCES=my.jsonl: where the prompts are}"
ROOT=${ROOT:-runs}
GPUS=${GPUS:-8}
K=${K:-3}
CODEC=${CODEC:-bf16}
STORE=${STORE:-}
VLLM_PYTHON=${VLLM_PYTHON:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$here/.venv/bin" ] && PATH="$here/.venv/bin:$PATH"

common=(run.name="$RUN" run.root="$ROOT" target.path="$TARGET" runtime=h100 features="$CODEC")
[ -z "$STORE" ] || common+=(features.path="$STORE")
common+=(validate.k="$K")
own=("$@")
ranks=(torchrun --standalone --nproc-per-node "$GPUS")

# Prints the command on a line that can be pasted, then runs it.
run() {
  printf '%q ' "$@" "${own[@]}"
  printf '\n'
  [ -n "${DRY_RUN:-}" ] || "$@" "${own[@]}"
}

# Does the machine have what it takes? Stops here otherwise.
run mtp doctor "${common[@]}"

# The whole line on 32 of the prompts, in minutes: a hop that loses the draft stops the script here.
run mtp preflight "${common[@]}" "data.sources=[$SOURCES]"

# The target answers the prompts: one process on one GPU. Servers of the same target on all GPUs are
# faster: pass data.regenerate.url=[http://host:8000/v1,...].
run mtp data "${common[@]}" "data.sources=[$SOURCES]" data.regenerate.enabled=true \
  data.regenerate.max_tokens=1024

# Its hidden states: every rank writes its own shards. Prints the size before anything is written.
run "${ranks[@]}" -m mtp_train.precompute "${common[@]}"

# The head: data parallel; each rank measures acceptance on its share of the validation prompts.
run "${ranks[@]}" -m mtp_train.train "${common[@]}" trainer.tokens_per_step=65536 \
  trainer.epochs=2 trainer.schedule=cosine loss.num_unroll_steps="$K" loss.step_decay=0.8

# Parity and acceptance, on one GPU; a rung that fails stops the script here.
run mtp validate "${common[@]}" "validate.sets=[mtbench,humaneval,gsm8k]"

# What vLLM and SGLang load; its README has the command lines that serve it.
run mtp export "${common[@]}"

# Does your engine accept as many drafts as the runtime did (rung P6)?
[ -z "$VLLM_PYTHON" ] || run mtp validate "${common[@]}" "validate.rungs=[P6]" engine=vllm \
  engine.python="$VLLM_PYTHON"
