import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from trained_tokenizers import with_template
from transformers import AutoTokenizer

from llama_core.config.models import model_spec
from llama_core.config.settings import DataConfig
from llama_core.data.chat import chat_format
from llama_core.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    difference,
    load_tokenizer,
    model_tokenizer,
)
from llama_core.errors import DataError, EnvironmentMismatchError


def train_tokenizer(folder, special_tokens, config=None):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello tokens"] * 4, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def set_template(folder, template):
    """Let the tokenizer of a folder add special tokens around a text."""
    file = str(folder / "tokenizer.json")
    with_template(tokenizers.Tokenizer.from_file(file), template).save(file)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return load_tokenizer(str(train_tokenizer(tmp_path_factory.mktemp("trained"), ["<s>", "</s>"])))


@pytest.fixture
def llama2(tmp_path):
    return train_tokenizer(tmp_path / "llama2", ["<s>", "</s>"])


@pytest.mark.parametrize("template", ["<s> </s>", "<s>"])
def test_a_tokenizer_whose_template_leaves_the_text_out_is_refused(llama2, template):
    set_template(llama2, template)
    with pytest.raises(DataError, match=r"llama2' makes no token of any text; .* put \$A"):
        load_tokenizer(str(llama2))


@given(st.lists(st.text(min_size=1), min_size=1))
def test_bytes_round_trip_every_text(documents):
    tokenizer = ByteTokenizer()
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_documents(documents)] == documents


def test_bytes_stand_between_bos_and_eos():
    [ids] = ByteTokenizer().encode_documents(["é!"])
    assert ids.tolist() == [256, 0xC3, 0xA9, 0x21, 257]


def test_ids_that_are_not_bytes_decode_to_nothing():
    assert ByteTokenizer().decode([256, 72, 100_000, 105, 257]) == "Hi"


@given(documents=st.lists(st.text(min_size=1), min_size=1))
def test_hugging_face_tokens_round_trip_every_text(trained, documents):
    assert [trained.decode(ids) for ids in trained.encode_documents(documents)] == documents


@pytest.mark.parametrize(("bos", "eos"), [("<s>", "</s>"), ("<|begin_of_text|>", "<|end_of_text|>")])
def test_llama_special_tokens_are_found_without_a_configuration(tmp_path, bos, eos):
    folder = train_tokenizer(tmp_path / "tokenizer", [bos, eos])
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    [ids] = tokenizer.encode_documents(["hello"])
    assert (tokenizer.bos_id, ids[-1]) == (0, 1)


@pytest.mark.parametrize("eos_token", ["<eot>", {"content": "<eot>", "special": True}])
def test_the_configured_special_tokens_win(tmp_path, eos_token):
    folder = train_tokenizer(tmp_path / "tokenizer", ["<s>", "</s>", "<eot>"], {"eos_token": eos_token})
    assert load_tokenizer(str(folder)).eos_id == 2


def test_a_tokenizer_without_bos_adds_none(tmp_path):
    folder = train_tokenizer(tmp_path / "tokenizer", ["</s>"])
    tokenizer = load_tokenizer(str(folder))
    [ids] = tokenizer.encode_documents(["hello"])
    assert tokenizer.bos_id is None
    assert tokenizer.decode(ids[:-1]) == "hello"


def test_text_that_spells_a_special_token_stays_text(llama2):
    tokenizer = load_tokenizer(str(llama2))
    [ids] = tokenizer.encode_documents(["a</s>b"])
    assert np.flatnonzero(ids == tokenizer.eos_id).tolist() == [len(ids) - 1]


