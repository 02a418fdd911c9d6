#!/usr/bin/env bash
# Every GPU check in one go, for a machine with a CUDA device: no network, under 8 minutes.
# Expects a Python with the project's dependencies (PYTHON=…); prints a table of results at the end.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
out=$(mktemp -d)
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
  echo "no CUDA device: nothing to check"; exit 2; }
timeout 450 "$PYTHON" -m pytest tests/gpu -m gpu -q --junitxml="$out/gpu.xml" -p no:cacheprovider
status=$?
"$PYTHON" - "$out/gpu.xml" <<'PY'
import sys
import xml.etree.ElementTree as ElementTree

print(f"{'check':70} {'result':8} {'s':>7}")
for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    print(f"{case.get('name', '')[:70]:70} {bad[0] if bad else 'passed':8} {float(case.get('time', 0)):7.2f}")
PY
exit $status
