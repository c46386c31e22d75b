"""What a run refuses of its parts before anything is computed."""

import types

import pytest

from rljax import parts
from rljax import tokenizer as tokenizer_lib
from rljax.tasks.base import Task


def model(vocab_size):
    return types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=vocab_size))


def test_prompts_of_tokens_that_the_model_lacks_are_refused(run_config, tiny_checkpoint):
    """Bytes are the tokenizer's ids but for a shift: "z" is the greatest here."""
    config, tokenizer = run_config(), tokenizer_lib.load(tiny_checkpoint)
    examples = [{"prompt": "1+1="}, {"prompt": "z="}]
    greatest = max(tokenizer.encode("z="))
    assert len(parts.encode(config, model(greatest + 1), examples, tokenizer, "training")) == 2
    told = rf"training prompt 'z=' has token {greatest}, but the model's vocabulary has {greatest} tokens"
    with pytest.raises(ValueError, match=told):
        parts.encode(config, model(greatest), examples, tokenizer, "training")


def test_an_end_token_that_the_model_lacks_is_refused(run_config):
    one = [{"prompt": "1+1=", "answer": "2"}]
    task = Task(name="none", train=one, eval=one, grade=lambda completion, example: 0.0)
    config = run_config()
    assert parts.make_tokenizer(config, model(257), task).eos_ids[-1] == 256
    with pytest.raises(ValueError, match="end token 256 is outside the model's vocabulary of 256 tokens"):
        parts.make_tokenizer(config, model(256), task)