@pytest.mark.parametrize("template", ["<s> $A", "$A </s>", None])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_what_a_model_reads_is_what_transformers_gives_it(tmp_path, template, flags):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | flags
    folder = train_tokenizer(tmp_path / "tokenizer", ["<s>", "</s>"], config)
    set_template(folder, template)
    ours = load_tokenizer(str(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("hello world", " a</s>b ", ""):
        assert ours.encode_input(text) == theirs.encode(text)
        assert ours.encode_input(text, adds_special=False) == theirs.encode(text, add_special_tokens=False)
    [documents] = ours.encode_documents(["a</s>b"])
    assert np.flatnonzero(documents == ours.eos_id).tolist() == [len(documents) - 1], "documents stay as they are"


def test_bytes_follow_bos():
    assert ByteTokenizer().encode_input("Hi") == [256, 72, 105]
    assert ByteTokenizer().encode_input("Hi", adds_special=False) == [72, 105]


def test_a_stored_truncation_does_not_cut_documents(llama2):
    raw = tokenizers.Tokenizer.from_file(str(llama2 / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.save(str(llama2 / "tokenizer.json"))
    [ids] = load_tokenizer(str(llama2)).encode_documents(["x y z " * 20])
    assert len(ids) > 20


def test_the_fingerprint_changes_with_the_special_tokens(tmp_path):
    special = ["<s>", "</s>", "<eot>"]
    one = train_tokenizer(tmp_path / "one", special)
    other = train_tokenizer(tmp_path / "other", special, {"eos_token": "<eot>"})
    assert load_tokenizer(str(one)).fingerprint != load_tokenizer(str(other)).fingerprint


def test_a_folder_and_its_file_are_the_same_tokenizer(llama2):
    file = llama2 / "tokenizer.json"
    assert load_tokenizer(str(llama2)).fingerprint == load_tokenizer(str(file)).fingerprint


def test_an_eos_that_cannot_be_found_is_refused(tmp_path):
    folder = train_tokenizer(tmp_path / "tokenizer", ["<pad>"])
    with pytest.raises(DataError, match=r"no end-of-text token: .*</s>.*'eos_token' in .*tokenizer_config\.json"):
        load_tokenizer(str(folder))


def test_a_configuration_of_another_tokenizer_is_refused(tmp_path):
    folder = train_tokenizer(tmp_path / "tokenizer", ["</s>"], {"eos_token": "<|im_end|>"})
    with pytest.raises(DataError, match=r"'<\|im_end\|>', which .*tokenizer\.json' does not hold"):
        load_tokenizer(str(folder))


def test_a_missing_tokenizer_names_the_file_looked_for(tmp_path):
    with pytest.raises(DataError, match=rf"no tokenizer '{tmp_path}': '{tmp_path}/tokenizer\.json' does not exist"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["not JSON", "[]", "{}"])
def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"is not a Hugging Face tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", ["not JSON", "[]"])
def test_a_damaged_tokenizer_configuration_is_refused(llama2, content):
    (llama2 / "tokenizer_config.json").write_text(content)
    with pytest.raises(DataError, match=r"tokenizer_config\.json"):
        load_tokenizer(str(llama2))


def test_a_missing_package_is_named_with_the_command_that_installs_it(llama2, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentMismatchError, match="pip install 'tokenizers"):
        HuggingFaceTokenizer(llama2)


def test_two_tokenizers_differ_in_ids_in_new_tokens_or_in_how_they_cut(tmp_path):
    one = load_tokenizer(str(train_tokenizer(tmp_path / "one", ["<s>", "</s>"])))
    more = load_tokenizer(str(train_tokenizer(tmp_path / "more", ["<s>", "</s>"], {"pad_token": "<pad>"})))
    other = load_tokenizer(str(train_tokenizer(tmp_path / "other", ["</s>", "<s>"])))
    plain = {"split_special_tokens": True}
    split = load_tokenizer(str(train_tokenizer(tmp_path / "split", ["<s>", "</s>"], plain)))
    again = load_tokenizer(str(tmp_path / "one" / "tokenizer.json"))
    assert difference(again, one) == ""
    assert difference(more, one) == "it has 1 more"
    assert difference(one, more).startswith("1 of ")
    assert difference(other, one).startswith("2 of ")
    assert difference(ByteTokenizer(), one).endswith("tokens have other ids or none")
    assert difference(split, one) == "the tokens are the same, but a text is cut otherwise"


def sized(vocab_size):
    return replace(model_spec("tiny_llama3_50m"), vocab_size=vocab_size)


def test_a_vocabulary_larger_than_the_models_is_refused(llama2):
    model_tokenizer(DataConfig(), sized(258))
    with pytest.raises(DataError, match=r"'bytes' has 258 tokens, more than the model's vocabulary of 257"):
        model_tokenizer(DataConfig(), sized(257))
    data = DataConfig(tokenizer=str(llama2))
    size = load_tokenizer(str(llama2)).vocab_size
    with pytest.raises(DataError, match=rf"has {size} tokens, more than the model's vocabulary of {size - 1}"):
        model_tokenizer(data, sized(size - 1))  # a word of its own


@pytest.mark.parametrize("config", [{"pad_token": "<pad>"}, {"additional_special_tokens": ["<pad>", "<|tool|>"]}])
def test_added_tokens_beyond_the_vocabulary_are_kept_until_a_text_spells_one(tmp_path, config):
    folder = train_tokenizer(tmp_path / "folder", ["<s>", "</s>"])
    size = load_tokenizer(str(folder)).vocab_size
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = model_tokenizer(DataConfig(tokenizer=str(folder)), sized(size))
    assert tokenizer.vocab_size == size
    assert tokenizer.beyond[size] == "<pad>"
    assert tokenizer.fingerprint != load_tokenizer(str(folder)).fingerprint, "shards of the larger model hold the token"
    [document] = tokenizer.encode_documents(["a <pad> b"])
    assert document.max() < size, "in a text it is plain text"
    for encode in (lambda text: tokenizer.encode_rendered([text]), tokenizer.encode_input):
        encode("hello")
        with pytest.raises(
            DataError, match=rf"a text spells '<pad>', token {size} of .*, but the model has only {size}"
        ):
            encode("a <pad> b")


def test_an_end_of_text_beyond_the_vocabulary_is_refused(tmp_path):
    folder = train_tokenizer(tmp_path / "folder", ["<s>", "</s>"])
    size = load_tokenizer(str(folder)).vocab_size
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][1] | {"id": size, "content": "<|eot|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot|>"}))
    with pytest.raises(DataError, match=f"has {size + 1} tokens, more than"):
        model_tokenizer(DataConfig(tokenizer=str(folder)), sized(size))


