"""Runs in vLLM's own environment, by path: decodes what it is told on stdin, line by line.

Arguments: the target's directory, dtype, sequences at once, length limit. One JSON line in
(``{"prompts": [[ids]], "max_tokens": n}``), one out (``{"seconds", "tokens"}``); the first line out
says that it has loaded. vLLM's own output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main(target: str, dtype: str, num_seqs: str, max_model_len: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    import vllm

    llm = vllm.LLM(
        model=target,
        dtype=dtype,
        max_num_seqs=int(num_seqs),
        max_model_len=int(max_model_len),
        enable_prefix_caching=False,
        generation_config="vllm",
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        started = time.perf_counter()
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5])
