"""Text to tokens and back, by the tokenizer in a model's directory.

Knows text, chat templates and how to cut text at a stop string; knows nothing of requests or engines. `transformers` is
imported when a tokenizer is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedlab.framework.errors import ModelError
from schedlab.framework.model.files import model_directory

Messages = Sequence[Mapping[str, str]]
"""A conversation: mappings with `role` and `content`."""
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these makes a directory's tokenizer."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What bytes that are not yet a whole character decode to."""


class Tokenizer:
    """The tokenizer of the model at `path`.

    With `vocab_size`, a warning if it has tokens that the model has not, and a ModelError for a text that uses one.
    """

    def __init__(self, path: str | Path, vocab_size: int | None = None) -> None:
        self.directory = model_directory(path)
        self._tokenizer = _load(self.directory)
        self._vocab_size = vocab_size
        highest = max(self._tokenizer.get_vocab().values(), default=-1)
        if vocab_size is not None and highest >= vocab_size:
            warnings.warn(
                f"{self.directory}: the tokenizer has token ids up to {highest}, the model {vocab_size}: a text that "
                "uses one beyond is refused",
                stacklevel=2,
            )

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, prompt: str | Messages, chat: bool = False) -> list[int]:
        """Token ids of a text as it is, or as a user's message if `chat`; of a conversation, ready for the answer."""
        if isinstance(prompt, str) and not chat:
            ids: list[int] = self._tokenizer.encode(prompt)
        else:
            ids = self._encode_chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if self._vocab_size is not None and (highest := max(ids, default=-1)) >= self._vocab_size:
            raise ModelError(
                f"{self.directory}: the tokenizer does not fit the model: expected token ids below its vocab_size of "
                f"{self._vocab_size}, found {highest} in this text"
            )
        return ids

    def _encode_chat(self, messages: Messages) -> list[int]:
        if not self.has_chat_template:
            raise ModelError(f"{self.directory}: the tokenizer has no chat template; give the prompt as plain text")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())
            raise ModelError(f"{self.directory}: the chat template refuses these messages: {reason}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without the tokens that only mark something, such as the end."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _load(directory: Path) -> Any:
    if not any((directory / name).exists() for name in FILES):
        raise ModelError(f"{directory}: expected a tokenizer (tokenizer.json or tokenizer.model), found none")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser does
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{directory}: the tokenizer cannot be loaded: {reason[:200]}") from None


class TextStream:
    """The text of one request as its tokens come, up to the first of `stops`.

    A token may bring no text yet: half a character, or what might become a stop string, is held back. What `push` and
    `end` return, one after the other, is the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._token_ids: list[int] = []
        self._context = 0  # first of the tokens that are decoded together
        self._read = 0  # tokens whose text is known
        self._held = ""
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Text that this token made certain."""
        self._token_ids.append(token_id)
        known = self._tokenizer.decode(self._token_ids[self._context : self._read])
        now = self._tokenizer.decode(self._token_ids[self._context :])
        if len(now) <= len(known) or now.endswith(INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self._token_ids)
        return self._release(now[len(known) :])

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped_by is not None:
            return ""
        known = self._tokenizer.decode(self._token_ids[self._context : self._read])
        rest = self._tokenizer.decode(self._token_ids[self._context :])[len(known) :]
        released = self._release(rest)
        if self.stopped_by is None:
            released += self._held
            self.text, self._held = self.text + self._held, ""
        return released

    def _release(self, new: str) -> str:
        """Of the text held back and `new`, what comes before a stop string, and before what may become one."""
        pending = self._held + new
        found = [(at, stop) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
        else:
            at = len(pending) - self._overhang(pending)
        released, self._held = pending[:at], pending[at:]
        self.text += released
        return released

    def _overhang(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        sizes = range(min(longest, len(text)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
