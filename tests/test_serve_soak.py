"""Many requests over HTTP at once, of which a third leaves midway: none is lost, nothing is left behind."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from modepth.cache import LayerCache
from modepth.serve.limits import Limits
from tests.serving import alone, asking, complete, engine_of, numbers, serving, streamed, tiny_served, wait_for

ASKED, LEAVING, AT_ONCE = 200, 67, 24
LONG = 1200  # tokens: nobody who leaves has been told all by then


class Asked(NamedTuple):
    prompt: str
    max_tokens: int
    seed: int
    stream: bool
    leaves: bool

    @property
    def sampling(self):
        return {"max_tokens": self.max_tokens, "temperature": 1.0, "seed": self.seed}

    @property
    def body(self):
        return {"prompt": self.prompt, "stream": self.stream, **self.sampling}


def make_up(chance):
    leaving = set(chance.sample(range(ASKED), LEAVING))
    return [
        Asked(
            prompt="x" * chance.choice((1, 2, 9, 33, 150)) + str(number),
            max_tokens=LONG if number in leaving else chance.randint(1, 20),
            seed=number,
            stream=chance.random() < 0.5,
            leaves=number in leaving,
        )
        for number in range(ASKED)
    ]


def ask(client, asked):
    """The text of the answer; None from who leaves."""
    if asked.leaves:
        return leave_stream(client, asked) if asked.stream else leave_whole(client, asked)
    if asked.stream:
        return "".join(chunk["choices"][0]["text"] for chunk in streamed(client, asked.body))
    return complete(client, **asked.body).json()["choices"][0]["text"]


def leave_stream(client, asked):
    chunks = streamed(client, asked.body)
    assert [next(chunks)["choices"][0]["finish_reason"] for _ in range(2)] == [None, None]
    chunks.close()


def leave_whole(client, asked):
    """Closes the connection while the engine computes the answer."""
    with asking(client, asked.body):
        wait_for(lambda: generating(engine_of(client), asked.seed))


def generating(engine, seed):
    return any(
        ticket.row.sampling.seed == seed and len(ticket.row.tokens) > ticket.row.num_prompt
        for ticket in list(engine.seated)
    )


def filled_caches():
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is LayerCache and each.room]


def test_200_requests_of_which_a_third_leaves_are_none_lost_and_leave_nothing():
    before = len(filled_caches())  # of servers that other tests stopped midway
    served, asked = tiny_served(), make_up(random.Random(3))
    limits = Limits(rows=8, prompt_piece=6)  # so that many wait
    with serving(lambda: served, limits=limits) as client:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda each: ask(client, each), asked, timeout=120))
        wait_for(lambda: not engine_of(client).busy)
        counted = numbers(client)
    assert [answer is None for answer in answers] == [each.leaves for each in asked]
    for each, answer in zip(asked, answers, strict=True):
        if not each.leaves:
            assert answer == alone(served, each.prompt, **each.sampling).text
    endings = {name: count for name, count in counted.items() if name.startswith("modepth_requests_total")}
    assert sum(endings.values()) == ASKED
    assert endings['modepth_requests_total{ending="cancelled"}'] == LEAVING
    assert endings['modepth_requests_total{ending="length"}'] == ASKED - LEAVING
    for name in ("cache_bytes", "tokens_reserved", "requests_running", "requests_waiting"):
        assert counted[f"modepth_{name}"] == 0
    assert len(filled_caches()) <= before
