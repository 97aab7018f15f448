"""SentencePiece's models give the ids that SentencePiece gives, for models that are trained here."""

import io
import json
import random
import sysconfig
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.pretrained import settings_of_weights
from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError

ROOT = Path(__file__).parents[2]
PROSE = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
CODE = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]]
ODD = [
    "naïve café ☕ 你好\uff0c世界 שלום ﷺ ﬁ ½ ① \uff46\uff55\uff4c\uff4c width\u3000space\ttab\nline",
    "👩\u200d👩\u200d👧 🇩🇪 e\u0301 é \u200b\u00a0",
    *("", " ", "   ", " a  b ", "a" * 13, "----====____", "▁x ▁", "\x00\x7f", "<s> </s> <unk> <0x0A>"),
]
LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
"""How Meta trained the models of Llama 1 and 2."""
KINDS = {
    "llama": LLAMA | {"split_digits": True, "allow_whitespace_only_pieces": True},
    "normalised": {"byte_fallback": True},
    "without bytes": {},
    "without prefix": LLAMA | {"add_dummy_prefix": False},
}


def trained(vocab_size=800, model_type="bpe", **options):
    model = io.BytesIO()
    lines = [line for text in (*PROSE[:6], *CODE[:4]) for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type=model_type,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def both(request, tmp_path_factory):
    """A model as SentencePiece reads it, and as we do."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(trained(**request.param))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return theirs, load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama2")
    (folder / "tokenizer.model").write_bytes(trained(**LLAMA))
    return folder


def runs_of_few_characters():
    draw = random.Random(0)
    return ["".join(draw.choices("ab -=_ \n.", k=40)) for _ in range(300)]


def test_the_ids_are_sentencepieces_own(both):
    theirs, ours = both
    texts = [*PROSE, *CODE, *ODD, *runs_of_few_characters()]
    found = [ids[1:-1].tolist() for ids in ours.encode_documents(texts)]
    assert [text for text, ids in zip(texts, found, strict=True) if ids != theirs.encode(text)] == []


def test_documents_stand_between_bos_and_eos(both):
    theirs, ours = both
    [ids] = ours.encode_documents(["hello"])
    assert (ids[0], ids[-1], ours.vocab_size) == (theirs.bos_id(), theirs.eos_id(), theirs.get_piece_size())


@given(text=st.text())
def test_every_text_has_the_same_ids_and_they_decode_to_the_same_text(llama2, text):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(llama2 / "tokenizer.model"))
    ours = load_tokenizer(str(llama2))
    [document] = ours.encode_documents([text])
    ids = theirs.encode(text)
    assert document[1:-1].tolist() == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_a_document_that_spells_a_special_token_holds_none_and_a_conversation_does(llama2):
    tokenizer = load_tokenizer(str(llama2))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(llama2 / "tokenizer.model"))
    [document] = tokenizer.encode_documents(["a</s>b"])
    assert document[1:-1].tolist() == theirs.encode("a</s>b")
    [rendered] = tokenizer.encode_rendered(["<s>[INST] hello [/INST] hi </s>"])
    inner = theirs.encode("[INST] hello [/INST] hi ")
    assert rendered.ids.tolist() == [theirs.bos_id(), *inner, theirs.eos_id()]
    assert (rendered.begins[0], rendered.ends[0], rendered.begins[-1], rendered.ends[-1]) == (0, 3, 27, 31)


def test_the_weights_of_a_folder_bring_it(llama2, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "tokenizer.model").symlink_to(llama2 / "tokenizer.model")
    assert settings_of_weights(str(tmp_path))["data"] == {"tokenizer": str(tmp_path)}


def test_a_tokenizer_json_beside_it_comes_first(llama2, tmp_path):
    (tmp_path / "tokenizer.model").symlink_to(llama2 / "tokenizer.model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json' is not a Hugging Face tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it is no SentencePiece model; copy it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is no SentencePiece model; copy it again"),
        (b"IQ== 0\nIg== 1\n", r"in the format of Llama 3's own code \(tiktoken\); use the tokenizer.json"),
        ({"model_type": "unigram"}, "it is no BPE model, as Llama's are; convert it with: pip install"),
        ({"user_defined_symbols": ["<sep>"]}, r"it has user-defined symbols \(<sep>\); convert it with: pip install"),
        ({"treat_whitespace_as_suffix": True}, "it has another way to write spaces than Llama's; convert it with: pip"),
    ],
    ids=["empty", "pointer", "tiktoken", "unigram", "own symbols", "suffix"],
)
def test_what_would_give_other_ids_is_refused_in_a_line(tmp_path, content, complaint):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content if isinstance(content, bytes) else trained(**content))
    with pytest.raises(DataError, match=f"cannot read tokenizer '{file}': .*{complaint}") as refused:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(refused.value)


@given(data=st.data())
def test_a_damaged_model_is_one_line_or_works(llama2, tmp_path_factory, data):
    content = bytearray((llama2 / "tokenizer.model").read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("damaged") / "tokenizer.model"
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        load_tokenizer(str(file)).encode_documents(["text"])
    except DataError as error:
        assert str(file) in str(error)
