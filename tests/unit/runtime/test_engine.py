"""The engine against naive decoding: schedule x page size x chunking x arrival, and the ends."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from runtime.metrics import pool_acceptance
from runtime.models.loader import Target
from runtime.request import Request, SamplingParams, SpecStep
from tests.unit.runtime.engine_fixtures import (
    EOS,
    VOCAB,
    ByteTokenizer,
    StubDraft,
    check_draft_state,
    make_engine,
    make_requests,
    random_head,
    run_stepwise,
    tiny_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def reference(target: Target) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target.path, dtype=torch.float64).eval()


def naive_greedy(model: LlamaForCausalLM, request: Request) -> tuple[list[int], float]:
    """Full recompute in float64 for every token; also the smallest top-two gap seen."""
    tokens, smallest = list(request.prompt_ids), float("inf")
    for _ in range(request.sampling.max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        top = logits.topk(2)
        smallest = min(smallest, float(top.values[0] - top.values[1]))
        tokens.append(int(top.indices[0]))
        if tokens[-1] == EOS and not request.sampling.ignore_eos:
            break
    return tokens[len(request.prompt_ids) :], smallest


@pytest.mark.parametrize("max_batch_tokens", [16, 64])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_greedy_output_equals_naive_decoding(
    target: Target,
    reference: LlamaForCausalLM,
    k: int,
    late: bool,
    page_size: int,
    max_batch_tokens: int,
) -> None:
    requests = make_requests()
    engine = make_engine(
        target,
        random_head(target) if k else None,
        num_draft_tokens=k,
        page_size=page_size,
        num_pages=1024 // page_size,
        max_batch_tokens=max_batch_tokens,
    )

    def after_step(engine: object) -> None:
        if k:
            check_draft_state(engine)  # type: ignore[arg-type]

    outputs = run_stepwise(engine, requests, late=late, after_step=after_step)
    for request in requests:
        want, gap = naive_greedy(reference, request)
        assert gap > 1e-4, "pick another seed: the oracle itself is nearly tied"
        assert outputs[request.request_id] == want


def test_draft_state_check_covers_accepted_and_rejected_drafts(target: Target) -> None:
    engine = make_engine(target, random_head(target), num_draft_tokens=3)
    checked = 0

    def after_step(engine: object) -> None:
        nonlocal checked
        checked += check_draft_state(engine)  # type: ignore[arg-type]

    requests = make_requests(ignore_eos=True, max_tokens=40)
    states = [engine.add(request) for request in requests]
    while engine.has_work:
        engine.step()
        after_step(engine)
    accepted = {step.num_accepted for state in states for step in state.steps}
    assert checked > 50
    assert accepted >= {0, 1, 2}, f"the random head only ever accepted {accepted}"


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_keyed_output_equals_plain_sampling(target: Target, k: int, temperature: float) -> None:
    requests = make_requests(temperature=temperature, top_k=8, top_p=0.95)
    plain = make_engine(target).generate(requests)
    spec = make_engine(target, random_head(target), num_draft_tokens=k).generate(requests)
    assert [g.output_ids for g in spec] == [g.output_ids for g in plain]
    assert any(step.num_accepted for g in spec for step in g.steps)


def test_batch_composition_does_not_change_sampled_output(target: Target) -> None:
    requests = make_requests(temperature=1.0)
    together = make_engine(target).generate(requests)
    for request, generation in zip(requests, together, strict=True):
        (alone,) = make_engine(target).generate([request])
        assert alone.output_ids == generation.output_ids


BEHAVIOURS = {
    "right": lambda position: True,
    "wrong": lambda position: False,
    "every_other": lambda position: position % 2 == 0,
}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_stub_drafts(target: Target, behaviour: str, k: int) -> None:
    requests = make_requests(3, ignore_eos=True, max_tokens=31)
    plain = make_engine(target).generate(requests)
    answers = {g.request_id: [*g.prompt_ids, *g.output_ids] for g in plain}
    stub = StubDraft(target, answers, BEHAVIOURS[behaviour])
    engine = make_engine(target, stub, num_draft_tokens=k)
    stub.engine = engine
    got = engine.generate(requests)
    assert [g.output_ids for g in got] == [g.output_ids for g in plain]
    for generation in got:
        inside = [s for s in generation.steps if s.start + k + 1 < len(generation.output_ids)]
        accepted = [step.num_accepted for step in inside]
        if behaviour == "right":
            assert set(accepted) == {k}
        elif behaviour == "wrong":
            assert set(accepted) == {0}
        else:
            # From an even position on the first draft is right and the second wrong.
            first = [step.start + len(generation.prompt_ids) for step in inside]
            assert accepted == [1 if position % 2 == 0 else 0 for position in first]


def test_eos_inside_an_accepted_run_ends_the_request(target: Target) -> None:
    requests = make_requests(8, seed=3, max_tokens=60)
    plain = make_engine(target).generate(requests)
    ended = [g for g in plain if g.finish_reason == "stop"]
    assert ended, "no request of this seed reaches EOS"
    # The stub goes on after EOS with what plain decoding would have said.
    longer = make_engine(target).generate(
        [
            Request(r.request_id, r.prompt_ids, SamplingParams(max_tokens=70, ignore_eos=True))
            for r in requests
        ]
    )
    answers = {g.request_id: [*g.prompt_ids, *g.output_ids] for g in longer}
    stub = StubDraft(target, answers, BEHAVIOURS["right"])
    engine = make_engine(target, stub, num_draft_tokens=4, max_model_len=128, num_pages=64)
    stub.engine = engine
    got = engine.generate(requests)
    assert [(g.output_ids, g.finish_reason) for g in got] == [
        (g.output_ids, g.finish_reason) for g in plain
    ]
    inside = [
        g
        for g in got
        if g.finish_reason == "stop"
        and g.steps
        and g.steps[-1].start + g.steps[-1].num_accepted + 1 > len(g.output_ids)
    ]
    assert inside, "no EOS fell inside an accepted run"
    pooled = pool_acceptance(got, 4)
    assert sum(pooled.accepted_trimmed) < sum(pooled.accepted)


@pytest.mark.parametrize("k", [0, 3])
def test_stop_string_ends_the_request_and_the_text(target: Target, k: int) -> None:
    tokenizer = ByteTokenizer()
    base = make_requests(1, ignore_eos=True, max_tokens=30)[0]
    (free,) = make_engine(target, tokenizer=tokenizer).generate([base])
    text = tokenizer.decode(list(free.output_ids), skip_special_tokens=False)
    stop = text[6:9]
    at = text.index(stop)
    request = Request(
        "s", base.prompt_ids, SamplingParams(max_tokens=30, ignore_eos=True, stop=("zzz", stop))
    )
    draft = random_head(target) if k else None
    engine = make_engine(target, draft, num_draft_tokens=k, tokenizer=tokenizer)
    (got,) = engine.generate([request])
    assert got.finish_reason == "stop"
    assert got.output_ids == free.output_ids[: at + len(stop)]
    assert got.text == tokenizer.decode(list(free.output_ids[:at]), skip_special_tokens=True)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_length_limits(target: Target, k: int) -> None:
    draft = random_head(target) if k else None
    prompt = tuple(range(3, 11)) * 3
    long = Request("long", prompt, SamplingParams(max_tokens=500, ignore_eos=True))
    short = Request("short", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    engine = make_engine(target, draft, num_draft_tokens=k, max_model_len=40)
    got = engine.generate([long, short])
    assert len(got[0].output_ids) == 40 - len(prompt)
    assert len(got[1].output_ids) == 1
    assert {g.finish_reason for g in got} == {"length"}
    plain = make_engine(target, max_model_len=40).generate([long, short])
    assert [g.output_ids for g in got] == [g.output_ids for g in plain]


@pytest.mark.parametrize("k", [0, 2])
def test_preemption_by_recompute_changes_nothing(target: Target, k: int) -> None:
    requests = make_requests(6, max_tokens=40, ignore_eos=True)
    roomy = make_engine(target).generate(requests)
    draft = random_head(target) if k else None
    engine = make_engine(
        target, draft, num_draft_tokens=k, page_size=1, num_pages=128, max_running=4
    )

    def after_step(engine: object) -> None:
        if k:
            check_draft_state(engine)  # type: ignore[arg-type]

    outputs = run_stepwise(engine, requests, after_step=after_step)
    assert engine.scheduler.num_preemptions > 0, "pages never ran out"
    assert [tuple(outputs[r.request_id]) for r in requests] == [g.output_ids for g in roomy]
    assert engine.table.allocator.num_free == 128


def test_abort_frees_pages_and_leaves_the_others_alone(target: Target) -> None:
    requests = make_requests(4, ignore_eos=True)
    plain = make_engine(target).generate(requests)
    engine = make_engine(target, random_head(target), num_draft_tokens=2)
    states = [engine.add(request) for request in requests]
    for _ in range(4):
        engine.step()
    engine.abort("r1")
    engine.abort("r1")
    assert states[1].finish_reason == "abort"
    while engine.has_work:
        engine.step()
    for index in (0, 2, 3):
        assert tuple(states[index].output_ids) == plain[index].output_ids
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_closing_a_stream_aborts_what_is_left(target: Target) -> None:
    engine = make_engine(target)
    stream = engine.stream(make_requests(3, ignore_eos=True))
    next(stream)
    stream.close()
    assert not engine.has_work
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_a_stream_ends_when_its_requests_are_aborted_from_outside(target: Target) -> None:
    engine = make_engine(target)
    stream = engine.stream(make_requests(2, ignore_eos=True))
    next(stream)
    for name in ("r0", "r1"):
        engine.abort(name)
    assert all(event.finish_reason is None for event in stream)
    assert engine.table.allocator.num_free == engine.config.num_pages


def test_stream_yields_the_tokens_of_generate(target: Target) -> None:
    requests = make_requests(3)
    want = {g.request_id: g.output_ids for g in make_engine(target).generate(requests)}
    engine = make_engine(target, random_head(target), num_draft_tokens=2)
    got: dict[str, list[int]] = {r.request_id: [] for r in requests}
    for event in engine.stream(requests):
        got[event.request_id].extend(event.token_ids)
    assert {name: tuple(ids) for name, ids in got.items()} == want


def test_events_carry_the_steps_of_generate(target: Target) -> None:
    requests = make_requests(3)
    head = random_head(target)
    want = {
        g.request_id: g.steps
        for g in make_engine(target, head, num_draft_tokens=2).generate(requests)
    }
    assert sum(step.num_accepted for steps in want.values() for step in steps) > 0
    got: dict[str, list[SpecStep]] = {r.request_id: [] for r in requests}
    lengths = dict.fromkeys(got, 0)
    for event in make_engine(target, head, num_draft_tokens=2).stream(requests):
        if event.step is not None:
            got[event.request_id].append(event.step)
            assert event.step.start == lengths[event.request_id]
            accepted = event.step.draft_ids[: event.num_accepted]
            assert event.token_ids[: event.num_accepted] == accepted
        lengths[event.request_id] += len(event.token_ids)
    assert {name: tuple(steps) for name, steps in got.items()} == want


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("x", ()), "prompt_ids is empty"),
        (Request("x", (1,) * 96), "at most 95 fit"),
        (Request("x", (1, VOCAB)), "outside the vocabulary"),
        (Request("x", (-1, 2)), "outside the vocabulary"),
        (Request("x", (1,), SamplingParams(stop=("a",))), "need an engine with a tokenizer"),
    ],
)
def test_bad_requests_are_refused(target: Target, request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(target).add(request_)


def test_living_request_id_is_refused(target: Target) -> None:
    engine = make_engine(target)
    engine.add(Request("x", (1,)))
    with pytest.raises(ValueError, match="is living"):
        engine.add(Request("x", (1,)))


GOOD, BAD = Request("good", (1, 3)), Request("bad", (1, VOCAB))


@pytest.mark.parametrize(
    "refused",
    [
        lambda engine: engine.generate([GOOD, BAD]),
        lambda engine: next(engine.stream([GOOD, BAD])),
        lambda engine: engine.generate([GOOD, GOOD]),
        lambda engine: next(engine.forward_hidden([(1, 3), (1, VOCAB)])),
        lambda engine: engine.score([(1, 3), ()]),
    ],
)
def test_a_refused_request_leaves_nothing_behind(target: Target, refused) -> None:
    engine = make_engine(target)
    with pytest.raises(ValueError, match="request"):
        refused(engine)
    assert not engine.has_work
    assert engine.generate([GOOD])[0].output_ids
