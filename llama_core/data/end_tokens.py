"""The tokens that end a text or an assistant's turn. Generation, tasks and exports ask here."""

from pathlib import Path

from llama_core.config.run import RunConfig
from llama_core.data.chat import chat_format
from llama_core.data.statistics import refuse_other_digest
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.templates.rendering import TemplateRefusalError
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError
from llama_core.hugging_face.generation_config import end_tokens, generation_config
from llama_core.hugging_face.pretrained import is_checkpoint
from llama_core.records.checkpoints import run_of
from llama_core.records.files import read_json

Ends = frozenset[tuple[int, ...]]
"""Sequences of tokens, each of which is an end."""


def ends_of_texts(weights: Path, config: RunConfig, tokenizer: Tokenizer) -> Ends:
    """Return what ends any text of a model: EOS, what its folder or run names, and the end of a turn it has learnt.

    Raises:
        WeightsError: as ``generation_config``.
        DataError: as ``end_of_turn``.
    """
    ends = (tokenizer.eos_id, *end_tokens(generation_config(weights)))
    return frozenset((end,) for end in ends) | end_of_learnt_turn(weights, config, tokenizer)


def end_of_learnt_turn(weights: Path, config: RunConfig, tokenizer: Tokenizer) -> Ends:
    """Return ``end_of_turn`` of the conversations that a checkpoint's run trains on; empty if there are none.

    Raises:
        DataError: as ``end_of_turn``.
    """
    if not trains_on_conversations(weights):
        return frozenset()
    return end_of_turn(learnt_template(weights, config, tokenizer), tokenizer)


def learnt_template(weights: Path, config: RunConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template of conversations of a model's settings.

    Raises:
        DataError: if it cannot be read, or is not the one that a checkpoint has learnt.
    """
    template = chat_format(config.data, tokenizer, config.spec, files=()).template
    if is_checkpoint(weights):
        refuse_other_digest(run_of(weights), "template", template.name, template.digest)
    return template


def trains_on_conversations(weights: Path) -> bool:
    """Return whether weights are a checkpoint of a run on conversations."""
    if not is_checkpoint(weights):
        return False
    data = run_of(weights).data
    return data.exists() and read_json(data).get("chat_template") is not None


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> Ends:
    """Return the tokens with which a template ends the assistant's turn, as the only element, if it does.

    A special token ends a turn alone: what some templates write after it, such as EOS at the very end, need not follow.

    Raises:
        DataError: if the template refuses a conversation of two turns.
    """
    try:
        end = template.end_of_turn
    except TemplateRefusalError as error:
        raise DataError(f"chat template {template.name!r} refuses a conversation: {error}") from None
    if not end:
        return frozenset()
    first, *others = tokenizer.encode_rendered([end])[0].ids.tolist()
    return frozenset({(first,) if first in tokenizer.special_ids else (first, *others)})
