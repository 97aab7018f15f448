"""Our model as one of EleutherAI's lm-evaluation-harness: it scores texts and writes them, as a task asks.

Texts become tokens as in the harness's own ``HFLM``, so that a model has the same scores here and there.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llama_core.data.bad_lines import UnusableRecordError, checked_text
from llama_core.data.templates.chat_template import ChatTemplate
from llama_core.data.templates.rendering import Message, TemplateRefusalError
from llama_core.data.tokenizer import Tokenizer
from llama_core.errors import DataError
from llama_core.evaluation.inference.batched_generation import generate_rows
from llama_core.evaluation.inference.divided import EvaluatingRanks
from llama_core.evaluation.inference.generation import Sampling
from llama_core.evaluation.inference.scoring import Continuation, LogLikelihood, log_likelihoods
from llama_core.models.llama import Llama
from llama_core.planning.inference import TOKENS_OF_A_GENERATION

MAX_ROWS = 64
"""Most texts that are generated at once."""
SEED = 1234
"""The harness's own seed, from which those of solved examples and of drawn texts come."""
_WITHOUT_EFFECT = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}
"""Settings of a generation that change nothing at these values."""
_OF_SAMPLING = ("temperature", "top_k", "top_p")

OnRequests = Callable[[int, int], None]
"""Called with the number of requests that are done, and of all of the same kind."""


class _Settings(NamedTuple):
    """How a text is generated."""

    until: tuple[str, ...]
    """Texts that end it."""
    num_tokens: int
    sampling: Sampling


class _Prompt(NamedTuple):
    """What a text is written after."""

    tokens: Sequence[int]
    seed: int
    """Of the text, if it is drawn."""


class HarnessModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """A model and its tokenizer, which answer the requests of tasks.

    Args:
        model: the whole model.
        tokenizer: its tokenizer.
        ends: the sequences of tokens that end any text that it writes.
        chat: the template of its conversations; None if tasks are not asked as conversations.
        ranks: the ranks that answer together, each with a part of the model or of the texts; None for one process.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        ends: Collection[tuple[int, ...]],
        chat: ChatTemplate | None = None,
        ranks: EvaluatingRanks | None = None,
    ) -> None:
        super().__init__()
        self._model = model
        self._tokens = tokenizer
        self._chat = chat
        self._ranks = ranks
        self._ends = tuple(ends)
        self._eos_text = tokenizer.named_tokens.get("eos_token", "")
        self._prefix_text = tokenizer.named_tokens.get("bos_token", self._eos_text)
        self.max_length = model.spec.max_context
        self.num_truncated = 0
        """Contexts that lost their beginning since this was last set to 0."""
        self.dropped_system_prompt = False
        """Whether the template refused a system prompt, so that conversations went without it."""
        self.on_progress: OnRequests = lambda done, total: None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, or the end of the document before."""
        return self._tokens.eos_id if self._tokens.bos_id is None else self._tokens.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text; by default with what the tokenizer adds, unless the text spells it itself."""
        if add_special_tokens is None:
            add_special_tokens = not (self._prefix_text and string.startswith(self._prefix_text))
        return self._encode(string, adds_special=add_special_tokens)

    def _encode(self, string: str, *, adds_special: bool) -> list[int]:
        try:
            return self._tokens.encode_input(checked_text(string), adds_special=adds_special)
        except UnusableRecordError as error:
            raise DataError(f"a text of the task is {error}") from None

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._chat is None:
            pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
            return pair
        # the template has spelled every special token, as in training
        own = context.rstrip()
        whole = self._encode(context + continuation, adds_special=False)
        before = self._encode(own, adds_special=False)
        return before, whole[len(before) :]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each text after its context, and whether the model would write it."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        for (_context, text), _before, own in requests:
            if not own:
                raise DataError(f"a text to score has no tokens: {text[:40]!r}; the task must name another")
        windows = [Continuation(tuple(before), tuple(own)) for _texts, before, own in requests]
        return [(one.total, one.is_greedy) for one in self._score(windows)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each whole text, in windows as long as the model's context."""
        windows: list[Continuation] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            of_text = [Continuation(*map(tuple, make_disjoint_window(window))) for window in rolling]
            windows += of_text
            owners += [index] * len(of_text)
        totals = [0.0] * len(requests)
        for index, one in zip(owners, self._score(windows), strict=True):
            totals[index] += one.total
        return totals

    def _score(self, windows: Sequence[Continuation]) -> list[LogLikelihood]:
        for window in windows:
            if len(window.tokens) > self.max_length:
                raise DataError(
                    f"a text to score has {len(window.tokens):,} tokens, more than the model's context of "
                    f"{self.max_length:,}; choose another task, or a model with a longer context"
                )
        longest = self.max_length + 1
        self.num_truncated += sum(len(window.context) + len(window.tokens) > longest for window in windows)
        done = 0

        def score(groups: Sequence[Sequence[int]]) -> list[list[LogLikelihood]]:
            own = [windows[index] for group in groups for index in group]
            found = iter(
                log_likelihoods(
                    self._model, own, context_length=self.max_length, on_progress=lambda num: count(num, len(own))
                )
            )
            return [[next(found) for _ in group] for group in groups]

        def count(num_scored: int, num_own: int) -> None:
            nonlocal done
            done += num_scored
            self.on_progress(done, num_own)

        groups = _sharing_a_row(windows)
        by_group = self._ranks.shared(groups, score) if self._ranks is not None else score(groups)
        by_index = {
            index: one
            for group, scores in zip(groups, by_group, strict=True)
            for index, one in zip(group, scores, strict=True)
        }
        return [by_index[index] for index in range(len(windows))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the text that the model writes after each context, up to one of the texts that end it."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        texts: dict[int, str] = {}
        for indices in groups.values():
            settings = self._settings(requests[indices[0]].args[1])
            room = self.max_length - settings.num_tokens
            asked_before: Counter[str] = Counter()
            prompts: dict[int, _Prompt] = {}
            for index in indices:
                context = requests[index].args[0]
                prompts[index] = _Prompt(self._prompt(context, room), _seed(context, asked_before[context]))
                asked_before[context] += 1
            ordered = sorted(prompts, key=lambda index: len(prompts[index].tokens), reverse=True)
            write = partial(self._write_all, prompts, settings, len(texts), len(requests))
            written = self._ranks.shared(ordered, write) if self._ranks is not None else write(ordered)
            texts |= zip(ordered, written, strict=True)
        return [texts[index] for index in range(len(requests))]

    def _settings(self, asked: Mapping[str, Any]) -> _Settings:
        known: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), 256))
        until = handle_stop_sequences(known.pop("until"), self._eos_text or None)
        num_tokens = known.pop("max_gen_toks")
        is_drawn = known.pop("do_sample")
        sampled = {name: known.pop(name, None) for name in _OF_SAMPLING}
        others = {name: value for name, value in known.items() if _WITHOUT_EFFECT.get(name, ...) != value}
        if others:
            raise DataError(
                f"the task generates with {', '.join(f'{name}={value!r}' for name, value in others.items())}, which is "
                "not supported; choose another task"
            )
        if not 0 < num_tokens < self.max_length:
            raise DataError(
                f"the task generates up to {num_tokens:,} tokens, and the model's context of {self.max_length:,} must "
                "hold them after a prompt; choose another task, or a model with a longer context"
            )
        sampling = Sampling()
        if is_drawn and sampled["temperature"]:
            top_k = sampled["top_k"] or None  # 0 draws from all
            sampling = Sampling(float(sampled["temperature"]), top_k, sampled["top_p"])
        return _Settings(tuple(until), num_tokens, sampling)

    def _prompt(self, context: str, room: int) -> list[int]:
        ids = self.tok_encode(context, add_special_tokens=None if self._chat is None else False)
        if not ids:
            ids = [self.prefix_token_id]
        self.num_truncated += len(ids) > room
        return ids[-room:]

    def _write_all(
        self,
        prompts: Mapping[int, _Prompt],
        settings: _Settings,
        num_before: int,
        num_requests: int,
        ordered: Sequence[int],
    ) -> list[str]:
        """Return the texts after some of ``prompts``, named in an order in which neighbours are of similar length."""
        texts: list[str] = []
        for batch in _batches([prompts[index] for index in ordered], settings.num_tokens):
            texts += self._write(batch, settings)
            self.on_progress(num_before + len(texts), num_requests)
        return texts

    def _write(self, prompts: Sequence[_Prompt], settings: _Settings) -> list[str]:
        stops = [text for text in settings.until if text]
        # a text of n bytes has at most n tokens, but for special ones, which are no text
        tail = max((len(text.encode()) for text in stops), default=0) + 4

        def is_end(_: int, tokens: Sequence[int]) -> bool:
            if self._end_of(tokens):
                return True
            recent = self._tokens.decode(tokens[-tail:])
            return any(text in recent for text in stops)

        rows = generate_rows(
            self._model,
            [prompt.tokens for prompt in prompts],
            num_tokens=settings.num_tokens,
            is_end=is_end,
            sampling=settings.sampling,
            seeds=[prompt.seed for prompt in prompts],
        )
        texts = [self._tokens.decode(row[: len(row) - len(self._end_of(row))]) for row in rows]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _end_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the end that ``tokens`` end with; empty if with none."""
        return next((end for end in self._ends if end == tuple(tokens[-len(end) :])), ())

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer."""
        return self._tokens.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, up to the assistant's next turn, or inside its last one.

        As ``HFLM`` does, a template that refuses a system prompt gets the conversation without it.

        Raises:
            DataError: if the template refuses that as well.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except TemplateRefusalError:
            without_system = [message for message in chat_history if message["role"] != "system"]
            self.dropped_system_prompt |= len(without_system) < len(chat_history)
        try:
            return self._render(without_system, add_generation_prompt)
        except TemplateRefusalError as error:
            raise DataError(f"the chat template refuses the task's conversation: {error}") from None

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        assert self._chat is not None
        rendered = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return rendered
        begun = str(messages[-1]["content"])
        before, content, _ = rendered.rpartition(begun.lstrip())
        if not content:
            before, content, _ = rendered.rpartition(begun.strip())
        return before + content


def _sharing_a_row(windows: Sequence[Continuation]) -> list[list[int]]:
    """Return the places of windows that differ at most in their last token together, the longest ones first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, window in enumerate(windows):
        groups.setdefault((window.context + window.tokens)[:-1], []).append(index)
    return [groups[row] for row in sorted(groups, key=len, reverse=True)]


def _seed(context: str, asked_before: int) -> int:
    """Return the seed of a text that is drawn, another one for each prompt and each time that it is asked."""
    return SEED + zlib.crc32(context.encode(errors="replace")) + asked_before


def _batches(prompts: Sequence[_Prompt], num_tokens: int) -> Iterator[Sequence[_Prompt]]:
    """Yield prompts, the longest of which come first, in batches."""
    start = 0
    while start < len(prompts):
        at_once = min(MAX_ROWS, max(1, TOKENS_OF_A_GENERATION // (len(prompts[start].tokens) + num_tokens)))
        yield prompts[start : start + at_once]
        start += at_once
