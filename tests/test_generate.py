"""Generation: the tokens of a loop over full forwards, for any batch, however they are asked for."""

import copy
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

import modepth
from modepth.calibration import calibrate
from modepth.generation import generate, stream
from modepth.sampling import Sampling
from modepth.text_stream import TextStream, token_texts
from modepth.tokenizer import ByteTokenizer, LibraryTokenizer, load_tokenizer, token_bytes
from tests.oracles import PARTS, tiny_model, tiny_tokens
from tests.test_cache import RULES, model_of, rows_of

SOME = Sampling(max_tokens=12)
HOT = Sampling(max_tokens=12, temperature=1.0, top_k=40, top_p=0.95, repetition_penalty=1.2)
PROMPTS = rows_of((9, 4, 13, 1))
TOKENIZERS = [ByteTokenizer(), load_tokenizer(Path(modepth.__file__).parent / "serve" / "shipped")]


def naive(model, prompt, count):
    """Greedy, by one full causal forward a token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits_BTV[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.law
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("choice", RULES, ids=str)
def test_greedy_tokens_are_those_of_full_forwards(choice, part, chunk):
    model = model_of(part=part, **choice)
    generated = generate(model, PROMPTS, SOME, chunk=chunk)
    assert [each.tokens for each in generated] == [naive(model, prompt, 12) for prompt in PROMPTS]
    assert {each.reason for each in generated} == {"length"}


@pytest.mark.law
def test_a_request_draws_the_same_alone_and_in_any_batch():
    model = model_of(**RULES[0])
    hows = [replace(HOT, seed=seed, max_tokens=5 + 3 * seed) for seed in range(4)]
    together = generate(model, PROMPTS, hows)
    assert [len(each.tokens) for each in together] == [5, 8, 11, 14]  # rows leave, others go on
    assert [generate(model, [prompt], how)[0] for prompt, how in zip(PROMPTS, hows, strict=True)] == together
    assert generate(model, PROMPTS[::-1], hows[::-1]) == together[::-1]
    assert generate(model, PROMPTS, hows, chunk=3) == together


def test_seeds_reproduce_and_differ():
    model = model_of(**RULES[0])
    one, two, again = (generate(model, PROMPTS[:1], replace(HOT, seed=seed))[0].tokens for seed in (1, 2, 1))
    assert one == again
    assert one != two


def test_a_stream_gives_the_tokens_as_they_come():
    model = model_of(**RULES[0])
    hows = [replace(SOME, max_tokens=count) for count in (2, 5, 3, 1)]
    emitted = list(stream(model, PROMPTS, hows))
    assert [each.row for each in emitted] == [0, 1, 2, 3, 0, 1, 2, 1, 2, 1, 1]
    for row, whole in enumerate(generate(model, PROMPTS, hows)):
        mine = [each for each in emitted if each.row == row]
        assert [each.token for each in mine] == whole.tokens
        assert [each.reason for each in mine] == [None] * (len(mine) - 1) + ["length"]


def test_a_stop_token_ends_a_row():
    model = model_of(**RULES[0])
    tokens = generate(model, PROMPTS[:1], SOME)[0].tokens
    place = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    (stopped,) = generate(model, PROMPTS[:1], replace(SOME, stop_ids=(96, tokens[place])))
    assert (stopped.tokens, stopped.reason) == (tokens[: place + 1], "stop")


def test_a_stop_text_ends_a_row_and_is_cut_off():
    model, prompt, tokenizer = tiny_model(vocab_size=257), "some prompt", ByteTokenizer()
    hot = Sampling(temperature=1.0, max_tokens=40, seed=5)
    (whole,) = generate(model, [prompt], hot, tokenizer=tokenizer)
    assert whole.text == tokenizer.decode(whole.tokens)
    stop = whole.text[17:19]
    (stopped,) = generate(model, [prompt], replace(hot, stop_strings=("nowhere", stop)), tokenizer=tokenizer)
    assert stopped.reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert stop in tokenizer.decode(stopped.tokens)
    pieces = stream(model, [prompt], replace(hot, stop_strings=(stop,)), tokenizer=tokenizer)
    assert "".join(each.text for each in pieces) == stopped.text


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_streamed_text_is_the_decoded_text_up_to_a_stop(text, stops):
    tokenizer = ByteTokenizer()
    written = TextStream(tokenizer, stops)
    shown = ""
    for token in tokenizer.encode(text):
        shown += written.add(token)
        assert text.startswith(shown)
    shown += written.finish()
    ends = [text.index(stop) for stop in stops if stop in text]
    assert written.stopped == bool(ends)
    # The stop that is complete first ends the text, wherever others would have begun.
    first = min((text.index(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    before = [text.index(stop) for stop in stops if stop in text[:first]]
    assert shown == text[: min(before, default=len(text))]


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=3, max_size=12), max_size=3))
def test_what_is_held_back_is_the_longest_start_of_a_stop(text, stops):
    written, shown = TextStream(ByteTokenizer(), stops), ""
    for count, token in enumerate(text.encode(), start=1):
        shown += written.add(token)
        if written.stopped:
            break
        starts = [stop[:length] for stop in stops for length in range(len(stop))]
        assert len(shown) == count - max((len(start) for start in starts if text[:count].endswith(start)), default=0)


def test_a_long_stop_costs_a_token_no_more_than_a_short_one():
    half = 20_000
    written = TextStream(ByteTokenizer(), ["a" * half + "b" * half, "a" * half + "c" * half])
    before = time.process_time()
    for _ in range(2000):
        written.add(ord("a"))
    assert time.process_time() - before < 2  # seconds; each start of the stop looked at for each token: minutes
    assert written.finish() == "a" * 2000


@given(st.binary(max_size=40))
def test_streamed_bytes_that_are_no_text_come_out_as_they_decode(data):
    written = TextStream(ByteTokenizer())
    shown = "".join(written.add(byte) for byte in data) + written.finish()
    assert shown == ByteTokenizer().decode(data)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "shipped"])
@given(text=st.text(max_size=20) | st.just("café 日本 😀"))
def test_the_texts_of_tokens_are_whole_characters_and_together_the_text(tokenizer, text):
    tokens = tokenizer.encode(text)
    texts = token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == text
    # The tokens until a character's last one are those that spell it.
    for place in range(len(tokens)):
        if texts[place] and not texts[place].endswith("\ufffd"):
            assert tokenizer.decode(tokens[: place + 1]) == "".join(texts[: place + 1])


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "shipped"])
@given(text=st.text(max_size=20) | st.just("café 日本 😀"))
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, text):
    assert b"".join(token_bytes(tokenizer, token) for token in tokenizer.encode(text)) == text.encode()


def test_a_byte_that_sentencepiece_writes_out_is_that_byte():
    vocabulary = {"<unk>": 0, "</s>": 1, "<0xC3>": 2, "<0xA9>": 3, "a": 4}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    library.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    tokenizer = LibraryTokenizer(library, "</s>")
    assert tokenizer.encode("aé") == [4, 2, 3]
    assert [token_bytes(tokenizer, token) for token in (4, 2, 3, 1)] == [b"a", b"\xc3", b"\xa9", b"</s>"]
    assert token_texts(tokenizer, [4, 2, 3]) == ["a", "", "é"]


def test_a_stream_does_not_decode_all_of_its_tokens_at_each_one():
    class Counting(ByteTokenizer):
        count = 0

        def decode(self, ids):
            ids = list(ids)
            self.count += len(ids)
            return super().decode(ids)

    tokenizer = Counting()
    written = TextStream(tokenizer, stops=["never"])
    text = "naïve €uro " * 40
    assert "".join(written.add(token) for token in text.encode()) + written.finish() == text
    assert tokenizer.count < 12 * len(text.encode())


def test_at_the_context_limit_generation_stops_and_says_so():
    model = model_of(max_length=23, **RULES[0])
    (one, two) = generate(model, [PROMPTS[0], PROMPTS[3]], replace(SOME, max_tokens=19))
    assert (len(one.tokens), one.reason) == (23 - 9 + 1, "context")
    assert (len(two.tokens), two.reason) == (19, "length")


def test_the_layers_that_computed_each_token_are_those_of_a_full_forward():
    model = model_of(**RULES[0])
    for prompt, each in zip(PROMPTS, generate(model, PROMPTS, SOME, chunk=5, layers=True), strict=True):
        read = [*prompt, *each.tokens[:-1]]  # the last token is never read
        routings = {routing.layer: routing.chosen_BT[0] for routing in model(torch.tensor([read])).routings}
        expected = [
            tuple(layer for layer in range(5) if layer not in routings or routings[layer][place])
            for place in range(len(read))
        ]
        assert each.layers == expected
        assert len(set(expected)) > 2
    assert generate(model, PROMPTS, SOME)[0].layers is None


@pytest.mark.parametrize("training", [True, False])
def test_generation_switches_dropout_off_and_leaves_the_model_as_it_was(training):
    model = model_of(dropout=0.5, **RULES[0])
    expected = generate(model, PROMPTS, SOME)
    before = copy.deepcopy(model.state_dict())
    assert generate(model.train(training), PROMPTS, SOME) == expected
    assert model.training == training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    pieces = stream(model, PROMPTS, SOME)
    next(pieces)
    assert model.training == training  # between two tokens too


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1, 97]], {}, "token ids must be in 0..96, got 97 at row 0, position 1"),
        ([[1], [3, -1]], {}, "prompt 2: token ids must be in 0..96, got -1"),
        ([[1.5]], {}, "tokens must be an int64 or int32 tensor"),
        ([[]], {}, "prompt 1: is empty"),
        ([], {}, "prompts must be a list of one or more"),
        ("text", {}, "prompts must be a list of one or more"),
        (["text"], {}, "prompt 1: text needs a tokenizer"),
        ([[1] * 65], {}, "prompt 1: 65 tokens are more than the model's max_length 64"),
        ([[1]], {"chunk": 0}, "chunk must be a whole number >= 1, got 0"),
        ([[1]], {"sampling": [SOME, SOME]}, "one for each of the 1 prompts, got 2"),
        ([[1]], {"sampling": Sampling(stop_strings=("x",))}, "stop_strings need a tokenizer"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), prompts, **options)


def test_a_router_score_that_is_nan_is_raised_with_its_layer():
    model = tiny_model()
    with torch.no_grad():
        model.layers[3].router.score.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="layer 3: the router score of row 0, token 0 is nan"):
        generate(model, PROMPTS, SOME)


# -- the dial


@pytest.mark.law
@pytest.mark.parametrize("choice", RULES, ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_calibrated_model_routes_the_share_that_was_asked_for(choice, part):
    model = model_of(part=part, **choice)
    held_out, fresh = tiny_tokens(B=97, seed=5), tiny_tokens(B=97, seed=6)
    held_out[:, 0] = torch.arange(97)  # equal beginnings would have equal scores, and a tie is decided by rounding
    for capacity in (0.1, 0.5, 1.0):
        routing = calibrate(model, held_out, capacity)
        for decided in model(held_out, routing=routing).routings:
            assert decided.chosen_BT.sum() == math.ceil(capacity * 97 * 23 - 1e-9)
        for decided in model(fresh, routing=routing).routings:
            assert decided.chosen_BT.double().mean().item() == pytest.approx(capacity, abs=0.06)
    low, high = (generate(model, PROMPTS, SOME, routing=calibrate(model, held_out, share)) for share in (0.1, 0.9))
    assert low != high


def test_only_what_follows_a_rule_can_be_calibrated():
    with pytest.raises(ValueError, match="a dense model has no thresholds"):
        calibrate(tiny_model(routing=None), tiny_tokens(), 0.5)
    with pytest.raises(ValueError, match="selection 'stride' follows no rule"):
        calibrate(tiny_model(selection="stride"), tiny_tokens(), 0.5)
    with pytest.raises(ValueError, match="capacity must be a number in"):
        calibrate(tiny_model(), tiny_tokens(), 1.5)
