#!/usr/bin/env bash
# Every check that needs a CUDA device, and the figures, in one go: under 8 minutes, no network.
#
#   tests/gpu/run.sh [--out DIR] [--wheels DIR] [--seconds N] [--only ROW]... [--rehearse]
#
# --out DIR     checks.xml, figures.jsonl and summary.txt go there (default: $OUT, else a new folder)
# --wheels DIR  packages that are carried along, installed for this run alone (default: .wheels)
# --seconds N   for everything together (default 450)
# --only ROW    figures of these rows only, and no checks
# --rehearse    a tiny model on the CPU, and the checks are skipped: does the script itself work?
#
# Expects python3 (or PYTHON=…) with torch, transformers and pytest. FlashInfer is carried:
#   pip download --no-deps -d .wheels --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux2014_x86_64 --only-binary=:all: -c constraints.txt \
#     flashinfer-python apache-tvm-ffi nvidia-ml-py tabulate
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2

PYTHON=${PYTHON:-python3}
out=${OUT:-}
wheels=.wheels
seconds=450
device=cuda
shape=8b
only=()
usage() { sed -n '2,17s/^# \{0,1\}//p' "$0"; }
need() { if [ $# -lt 2 ] || [ -z "$2" ]; then echo "$1 needs a value" >&2; exit 2; fi; }
while [ $# -gt 0 ]; do
  case $1 in
    --out) need "$@"; out=$2; shift 2 ;;
    --wheels) need "$@"; wheels=$2; shift 2
      [ -d "$wheels" ] || { echo "--wheels $wheels: no such folder" >&2; exit 2; } ;;
    --seconds) need "$@"; seconds=$2; shift 2
      case $seconds in '' | *[!0-9]*) echo "--seconds $seconds: not a number" >&2; exit 2 ;; esac ;;
    --only) need "$@"; only+=(--only "$2"); shift 2 ;;
    --rehearse) device=cpu; shape=tiny; shift ;;
    -h | --help) usage; exit 0 ;;
    *) echo "unknown argument $1" >&2; usage >&2; exit 2 ;;
  esac
done
out=${out:-$(mktemp -d)}
mkdir -p "$out" || exit 2
begin=$SECONDS
left() { echo $((seconds - (SECONDS - begin))); }

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$wheels" ] && compgen -G "$wheels/*.whl" >/dev/null; then
  site=$(mktemp -d)
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
    "$wheels"/*.whl || exit 2
  PYTHONPATH=$PYTHONPATH:$site
fi

if [ "$device" = cuda ]; then
  "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
    { echo "no CUDA device (--rehearse needs none)" >&2; exit 2; }
  if [ -z "${FLASHINFER_CUDA_ARCH_LIST:-}" ]; then
    FLASHINFER_CUDA_ARCH_LIST=$("$PYTHON" -c 'import torch
major, minor = torch.cuda.get_device_capability()
print(f"{major}.{minor}" + ("a" if major >= 9 else ""))')
    export FLASHINFER_CUDA_ARCH_LIST
  fi
fi

# Kernels are compiled while the checks run; the figures find them there.
if [ ${#only[@]} -eq 0 ]; then
  timeout $(($(left) * 6 / 10)) "$PYTHON" -m pytest tests/gpu -m gpu -q -p no:cacheprovider \
    --junitxml="$out/checks.xml" 2>&1 | tail -n 60
fi
timeout "$(left)" "$PYTHON" -m tests.gpu.figures --device "$device" --shape "$shape" \
  --out "$out/figures.jsonl" --seconds $(($(left) * 8 / 10)) ${only[@]+"${only[@]}"}
[ $? -eq 124 ] && echo "the figures were cut off" >&2

rest=()
if [ ${#only[@]} -gt 0 ] || [ "$device" = cpu ]; then rest=(--figures-only); fi
"$PYTHON" -m tests.gpu.summary "$out" ${rest[@]+"${rest[@]}"} | tee "$out/summary.txt"
