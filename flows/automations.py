"""The automation of Prefect's server that marks flow runs as crashed when their process has disappeared."""

from datetime import timedelta
from typing import Any

from prefect import get_client
from prefect.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState

NO_HEARTBEAT_SECONDS = 300
"""Time without a heartbeat after which a flow run counts as lost: ten of the intervals in prefect.yaml, so that a
server that was away for some minutes does not declare running flow runs lost."""

_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "Scheduled", "AwaitingRetry")

LOST_FLOW_RUNS = AutomationCore(
    name="lost flow runs of train and benchmark",
    description="Marks a flow run without heartbeats as Crashed. Its job keeps running, and a retry attaches to it.",
    trigger=EventTrigger(
        posture=Posture.Proactive,
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=ResourceSpecification(
            {"prefect.resource.role": "flow", "prefect.resource.name": ["train", "benchmark"]}
        ),
        for_each={"prefect.resource.id"},
        after={_HEARTBEAT},
        expect={_HEARTBEAT, *(f"prefect.flow-run.{state}" for state in _ENDS)},
        threshold=1,
        within=timedelta(seconds=NO_HEARTBEAT_SECONDS),
    ),
    actions=[
        ChangeFlowRunState(
            name="Crashed",
            state=StateType.CRASHED,
            message=f"no heartbeat for {NO_HEARTBEAT_SECONDS} s; its job, if any, keeps running; attach to it with "
            "`prefect flow-run retry`",
        )
    ],
)
"""Without it, a flow run ended by ``kill -9`` or a power cut would stay Running for ever."""


async def install_automations() -> None:
    """Create the automation on the configured server, or update it.

    An automation that is up to date is left alone: an update makes the server forget which heartbeats it waits for.
    """
    async with get_client() as client:
        known = await client.read_automations_by_name(LOST_FLOW_RUNS.name)
        if not known:
            await client.create_automation(LOST_FLOW_RUNS)
        elif _definition(known[0]) != _definition(LOST_FLOW_RUNS):
            await client.update_automation(known[0].id, LOST_FLOW_RUNS)


def _definition(automation: AutomationCore) -> dict[str, Any]:
    fields = set(AutomationCore.model_fields)
    return automation.model_dump(mode="json", include=fields, exclude={"trigger": {"id"}, "enabled": True})
