"""Check an export: whether transformers computes from its files what the run has learnt."""

import gc
import importlib
import importlib.metadata
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_core.data.datasets import rows_spread_evenly
from llama_core.data.end_tokens import learnt_template, trains_on_conversations
from llama_core.data.tokenizer import PROBES, Tokenizer, model_tokenizer
from llama_core.errors import ConfigError, DataError, EnvironmentMismatchError, WeightsError
from llama_core.evaluation.generate import choose_device, find_model
from llama_core.evaluation.held_out import LossOnData
from llama_core.imports import how_to_install, importing_torch
from llama_core.redaction import one_line
from llama_core.runs.export import CHAT_TEMPLATE, has_tokenizer
from llama_core.runs.export_source import ExportSource
from llama_core.units import counted

_MAX_ROWS = 4
_MAX_TOKENS = 4096
"""Most tokens of a row: in fp32 on a CPU, a row of 4,096 takes an 8B model a minute."""
_PLACES = 64
"""Places of a row whose predictions are compared, spread evenly, with the last one."""
_SAME = 1e-3
"""Largest difference of two logits, in standard deviations of a place's logits, that rounding in fp32 explains.

Between transformers and this engine it is 1e-6 to 1e-4; a wrong frequency or scale makes it 0.01 to 1."""
_MAX_ROUNDING = 0.05
"""Largest mean divergence, in nats, that rounding weights to 16 bits explains."""


@dataclass(frozen=True)
class Agreement:
    """How far the predictions of two models are apart, over some places of some rows."""

    difference: float
    """Largest difference of a logit, in standard deviations of the logits of its place."""
    divergence: float
    """Mean Kullback-Leibler divergence of the second from the first, in nats."""
    same_tokens: float
    """Share of the places at which both find the same token likeliest."""


@dataclass(frozen=True)
class ExportCheck:
    """What was found out about an export."""

    num_rows: int
    num_places: int
    """Over all rows."""
    rows: str
    """What the rows are, in words."""
    package: str
    """Who opened the export: transformers or peft, with its version."""
    reading: Agreement
    """Between this engine and the package, both from the files of the export, in fp32."""
    rounding: Agreement | None
    """Between the run's own weights and the export's, both in this engine; None for the mean of several checkpoints."""
    num_texts: int
    """Texts that transformers cuts into the tokens that the run learnt; 0 if the export has no tokenizer."""

    def summary(self) -> Iterator[str]:
        """Yield a line for each comparison."""
        yield (
            f"{self.package} computes the same from these files as this engine: logits differ by at most "
            f"{self.reading.difference:.1e} of their standard deviation, in {counted(self.num_places, 'place')} of "
            f"{counted(self.num_rows, 'row')} ({self.rows})"
        )
        if self.rounding is not None:
            yield (
                f"against the run's own weights in fp32: divergence {self.rounding.divergence:.1e} nats, the same "
                f"token likeliest in {self.rounding.same_tokens:.1%} of the places"
            )
        if self.num_texts:
            yield f"AutoTokenizer cuts {self.num_texts} texts into the tokens that the run learnt"


def refuse_missing_packages(export: ExportSource) -> None:
    """Refuse to check an export that nothing here can open.

    Raises:
        EnvironmentMismatchError: if transformers, or PEFT for adapters, cannot be imported.
    """
    for package in ("transformers", "peft") if export.is_adapter else ("transformers",):
        try:
            with importing_torch():
                importlib.import_module(package)
        except ImportError as error:
            raise EnvironmentMismatchError(
                f"--check opens the export with {package}: {error}; {how_to_install(package)}"
            ) from None


def check_export(
    export: ExportSource, folder: Path, *, device: str | None = None, tell: Callable[[str], None] = lambda text: None
) -> ExportCheck:
    """Open an export with transformers, or with PEFT, and compare what it predicts with the run's own predictions.

    All is computed in fp32, one model after another. Rows are those that the run has held out, or else random tokens.

    Args:
        export: what was exported.
        folder: where it is.
        device: cpu or cuda; by default cuda if present.
        tell: called with a line about what is done, if it is not the usual.

    Raises:
        DoesNotFitError, EnvironmentMismatchError: if there is no such device, it is too small, or a package is missing.
        WeightsError: if the package cannot open the export or computes something else, or if the export's predictions
            are not those of the run.
    """
    refuse_missing_packages(export)
    with importing_torch():
        from llama_core.evaluation.inference.next_tokens import TheirModel, logits_of
        from llama_core.training.stored_weights import whole_model

    device = choose_device(device, export.config, "fp32")
    num_texts = _check_tokenizer(export, folder, tell)
    rows, which = _rows(export, tell)
    places = [_places(len(row)) for row in rows]

    def own(source: Path) -> list[Any]:
        weights, config = find_model(source, None, tell)
        model = whole_model(config.spec, weights, device=device)
        return [logits_of(model, row, at) for row, at in zip(rows, places, strict=True)]

    def theirs() -> list[Any]:
        model = TheirModel(folder, device)
        return [model.logits_of(row, at) for row, at in zip(rows, places, strict=True)]

    found = theirs()
    gc.collect()  # before another model takes as much memory
    expected = own(folder)
    reading = _agreement(expected, found)
    if not reading.difference <= _SAME:
        raise WeightsError(
            f"{folder} is wrong: transformers computes other logits from it than this engine, by "
            f"{reading.difference:.1e} of their standard deviation; do not use it, and report it with its config.json"
        )
    gc.collect()
    rounding = None if export.others else _agreement(own(export.newest), expected)
    if rounding is not None and not _is_explained(rounding, export.dtype):
        raise WeightsError(
            f"{folder} in {export.dtype} predicts otherwise than {export.newest}: logits differ by "
            f"{rounding.difference:.1e} of their standard deviation, {rounding.divergence:.2g} nats; "
            + ("do not use it, and report it" if export.dtype == "fp32" else "export in another dtype (--dtype)")
        )
    return ExportCheck(len(rows), sum(map(len, places)), which, _package(export), reading, rounding, num_texts)


