import logging
import os
import pty
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpora import byte_cache, texts, texts_in, write_jsonl
from hypothesis import given
from hypothesis import strategies as st

from llama_core.config.models import model_spec
from llama_core.config.run import DataConfig
from llama_core.config.settings import UNNAMED
from llama_core.data.chat import ConversationCounts
from llama_core.data.datasets import BatchStream, load_datasets, validation_batches
from llama_core.data.mixture import Mixture
from llama_core.data.packing import PackedDataset
from llama_core.data.selection import everything
from llama_core.errors import ConfigError, DataError
from llama_core.models.batch import IGNORE_INDEX, Batch

DOCUMENTS = [f"document number {n}, of its own words" for n in range(40)]


def rows_of(documents, seq_len=6, *, document_mask=True):
    return PackedDataset(everything(byte_cache(documents)), seq_len, document_mask=document_mask)


def dataset_of(documents, seq_len=6, *, document_mask=True):
    return Mixture({UNNAMED: rows_of(documents, seq_len, document_mask=document_mask)}, {UNNAMED: 1})


def load(source, tmp_path, *, seq_len=16, vocab_size=300, on_progress=None, **settings):
    data = DataConfig(source=str(source), cache_dir=str(tmp_path / "cache"), **settings)
    spec = replace(model_spec("tiny_llama3_50m"), vocab_size=vocab_size)
    return load_datasets(data, spec, seq_len=seq_len, on_progress=on_progress)


def trained_on(datasets):
    (rows,) = datasets.train.sources
    return texts_in(rows.selection)


def held_out_of(datasets):
    return texts_in(datasets.validation[UNNAMED].selection)


def take(stream, count):
    return [stream.next_batch() for _ in range(count)]


def tensors(batch):
    return batch.tokens_BS, batch.targets_BS, batch.positions_BS


def assert_same(one, other):
    assert all(map(torch.equal, tensors(one), tensors(other)))


def join(batches):
    return Batch(*map(torch.cat, zip(*map(tensors, batches), strict=True)))


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "data.jsonl", DOCUMENTS)


@given(documents=texts, seed=st.integers(0, 9), world_size=st.integers(1, 4), share=st.integers(1, 3))
def test_the_ranks_shares_join_to_the_global_batch(documents, seed, world_size, share):
    dataset, batch_size = dataset_of(documents), world_size * share
    single = BatchStream(dataset, batch_size, seed)
    ranks = [BatchStream(dataset, batch_size, seed, rank, world_size) for rank in range(world_size)]
    for _ in range(4):
        assert_same(join([rank.next_batch() for rank in ranks]), single.next_batch())


@given(documents=texts, batch_size=st.sampled_from([2, 4]), before=st.integers(0, 6), ranks=st.sampled_from([1, 2]))
def test_a_resumed_stream_continues_as_if_never_stopped(documents, batch_size, before, ranks):
    dataset = dataset_of(documents)
    uninterrupted = take(BatchStream(dataset, batch_size, 3), before + 4)
    stopped = BatchStream(dataset, batch_size, 3, 0, ranks)
    take(stopped, before)
    resumed = BatchStream(dataset, batch_size, 3)
    resumed.load_state_dict(stopped.state_dict())
    for one, other in zip(take(resumed, 4), uninterrupted[before:], strict=True):
        assert_same(one, other)


@given(documents=texts, batch_size=st.integers(1, 9), seed=st.integers(0, 9))
def test_an_epoch_visits_every_row_once(documents, batch_size, seed):
    dataset = dataset_of(documents)
    rows = torch.cat([batch.tokens_BS for batch in take(BatchStream(dataset, batch_size, seed), 2 * len(dataset))])
    all_rows = sorted(dataset.row(index)[0].tolist() for index in range(len(dataset)))
    for epoch in range(2):
        visited = rows[epoch * len(dataset) : (epoch + 1) * len(dataset)].tolist()
        assert sorted(visited) == all_rows


def test_each_epoch_and_seed_has_its_own_order():
    dataset = dataset_of(DOCUMENTS)
    first, second = take(BatchStream(dataset, len(dataset), 0), 2)
    other = BatchStream(dataset, len(dataset), 1).next_batch()
    assert not torch.equal(first.tokens_BS, second.tokens_BS)
    assert not torch.equal(first.tokens_BS, other.tokens_BS)


