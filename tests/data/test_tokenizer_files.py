"""Folders of published shapes give the ids of transformers, or are refused in a line that names the file."""

import io
import json
import random
from itertools import product

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from trained_tokenizers import with_template
from transformers import AutoTokenizer

from llama_core.data.tokenizer import load_tokenizer
from llama_core.errors import DataError

WORDS = ["a small house stood by the wide river", "user asks and assistant answers: 12 + 30 = 42", "é漢 ▁x"] * 4
TEXTS = [
    "a house 12 + 30",
    " a house",
    "  two  spaces  ",
    "a\n b\n",
    "",
    "é漢☕",
    "<s>a house</s> by",
    "<s> the </s>\n",
    "<|turn|>user\na<|over|> b<|turn|>",
    "x<|over|>  y <tool> z<pad>",
    "<unk> <mask>",
    "▁wide ▁",
]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ANY = LLAMA | {"tokenizer_class": "PreTrainedTokenizerFast"}


def trained_model():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def sentence_piece():
    content = trained_model()
    return content, sentencepiece.SentencePieceProcessor(model_proto=content).get_piece_size()


def llama_json(added=("<|turn|>",), template=None):
    """A ``tokenizer.json`` like Llama 2's."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=330, show_progress=False, special_tokens=special[:3])
    )
    described = json.loads(tokenizer.to_str())
    vocab = described["model"]["vocab"]
    for token in special[3:]:
        vocab.setdefault(token, len(vocab))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens(list(added))
    return with_template(tokenizer, template).to_str()


def byte_json(added=("<|turn|>",), template=None):
    """A ``tokenizer.json`` like Llama 3's or Qwen's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>", *added])
    return with_template(tokenizer, template).to_str()


def written(folder, content, **files):
    """Write a folder with a vocabulary, and with a JSON file for each keyword."""
    folder.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        (folder / "tokenizer.model").write_bytes(content)
    else:
        (folder / "tokenizer.json").write_text(content)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def flags(content, **changed):
    """An added token as files spell it."""
    usual = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content} | usual | changed


def assert_the_ids_of_transformers(folder):
    ours = load_tokenizer(str(folder))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text, adds in product(TEXTS, (True, False)):
        expected = theirs.encode(text, add_special_tokens=adds)
        assert ours.encode_input(text, adds_special=adds) == expected, (text, theirs.convert_ids_to_tokens(expected))
    assert ours.vocab_size == 1 + max(theirs.get_vocab().values())
    assert ours.special_ids == {index for index, token in theirs.added_tokens_decoder.items() if token.special}
    for name, token in theirs.special_tokens_map.items():
        assert ours.named_tokens.get(name) == token
    return ours, theirs


BESIDE_MODEL = {
    "nothing of Llama's own": {},
    "legacy": {"legacy": True},
    "not legacy": {"legacy": False},
    "no prefix": {"add_prefix_space": False},
    "no prefix, legacy": {"add_prefix_space": False, "legacy": True},
    "bos": {"add_bos_token": True},
    "no bos": {"add_bos_token": False},
    "bos and eos": {"add_bos_token": True, "add_eos_token": True},
    "a pad": {"pad_token": "<pad>"},
    "more special tokens": {"additional_special_tokens": ["<|turn|>", "<|over|>"]},
    "tokens of one model": {"mask_token": "<mask>", "tool_token": "<tool>"},
}


@pytest.mark.parametrize("keys", BESIDE_MODEL.values(), ids=BESIDE_MODEL)
@pytest.mark.parametrize(
    "base", [LLAMA, ANY, LLAMA | {"tokenizer_class": "CodeLlamaTokenizer"}], ids=["llama", "any", "code"]
)
def test_keys_beside_a_sentencepiece_model(sentence_piece, tmp_path, base, keys):
    assert_the_ids_of_transformers(written(tmp_path / "folder", sentence_piece[0], tokenizer_config=base | keys))


def decoder(num_pieces, **changed):
    """``added_tokens_decoder`` of two tokens after the pieces, as the slow class writes it."""
    own = {0: flags("<unk>"), 1: flags("<s>"), 2: flags("</s>")}
    new = {num_pieces: flags("<|turn|>", **changed), num_pieces + 1: flags("<tool>", special=False, normalized=True)}
    return {str(index): token for index, token in (own | new).items()}


