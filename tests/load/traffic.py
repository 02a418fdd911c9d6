"""Random traffic: who arrives when, asks for what, and gives up when. Everything from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from runtime.request import Request, SamplingParams
from tests.load.schedules import MAX_MODEL_LEN
from tests.unit.runtime.engine_fixtures import VOCAB

GivesUp = Literal["never", "between_steps", "in_a_step"]


@dataclass(frozen=True)
class Visitor:
    """A request, the step it arrives before, and how and when it gives up: ``between_steps`` after
    ``patience`` steps, ``in_a_step`` in a step that works for it, after ``patience`` tokens.
    """

    request: Request
    arrives: int
    gives_up: GivesUp = "never"
    patience: int = 0


def make_traffic(count: int, *, seed: int, share_giving_up: float = 0.3) -> list[Visitor]:
    """``count`` visitors in order of arrival; half of them come in one crowd at the start."""
    dice = random.Random(seed)
    visitors: list[Visitor] = []
    step = 0
    for index in range(count):
        if index >= count // 2:
            step += dice.choice((0, 0, 0, 1, 1, 3))
        gives_up: GivesUp = "never"
        if dice.random() < share_giving_up:
            gives_up = dice.choice(("between_steps", "in_a_step"))
        prompt_len = dice.choice((1, 2, 3, 7, 8, 15, 17, 55, MAX_MODEL_LEN - 1))
        request = Request(
            f"v{seed}-{index}",
            tuple(dice.randrange(VOCAB) for _ in range(prompt_len)),
            make_sampling(dice),
        )
        patience = dice.randrange(8 if gives_up == "in_a_step" else 120)
        visitors.append(Visitor(request, step, gives_up, patience))
    return visitors


def make_sampling(dice: random.Random) -> SamplingParams:
    """Greedy or keyed with any filter; short and long answers; stop strings and stop ids."""
    is_greedy = dice.random() < 0.4
    return SamplingParams(
        temperature=0.0 if is_greedy else dice.choice((0.3, 0.8, 1.5)),
        top_k=dice.choice((0, 0, 3, 8)),
        top_p=dice.choice((1.0, 1.0, 0.9, 0.5)),
        min_p=dice.choice((0.0, 0.0, 0.05)),
        seed=dice.randrange(2**40),
        max_tokens=dice.choice((1, 2, 20, 60, 200, 200)),
        stop=dice.choice(((), (), (), ("ca", "jjk"))),
        stop_token_ids=dice.choice(((), (), (), (), (VOCAB - 1,))),
        ignore_eos=dice.random() < 0.8,
        logprobs=dice.random() < 0.3,
    )
