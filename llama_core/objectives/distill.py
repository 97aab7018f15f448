"""Distillation: the next token, and a teacher's distribution over it that is computed once before the run."""

from llama_core.objectives.traits import ObjectiveType, Reference

TOKENS = "teacher_tokens"
"""The tokens that the teacher takes for the most probable ones, in the place of each token's target."""
LOGS = "teacher_log_probabilities"
"""Their log-probabilities under the teacher, in nats."""
REST = "teacher_rest"
"""The logarithm of the probability of all other tokens together."""

_LOST = "what the teacher makes of the data is computed once, before the first step"

DISTILL = ObjectiveType(
    "distill",
    module="llama_core.models.distill",
    program="llama_core.planning.program.distill",
    keys=("teacher", "distill_top_k", "distill_weight"),
    required=("teacher",),
    per_token=(TOKENS, LOGS, REST),
    sized_by={TOKENS: "distill_top_k", LOGS: "distill_top_k"},
    reference=Reference((TOKENS, LOGS, REST), name="teacher", lost=_LOST, weights="teacher"),
    shown={"teacher_kl": "KL {:.4f}"},
)