@pytest.mark.parametrize("strips", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}], ids=str)
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("base", [LLAMA, ANY], ids=["llama", "any"])
def test_added_tokens_decoder_beside_a_sentencepiece_model(sentence_piece, tmp_path, base, legacy, strips):
    content, num_pieces = sentence_piece
    config = base | {"legacy": legacy, "added_tokens_decoder": decoder(num_pieces, **strips), "mask_token": "<tool>"}
    # where the newer file lists the tokens, transformers reads the older ones no more
    older = {"<ignored>": num_pieces + 7}
    folder = written(tmp_path / "folder", content, tokenizer_config=config, added_tokens=older)
    assert_the_ids_of_transformers(folder)


@pytest.mark.parametrize("base", [LLAMA, ANY, LLAMA | {"legacy": True}], ids=["llama", "any", "legacy"])
@pytest.mark.parametrize("named", [{}, {"eos_token": "<|over|>"}, {"pad_token": flags("<pad>")}], ids=str)
def test_added_tokens_json_and_the_map_of_special_tokens_beside_a_sentencepiece_model(
    sentence_piece, tmp_path, base, named
):
    content, num_pieces = sentence_piece
    added = {"<|over|>": num_pieces, "<|turn|>": num_pieces + 1, "<pad>": num_pieces + 2}
    folder = written(tmp_path / "folder", content, tokenizer_config=base, added_tokens=added, special_tokens_map=named)
    assert_the_ids_of_transformers(folder)


BESIDE_JSON = {
    "nothing": {},
    "flags that tokenizer.json overrules": {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True},
    "legacy": {"legacy": True},
    "no prefix": {"add_prefix_space": False, "legacy": False},
    "a pad that is new": {"pad_token": "<pad>"},
    "special tokens that are words": {"unk_token": "▁a", "pad_token": "house"},
    "named tokens": {"extra_special_tokens": {"tool_token": "<tool>"}, "mask_token": "<mask>"},
    "split special tokens": {"split_special_tokens": True},
}


@pytest.mark.parametrize("keys", BESIDE_JSON.values(), ids=BESIDE_JSON)
@pytest.mark.parametrize("template", [None, "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("LlamaTokenizer", llama_json),
        ("LlamaTokenizerFast", byte_json),
        ("PreTrainedTokenizerFast", llama_json),
        ("PreTrainedTokenizerFast", byte_json),
        ("CodeLlamaTokenizer", llama_json),
        ("GPT2TokenizerFast", byte_json),
        ("GPTNeoXTokenizerFast", byte_json),
        ("Qwen2Tokenizer", byte_json),
    ],
)
def test_keys_beside_a_tokenizer_json(tmp_path, name, make, template, keys):
    config = LLAMA | {"tokenizer_class": name} | keys
    assert_the_ids_of_transformers(written(tmp_path / "folder", make(template=template), tokenizer_config=config))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("make", [llama_json, byte_json])
def test_the_model_of_a_folder_may_choose_the_class(tmp_path, make, name, model_type):
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": name, "legacy": False}
    folder = written(tmp_path / "folder", make(), tokenizer_config=config, config={"model_type": model_type})
    assert_the_ids_of_transformers(folder)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("shape", ["decoder", "older files"])
@pytest.mark.parametrize("make", [llama_json, byte_json])
def test_added_tokens_beside_a_tokenizer_json(tmp_path, make, shape, name):
    content = make()
    size = tokenizers.Tokenizer.from_str(content).get_vocab_size()
    config = LLAMA | {"tokenizer_class": name}
    if shape == "decoder":
        listed = {str(token["id"]): flags(token["content"]) for token in json.loads(content)["added_tokens"]}
        listed[str(size)] = flags("<tool>", special=False, normalized=True)
        listed[str(size + 1)] = flags("<|over|>", lstrip=True)
        folder = written(tmp_path / "folder", content, tokenizer_config=config | {"added_tokens_decoder": listed})
    else:
        added = {"<tool>": size, "<pad>": size + 1}
        special = {"pad_token": "<pad>", "additional_special_tokens": ["<|over|>", "<|turn|>"]}
        folder = written(
            tmp_path / "folder", content, tokenizer_config=config, added_tokens=added, special_tokens_map=special
        )
    assert_the_ids_of_transformers(folder)