def _is_explained(rounding: Agreement, dtype: str) -> bool:
    """Return whether an export predicts what the run does, but for the rounding of its weights."""
    return rounding.difference <= _SAME if dtype == "fp32" else rounding.divergence <= _MAX_ROUNDING


def _rows(export: ExportSource, tell: Callable[[str], None]) -> tuple[list[list[int]], str]:
    """Return rows to compare predictions on, and what they are."""
    question = LossOnData(None, seq_len=None, num_sequences=None, tokenizer=None)
    most = min(_MAX_TOKENS, export.config.spec.max_context)
    try:
        held_out = question.rows_for(export.newest, export.config)
    except (ConfigError, DataError) as error:
        tell(f"rows of random tokens: {str(error).partition(';')[0]}")
        draw = random.Random(0)
        length = min(most, export.config.first_seq_len)
        vocab_size = export.config.spec.vocab_size
        return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(_MAX_ROWS)], "random tokens"
    of_each = -(-_MAX_ROWS // len(held_out))
    rows = [
        packed.row(place)[0][:most].tolist()
        for packed in held_out.values()
        for place in rows_spread_evenly(packed, of_each)
    ]
    return rows[:_MAX_ROWS], "held out"


def _check_tokenizer(export: ExportSource, folder: Path, tell: Callable[[str], None]) -> int:
    """Compare the tokens that transformers makes of texts with the run's own; return how many texts."""
    from llama_core.evaluation.inference.next_tokens import their_tokenizer

    if not has_tokenizer(folder):
        return 0
    own = model_tokenizer(export.config.data, export.config.spec)
    theirs = their_tokenizer(folder)
    for text in PROBES:
        learnt = own.encode_input(text, adds_special=False)
        found = theirs(text, add_special_tokens=False)["input_ids"]
        if list(found) != learnt:
            raise WeightsError(
                f"{folder} is wrong: AutoTokenizer cuts {text!r} into {list(found)}, and the run learnt {learnt}; "
                "correct its tokenizer_config.json"
            )
    text = PROBES[0]
    learnt, found = own.encode_input(text), list(theirs(text)["input_ids"])
    if found != learnt:
        tell(f"AutoTokenizer frames a text otherwise: {_ends(found)}, and the run learnt {_ends(learnt)}")
    if trains_on_conversations(export.newest):
        _check_template(export, folder, own, theirs)
    return len(PROBES)


def _check_template(export: ExportSource, folder: Path, own: Tokenizer, theirs: Any) -> None:
    """Compare the tokens that transformers' chat template makes of a question with those that the run learnt."""
    asked = [{"role": "user", "content": PROBES[0]}]
    template = learnt_template(export.newest, export.config, own)
    [learnt] = own.encode_rendered([template.render(asked, add_generation_prompt=True)])
    try:
        found = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    except Exception as error:  # whatever a template raises
        raise WeightsError(f"{folder}: transformers cannot render its chat template: {one_line(str(error))}") from None
    if list(found) != learnt.ids.tolist():
        raise WeightsError(
            f"{folder} is wrong: its chat template begins an answer with {list(found)}, and the run learnt "
            f"{learnt.ids.tolist()} with {template.name}; correct its {CHAT_TEMPLATE}"
        )


def _ends(ids: Sequence[int]) -> str:
    return f"it begins with token {ids[0]} and ends with {ids[-1]}"


def _places(num_tokens: int) -> list[int]:
    """Return the places of a row to compare, the last one among them."""
    number = min(_PLACES, num_tokens)
    return [num_tokens * (index + 1) // number - 1 for index in range(number)]


def _agreement(expected: Sequence[Any], found: Sequence[Any]) -> Agreement:
    """Compare the logits of rows, [P, V] each."""
    import torch

    one = torch.cat(list(expected)).double()
    other = torch.cat(list(found)).double()
    tiny = torch.finfo(one.dtype).tiny  # an untouched head gives all tokens one logit
    in_deviations = (one - other).abs().amax(1) / one.std(1).clamp_min(tiny)
    log_one, log_other = one.log_softmax(1), other.log_softmax(1)
    divergence = (log_one.exp() * (log_one - log_other)).sum(1).mean()
    same = (one.argmax(1) == other.argmax(1)).double().mean()
    return Agreement(float(in_deviations.max()), float(divergence), float(same))


def _package(export: ExportSource) -> str:
    name = "peft" if export.is_adapter else "transformers"
    return f"{name} {importlib.metadata.version(name)}"
