"""Encode, decode, chat and stop ids of a small byte-level tokenizer."""

import json

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rljax import prompts, tokenizer

BOS, EOS, END, PAD = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_end|>": END, "<pad>": PAD}
TEMPLATE = (
    "<s>{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make(folder, *, eos="</s>", template=TEMPLATE, bos=True):
    """A byte-level tokenizer in `folder` that puts a BOS before every text, as Llama's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Raw(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | SPECIAL, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    inner = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token=eos, pad_token="<pad>",
        additional_special_tokens=["<|im_end|>"],
    )  # fmt: skip
    inner.chat_template = template
    inner.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path / "model")


@pytest.mark.parametrize("text", ["37+48=", " two  spaces\n\ttab", "naïve Ω 数学 🙂", ""])
def test_decode_gives_the_encoded_text_back(folder, text):
    t = tokenizer.load(folder)
    ids = t.encode(text)
    assert t.decode(ids) == text and all(isinstance(i, int) for i in ids)
    assert ids[0] == BOS and len(ids) == 1 + len(text.encode())


def test_decode_leaves_stop_ids_out(folder):
    t = tokenizer.load(folder, stop=(END,))
    assert t.decode([*t.encode("85"), END]) == "85" and t.decode([*t.encode("85"), EOS]) == "85"


def test_a_template_that_writes_a_bos_gets_exactly_its_own(folder):
    t = tokenizer.load(folder)
    ids = t.chat([{"role": "user", "content": "hi"}])
    assert ids.count(BOS) == 1 and ids[0] == BOS
    assert ids[1:] == t.encode("user:hi<|im_end|>assistant:")[1:]


def test_a_template_without_a_bos_gets_none(tmp_path):
    t = tokenizer.load(make(tmp_path / "model", template="{{ messages[0]['content'] }}"))
    assert t.chat([{"role": "user", "content": "hi"}]) == t.encode("hi")[1:]


def test_no_template_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.load(make(tmp_path / "model", template=None)).chat([{"role": "user", "content": "hi"}])


def test_stop_ids_are_the_union_of_every_source(folder):
    assert tokenizer.load(folder).stop_ids == (EOS,)  # the tokenizer's own
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    assert tokenizer.load(folder).stop_ids == (EOS, END)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [PAD, END]}))
    assert tokenizer.load(folder).stop_ids == (EOS, END, PAD)
    assert tokenizer.load(folder, stop=(10,)).stop_ids == (10, EOS, END, PAD)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (folder / "generation_config.json").write_text("{}")
    assert tokenizer.load(folder).stop_ids == (EOS,)


def test_no_stop_id_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no eos_token_id"):
        tokenizer.load(make(tmp_path / "model", eos=None))
    assert tokenizer.load(tmp_path / "model", stop=(END,)).stop_ids == (END,)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(FileNotFoundError, match="model has no tokenizer.json"):
        tokenizer.load(tmp_path / "model")


def test_a_stop_text_ends_completions_and_is_no_part_of_them(folder, tmp_path):
    t = tokenizer.load(folder)
    assert t.stopping_at("") is t
    newline = t.stopping_at("\n")
    (added,) = set(newline.stop_ids) - set(t.stop_ids)
    assert t.decode([added]) == "\n"
    ids = t.encode("85\nrest")
    assert newline.completion(ids) == "85" and t.completion(ids) == "85\nrest"
    assert newline.completion([*t.encode("85"), EOS]) == "85"
    with pytest.raises(ValueError, match="no token of the vocabulary holds the stop text 'END'"):
        t.stopping_at("END")
    newline.save(tmp_path / "export")  # the text is the task's, not the model's
    assert tokenizer.load(tmp_path / "export").stop_ids == t.stop_ids


def test_save_keeps_the_tokenizer_and_all_stop_ids(folder, tmp_path):
    t = tokenizer.load(folder, stop=(END,))
    t.save(tmp_path / "export")
    again = tokenizer.load(tmp_path / "export")
    assert again.stop_ids == (EOS, END) and again.encode("37+48=") == t.encode("37+48=")
    message = [{"role": "user", "content": "hi"}]
    assert again.chat(message) == t.chat(message)


def test_overlong_prompts_are_dropped_and_counted_never_cut(folder):
    t = tokenizer.load(folder)
    kept = prompts.encode([{"prompt": "12345"}, {"prompt": "1234"}, {"prompt": "1+1="}], t, 5, "training")
    assert kept.dropped == 1 and [t.decode(ids) for ids in kept.tokens] == ["1234", "1+1="]
