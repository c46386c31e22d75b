"""Encode, decode, chat and stop ids of a small byte-level tokenizer."""

import json

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rljax import prompts, tokenizer
from rljax.tasks import grading

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


def test_a_rendered_prompt_that_has_its_bos_gets_no_second(folder):
    t = tokenizer.load(folder)
    assert t.encode("<s>2+2=") == t.encode("2+2=") == [BOS, *t.encode("2+2=")[1:]]
    assert t.encode(" <s>").count(BOS) == 2  # it does not begin with one


def test_a_template_that_refuses_a_system_message_is_told(tmp_path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m['content'] + '' }}{% endfor %}"
    )
    t = tokenizer.load(make(tmp_path / "model", template=template))
    assert t.chat([{"role": "user", "content": "hi"}]) == t.encode("hi")[1:]
    with pytest.raises(ValueError, match="refuses a conversation of system, user: System role not supported; leave"):
        t.chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="refuses a conversation of user: "):
        t.chat([{"role": "user", "content": 3}])


@pytest.mark.parametrize(
    "ending, prefilled",
    [("<think>\n", "<think>\n"), ("<think>", "<think>"), ("", ""), ("<think>\n\n</think>\n\n", ""), ("<b>", "")],
)
def test_the_tag_that_a_template_writes_itself(ending, prefilled, tmp_path):
    template = TEMPLATE.replace("assistant:", "assistant:" + ending.replace("\n", "{{ '\\n' }}"))
    t = tokenizer.load(make(tmp_path / "model", template=template))
    assert t.prefilled(t.chat([{"role": "user", "content": "<think>"}])) == prefilled
    completion = "2+2</think><answer>4</answer>"
    assert grading.format_reward(t.prefilled(t.encode("Q: " + ending)) + completion) == float(bool(prefilled))


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


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("generation_config.json", "[256]", "generation_config.json holds a JSON list"),
        ("config.json", '{"eos_token_id": "</s>"}', "config.json: eos_token_id='</s>' is not a token id"),
        ("generation_config.json", '{"eos_token_id": [1, -1]}', r"eos_token_id=\[1, -1\] is not a token id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id=True is not a token id"),
        ("tokenizer.json", '{"model": ', "tokenizer.json is not valid JSON"),
        ("tokenizer.json", "{}", "model: its tokenizer files cannot be read"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not valid JSON"),
    ],
)
def test_a_malformed_file_is_named(name, content, told, folder):
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=told):
        tokenizer.load(folder)


def test_code_that_comes_with_a_tokenizer_is_not_run(folder):
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }  # fmt: skip
    file.write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    try:
        tokenizer.load(folder)
    except ValueError as e:
        assert "cannot be read" in str(e)
    assert not (folder / "ran").exists()


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
    saved = json.loads((tmp_path / "export/tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows no TokenizersBackend


def test_save_keeps_what_else_the_generation_config_says(folder, tmp_path):
    source = {"eos_token_id": END, "bos_token_id": BOS, "temperature": 0.6, "top_p": 0.95, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(source))
    tokenizer.load(folder).save(tmp_path / "export")
    written = json.loads((tmp_path / "export/generation_config.json").read_text())
    assert written == source | {"eos_token_id": [EOS, END]}


def test_overlong_prompts_are_dropped_and_counted_never_cut(folder):
    t = tokenizer.load(folder)
    examples = [{"prompt": p} for p in ("12345", "1234", "1+1=")]
    kept = prompts.encode(examples, t, 5, "training", chat=False, system="")
    assert kept.dropped == 1 and [t.decode(ids) for ids in kept.tokens] == ["1234", "1+1="]
