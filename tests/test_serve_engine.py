"""Continuous batching: whatever the company and however prompts are cut, each answer is the one given alone."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from modepth.calibration import calibrate
from modepth.depth import layers_used, router_scores
from modepth.flops import forward_flops, spent_share
from modepth.generation import Row, generate
from modepth.sampling import Sampling
from modepth.serve import engine as engine_module
from modepth.serve.engine import BusyError, Engine, Request
from modepth.serve.limits import Limits
from modepth.serve.watch import drawn_logprobs, next_logprobs
from modepth.tokenizer import ByteTokenizer
from tests.oracles import tiny_config, tiny_model, tiny_tokens
from tests.test_cache import RULES, model_of

SMALL = Limits(rows=5, prompt_piece=3, prompt_alone=7)
LENGTHS = (1, 40, 3, 17, 8, 2, 31, 5, 23, 12, 1, 44, 9, 6, 27, 14)


@pytest.fixture(scope="module")
def model():
    torch.set_default_dtype(torch.float64)
    made = model_of(**RULES[0])
    torch.set_default_dtype(torch.float32)
    return made


def prompts_of(lengths=LENGTHS):
    return [row[:length] for row, length in zip(tiny_tokens(B=len(lengths), T=64).tolist(), lengths, strict=True)]


def run(engine, arrivals):
    """Submit the requests of each step before it, step until all have ended; tokens and endings, in order."""
    tickets, tokens, endings = [], {}, {}
    steps = iter(arrivals)
    for requests in steps:
        tickets += engine.submit(requests)
        collect(engine.step(), tokens, endings)
    while engine.busy:
        collect(engine.step(), tokens, endings)
    return [(tokens.get(id(ticket), []), endings[id(ticket)]) for ticket in tickets]


def collect(events, tokens, endings):
    for event in events:
        if event.token is not None:
            tokens.setdefault(id(event.ticket), []).append(event.token)
        if event.ending is not None:
            assert id(event.ticket) not in endings, "ended twice"
            endings[id(event.ticket)] = event.ending


def solo(model, request):
    (answer,) = generate(model, [request.prompt], request.sampling, routing=request.routing)
    return answer.tokens, answer.reason


def mixed_requests():
    """Greedy and drawn, short and long, each with a seed of its own."""
    return [
        Request(
            prompt=prompt,
            sampling=Sampling(max_tokens=1 + 5 * number % 17, temperature=number % 3 / 2, top_p=0.9, seed=number),
        )
        for number, prompt in enumerate(prompts_of())
    ]


@pytest.mark.law
@pytest.mark.parametrize("limits", [SMALL, Limits(), Limits(rows=2, prompt_piece=1, prompt_alone=1)], ids=str)
def test_every_answer_equals_its_solo_answer(model, limits):
    requests = mixed_requests()
    alone = [solo(model, request) for request in requests]
    assert run(Engine(model, limits=limits), [requests]) == alone
    shuffled = random.Random(1).sample(range(16), 16)
    late = [[requests[number]] if step % 2 else [] for step, number in enumerate(n for n in shuffled for _ in "ab")]
    assert run(Engine(model, limits=limits), late) == [alone[number] for number in shuffled]


@pytest.mark.law
def test_in_float32_greedy_answers_differ_only_where_a_margin_is_below_1e_4():
    model = tiny_model(cutoff=0.3).eval()
    requests = [Request(prompt=prompt, sampling=Sampling(max_tokens=16)) for prompt in prompts_of()]
    for request, (tokens, _) in zip(requests, run(Engine(model, limits=SMALL), [requests]), strict=True):
        expected, _ = solo(model, request)
        place = next((n for n, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            with torch.no_grad():
                out = model(torch.tensor([[*request.prompt, *expected[:place]]]))
            best = out.logits_BTV[0, -1].topk(2).values
            scores = [(routing.logit_BT - 0.3).abs().min() for routing in out.routings]
            assert min(best[0] - best[1], *scores) < 1e-4


@pytest.mark.law
def test_requests_of_different_dials_share_a_batch_and_answer_as_alone(model):
    routings = [None, *(calibrate(model, tiny_tokens(B=8), share) for share in (0.1, 0.9))]
    requests = [
        replace(request, routing=routings[number % 3], watches={"layers": layers_used})
        for number, request in enumerate(mixed_requests())
    ]
    answers = run(Engine(model, limits=SMALL), [requests])
    assert answers == [solo(model, request) for request in requests]
    assert answers != run(Engine(model, limits=SMALL), [mixed_requests()])


@pytest.mark.law
def test_what_rows_route_is_computed_together(model, monkeypatch):
    """A step is one pass for each routing that is asked for; in it a routed layer is called once, with the chosen
    tokens of all rows."""
    extend, passes, called = model.extend, [], []

    def spy(tokens, caches, **options):
        called.clear()
        out = extend(tokens, caches, **options)
        chosen = [int(routing.chosen_BT.sum()) for routing in out[1]]
        passes.append((len(caches), sum(map(len, tokens)), chosen))
        assert called == [count for count in chosen if count]
        return out

    monkeypatch.setattr(model, "extend", spy)
    hooks = [
        model.layers[layer].mlp.register_forward_pre_hook(lambda _, inputs: called.append(inputs[0][..., 0].numel()))
        for layer in model.config.routed_layers
    ]
    engine = Engine(model, limits=Limits(prompt_piece=3))
    engine.submit(mixed_requests())
    for step in range(1, 8):
        num_seated = len(engine.seated) or 16
        engine.step()
        assert len(passes) == step
        assert passes[-1][0] == num_seated
    assert any(0 < sum(chosen) < len(chosen) * count for _, count, chosen in passes)
    engine.submit([replace(request_of(), routing=replace(model.config.routing, capacity=1.0))])
    engine.step()
    assert len(passes) == 9
    for hook in hooks:
        hook.remove()


@pytest.mark.law
def test_a_long_prompt_does_not_hold_up_the_others(model):
    """The others get a token at every step; what a long step leaves of the prompt waits, then goes by pieces."""
    engine = Engine(model, limits=Limits(prompt_piece=2, prompt_alone=20))
    talking = engine.submit([Request(prompt=[1], sampling=Sampling(max_tokens=60)) for _ in range(3)])
    engine.step()
    (long,) = engine.submit([Request(prompt=prompts_of()[11], sampling=Sampling(max_tokens=1))])  # 44 tokens
    read = []
    while engine.num_admitted > 3:
        events = engine.step()
        assert {id(event.ticket) for event in events} >= {id(ticket) for ticket in talking}
        read.append(engine.num_read["prompt"] - 3 - sum(read))
    assert [(step, count) for step, count in enumerate(read) if count] == [(0, 20), (41, 20), (42, 2), (43, 2)]
    assert events[-1].ticket is long
    assert events[-1].ending == "length"


# -- admission


def request_of(prompt=3, most=4, **more):
    return Request(prompt=[1] * prompt, sampling=Sampling(max_tokens=most), **more)


@pytest.mark.law
@pytest.mark.parametrize("limits", [Limits(requests=3), Limits(tokens=21)], ids=str)
def test_what_finds_no_room_is_refused_and_the_room_comes_back(model, limits):
    engine = Engine(model, limits=limits)
    engine.submit([request_of(), request_of()])
    with pytest.raises(BusyError, match=r"2 requests with 14 tokens are on their way; with 2 and 14 more there would"):
        engine.submit([request_of(), request_of()])  # all or none
    (last,) = engine.submit([request_of()])
    with pytest.raises(BusyError):
        engine.submit([request_of(1, 1)])
    engine.cancel(last)
    engine.step()
    assert (engine.num_admitted, engine.num_reserved) == (2, 14)
    engine.submit([request_of()])
    while engine.busy:
        engine.step()
    assert (engine.num_admitted, engine.num_reserved, engine.cache_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request_of(60, 5)], "the prompt has 60 tokens and max_tokens is 5, together 65: more than the model's .* 64"),
        ([request_of()] * 4, "4 answers at once are more than the 3"),
        ([request_of(30, 30)] * 2, "add up to 120 tokens, more than the 100"),
        ([Request(prompt=[97], sampling=Sampling())], "token ids must be in 0..96, got 97"),
        ([Request(prompt=[], sampling=Sampling())], "is empty"),
    ],
)
def test_what_can_never_be_is_refused_at_once(model, requests, message):
    requests = [replace(each, sampling=replace(each.sampling, max_tokens=min(30, each.sampling.max_tokens)))
                for each in requests]  # fmt: skip
    engine = Engine(model, limits=Limits(requests=3, tokens=100))
    with pytest.raises(ValueError, match=message):
        engine.submit(requests)
    assert not engine.busy


@pytest.mark.law
def test_nothing_is_made_of_what_finds_no_room(model, monkeypatch):
    made = []

    class Counted(Row):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(engine_module, "Row", Counted)
    engine = Engine(model, limits=Limits(requests=3, tokens=70))
    for never in ([request_of()] * 4, [request_of(30, 30)] * 2, [request_of(), request_of(60, 5)]):
        with pytest.raises(ValueError, match="more than"):
            engine.submit(never)
    assert made == []
    engine.submit([request_of()] * 2)
    with pytest.raises(BusyError):
        engine.submit([request_of()] * 2)
    with pytest.raises(BusyError):
        engine.submit([request_of(50, 10)])
    assert len(made) == 2
    with pytest.raises(ValueError, match="got 97"):
        engine.submit([Request(prompt=[97], sampling=Sampling(max_tokens=4))])
    assert (engine.num_admitted, engine.num_reserved) == (2, 14)


# -- cancelling, failing


@pytest.mark.law
def test_a_cancelled_request_gets_no_further_token_and_frees_its_cache(model):
    engine = Engine(model, limits=Limits(rows=2))
    one, two, waiting = engine.submit([request_of(most=20) for _ in range(3)])
    engine.step()
    held = engine.cache_bytes
    for ticket in (one, waiting):
        engine.cancel(ticket)
    events = engine.step()
    assert [(event.ticket, event.token, event.ending) for event in events if event.ending] == [
        (waiting, None, "cancelled"),
        (one, None, "cancelled"),
    ]
    assert {event.ticket for event in events if event.token is not None} == {two}
    assert engine.num_admitted == 1
    assert engine.cache_bytes < held
    assert one.row.cache.bytes_allocated == 0
    engine.cancel(one)  # it has ended already
    assert [event.ticket for event in engine.step()] == [two]


@pytest.mark.law
@pytest.mark.usefixtures("fp64")
def test_a_request_that_fails_ends_alone():
    model = model_of(**RULES[0], tie_embeddings=False)
    with torch.no_grad():
        model.embed_tokens.weight[96] = math.nan
        model.lm_head.weight[96] = 0.0  # so that nobody else says it
    requests = mixed_requests()
    requests = [replace(each, prompt=[token % 96 for token in each.prompt]) for each in requests]
    alone = [solo(model, request) for request in requests]
    poisoned = Request(prompt=[1, 2, 96, 3], sampling=Sampling(max_tokens=9))
    engine = Engine(model, limits=SMALL)
    answers = run(engine, [requests[:3], [poisoned], requests[3:]])
    assert answers[3] == ([], "failed")
    assert answers[:3] + answers[4:] == alone
    assert engine.cache_bytes == 0


@pytest.mark.law
@pytest.mark.parametrize("part", ["watch", "accept"])
def test_what_fails_after_a_token_is_drawn_ends_its_own_request_alone(model, part):
    def third(row):
        return len(row.tokens) == row.num_prompt + 3

    def watch(model, reading, number):
        if part == "watch" and third(reading.rows[number]):
            raise LookupError("planted")
        return []

    class Planted(Row):
        def accept(self, logits_V):
            drawn = super().accept(logits_V)
            if part == "accept" and third(self):
                raise LookupError("planted")
            return drawn

    class PlantedEngine(Engine):
        def new_row(self, request):
            kind = Planted if request.watches else Row
            return kind(model, request.prompt, request.sampling, None)

    requests = mixed_requests()
    alone = [solo(model, request) for request in requests]
    requests[4] = replace(requests[4], watches={"watch": watch})
    engine = PlantedEngine(model, limits=SMALL)
    answers = run(engine, [requests])
    assert answers[4] == (alone[4][0][:2], "failed")
    assert answers[:4] + answers[5:] == alone[:4] + alone[5:]
    assert (engine.num_admitted, engine.num_reserved, engine.cache_bytes) == (0, 0, 0)


def test_a_failure_says_what_it_was():
    model = tiny_model(routing=None)
    with torch.no_grad():
        model.lm_head.weight[5, 0] = math.nan
    engine = Engine(model)
    engine.submit([request_of()])
    (event,) = engine.step()
    assert (event.ending, event.error.split(":")[0]) == ("failed", "FloatingPointError")
    assert "the logits are not finite" in event.error


# -- what a request may ask to know


def watch_all(model, prompt, **watches):
    engine = Engine(model, limits=SMALL)
    engine.submit([*mixed_requests()[:3], Request(prompt=prompt, sampling=Sampling(max_tokens=6), watches=watches)])
    notes, tokens = {name: [] for name in watches}, []
    while engine.busy:
        for event in engine.step():
            if event.ticket.request.watches:
                tokens.append(event.token)
                for name, new in event.notes.items():
                    notes[name] += new
    return tokens, notes


@pytest.mark.law
def test_what_is_noted_of_a_request_is_what_one_full_forward_shows(model):
    prompt = prompts_of()[6]
    tokens, notes = watch_all(
        model,
        prompt,
        layers=layers_used,
        scores=router_scores,
        all=partial(next_logprobs, top=3),
        drawn=partial(drawn_logprobs, top=2),
    )
    text = [*prompt, *tokens]
    with torch.no_grad():
        out = model(torch.tensor([text]))
    chosen = {each.layer: each.chosen_BT[0] for each in out.routings}
    expected = [tuple(n for n in range(5) if n not in chosen or chosen[n][place]) for place in range(len(text) - 1)]
    assert notes["layers"] == expected
    for place, scores in enumerate(notes["scores"]):
        for score, routing in zip(scores, out.routings, strict=True):
            assert (score.layer, score.routed) == (routing.layer, bool(routing.chosen_BT[0, place]))
            assert score.score == pytest.approx(routing.logit_BT[0, place].item(), abs=1e-12)
    log = out.logits_BTV[0].log_softmax(-1)
    assert len(notes["all"]) == len(text) - 1
    for place, note in enumerate(notes["all"]):
        assert note.logprob == pytest.approx(log[place, text[place + 1]].item(), abs=1e-12)
        assert [each.token for each in note.top] == log[place].topk(3).indices.tolist()
    drawn = [each.logprob for each in notes["drawn"]]
    assert drawn == pytest.approx([each.logprob for each in notes["all"][len(prompt) - 1 :]], abs=1e-12)


def test_the_share_of_flops_is_that_of_the_formula_where_capacity_is_kept():
    config = tiny_config(capacity=0.25)
    for part in ("block", "attention", "mlp"):
        routed = replace(config, routing=replace(config.routing, part=part))
        dense = forward_flops(replace(config, routing=None), 64, half_causal=True)
        share = spent_share(routed, 64, dict.fromkeys(routed.routed_layers, 16))
        assert share == pytest.approx(forward_flops(routed, 64, half_causal=True) / dense)


def test_the_text_of_a_stop_token_is_not_shown():
    model, tokenizer = tiny_model(vocab_size=257), ByteTokenizer()
    (free,) = generate(model, ["some prompt"], Sampling(temperature=1.0, seed=5, max_tokens=9), tokenizer=tokenizer)
    stop = free.tokens[4]
    how = Sampling(temperature=1.0, seed=5, max_tokens=9, stop_ids=(stop,))
    (stopped,) = generate(model, ["some prompt"], how, tokenizer=tokenizer)
    end = free.tokens.index(stop)
    assert (stopped.tokens, stopped.text) == (free.tokens[: end + 1], tokenizer.decode(free.tokens[:end]))