@pytest.mark.parametrize(
    "other",
    [
        BatchStream(dataset_of(DOCUMENTS[1:]), 4, 0),
        BatchStream(dataset_of(DOCUMENTS, 7), 4, 0),
        BatchStream(dataset_of(DOCUMENTS), 4, 1),
    ],
    ids=["documents", "seq_len", "seed"],
)
def test_a_stream_over_other_data_refuses_the_state(other):
    state = BatchStream(dataset_of(DOCUMENTS), 4, 0).state_dict()
    with pytest.raises(DataError, match=r"the checkpoint was made on other data \(digest .*, now .*\)"):
        other.load_state_dict(state)


def test_a_batch_the_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match=r"training\.batch_size=6 cannot be divided over 4 .*; use 8"):
        BatchStream(dataset_of(DOCUMENTS), 6, 0, 0, 4)


def test_without_a_document_mask_a_row_has_no_positions():
    batch = BatchStream(dataset_of(DOCUMENTS, document_mask=False), 4, 0).next_batch()
    assert batch.positions_BS is None
    assert [micro.positions_BS for micro in batch.split(2)] == [None, None]


@given(documents=texts, batch_size=st.integers(1, 7), microbatch_size=st.integers(1, 7))
def test_microbatches_join_to_the_batch(documents, batch_size, microbatch_size):
    batch = BatchStream(dataset_of(documents), batch_size, 0).next_batch()
    micros = batch.split(microbatch_size)
    assert_same(join(micros), batch)
    assert sum(micro.num_targets() for micro in micros) == batch.num_targets()
    assert max(len(micro.tokens_BS) for micro in micros) <= microbatch_size


def test_a_batch_counts_its_targets_and_moves_as_a_whole():
    batch = BatchStream(dataset_of(DOCUMENTS), 4, 0).next_batch()
    assert int(batch.num_targets()) == sum(target != IGNORE_INDEX for target in batch.targets_BS.flatten().tolist())
    moved = batch.to("meta")
    assert {moved.tokens_BS.device.type, moved.targets_BS.device.type, moved.positions_BS.device.type} == {"meta"}


@given(documents=texts, batch_size=st.integers(1, 5), max_rows=st.integers(1, 30))
def test_validation_takes_distinct_rows_in_the_order_of_the_dataset(documents, batch_size, max_rows):
    dataset = rows_of(documents)
    batches = list(validation_batches(dataset, batch_size, max_rows))
    rows = torch.cat([batch.tokens_BS for batch in batches]).tolist()
    count = min(max_rows, len(dataset))
    spread = [index * len(dataset) // count for index in range(count)]
    assert sorted(set(spread)) == spread
    assert rows == [dataset.row(index)[0].tolist() for index in spread]
    assert all(len(batch.tokens_BS) == batch_size for batch in batches[:-1])


@given(documents=texts, batch_size=st.integers(1, 5), max_rows=st.integers(1, 30), world_size=st.integers(1, 3))
def test_filled_batches_of_validation_have_one_size_and_the_same_targets(documents, batch_size, max_rows, world_size):
    """Compiled blocks would be compiled anew for a smaller one."""
    dataset = rows_of(documents)
    for rank in range(world_size):
        share = (batch_size, max_rows, rank, world_size)
        batches = list(validation_batches(dataset, *share, fills_batches=True))
        plain = list(validation_batches(dataset, *share))
        assert {len(batch.tokens_BS) for batch in batches} == {batch_size}
        assert len(batches) == len(plain)
        targets, expected = (torch.cat([batch.targets_BS for batch in those]) for those in (batches, plain))
        assert torch.equal(targets[: len(expected)], expected)
        assert (targets[len(expected) :] == IGNORE_INDEX).all()


def test_a_fraction_of_zero_holds_out_nothing(source, tmp_path):
    assert load(source, tmp_path, validation_fraction=0.0).validation == {}


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.7])
def test_training_and_held_out_documents_are_disjoint_and_complete(source, tmp_path, fraction):
    datasets = load(source, tmp_path, validation_fraction=fraction)
    assert sorted(trained_on(datasets) + held_out_of(datasets)) == sorted(DOCUMENTS)


