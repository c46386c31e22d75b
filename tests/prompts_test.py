"""The stream of prompts: every epoch visits each once, and the number of draws is its whole state."""

import numpy as np
import pytest

from rljax import prompts


class Letters:
    """A tokenizer of one id a letter; in a chat, after a 0, each message is its letters after its role's id."""

    def encode(self, text):
        return [ord(c) for c in text]

    def chat(self, messages):
        roles = {"user": 1, "system": 2}
        return [0] + [i for m in messages for i in (roles[m["role"]], *self.encode(m["content"]))]


def encode(examples, max_tokens, what="training", chat=False, system=""):
    return prompts.encode(examples, Letters(), max_tokens, what, chat=chat, system=system)


@pytest.fixture
def seven():
    examples = [{"prompt": "abcdefg"[i] * (i + 1), "answer": str(i)} for i in range(7)]
    return encode(examples, 99)


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own(seven):
    stream = prompts.Stream(seven, seed=0)
    epochs = [stream.take(7 * e, 7).ids for e in range(6)]
    for ids in epochs:
        assert sorted(ids) == list(range(7))
    assert len({tuple(ids) for ids in epochs}) > 3


def test_a_stream_resumes_from_the_number_of_draws(seven):
    straight = prompts.Stream(seven, seed=3).take(0, 20)
    np.testing.assert_array_equal(straight.draws, np.arange(20))
    pieces, stream = [], prompts.Stream(seven, seed=3)
    for start, count in [(0, 3), (3, 4), (7, 1), (8, 12)]:  # 3 + 4: also at an epoch's end
        pieces.append(stream.take(start, count))
        stream = prompts.Stream(seven, seed=3)  # a new process
    np.testing.assert_array_equal(np.concatenate([p.ids for p in pieces]), straight.ids)
    np.testing.assert_array_equal(np.concatenate([p.draws for p in pieces]), straight.draws)
    assert sum((p.tokens for p in pieces), ()) == straight.tokens


def test_the_seed_decides_the_order(seven):
    orders = {tuple(prompts.Stream(seven, seed=s).take(0, 7).ids) for s in range(5)}
    assert len(orders) > 2


def test_prompts_come_with_their_tokens_and_examples(seven):
    drawn = prompts.Stream(seven, seed=0).take(5, 4)
    assert len(drawn) == 4 and drawn.ids.dtype == np.int64 and drawn.draws.dtype == np.int64
    for i, tokens, example in zip(drawn.ids, drawn.tokens, drawn.examples, strict=True):
        assert example["answer"] == str(i) and tokens == Letters().encode(example["prompt"])


def test_an_overlong_prompt_is_dropped_and_counted_never_cut():
    examples = [{"prompt": p} for p in ("ab", "abcdef", "", "abc", "abcd")]
    kept = encode(examples, 3)
    assert [e["prompt"] for e in kept.examples] == ["ab", "abc"] and kept.dropped == 3
    assert kept.tokens == ([97, 98], [97, 98, 99]) and len(kept) == 2


def test_a_chat_goes_through_the_template_and_is_measured_after_it():
    examples = [{"prompt": p} for p in ("a", "b" * 6)]
    kept = encode(examples, 7, chat=True)
    assert kept.tokens == ([0, 1, 97],) and kept.dropped == 1  # the other has eight
    assert encode(examples, 7).dropped == 0
    assert encode(examples[:1], 7, chat=True, system="s").tokens == ([0, 2, 115, 1, 97],)


def test_nothing_left_is_an_error_that_names_the_key():
    told = r"2 held-out .*shortest has 4, the median 5, the longest 5\); raise rollout.max_prompt_tokens to 5$"
    with pytest.raises(ValueError, match=told):
        encode([{"prompt": "abcd"}, {"prompt": "abcde"}], 3, what="held-out")


def test_all_is_the_data_set_in_order(seven):
    everything = seven.all()
    assert everything.ids.tolist() == everything.draws.tolist() == list(range(7))
