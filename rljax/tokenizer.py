"""A Hugging Face tokenizer behind one small interface: encode, decode, chat, stop ids."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

# transformers warns at import that it has no torch; here it only tokenises.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import AutoTokenizer  # noqa: E402

from rljax.models import hf


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """inner: the transformers tokenizer. stop_ids: every id that ends a completion, ascending.

    eos_ids: those of them that the checkpoint names; the others hold the text `stop`.
    """

    inner: Any
    stop_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    stop: str = ""

    def encode(self, text: str) -> list[int]:
        """Token ids of text, with the special tokens the tokenizer itself adds (a BOS, where it has one)."""
        return list(self.inner(text)["input_ids"])

    def decode(self, ids) -> str:
        """Text of ids, special tokens (stop ids among them) left out."""
        return self.inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def completion(self, ids) -> str:
        """Text of a completion's ids, without what ended it: special tokens, and the text from `stop` on."""
        text = self.decode(ids)
        return text.partition(self.stop)[0] if self.stop else text

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

        Raises ValueError if the tokenizer has no chat template.
        """
        if not self.inner.chat_template:
            raise ValueError("this tokenizer has no chat template; use raw prompts")
        text = self.inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def save(self, path: str | os.PathLike) -> None:
        """Writes the tokenizer's files, and generation_config.json with the EOS ids, into a directory."""
        self.inner.save_pretrained(path)
        file = pathlib.Path(path) / "generation_config.json"
        file.write_text(json.dumps({"eos_token_id": list(self.eos_ids)}, indent=2) + "\n")


def load(path: str | os.PathLike, *, stop: tuple[int, ...] = ()) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or shipped checkpoint.

    Stop ids are the union of generation_config.json, config.json, the tokenizer's EOS and `stop`.
    Raises FileNotFoundError if the directory has no tokenizer, ValueError if no stop id is found.
    """
    folder = hf.resolve(path)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if not any((folder / name).is_file() for name in files):
        raise FileNotFoundError(f"{folder} has no tokenizer.json; copy the model's tokenizer files into it")
    inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ids: set[int] = set(stop)
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        ids |= {int(i) for i in (eos if isinstance(eos, list) else [eos]) if i is not None}
    if inner.eos_token_id is not None:
        ids.add(inner.eos_token_id)
    if not ids:
        raise ValueError(
            f"{folder}: no eos_token_id in generation_config.json, config.json or tokenizer; "
            "completions could not end. Add one"
        )
    eos = tuple(sorted(ids))
    return Tokenizer(inner, eos, eos)
