"""What a real vLLM does with heads of every layout on quantised targets: ``python -m
tests.interop.quantised_table OUT.json [NAME ...]`` writes the answers down and prints a table.

Target and head are tiny and random; the head was trained on the unquantised target and is not
quantised itself. What loads is judged by what the same head accepts in our runtime on the same
quantised target.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mtp_train.config import HeadConfig
from mtp_train.export import write_export
from mtp_train.quantise import SCHEMES, quantise_target
from mtp_train.serving.job import ServingError
from runtime.head_spec import load_head, save_head
from runtime.models.loader import fingerprint_target
from tests.interop.engines import Bench
from tests.interop.test_eagle import EAGLE, EAGLE3
from tests.interop.tiny_heads import TinyHead, make_tiny_bench, share_accepted

HEADS = {
    "mimo": TinyHead("mimo", HeadConfig()),
    "eagle": TinyHead("eagle", EAGLE),
    "eagle3": TinyHead("eagle3", HeadConfig(**EAGLE3, layer_ids=(1, 3))),
    "speculators": TinyHead(
        "speculators", HeadConfig(**EAGLE3, layer_ids=(3,), norm_before_residual=True)
    ),
}


@dataclass(frozen=True)
class Answer:
    """``shares`` of drafts that were accepted, ours and theirs; ``same_text`` of answers."""

    layout: str
    scheme: str
    load_error: str = ""
    ours: float = 0.0
    theirs: float = 0.0
    same_text: int = 0
    prompts: int = 0

    @property
    def vllm(self) -> str:
        if self.load_error:
            return f"refuses: {self.load_error}"
        return (
            f"loads; accepts {self.theirs:.3f} of the drafts, we {self.ours:.3f}; "
            f"{self.same_text} of {self.prompts} texts are ours"
        )


def quantised_bench(path: Path, layout: str, scheme: str) -> Bench:
    """The head of ``layout`` for a tiny target, bound to the quantised copy of that target."""
    plain = make_tiny_bench(path, HEADS[layout])
    target = path / "quantised"
    quantise_target(plain.target_dir, target, SCHEMES[scheme])
    spec, tensors = load_head(path / "head")
    own = fingerprint_target(target, cache_dir=path / "cache")
    save_head(path / "bound", replace(spec, target_fingerprint=own), tensors)
    out = path / "served" / layout
    write_export(path / "bound", out, format=plain.format, target_dir=target, unvalidated=True)
    return replace(plain, target_dir=target, export_dir=out)


def without_draft_layers(bench: Bench) -> dict[str, Any]:
    """vLLM's override that puts back an ``ignore`` list which names ``lm_head`` alone."""
    config = json.loads((bench.target_dir / "config.json").read_text())["quantization_config"]
    overrides = {"num_nextn_predict_layers": 1}
    return {"hf_overrides": overrides | {"quantization_config": config | {"ignore": ["lm_head"]}}}


def ask(
    bench: Bench, layout: str, scheme: str, llm_args: Mapping[str, Any] | None = None
) -> Answer:
    """Serve in fp32 at K = 3 and compare with our runtime."""
    try:
        pair = bench.compare(k=3, llm_args=llm_args)
    except ServingError as error:
        return Answer(layout, scheme, load_error=" ".join(str(error).split())[-300:])
    texts = zip(pair.generations, pair.served.prompts, strict=True)
    same = sum(ours.output_ids == theirs.output_ids for ours, theirs in texts)
    return Answer(
        layout,
        scheme,
        ours=share_accepted(pair.our_sums.tolist()),
        theirs=share_accepted(pair.their_sums.tolist()),
        same_text=same,
        prompts=len(pair.generations),
    )


def main(out: str, *names: str) -> None:
    answers = []
    for name in names or [f"{layout}:{scheme}" for layout in HEADS for scheme in SCHEMES]:
        layout, scheme, *rest = name.split(":")
        with tempfile.TemporaryDirectory(prefix="mtp-quantised-") as folder:
            bench = quantised_bench(Path(folder), layout, scheme)
            llm_args = without_draft_layers(bench) if rest else None
            answer = ask(bench, ":".join([layout, *rest]), scheme, llm_args)
        answers.append(answer)
        sys.stdout.write(f"| {answer.layout} | {answer.scheme} | {answer.vllm} |\n")
        sys.stdout.flush()
        Path(out).write_text(json.dumps([asdict(a) for a in answers], indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
