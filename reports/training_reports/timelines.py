"""The timeline of a pipeline's step, as planned and as measured."""

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from llama_core.calibration.demand import device_for
from llama_core.config.run import RunConfig
from llama_core.errors import PlanError, TrainingInfraError
from llama_core.planning.plan import ParallelPlan
from llama_core.planning.time.parts import StepParts
from llama_core.planning.work import Work
from llama_core.schedules.actions import Action, Kind, Schedule, TimedAction
from llama_core.schedules.clock import Timeline
from training_reports.contents import RunContents
from training_reports.layout import Panel
from training_reports.schedules import MAX_ACTIONS, shades, timelines_figure

TITLE = "Pipeline: planned and measured"


def pipeline_timelines(contents: RunContents) -> Iterator[Panel]:
    """Yield a panel if the run has a pipeline."""
    plan = contents.parallel_plan
    if plan is None or plan.pp == 1:
        return
    measured = _recorded(contents, plan)
    if measured is None:
        how = (
            "No timeline: a run records the actions of one step after its timed steps (benchmark.steps). To time steps "
            f"in a new run of the same configuration: {contents.profile_command}"
        )
        yield Panel(TITLE, None, "", [how], wide=True)
        return
    predicted = predicted_timeline(contents, measured.schedule)
    planned = predicted or planned_timeline(measured)
    if predicted is not None:
        durations = f"the time that the planner predicts for this GPU (rates: {_source(contents)}); transfers count"
    else:
        durations = "the median time measured for its kind on its stage; transfers take no time"
    told = (
        f"The planned step takes {planned.makespan:.3g} s, and ranks wait {planned.bubble_ratio:.1%} of that; the "
        f"measured one takes {measured.makespan:.3g} s, and they wait {measured.bubble_ratio:.1%}."
    )
    notes = [
        told,
        f"Measured: one step of schedule {plan.schedule} after the timed ones, on the first rank of every pipeline "
        "position. An action begins when its inputs have arrived.",
        f"Planned: the same actions in order. Each begins when its inputs have arrived, and takes {durations}.",
    ]
    if words := shades(measured.schedule):
        notes.append(f"Colours, from {words}.")
    if sum(map(len, measured.lanes)) > MAX_ACTIONS:
        notes.append(f"The figure draws the first {MAX_ACTIONS // plan.pp} actions of every rank.")
    yield Panel(TITLE, timelines_figure(planned, measured), told, notes, wide=True, height_px=150 + 2 * 34 * plan.pp)


def _recorded(contents: RunContents, plan: ParallelPlan) -> Timeline | None:
    """Return the recorded step; None without one. The schedule, which takes seconds if it is long, is built for one."""
    is_whole = len(contents.lanes) == plan.pp and all(
        len(lane.actions) >= plan.num_microbatches for lane in contents.lanes
    )
    return measured_timeline(contents, plan.build_schedule()) if is_whole else None


def measured_timeline(contents: RunContents, schedule: Schedule) -> Timeline | None:
    """Return the recorded step, from the start of its first action; None if the record is not of this schedule."""
    try:
        lanes = [
            [
                TimedAction(Action.parse(action), begin, end)
                for action, begin, end in zip(lane.actions, lane.begins, lane.ends, strict=True)
            ]
            for lane in contents.lanes
        ]
    except (PlanError, ValueError, TypeError):  # damaged
        return None
    if [tuple(timed.action for timed in lane) for lane in lanes] != list(schedule.actions):
        return None
    start = min(lane[0].start for lane in lanes)
    return Timeline(
        schedule,
        tuple(tuple(TimedAction(t.action, t.start - start, t.end - start) for t in lane) for lane in lanes),
    )


def predicted_timeline(contents: RunContents, schedule: Schedule) -> Timeline | None:
    """Return the schedule with the planner's times of every stage; None on a CPU, for which it has no time model."""
    plan = contents.parallel_plan
    try:
        config = RunConfig.from_mapping(contents.config or {})
        if plan is None or config.launch.device != "cuda":
            return None
        gpu = device_for(config).spec
        assert gpu is not None  # a GPU has a data sheet
        parts = StepParts(Work.of(config, plan), gpu)
        passes = parts.passes()
    except TrainingInfraError:  # the configuration of another version
        return None

    return Timeline(schedule, schedule.replay(lambda action: passes[action.stage].of(action.kind), parts.hop))


def _source(contents: RunContents) -> str:
    """Return where the rates of a predicted timeline are from."""
    return device_for(RunConfig.from_mapping(contents.config or {})).source


def planned_timeline(measured: Timeline) -> Timeline:
    """Return the schedule of ``measured`` with the median time of each kind of action on each stage."""
    taken: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for timed in (timed for lane in measured.lanes for timed in lane):
        taken[timed.action.stage, timed.action.kind].append(timed.end - timed.start)
    usual = {key: median(seconds) for key, seconds in taken.items()}
    schedule = measured.schedule
    return Timeline(schedule, schedule.replay(lambda action: usual[action.stage, action.kind]))
