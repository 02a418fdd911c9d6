"""Pooled acceptance against a hand count."""

from __future__ import annotations

from runtime.metrics import pool_acceptance
from runtime.request import Generation, SpecStep


def generation(output_len: int, steps: list[SpecStep]) -> Generation:
    return Generation("r", (1,), tuple(range(output_len)), "length", tuple(steps))


def test_pooled_acceptance_equals_hand_count() -> None:
    first = generation(
        8,
        [
            SpecStep((1, 2, 3), 3, 1),  # tokens 1..4
            SpecStep((1, 2, 3), 0, 5),  # token 5
            SpecStep((1, 2, 3), 2, 6),  # tokens 6, 7, 8: the output ends after token 7
        ],
    )
    second = generation(3, [SpecStep((1, 2, 3), 1, 1), SpecStep((1,), 1, 3)])
    total = pool_acceptance([first, second], 3)
    assert total.num_drafts == 4
    assert total.num_clipped == 1
    assert total.accepted == (3, 2, 1)
    assert total.accepted_trimmed == (3, 2, 1)
    assert total.tau == 1 + 6 / 4
    assert total.rates == (0.75, 0.5, 0.25)
    assert total.conditional_rates == (0.75, 2 / 3, 0.5)


def test_trimmed_counts_leave_out_what_the_user_never_got() -> None:
    cut = generation(4, [SpecStep((1, 2, 3), 3, 2)])  # four tokens emitted, two kept
    total = pool_acceptance([cut], 3)
    assert total.accepted == (1, 1, 1)
    assert total.accepted_trimmed == (1, 1, 0)


def test_pooling_is_not_a_mean_of_means() -> None:
    long = generation(11, [SpecStep((1,), 1, 1 + 2 * i) for i in range(5)])
    short = generation(2, [SpecStep((1,), 0, 1)])
    assert pool_acceptance([long, short], 1).tau == 1 + 5 / 6


def test_no_drafts_is_tau_one() -> None:
    assert pool_acceptance([], 2).tau == 1.0
