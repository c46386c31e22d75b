"""A Hugging Face tokenizer behind one small interface: encode, decode, chat, stop ids."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
from typing import Any

import jinja2

# transformers warns at import that it has no torch; here it only tokenises.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import AutoTokenizer  # noqa: E402

from rljax.models import hf  # noqa: E402

_OPENING_TAG = re.compile(r"<think>\s*\Z")
_TAIL = 16  # tokens at the end of a prompt that may hold an opening tag


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """inner: the transformers tokenizer. stop_ids: every id that ends a completion, ascending.

    eos_ids: those of them that the checkpoint names; the others hold the text `stop`.
    generation_config: the checkpoint's file of that name, as JSON.
    """

    inner: Any
    stop_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    stop: str = ""
    generation_config: str = dataclasses.field(default="{}", repr=False)

    def encode(self, text: str) -> list[int]:
        """Token ids of text, with the special tokens the tokenizer itself adds (a BOS, where it has one).

        A text that begins with the BOS, as a rendered prompt may, gets no second one.
        """
        bos = self.inner.bos_token
        has_bos = bool(bos) and text.startswith(bos)
        return list(self.inner(text, add_special_tokens=not has_bos)["input_ids"])

    def decode(self, ids) -> str:
        """Text of ids, special tokens (stop ids among them) left out."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def completion(self, ids) -> str:
        """Text of a completion's ids, without what ended it: special tokens, and the text from `stop` on."""
        text = self.decode(ids)
        return text.partition(self.stop)[0] if self.stop else text

    def prefilled(self, prompt_ids) -> str:
        """The opening tag that a prompt ends with, "<think>\\n" say, or "".

        Templates of reasoning models begin the answer with it, so that the completion starts inside; graders of a
        format are to see it before the completion.
        """
        tail = self.inner.decode([int(i) for i in prompt_ids[-_TAIL:]], skip_special_tokens=False)
        found = _OPENING_TAG.search(tail)
        return "" if found is None else found.group()

    def stopping_at(self, text: str) -> Tokenizer:
        """This tokenizer with every id whose token holds `text` among its stop ids; "" changes nothing.

        Raises ValueError if no token holds the text: a completion could not end there.
        """
        if not text:
            return self
        holding = {i for i in range(len(self.inner)) if text in self.inner.decode([i])}
        if not holding:
            raise ValueError(f"no token of the vocabulary holds the stop text {text!r}; choose one that a token holds")
        return dataclasses.replace(self, stop_ids=tuple(sorted({*self.stop_ids, *holding})), stop=text)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; a BOS comes from the template alone.

        Raises ValueError if the tokenizer has no chat template, or if its template refuses the conversation, as some
        do a system message.
        """
        if not self.inner.chat_template:
            raise ValueError("this tokenizer has no chat template; use raw prompts")
        try:
            text = self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError) as e:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise ValueError(
                f"the chat template refuses a conversation of {roles}: {e}; "
                "leave the role out that it does not know, or put that text into the user's message"
            ) from e
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def save(self, path: str | os.PathLike) -> None:
        """Writes the tokenizer's files, and generation_config.json with the EOS ids, into a directory."""
        self.inner.save_pretrained(path)
        file = pathlib.Path(path) / "tokenizer_config.json"
        settings = hf.read_json(file)
        if settings.get("tokenizer_class") == "TokenizersBackend":  # a name that transformers 4 does not know
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        content = json.loads(self.generation_config) | {"eos_token_id": list(self.eos_ids)}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (pathlib.Path(path) / "generation_config.json").write_text(text, encoding="utf-8")


def load(path: str | os.PathLike, *, stop: tuple[int, ...] = ()) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or shipped checkpoint. Code that comes with it is not run.

    Stop ids are the union of generation_config.json, config.json, the tokenizer's EOS and `stop`.
    Raises FileNotFoundError if the directory has no tokenizer; ValueError, which names the file, if one cannot be
    read or no stop id is found.
    """
    folder = hf.resolve(path)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in files):
        raise FileNotFoundError(f"{folder} has no tokenizer.json; copy the model's tokenizer files into it")
    configs = {name: _read(folder / name) for name in ("generation_config.json", "config.json")}
    inner = _inner(folder)
    ids: set[int] = {*stop, *(i for name, content in configs.items() for i in _eos_ids(content, folder / name))}
    if inner.eos_token_id is not None:
        ids.add(inner.eos_token_id)
    if not ids:
        raise ValueError(
            f"{folder}: no eos_token_id in generation_config.json, config.json or tokenizer; "
            "completions could not end. Add one"
        )
    eos = tuple(sorted(ids))
    return Tokenizer(inner, eos, eos, generation_config=json.dumps(configs["generation_config.json"]))


def _read(file: pathlib.Path) -> dict[str, Any]:
    return hf.read_json(file) if file.is_file() else {}


def _inner(folder: pathlib.Path):
    """The transformers tokenizer of a directory."""
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as e:  # transformers and tokenizers raise no narrower class
        for name in ("tokenizer.json", "tokenizer_config.json"):
            _read(folder / name)  # tells which of them is broken as JSON
        raise ValueError(f"{folder}: its tokenizer files cannot be read ({e}); fetch them again") from e


def _eos_ids(content: dict[str, Any], file: pathlib.Path) -> list[int]:
    eos = content.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, int) or i < 0]
    if wrong:
        raise ValueError(f"{file}: eos_token_id={eos!r} is not a token id or a list of them")
    return ids
