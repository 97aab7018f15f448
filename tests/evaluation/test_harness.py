"""Our model answers the requests of lm-evaluation-harness as the harness's own ``HFLM`` does with transformers."""

import pytest
import yaml
from harness_folders import BOS, CONTEXT, SENTENCES, TASKS, make_folder, make_tasks
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from llama_core.data.chat import chat_format
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError
from llama_core.evaluation.generate import find_model
from llama_core.evaluation.harness.limits import quiet
from llama_core.evaluation.harness.model import HarnessModel
from llama_core.evaluation.harness.named_tasks import NamedTasks
from llama_core.hugging_face.generation_config import end_tokens, generation_config
from llama_core.training.stored_weights import whole_model

CLOSE = {"rel": 1e-4, "abs": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.delenv("LOCAL_RANK", raising=False)  # DeepSpeed sets it, and HFLM would wait for other ranks
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def our_model(folder, *, chat=False):
    weights, config = find_model(folder, None, print)
    tokenizer = load_tokenizer(str(folder))
    ends = {(end,) for end in (tokenizer.eos_id, *end_tokens(generation_config(weights)))}
    template = chat_format(config.data, tokenizer, config.spec, files=()).template if chat else None
    return HarnessModel(whole_model(config.spec, weights), tokenizer, ends=ends, chat=template)


def their_model(folder):
    with quiet(allow_code=False):
        return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)


@pytest.fixture(scope="module")
def ours(folder):
    return our_model(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return their_model(folder)


def ask(model, kind, arguments):
    requests = [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]
    with quiet(allow_code=False):
        return getattr(model, kind)(requests)


PAIRS = [
    ("the colour of", " a house"),
    ("the colour of", " a tree"),
    ("the colour of", " red"),
    ("the colour of", " blue"),
    ("spaces belong to what follows  ", "seven"),
    ("", "five six"),
    (f"{BOS}the text spells it", " itself"),
    ("a special <|eot_id|> token", " of the text"),
    (" ".join(SENTENCES), " the end of a long text"),
    ("é", "à ü"),
]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_log_likelihoods_are_those_of_hflm(adds_bos, tmp_path, ours, theirs):
    if not adds_bos:
        other = make_folder(tmp_path / "other", adds_bos=False)
        ours, theirs = our_model(other), their_model(other)
    pairs = list(PAIRS)
    likeliest = ask(theirs, "generate_until", [(sentence, {"until": [], "max_gen_toks": 1}) for sentence in SENTENCES])
    pairs += [(sentence, text) for sentence, text in zip(SENTENCES, likeliest, strict=True) if text.isascii() and text]
    found = ask(ours, "loglikelihood", pairs)
    expected = ask(theirs, "loglikelihood", pairs)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], **CLOSE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}


def test_rolling_log_likelihoods_are_those_of_hflm(ours, theirs):
    texts = [("five six",), (" ".join(SENTENCES[:8]),), (" ".join(SENTENCES),)]
    assert len(ours.tok_encode(texts[-1][0])) > 2 * CONTEXT
    expected = ask(theirs, "loglikelihood_rolling", texts)
    assert ask(ours, "loglikelihood_rolling", texts) == pytest.approx(expected, **CLOSE)


@pytest.mark.parametrize("until", [[], ["e"], [" t", "\n"], "ed"])
def test_generated_texts_are_those_of_hflm(until, ours, theirs):
    prompts = [SENTENCES[0], "a", SENTENCES[1][:20], " ".join(SENTENCES[:20]), "red green", ""]
    settings = {"until": until, "max_gen_toks": 20}
    expected = ask(theirs, "generate_until", [(prompt, settings) for prompt in prompts[:-1]])
    found = ask(ours, "generate_until", [(prompt, settings) for prompt in prompts])
    assert found[:-1] == expected
    assert len(set(found)) > 3


def scores_of(tasks, model, **asked):
    names = tuple(TASKS)
    found = NamedTasks(names, folder=tasks, num_fewshot=asked.pop("num_fewshot", None))
    return {(score.task, score.metric): score for name in names for score in found.run(name, model, **asked)}