@pytest.mark.parametrize("seed", range(12))
def test_folders_of_random_shapes(sentence_piece, tmp_path, seed):
    draw = random.Random(seed)
    content, size = sentence_piece
    if draw.random() < 0.5:
        content = draw.choice([llama_json, byte_json])(template=draw.choice([None, "<s> $A"]))
        size = tokenizers.Tokenizer.from_str(content).get_vocab_size()
    config = LLAMA | {"tokenizer_class": draw.choice(["LlamaTokenizer", "PreTrainedTokenizerFast"])}
    for key in ("legacy", "add_prefix_space", "add_bos_token", "add_eos_token"):
        if draw.random() < 0.5:
            config[key] = draw.choice([True, False])
    files = {}
    new = draw.sample(["<|over|>", "<pad>", "<tool>", "<mask>"], draw.randint(0, 4))
    if draw.random() < 0.5:
        config["pad_token"] = "<pad>"
    if draw.random() < 0.5:
        files["special_tokens_map"] = {"eos_token": flags("</s>"), "bos_token": "<s>"}
    if draw.random() < 0.5:
        files["added_tokens"] = {token: size + place for place, token in enumerate(new)}
    else:
        old = [] if isinstance(content, bytes) else json.loads(content)["added_tokens"]
        listed = {token["id"]: flags(token["content"]) for token in old}
        listed |= {size + place: flags(token, special=draw.random() < 0.5) for place, token in enumerate(new)}
        config["added_tokens_decoder"] = {str(index): token for index, token in listed.items()}
    assert_the_ids_of_transformers(written(tmp_path / "folder", content, tokenizer_config=config, **files))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"added_tokens": {"<over>": 5000}},
            r"added_tokens\.json' gives the token '<over>' the id 5000, but .* it gets 3",
        ),
        (
            {"tokenizer_config": LLAMA | {"added_tokens_decoder": {"7": flags("<over>")}}},
            r"tokenizer_config\.json' gives the token '<over>' the id 7, but",
        ),
        ({"tokenizer_config": {"tokenizer_class": "T5Tokenizer"}}, "tokenizer_class=T5Tokenizer, which does not cut"),
        (
            {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}},
            r"GPT2Tokenizer, which is not read from tokenizer\.m",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"one": flags("<a>")}}},
            r"the added tokens in .*cannot be read",
        ),
        ({"tokenizer_config": {"added_tokens_decoder": ["<a>"]}}, r"the added tokens in .*cannot be read"),
        ({"added_tokens": ["<a>"]}, r"added_tokens\.json' is not a JSON object"),
        ({"special_tokens_map": {"eos_token": "<over>"}}, r"special_tokens_map\.json' names the token '<over>', which"),
    ],
    ids=["id after a gap", "id of a piece", "class", "class of a json", "index", "list", "no object", "unknown eos"],
)
def test_what_would_give_other_ids_is_refused_in_a_line_that_names_the_file(sentence_piece, tmp_path, files, complaint):
    folder = written(tmp_path / "folder", sentence_piece[0], **files)
    with pytest.raises(DataError, match=complaint) as refused:
        load_tokenizer(str(folder))
    assert "\n" not in str(refused.value)


def test_the_fingerprint_tells_what_the_files_beside_a_vocabulary_change(sentence_piece, tmp_path):
    content, num_pieces = sentence_piece
    shapes = [
        {},
        {"tokenizer_config": LLAMA},
        {"tokenizer_config": LLAMA | {"legacy": True}},
        {"tokenizer_config": LLAMA | {"add_prefix_space": False}},
        {"tokenizer_config": LLAMA | {"add_bos_token": True}},
        {"tokenizer_config": LLAMA, "added_tokens": {"<|turn|>": num_pieces}},
        {"tokenizer_config": LLAMA, "added_tokens": {"<|over|>": num_pieces}},
    ]
    folders = [written(tmp_path / str(number), content, **files) for number, files in enumerate(shapes)]
    assert len({load_tokenizer(str(folder)).fingerprint for folder in folders}) == len(shapes)
