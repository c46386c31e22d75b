"""Lines of rollouts.jsonl and samples.jsonl, by hand: two rounds of prompts, three rollouts learned from."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax import records
from rljax import tokenizer as tokenizer_lib
from rljax.types import Prompts, Rollouts


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_lib.load("tiny-policy")


def prompts(ids, draws, kinds) -> Prompts:
    named = zip(ids, kinds, strict=True)
    examples = tuple({"prompt": f"{i}+1=", "answer": "2"} | ({"kind": k} if k else {}) for i, k in named)
    return Prompts(ids=np.array(ids), draws=np.array(draws), tokens=tuple([1] for _ in ids), examples=examples)


def trace(tokenizer, acceptance=None) -> records.Trace:
    """Prompts 7, 8 and 7 again, of draws 3, 4 and 15 in a set of 12; two rollouts each. Only 7's are learned from."""
    asked = prompts([7, 8, 7], [3, 4, 15], ["add", "", "add"])
    texts = [" 8", " 9", " 1", " 2", " 8é", " "]
    ids = [tokenizer.encode(text) for text in texts]
    lengths = np.array([len(x) for x in ids], np.int32)
    T = int(lengths.max())
    rollouts = Rollouts(
        tokens=np.array([x + [0] * (T - len(x)) for x in ids], np.int32), logprobs=np.zeros((6, T), np.float32),
        lengths=lengths, group=np.array([0, 0, 1, 1, 2, 2]), sample=np.array([0, 1, 0, 1, 0, 1]),
        truncated=np.zeros(6, bool), top_ids=np.zeros((6, T, 0), np.int32), top_logprobs=np.zeros((6, T, 0)),
    )  # fmt: skip
    # Learned from: draws 3 and 15, which are rows 0 and 1 there; of draw 3 sample 1 alone.
    learned = prompts([7, 7], [3, 15], ["add", "add"])
    indices, kept = np.array([[1, 0], [0, 1]]), np.array([[True, False], [True, True]])
    rewards = np.array([0, 1, 0.1, np.nan, 1, -0.5], np.float32)
    place = records.places(asked, rollouts, learned, indices, kept)
    return records.Trace(
        prompts=asked, rollouts=rollouts, rewards=rewards, place=place, acceptance=acceptance, set_size=12
    )


def test_rollouts_find_their_row_among_the_kept_ones(tokenizer):
    made = trace(tokenizer)
    assert made.place.tolist() == [[-1, -1], [0, 0], [-1, -1], [-1, -1], [1, 0], [1, 1]]
    assert made.kept.tolist() == [False, True, False, False, True, True]


def test_a_line_of_prompts_counts_rollouts_by_reward(tokenizer):
    line = records.of_prompts(trace(tokenizer))
    assert json.loads(json.dumps(line)) == {
        "prompts": [
            {"id": 7, "epoch": 0, "kind": "add", "rollouts": 2, "rewards": {"0": 1, "1": 1}, "kept": {"1": 1}},
            {"id": 8, "epoch": 0, "rollouts": 2, "rewards": {"0.1": 1}, "kept": {}},
            {"id": 7, "epoch": 1, "kind": "add", "rollouts": 2, "rewards": {"-0.5": 1, "1": 1},
             "kept": {"-0.5": 1, "1": 1}},
        ]
    }  # fmt: skip


def test_samples_are_whole_rollouts_with_their_acceptance(tokenizer):
    acceptance = np.arange(2 * 2 * 4, dtype=np.float32).reshape(2, 2, 4) / 16
    found = records.of_rollouts(trace(tokenizer, acceptance), tokenizer, (0, 1), most=6)
    assert all("".join(x["tokens"]) in (" 8", " 9", " 1", " 2", " 8é", " ") for x in found) and len(found) == 6
    by_text = {"".join(x["tokens"]): x for x in found}
    assert by_text[" 9"] == {
        "prompt": "7+1=", "tokens": [" ", "9"], "acceptance": [0.0, 0.0625], "reward": 1.0, "kept": True,
    }  # fmt: skip
    assert by_text[" 8é"]["acceptance"] == [0.5, 0.5625, 0.625, 0.6875]  # row [1, 0], a token for each byte of é
    assert by_text[" 8é"]["tokens"] == [" ", "8", "", "é"]
    assert by_text[" 2"] == {"prompt": "8+1=", "tokens": [" ", "2"], "reward": None, "kept": False}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_half_of_the_samples_are_kept_ones_where_not_all_are(tokenizer):
    drawn = [records.of_rollouts(trace(tokenizer), tokenizer, (0, step)) for step in range(20)]
    assert all([x["kept"] for x in found] == [True, True, False, False] for found in drawn)
    assert all("acceptance" not in x for found in drawn for x in found)
    assert len({json.dumps(found) for found in drawn}) > 10  # other ones at other steps
    assert drawn[3] == records.of_rollouts(trace(tokenizer), tokenizer, (0, 3))


@pytest.mark.parametrize("keep, kept", [(True, 4), (False, 0)])
def test_where_one_kind_is_missing_the_other_fills_in(tokenizer, keep, kept):
    made = trace(tokenizer)
    made.place[:] = 0 if keep else -1
    found = records.of_rollouts(made, tokenizer, (0, 0))
    assert len(found) == 4 and sum(x["kept"] for x in found) == kept


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=20))
def test_pieces_are_the_text_one_a_token(text):
    tokenizer = tokenizer_lib.load("tiny-policy")
    ids = [i for i in tokenizer.inner(text, add_special_tokens=False)["input_ids"]]
    found = records.pieces(tokenizer, ids)
    assert len(found) == len(ids) and "".join(found) == tokenizer.inner.decode(ids)


def test_broken_bytes_and_stop_tokens_have_pieces(tokenizer):
    first = tokenizer.encode("é")[0]
    ids = [first] * 6 + [tokenizer.stop_ids[0]]
    found = records.pieces(tokenizer, ids)
    assert len(found) == 7 and set("".join(found[:6])) == {"\N{REPLACEMENT CHARACTER}"}
    assert found[6].endswith(tokenizer.inner.decode([tokenizer.stop_ids[0]]))