@pytest.mark.parametrize("limit", [None, 4])
def test_scores_of_every_kind_of_task_are_those_of_hflm(tasks, ours, theirs, limit):
    found = scores_of(tasks, ours, limit=limit)
    expected = scores_of(tasks, theirs, limit=limit)
    assert found.keys() == expected.keys()
    assert {task for task, _ in found} == set(TASKS)
    for key, score in found.items():
        assert score.value == pytest.approx(expected[key].value, **CLOSE), key
        assert score.examples == (limit or 10)
    accuracy = found["toy_choice", "acc"]
    assert accuracy.standard_error == expected["toy_choice", "acc"].standard_error
    assert (accuracy.version, accuracy.higher_is_better) == ("2.0", True)
    assert not found["toy_rolling", "word_perplexity"].higher_is_better
    directions = NamedTasks(list(TASKS), folder=tasks).directions()
    assert directions == {name: score.higher_is_better for name, score in found.items()}


def test_chat_with_solved_examples_and_a_system_prompt_has_the_scores_of_hflm(tasks, folder, theirs):
    names = ("toy_choice", "toy_generation")
    asked = {"limit": 6, "chat": True, "system": "be brief"}
    chosen = NamedTasks(names, folder=tasks, num_fewshot=1)
    for name in names:
        found = chosen.run(name, our_model(folder, chat=True), **asked)
        expected = chosen.run(name, theirs, **asked)
        assert [(one.metric, one.num_fewshot) for one in found] == [(one.metric, 1) for one in expected]
        assert [one.value for one in found] == pytest.approx([one.value for one in expected], **CLOSE)
        plainly = chosen.run(name, our_model(folder), limit=6)
        assert found[-1].value != pytest.approx(plainly[-1].value, **CLOSE), "the template matters"


@pytest.mark.parametrize("generated", [True, False])
def test_a_conversation_is_rendered_as_by_transformers(folder, theirs, generated):
    said = [{"role": "user", "content": "a tree? "}, {"role": "assistant", "content": " it is "}]
    turns = said[:1] if generated else said
    ours = our_model(folder, chat=True).apply_chat_template(turns, generated)
    assert ours == theirs.apply_chat_template(turns, generated)
    assert "a tree?" in ours


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("loglikelihood", ("a", " ".join(SENTENCES)), "more than the model's context of 96"),
        ("loglikelihood", ("a", ""), "a text to score has no tokens"),
        ("generate_until", ("a", {"until": [], "max_gen_toks": 96}), "generates up to 96 tokens"),
        ("generate_until", ("a", {"until": [], "max_gen_toks": 4, "num_beams": 4}), "with num_beams=4, which is not"),
        ("loglikelihood_rolling", ("\ud800",), "a text of the task is"),
    ],
)
def test_a_request_that_does_not_suit_the_model_is_one_line(ours, kind, arguments, message):
    with pytest.raises(DataError, match=message) as refused:
        ask(ours, kind, [arguments])
    assert "\n" not in str(refused.value)


def test_drawn_texts_do_not_depend_on_the_other_texts_of_a_batch(ours):
    settings = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    prompts = [SENTENCES[2], "a", "one two"]
    together = ask(ours, "generate_until", [(prompt, settings) for prompt in prompts])
    assert together == [ask(ours, "generate_until", [(prompt, settings)])[0] for prompt in prompts]
    greedy = ask(ours, "generate_until", [(prompt, settings | {"do_sample": False}) for prompt in prompts])
    assert together != greedy
    several = ask(ours, "generate_until", [(prompts[0], settings)] * 3)
    assert several[0] == together[0]
    assert len(set(several)) == 3, "a prompt that is asked again gets another text"


def test_a_group_has_the_scores_of_its_tasks_and_their_mean(ours, tmp_path):
    folder = make_tasks(tmp_path / "tasks", {"one": TASKS["toy_choice"], "two": TASKS["toy_choice"]})
    aggregate = [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]
    group = {"group": "both", "task": ["one", "two"], "aggregate_metric_list": aggregate, "metadata": {"version": 3}}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    both = NamedTasks(["both"], folder=folder)
    found = {(one.task, one.metric): one for one in both.run("both", ours, limit=5)}
    assert both.directions() == {name: one.higher_is_better for name, one in found.items()}
    assert {task for task, _ in found} == {"both", "one", "two"}
    whole = found["both", "acc"]
    assert whole.value == pytest.approx((found["one", "acc"].value + found["two", "acc"].value) / 2)
    assert (whole.examples, whole.version) == (10, "3")
    assert whole.standard_error < found["one", "acc"].standard_error
