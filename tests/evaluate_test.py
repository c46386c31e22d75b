"""Held-out scores of a stated policy, and scores that arrive while rows still decode."""

from concurrent.futures import Future

import jax
import numpy as np
import pytest

from rljax import evaluate, rewards, rollout, sharding
from rljax import tokenizer as tokenizer_lib
from rljax.models import hf
from rljax.prompts import PromptSet
from rljax.types import Prompts, Rollouts

SCORES = np.array(  # greedy, then two samples, of five prompts of kinds a, b, a, b, a
    [[1, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 1], [0, np.nan, 1]], np.float32
)


class Text:
    """A tokenizer whose text is the ids, spaced."""

    stop_ids = (0,)

    def completion(self, ids):
        return " ".join(map(str, ids))

    def prefilled(self, prompt):
        return "<think>" if prompt == [99] else ""


class Pool:
    """Answers when asked for results, not before; `grade` of one (text, example)."""

    def __init__(self, grade):
        self.grade, self.jobs = grade, []

    def submit(self, texts, examples):
        self.jobs.append((texts, examples))
        values = np.array([self.grade(*pair) for pair in zip(texts, examples, strict=True)], np.float32)
        bad = int(np.isnan(values).sum())
        future = Future()
        error = f"row {texts[0]}" if bad else None
        future.set_result(
            rewards.Scores(rewards=values, unscorable=bad, errors=bad, timeouts=len(texts) // 3, first_error=error)
        )
        return future


def prompt_set():
    examples = tuple({"id": i, "kind": "ab"[i % 2]} for i in range(len(SCORES)))
    return PromptSet(examples, tuple([3 + i] for i in range(len(SCORES))), 0)


def rollouts_of(group, sample, tokens, lengths) -> Rollouts:
    R = len(group)
    return Rollouts(
        tokens=np.asarray(tokens, np.int32), logprobs=np.zeros((R, 2), np.float32),
        lengths=np.asarray(lengths, np.int32), group=np.asarray(group, np.int32),
        sample=np.asarray(sample, np.int32), truncated=np.asarray(sample) == 2,
        top_ids=np.zeros((R, 2, 0), np.int32), top_logprobs=np.zeros((R, 2, 0), np.float32),
    )  # fmt: skip


def test_measures_of_stated_scores(run_config, monkeypatch):
    """Greedy .6; samples (1+0+2+1+1)/10; a right one among two for 4 of 5; the third sample is the cut one."""
    calls = []

    def generate(model, params, prompts, counts, *, on_finished, **options):
        calls.append((counts.tolist(), options))
        group, sample = np.divmod(np.arange(15), 3)
        out = rollouts_of(group, sample, np.stack([group, sample], 1), np.full(15, 2))
        on_finished(out, np.arange(7, 15))
        on_finished(out, np.arange(7))
        return out

    monkeypatch.setattr(rollout, "generate", generate)
    pool = Pool(lambda text, example: SCORES[example["id"], int(text.split()[1])])
    config = run_config({"eval.samples": 2, "eval.temperature": 0.9, "rollout.lanes": 4, "rollout.slots": 4})
    params = jax.device_put(np.zeros(1), jax.devices()[0])
    scored = evaluate.score(
        None, params, prompt_set(), config=config, tokenizer=Text(), pool=pool, key=jax.random.key(0)
    )
    assert evaluate.summarise(scored) == {
        "eval/accuracy": pytest.approx(0.6), "eval/avg_at_k": pytest.approx(0.5),
        "eval/pass_at_k": pytest.approx(0.8), "eval/truncated": 0.5, "eval/unscorable": 1,
        "eval/accuracy_a": pytest.approx(2 / 3), "eval/accuracy_b": pytest.approx(0.5),
    }  # fmt: skip
    rows = evaluate.report(scored)
    means = {"accuracy": 0.6, "avg@2": 0.5, "pass@1": 0.5, "pass@2": 0.8, "length": 2, "truncated": 0.5}
    assert {name: rows[name]["value"] for name in means} == pytest.approx(means)
    # The two samples' texts differ, so the first has the vote: 1, 0, 1, 0 and the unscorable 0.
    assert rows["maj@2"]["value"] == pytest.approx(0.4)
    assert rows["accuracy, a"]["value"] == pytest.approx(2 / 3)
    assert rows["accuracy"]["low"] < 0.6 < rows["accuracy"]["high"] and rows["length"]["low"] == 2
    record = evaluate.records(scored)[4]
    assert record["example"] == {"id": 4, "kind": "a"}
    assert [(c["text"], c["reward"], c["truncated"]) for c in record["completions"]] == [
        ("4 0", 0.0, False), ("4 1", 0.0, False), ("4 2", 1.0, True)
    ]  # fmt: skip
    counts, options = calls[0]
    assert counts == [3] * 5 and options["temperature"] == [0.0, 0.9]
    assert options["slots"] == 3 and options["lanes"] == 5  # 4 × 4 rows make 5 lanes of 3


@pytest.mark.parametrize(
    "rows, devices, want", [((4, 4), 1, (5, 9)), ((2, 2), 1, (1, 4)), ((4, 4), 4, (4, 4)), ((1, 1), 1, (1, 1))]
)
def test_never_more_rows_decode_at_once_than_the_config_allows(rows, devices, want, run_config, monkeypatch):
    """However many samples there are. Five prompts, nine completions each."""
    calls = []
    monkeypatch.setattr(rollout, "generate", lambda *_, **options: calls.append(options) or 1 / 0)
    config = run_config({"eval.samples": 8, "rollout.lanes": rows[0], "rollout.slots": rows[1]})
    if rows == (4, 4) and devices == 1:
        config = run_config({"eval.samples": 8, "rollout.lanes": 16})
    mesh = sharding.make_mesh(data=devices, devices=jax.devices()[:devices])
    params = jax.device_put(np.zeros(8), sharding.replicated(mesh))
    with pytest.raises(ZeroDivisionError):
        evaluate.score(
            None, params, prompt_set(), config=config, tokenizer=Text(), pool=Pool(None), key=jax.random.key(0)
        )
    assert (calls[0]["lanes"], calls[0]["slots"]) == want


def test_several_data_files_at_once(run_config, tmp_path, capsys, few_devices):
    """Each whole, by its own fields, and with files of its own; no training data is needed."""
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    (tmp_path / "test.json").write_text('[{"question": "3+3=", "answer": "so #### 6", "level": "easy"}]')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sums.jsonl").write_text('{"prompt": "5+5=", "answer": "10"}\n')
    files = f"file:{tmp_path / 'sums.jsonl'},gsm8k:{tmp_path / 'test.json'},file:{tmp_path / 'other/sums.jsonl'}"
    changes = {"eval.tasks": files, "rollout.max_prompt_tokens": 90, "eval.samples": 1}
    out = evaluate.run(run_config(changes), tmp_path / "run")
    assert {name: outcome["prompts"] for name, outcome in out.items()} == {
        "file-sums": 2, "gsm8k-test": 1, "file-sums.2": 1,
    }  # fmt: skip
    assert out["file-sums"]["task_options"]["eval_path"] == str(tmp_path / "sums.jsonl")
    written = sorted(path.name for path in (tmp_path / "run" / "eval").iterdir())
    assert written == sorted(f"{name}.{kind}" for name in out for kind in ("json", "jsonl"))
    assert "no checkpoint in" in capsys.readouterr().out


@pytest.mark.parametrize("devices", [1, 4])
def test_real_model_greedy_is_greedy_and_the_same_key_the_same_samples(run_config, tiny_checkpoint, devices):
    mesh = sharding.make_mesh(data=devices, devices=jax.devices()[:devices])
    model, params = hf.load(tiny_checkpoint, mesh=mesh)
    config, seen = run_config(), []

    def run(key):
        pool = Pool(lambda text, example: seen.append((example["id"], text)) or 1.0)
        start = len(seen)
        args = dict(config=config, tokenizer=tokenizer_lib.load(tiny_checkpoint), pool=pool)
        out = evaluate.score(model, params, prompt_set(), key=jax.random.key(key), **args)
        return out.truncated.mean(), sorted(seen[start:])

    first, again, other = run(0), run(0), run(1)
    assert first == again != other and len(first[1]) == 15
    greedy = {i: set(t for j, t in first[1] if j == i) & {t for j, t in other[1] if j == i} for i in range(5)}
    assert all(greedy.values())  # under either key each prompt has its greedy completion


def test_streaming_scores_come_back_in_the_rollouts_order():
    """Rows end in any order and in parts; each is graded with its own prompt's example, up to its length."""
    prompts = Prompts(ids=np.array([7, 8]), draws=np.array([0, 1]), tokens=([1], [99]), examples=({"id": 7}, {"id": 8}))
    tokens, lengths = [[5, 0], [6, 9], [7, 9], [8, 0]], [1, 2, 2, 1]
    rows = rollouts_of([0, 0, 1, 1], [0, 1, 0, 1], tokens, lengths)
    values = {"5": 0.5, "6 9": np.nan, "<think>7 9": 0.25, "<think>8": 1.0}
    pool = Pool(lambda text, example: values[text] + example["id"])
    scorer = rewards.StreamingScorer(pool, Text(), prompts)
    scorer(rows, np.array([3]))
    scorer(rows, np.array([2, 0, 1]))
    scores = scorer.result(4)
    assert scorer.texts == {0: "5", 1: "6 9", 2: "<think>7 9", 3: "<think>8"}
    np.testing.assert_array_equal(scores.rewards, np.array([7.5, np.nan, 8.25, 9.0], np.float32))
    assert scores.rewards.dtype == np.float32
    assert (scores.unscorable, scores.errors, scores.timeouts) == (1, 1, 1)
    assert scores.first_error == "row <think>7 9"


def test_streaming_scorer_refuses_rows_that_never_came_or_came_twice():
    prompts = Prompts(ids=np.array([0]), draws=np.array([0]), tokens=([1],), examples=({"id": 0},))
    rows = rollouts_of([0, 0, 0], [0, 1, 2], [[1, 1]] * 3, [2, 2, 2])
    for parts in ([[0, 1]], [[0, 1], [1]], [[0, 1, 2], [2]]):
        scorer = rewards.StreamingScorer(Pool(lambda *_: 1.0), Text(), prompts)
        for part in parts:
            scorer(rows, np.array(part))
        with pytest.raises(ValueError, match=r"of 3 rollouts \d were never submitted .* and \d more than once"):
            scorer.result(3)