def test_documents_of_the_validation_source_are_not_trained_on(source, tmp_path, caplog):
    validation = write_jsonl(tmp_path / "held.jsonl", [DOCUMENTS[3], "something else"])
    datasets = load(source, tmp_path, validation=str(validation))
    assert set(held_out_of(datasets)) == {DOCUMENTS[3], "something else"}
    assert sorted(trained_on(datasets)) == sorted({*DOCUMENTS} - {DOCUMENTS[3]})
    assert datasets.statistics.num_shared_documents == 1
    assert "1 documents of" in caplog.text


def test_a_single_source_trains_on_the_same_rows_as_a_mixture_of_one(source, tmp_path):
    single = load(source, tmp_path).train
    (rows,) = single.sources
    mixed = Mixture({UNNAMED: rows}, {UNNAMED: 7})
    for one, other in zip(take(BatchStream(single, 4, 3), 20), take(BatchStream(mixed, 4, 3), 20), strict=True):
        assert_same(one, other)


def test_a_single_text_is_not_held_out_and_a_warning_says_so(tmp_path, caplog):
    datasets = load(write_jsonl(tmp_path / "a.jsonl", ["the only text there is"]), tmp_path)
    assert datasets.validation == {}
    assert "holds a single text, so nothing is held out" in caplog.text


def test_held_out_documents_that_are_most_of_the_data_are_reported_with_both_counts(tmp_path, caplog):
    texts = ["a short text of its own", "x" * 5000]
    for text in (texts, texts[::-1]):  # whichever of the two is held out
        load(write_jsonl(tmp_path / "a.jsonl", text), tmp_path)
    [warning] = {record.getMessage() for record in caplog.records}
    assert warning.startswith(f"most of {tmp_path}/a.jsonl is held out: 5,002 tokens, and 25 to train on")
    caplog.clear()
    load(tmp_path / "a.jsonl", tmp_path, validation_fraction=0.6)
    load(tmp_path / "a.jsonl", tmp_path, validation_fraction=0.0)
    assert caplog.text == ""


def test_too_little_text_beside_what_is_held_out_says_how_much_that_is(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["a short text of its own", "x" * 5000])
    with pytest.raises(
        DataError, match=r"leaves 25 tokens .*\(1 more, of 5,002 tokens, are held out\), fewer than the 65"
    ):
        load(source, tmp_path, seq_len=64)


