"""Preferences: which of two answers to a prompt is better, or whether an answer is good."""

from llama_core.objectives.records import LABELLED_ANSWERS, PAIRS
from llama_core.objectives.traits import ObjectiveType, Reference

ANSWER = "answer"
"""The value of each token that says which answer it belongs to: the answers of a row count from 1, and 0 is none. The
two of a pair follow each other, the better one with the odd number; labelled answers take one of two numbers, the odd
one if they are good. The first token that counts in an answer has the negative number."""
REFERENCE = "reference"
"""The value of each token whose sum over an answer is its log-probability under the reference."""
MISMATCH = "mismatch"
"""The same of the answer's log-probability after another prompt, that of the answer before it in the row."""

_MODULE = "llama_core.models.preferences"
_PROGRAM = "llama_core.planning.program.preferences"
_SHOWN = {"reward_margin": "margin {:.4f}", "reward_accuracy": "accuracy {:.1%}"}
"""How far good answers are ahead of bad ones, and how often; a batch may have good ones alone."""

DPO = ObjectiveType(
    "dpo",
    module=_MODULE,
    program=_PROGRAM,
    keys=("preference_beta", "label_smoothing"),
    per_token=(ANSWER, REFERENCE),
    reference=Reference((REFERENCE,)),
    unit="nats/pair",
    reads=PAIRS.name,
    shown=_SHOWN,
)
IPO = ObjectiveType(
    "ipo",
    module=_MODULE,
    program=_PROGRAM,
    keys=("preference_beta",),
    per_token=(ANSWER, REFERENCE),
    reference=Reference((REFERENCE,)),
    unit="squared nats/pair",
    reads=PAIRS.name,
    shown=_SHOWN,
)
SIMPO = ObjectiveType(
    "simpo",
    module=_MODULE,
    program=_PROGRAM,
    keys=("preference_beta", "simpo_gamma"),
    per_token=(ANSWER,),
    unit="nats/pair",
    reads=PAIRS.name,
    shown=_SHOWN,
)
ORPO = ObjectiveType(
    "orpo",
    module=_MODULE,
    program=_PROGRAM,
    keys=("preference_beta",),
    per_token=(ANSWER,),
    unit="nats/pair",
    reads=PAIRS.name,
    shown=_SHOWN,
)
KTO = ObjectiveType(
    "kto",
    module="llama_core.models.kto",
    program=_PROGRAM,
    keys=("preference_beta", "desirable_weight", "undesirable_weight"),
    per_token=(ANSWER, REFERENCE, MISMATCH),
    reference=Reference((REFERENCE, MISMATCH), num_forwards=2),
    unit="utility/answer",
    reads=LABELLED_ANSWERS.name,
    prepares=True,
    shown=_SHOWN,
)