FRAMES = {None: ([], []), "<s> $A": (["<s>"], []), "$A </s>": ([], ["</s>"]), "<s> $A </s>": (["<s>"], ["</s>"])}


@pytest.mark.parametrize("forced", [None, True, False])
@pytest.mark.parametrize("template", FRAMES)
def test_a_text_begins_as_the_tokenizer_says_and_ends_with_one_eos_unless_it_is_forced(tmp_path, template, forced):
    folder = train_tokenizer(tmp_path / "folder", ["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"})
    set_template(folder, template)
    theirs = AutoTokenizer.from_pretrained(folder)
    data = DataConfig(tokenizer=str(folder), add_bos_token=forced)
    ours = model_tokenizer(data, sized(1000))
    words = theirs.encode("hello world", add_special_tokens=False)
    begins, ends = FRAMES[template]
    begins = begins if forced is None else ["<s>"] * forced
    expected = [*theirs.convert_tokens_to_ids(begins), *words, theirs.eos_token_id]
    assert ours.encode_documents(["hello world"])[0].tolist() == expected
    assert ours.encode_input("hello world") == expected[: None if ends else -1]
    if forced is None:
        assert ours.encode_input("hello world") == theirs.encode("hello world")
    frame = chat_format(data, ours, sized(1000), files=()).frame
    assert frame == ("<s>" if begins else "", "</s>")


def test_bytes_begin_with_bos_unless_they_must_not():
    plain = model_tokenizer(DataConfig(add_bos_token=False), sized(258))
    assert plain.encode_documents(["Hi"])[0].tolist() == [72, 105, 257]
    assert plain.encode_input("Hi") == [72, 105]
    assert plain.fingerprint != ByteTokenizer().fingerprint


def test_a_bos_that_a_tokenizer_lacks_cannot_be_forced(tmp_path):
    folder = train_tokenizer(tmp_path / "folder", ["</s>"])
    with pytest.raises(DataError, match=r"data\.add_bos_token=true: tokenizer .*folder' has no BOS; name it as"):
        model_tokenizer(DataConfig(tokenizer=str(folder), add_bos_token=True), sized(1000))
