"""Ranks that divide the matrices and the texts among them answer a task as one process does."""

import pytest
from distributed import run_ranks
from harness_folders import SENTENCES, TASKS, make_folder, make_tasks

from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError
from llama_core.evaluation.generate import find_model
from llama_core.evaluation.inference.divided import EvaluatingRanks
from llama_core.planning.plan import ParallelPlan
from llama_core.training.stored_weights import whole_model


def answers(folder, tasks, plan):
    """Return every score of the tasks, and the written texts of some prompts of many lengths."""
    from lm_eval.api.instance import Instance

    from llama_core.evaluation.harness.model import HarnessModel
    from llama_core.evaluation.harness.named_tasks import NamedTasks

    ranks = EvaluatingRanks(plan, "cpu")
    _, config = find_model(folder, None, print)
    model = whole_model(config.spec, folder, layers=ranks.layers(config.spec), divide=ranks.divide)
    tokenizer = load_tokenizer(str(folder))
    ours = HarnessModel(model, tokenizer, ends={(tokenizer.eos_id,)}, ranks=ranks)
    chosen = NamedTasks(tuple(TASKS), folder=tasks)
    scores = [(score.task, score.metric, score.value) for name in chosen.names for score in chosen.run(name, ours)]
    settings = {"until": [], "max_gen_toks": 10}
    prompts = [" ".join(SENTENCES[:number])[: 7 * number] for number in range(1, 8)]
    texts = ours.generate_until(
        [Instance("generate_until", {}, (prompt, settings), index) for index, prompt in enumerate(prompts)]
    )
    return scores, texts


PLANS = {
    "tp 2, dp 2": ParallelPlan(tp=2, dp_replicate=2),
    "dp 3": ParallelPlan(dp_replicate=3),
    "tp 2, pp 2": ParallelPlan(tp=2, pp=2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_answer_as_one_process(tmp_path, plan):
    folder = make_folder(tmp_path / "model")
    tasks = make_tasks(tmp_path / "tasks", num_documents=5)
    expected, written = answers(folder, tasks, ParallelPlan())
    found = run_ranks(plan.world_size, answers, folder, tasks, plan)
    for scores, texts in found:
        assert [score[:2] for score in scores] == [score[:2] for score in expected]
        assert [value for _, _, value in scores] == pytest.approx([value for *_, value in expected], rel=1e-4)
        assert texts == written


def refusal(plan):
    def compute(items):
        if 1 in items:
            raise DataError("one of them is odd")
        return items

    ranks = EvaluatingRanks(plan, "cpu")
    assert ranks.shared([4, 2, 0], lambda items: [2 * item for item in items]) == [8, 4, 0]
    try:
        ranks.shared([0, 1], compute)
    except DataError as error:
        return str(error)


def test_an_error_of_one_rank_is_raised_on_all():
    assert run_ranks(2, refusal, ParallelPlan(dp_replicate=2)) == ["one of them is odd"] * 2
