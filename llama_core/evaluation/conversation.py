"""A conversation with a model, turn by turn, in its chat template."""

from collections.abc import Generator, Iterator
from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.data.bad_lines import UnusableRecordError, checked_text
from llama_core.data.end_tokens import end_of_turn, learnt_template, trains_on_conversations
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.templates.rendering import Message, TemplateRefusalError
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError
from llama_core.evaluation.generate import TextModel, check_text


class ChatSession:
    """The turns of a user and a model so far.

    Args:
        model: the model, with a chat template of its own, or from the conversations of its run.
        system: the system prompt; None for none.

    Raises:
        DataError: if the model has no chat template, or that refuses the system prompt.
    """

    def __init__(self, model: TextModel, system: str | None = None) -> None:
        self._model = model
        self._template = template_of(model.weights, model.config, model.tokenizer)
        self._opening: list[Message] = []
        if system is not None:
            check_text(system, "system prompt")
            self._opening.append({"role": "system", "content": system})
            model.check_ids(self._encode([*self._opening, _from_user("?")]), "system prompt")
        self._messages = list(self._opening)
        self._ends = model.ends | end_of_turn(self._template, model.tokenizer)

    def answer(self, message: str) -> Generator[str, None, None]:
        """Return the answer to a message in pieces, as they are generated, up to the end of the turn.

        The message is checked, and the weights are read, before this returns. The conversation remembers both sides of
        the turn, and of an answer that is closed early what it has yielded. If the model's context has no room left,
        the conversation begins anew with this message, and the model's ``tell`` is called with a line about it.

        Raises:
            DataError: if the message is empty, no text, or fills the context alone, or the chat template refuses it.
            WeightsError: while generating, if logits are not finite.
        """
        check_text(message, "message")
        asked = [*self._messages, _from_user(message)]
        ids = self._encode(asked)
        begins_anew = self._messages != self._opening and self._model.room_after(ids) < 1
        if begins_anew:
            asked = [*self._opening, _from_user(message)]
            ids = self._encode(asked)
        self._model.check_ids(ids, "message")
        if begins_anew:
            spec = self._model.config.spec
            self._model.tell(
                f"the conversation fills the context of {spec.name} ({spec.max_context:,} tokens) and begins anew"
            )
            self._messages = list(self._opening)
        return self._remembering(asked, self._model.pieces_after(ids, self._ends))

    def _remembering(self, asked: list[Message], pieces: Iterator[str]) -> Generator[str, None, None]:
        said = ""
        try:
            for piece in pieces:
                said += piece
                yield piece
        finally:
            if said.strip():  # templates that alternate user and assistant refuse a turn that is missing
                self._messages = [*asked, {"role": "assistant", "content": said}]

    def _encode(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's next turn begins."""
        try:
            text = checked_text(self._template.render(messages, add_generation_prompt=True))
        except TemplateRefusalError as error:
            raise DataError(f"chat template {self._template.name!r} refuses the conversation: {error}") from None
        except UnusableRecordError as error:
            raise DataError(
                f"chat template {self._template.name!r} renders text that is {error}; name another"
            ) from None
        return self._ids(text)

    def _ids(self, rendered: str) -> list[int]:
        ids: list[int] = self._model.tokenizer.encode_rendered([rendered])[0].ids.tolist()
        return ids


def _from_user(content: str) -> Message:
    return {"role": "user", "content": content}


def template_of(weights: Path, config: RunConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the chat template that a model knows: its own, or that of the conversations of its run.

    Raises:
        DataError: if it knows none.
    """
    if not _has_chat_template(weights, config, tokenizer):
        raise DataError(
            f"{weights} has no chat template: neither an instruct model, nor trained on conversations; drop --chat"
        )
    return learnt_template(weights, config, tokenizer)


def _has_chat_template(weights: Path, config: RunConfig, tokenizer: Tokenizer) -> bool:
    if config.data.chat_template or tokenizer.chat_template or config.spec.instruct:
        return True
    return trains_on_conversations(weights)
