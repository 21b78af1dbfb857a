"""Conversation with a trained model. The tokenizer's chat template renders messages, and shows where a reply ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megascale.data.tokenizer.chat_template import ChatTemplate, Message, TemplateError
from megascale.data.tokenizer.tokenizer import Tokenizer
from megascale.errors import DataError
from megascale.model.transformer import Chunk
from megascale.train.generation import Sampling, decode_stream, generate_tokens


class ChatSession:
    """A conversation.

    Args:
        model: the complete model as a single chunk.
        ends: ids of tokens that end a reply, in addition to the text with which the template ends a turn.
        tokens: largest number of tokens of a reply.
        system: content of a first message with the role system; "": none.
        step: step of the checkpoint.

    Attributes:
        messages: all messages so far.

    Raises DataError if the template does not show where a turn ends, or leaves out `system`.
    """

    def __init__(
        self,
        model: Chunk,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        ends: set[int],
        sampling: Sampling,
        tokens: int,
        system: str = "",
        step: int | None = None,
    ) -> None:
        self.step = step
        self.messages: list[Message] = []
        if system:
            self.messages.append({"role": "system", "content": system})
            if template.leaves_out([*self.messages, {"role": "user", "content": "Question"}], 0):
                raise DataError(
                    f"the template {template.name} leaves out messages with the role system, so --system has no "
                    "effect; put the text into --prompt"
                )
        self._model = model
        self._tokenizer = tokenizer
        self._template = template
        self._ends = ends
        self._sampling = sampling
        self._tokens = tokens
        try:
            turn_end = template.find_turn_end()
        except TemplateError as error:
            raise DataError(str(error)) from None
        self._stops = [turn_end] if turn_end else []

    def reply(self, text: str) -> Iterator[str]:
        """Add a user's message, and yield the text of the reply while it is generated.

        If the caller stops early, the reply in `messages` is the text that was yielded. Raises DataError if the
        template refuses the messages.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._template.render_text(self.messages, add_generation_prompt=True)
        except TemplateError as error:
            self.messages.pop()
            raise DataError(str(error)) from None
        [(ids, _)] = self._tokenizer.encode_markup([prompt])
        stream = generate_tokens(self._model, ids, self._tokens, self._sampling, ends=self._ends)
        reply = ""
        try:
            for text_delta in decode_stream(self._tokenizer, stream, self._stops):
                reply += text_delta
                yield text_delta
        finally:
            self.messages.append({"role": "assistant", "content": reply})


def find_chat_folder(run: Path, tokenizer_file: Path) -> Path:
    """Return the folder with a run's chat template: the run folder if it has the tokenizer, else the tokenizer's."""
    if (run / tokenizer_file.name).exists():
        return run
    return tokenizer_file.parent