def test_several_paths_are_one_source(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", DOCUMENTS[:15])
    other = write_jsonl(tmp_path / "other.jsonl", DOCUMENTS[15:])
    together = write_jsonl(tmp_path / "together.jsonl", DOCUMENTS)
    data = DataConfig(source=[str(one), str(other)], cache_dir=str(tmp_path / "cache"))
    datasets = load_datasets(data, model_spec("tiny_llama3_50m"), seq_len=16)
    expected = load(together, tmp_path)
    assert datasets.train.digest == expected.train.digest
    assert datasets.validation[UNNAMED].digest == expected.validation[UNNAMED].digest


def test_several_paths_are_held_out_as_one_source(source, tmp_path):
    held = [write_jsonl(tmp_path / f"held-{n}.jsonl", [DOCUMENTS[n]]) for n in (3, 7)]
    datasets = load(source, tmp_path, validation=[str(path) for path in held])
    assert set(held_out_of(datasets)) == {DOCUMENTS[3], DOCUMENTS[7]}
    assert datasets.statistics.num_shared_documents == 2


def test_an_error_of_several_paths_names_the_first_of_them(tmp_path):
    paths = [str(write_jsonl(tmp_path / f"{n}.jsonl", ["ab"])) for n in range(5)]
    data = DataConfig(source=paths, cache_dir=str(tmp_path / "cache"))
    named = f"{', '.join(paths[:3])} and 2 more"
    with pytest.raises(DataError, match=rf"data source '{named}' leaves 20 tokens in 5 documents to train on"):
        load_datasets(data, model_spec("tiny_llama3_50m"), seq_len=64)


def test_statistics_count_the_training_documents(source, tmp_path):
    datasets = load(source, tmp_path, validation_fraction=0.3)
    statistics = datasets.statistics
    trained = trained_on(datasets)
    assert statistics.num_documents == len(trained)
    assert statistics.num_tokens == sum(len(text) + 2 for text in trained)
    assert statistics.num_sequences == len(datasets.train)
    assert statistics.num_documents + statistics.num_validation_documents == len(DOCUMENTS)
    assert 0 < statistics.entropies.bigram < statistics.entropies.unigram


def test_entropies_are_of_the_training_documents_and_are_cached(source, tmp_path):
    all_of_it = load(source, tmp_path, validation_fraction=0.0).statistics
    part = load(source, tmp_path, validation_fraction=0.7).statistics
    assert part.entropies.unigram != all_of_it.entropies.unigram
    assert load(source, tmp_path, validation_fraction=0.7).statistics == part
    assert len(list((tmp_path / "cache").glob("entropy-*.json"))) == 2


def test_bad_lines_are_reported_in_the_log_and_the_statistics(source, tmp_path, caplog):
    source.write_text(source.read_text() + "oops\n")
    with caplog.at_level(logging.WARNING):
        statistics = load(source, tmp_path).statistics
    assert statistics.bad_lines == {"invalid JSON": 1}
    assert statistics.bad_line_examples[0].startswith(f"{source}:41: invalid JSON")
    assert f"left out of {source}: unusable lines (1 invalid JSON); the first: {source}:41" in caplog.text


def test_progress_reaches_the_end(source, tmp_path):
    calls = []
    load(source, tmp_path, on_progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (source.stat().st_size, source.stat().st_size)


def test_the_sample_is_data_like_any_other(tmp_path):
    datasets = load("sample", tmp_path, seq_len=512, text_field="not the sample's")
    assert datasets.statistics.num_tokens > 5_000_000
    assert datasets.statistics.bad_lines == {}
    assert 2 < datasets.statistics.entropies.bigram < datasets.statistics.entropies.unigram < 4


CHATS = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!" * (1 + n % 3)}] for n in range(40)
]


def test_conversations_are_counted_and_only_assistant_text_is_trained_on(tmp_path):
    system = {"role": "system", "content": "count"}
    chats = [[system, *chat, *chat, {"role": "user", "content": ""}] for chat in CHATS]
    datasets = load(write_jsonl(tmp_path / "a.jsonl", chats), tmp_path, seq_len=1024, validation_fraction=0.3)
    statistics = datasets.statistics
    assert statistics.conversations == ConversationCounts(40, 40, 40, 80, 40)
    assert (statistics.num_truncated, statistics.num_left_out, statistics.notes[1:]) == (0, 0, ())
    assert statistics.num_sequences == len(datasets.train)
    batch = BatchStream(datasets.train, len(datasets.train), 0).next_batch()
    targets = batch.targets_BS[batch.targets_BS != IGNORE_INDEX]
    assert statistics.num_targets == len(targets)
    said = bytes(targets.tolist()).decode().split("<|eot_id|>")[:-1]
    assert len(said) == 2 * statistics.num_documents
    assert set(said) <= {chat[1]["content"] for chat in CHATS}


def test_held_out_conversations_stay_held_out_under_another_template(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", CHATS)
    one, other = (
        load(source, tmp_path, seq_len=512, validation_fraction=0.3, chat_template=template)
        for template in ("llama2", "llama3")
    )
    one_hashes, other_hashes = (
        [part.shard.text_hashes[: part.num_documents].tolist() for part in rows.validation[UNNAMED].selection.parts]
        for rows in (one, other)
    )
    assert one_hashes == other_hashes
    assert one.validation[UNNAMED].digest != other.validation[UNNAMED].digest


def test_truncated_conversations_are_reported(tmp_path):
    long = [{"role": "user", "content": "?" * 300}, {"role": "assistant", "content": "!"}]
    source = write_jsonl(tmp_path / "a.jsonl", [*CHATS, long, [*CHATS[0], *long]])
    statistics = load(source, tmp_path, seq_len=256, validation_fraction=0.0).statistics
    assert (statistics.num_truncated, statistics.num_left_out) == (2, 1)
    assert statistics.notes[-1] == (
        "2 of the conversations to train on are longer than training.seq_len=256 and are truncated; "
        "1 of them lose every token that counts and are left out"
    )
    with pytest.raises(DataError, match=r"none of 42 conversations .* has a token that counts .* first 65; .*seq_len"):
        load(source, tmp_path, seq_len=64, validation_fraction=0.0)


def test_texts_may_be_validated_on_conversations_and_conversations_on_texts(tmp_path):
    chats, texts = (write_jsonl(tmp_path / f"{len(kind[0])}.jsonl", kind) for kind in (CHATS, DOCUMENTS))
    on_texts = load(texts, tmp_path, seq_len=256, validation=str(chats))
    on_chats = load(chats, tmp_path, seq_len=256, validation=str(texts))
    assert on_texts.statistics.conversations == on_chats.statistics.conversations
    assert on_texts.validation[UNNAMED].num_targets == on_chats.statistics.num_targets
    assert on_chats.validation[UNNAMED].num_targets == on_texts.statistics.num_targets


def test_entropies_cover_only_the_tokens_that_count(tmp_path):
    chats = [[{"role": "user", "content": "abcdefgh"}, {"role": "assistant", "content": "aaaa"}]]
    settings = {"seq_len": 256, "validation_fraction": 0.0, "chat_template": str(tmp_path / "plain.jinja")}
    Path(settings["chat_template"]).write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    source = write_jsonl(tmp_path / "a.jsonl", chats)
    assert load(source, tmp_path, **settings).statistics.entropies.unigram == 0
    assert load(source, tmp_path, loss_on="all", **settings).statistics.entropies.unigram > 1


def test_texts_among_conversations_count_in_full(tmp_path):
    statistics = load(
        write_jsonl(tmp_path / "a.jsonl", [CHATS[0], DOCUMENTS[0]]), tmp_path, seq_len=256, validation_fraction=0.0
    ).statistics
    assert statistics.num_targets == len(f"{CHATS[0][1]['content']}<|eot_id|>") + len(DOCUMENTS[0]) + 1
    assert "1 of the documents are texts, where every token counts in the loss" in statistics.notes


def test_less_text_than_one_sequence_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["abc"])
    assert len(load(source, tmp_path, seq_len=4).train) == 1
    with pytest.raises(DataError, match=r"leaves 5 tokens in 1 documents .*fewer than the 6 that one sequence takes"):
        load(source, tmp_path, seq_len=5)


def test_a_tokenizer_that_does_not_fit_is_refused_before_any_work(source, tmp_path):
    with pytest.raises(DataError, match="'bytes' has 258 tokens"):
        load(source, tmp_path, vocab_size=200)
    assert not (tmp_path / "cache").exists()


def test_tokenising_needs_no_torch_and_is_silent_without_a_terminal(source, tmp_path):
    loaded = load_in_a_process_without_torch(source, tmp_path, stderr=subprocess.PIPE)
    assert (loaded.returncode, loaded.stderr) == (0, b"")


def test_a_terminal_shows_a_progress_bar(source, tmp_path):
    terminal, its_end = pty.openpty()
    load_in_a_process_without_torch(source, tmp_path, stderr=its_end)
    os.close(its_end)
    assert f"tokenising {source.name}".encode() in os.read(terminal, 100_000)
    os.close(terminal)


def load_in_a_process_without_torch(source, tmp_path, stderr):
    command = (
        "import sys; sys.modules['torch'] = None;"
        "from llama_core.config.run import RunConfig; from llama_core.data.datasets import load_datasets;"
        f"config = RunConfig(data=dict(source={source.name!r}, cache_dir={str(tmp_path / 'cache')!r}));"
        "load_datasets(config.data, config.spec, seq_len=8)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    command_line = [sys.executable, "-c", command]
    return subprocess.run(command_line, env=environment, cwd=source.parent, stderr=stderr, check=False)


def test_a_cache_directory_that_cannot_be_made_is_one_line(source, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(
        DataError, match=r"cannot write the token cache in .*/cache': (File exists|Not a directory); make"
    ):
        load(source, tmp_path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to mount a small file system")
@pytest.mark.parametrize("name", ["data.jsonl", "sample"])
def test_a_full_disk_is_one_line_and_leaves_no_cache(tmp_path, name):
    write_jsonl(tmp_path / "data.jsonl", ["x" * 1000] * 2000)
    disk = tmp_path / "cache"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        source = {"data.jsonl": tmp_path / "data.jsonl", "sample": "sample"}[name]
        with pytest.raises(
            DataError, match=rf"cannot write the token cache in '{disk}': the disk of \S+ is full: 1.00 MiB free; make"
        ):
            load(source, tmp_path)
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root, to become a user without rights")
def test_a_cache_of_another_user_can_still_be_used():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        source = write_jsonl(folder / "data.jsonl", DOCUMENTS)
        load(source, folder)
        os.seteuid(65534)
        try:
            statistics = load(source, folder, validation_fraction=0.5).statistics
        finally:
            os.seteuid(0)
    assert statistics.entropies.unigram > 0
