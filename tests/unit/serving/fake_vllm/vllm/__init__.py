"""A stand-in for vLLM: answers with its prompts' own ids, counts drafts, fails when told to.

``FAKE_VLLM`` names what it plays: ``new`` (tells accepted per step), ``old`` (counts only),
``ancient`` (an old version), ``refuses`` (cannot load), ``dies`` (ends without a word of ours),
``hangs``, ``forgets`` (answers fewer prompts).
"""

import os
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

PLAYED = os.environ["FAKE_VLLM"]
__version__ = "0.9.2" if PLAYED == "ancient" else "0.32.0"
WARM_UP = 5

if PLAYED == "old":

    @dataclass
    class EngineArgs:
        model: str = ""

else:

    @dataclass
    class EngineArgs:
        model: str = ""
        per_request_spec_decode_metrics: str = "none"


class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings


class LLM:
    def __init__(self, **arguments):
        if PLAYED == "refuses":
            raise ValueError("There is no module or parameter named 'extra'")
        if PLAYED == "dies":
            sys.stderr.write("Illegal instruction, says the engine\n")
            sys.stderr.flush()
            os._exit(132)
        if PLAYED == "hangs":
            time.sleep(60)
        self.arguments = arguments
        self.k = arguments["speculative_config"]["num_speculative_tokens"]
        self.drafts, self.accepted = WARM_UP, [2] + [0] * (self.k - 1)

    def get_metrics(self):
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            SimpleNamespace(
                name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(self.accepted)
            ),
        ]

    def generate(self, inputs, sampling, use_tqdm=True):
        outputs = [self.answer(entry["prompt_token_ids"], sampling) for entry in inputs]
        return outputs[:-1] if PLAYED == "forgets" else outputs

    def answer(self, prompt, sampling):
        """As many steps as the prompt has tokens, of which step i accepts i modulo K + 1."""
        accepted = [index % (self.k + 1) for index in range(len(prompt))]
        self.drafts += len(accepted)
        for position in range(self.k):
            self.accepted[position] += sum(count > position for count in accepted)
        detailed = self.arguments.get("per_request_spec_decode_metrics") == "detailed"
        metrics = SimpleNamespace(
            per_step_accepted=accepted, per_step_drafted=[self.k] * len(accepted)
        )
        completion = SimpleNamespace(
            token_ids=[*prompt, *sampling.settings["stop_token_ids"]],
            finish_reason="stop",
            spec_decode_metrics=metrics if detailed else None,
        )
        return SimpleNamespace(outputs=[completion])
