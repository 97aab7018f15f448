"""The next token: cross-entropy, averaged over the targets."""

from llama_core.objectives.traits import ObjectiveType

NEXT_TOKEN = ObjectiveType("next_token", module="llama_core.models.next_token", keys=("z_loss", "mtp_weight"))
