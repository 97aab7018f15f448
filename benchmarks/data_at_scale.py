"""Measure the start of a rank on many documents, and tokenising: ``python -m benchmarks.data_at_scale --out DIR``.

The first part makes shards of short random documents in ``DIR``, and loads them in a process of its own, as each rank
does. Beside it, another process does what a shuffle of all documents in memory takes: the hashes of those to hold out,
the order of the others and the sums of their lengths. The second part tokenises the same text in turns: as
``training-infra tokenize`` does, with ``tokenizers`` alone, and line by line, as preprocessing scripts do that take one
process for each file. ``DIR`` then holds ``data_at_scale.json`` and ``data_at_scale.md``.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import publish
from llama_core.config.models import model_spec
from llama_core.config.settings import DataConfig
from llama_core.data.bad_lines import BadLines
from llama_core.data.chat import ConversationCounts
from llama_core.data.formats import FormatCounts
from llama_core.data.shards.shard import OFFSETS, TEXT_HASHES, TOKENS, Shard, ShardFacts
from llama_core.data.shards.token_cache import TokenCache, manifest_of, write_manifest
from llama_core.data.tokenising import found_source
from llama_core.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from llama_core.machine.detect import cpu_model
from llama_core.units import MIB

TOKENS_OF_A_DOCUMENT = 10
SEQ_LEN = 2048
STARTS = ((10**6, 1), (10**7, 10), (10**8, 100), (10**7, 4000))
"""Documents and shards of each measurement; the last one shows what a shard costs."""
LARGE = (2 * 10**9, 40_000)
"""What is computed from them."""
SPEC = model_spec("tiny_llama3_50m")
Row = dict[str, Any]


# --- the start of a rank


def make_source(folder: Path, num_documents: int, num_shards: int) -> DataConfig:
    """Make shards of random documents, the files that they stand for, and their manifest."""
    data = DataConfig(source=str(folder / "files"), cache_dir=str(folder / "cache"), tokenizer="sample")
    tokenizer = load_tokenizer(data.tokenizer)
    (folder / "files").mkdir(parents=True)
    for number in range(num_shards):
        (folder / "files" / f"{number:06}.jsonl").write_text('{"text": "not read"}\n')
    source = found_source(data.source or "", data, tokenizer, SPEC)
    drawn = np.random.default_rng(0)
    size = num_documents // num_shards
    shards = tuple(
        _make_shard(source.directory / f"shard-made-{number:06}", size, tokenizer, drawn)
        for number in range(num_shards)
    )
    cache = TokenCache(shards, tokenizer.eos_id, source.directory, BadLines(), FormatCounts(), ConversationCounts())
    write_manifest(manifest_of(source.found.files, source.recipe, source.directory), cache)
    return data


def _make_shard(path: Path, num_documents: int, tokenizer: Tokenizer, drawn: np.random.Generator) -> Shard:
    path.mkdir(parents=True)
    dtype = token_dtype(tokenizer)
    num_tokens = num_documents * TOKENS_OF_A_DOCUMENT
    drawn.integers(tokenizer.vocab_size, size=num_tokens, dtype=dtype).tofile(path / TOKENS)
    np.arange(0, num_tokens + 1, TOKENS_OF_A_DOCUMENT).tofile(path / OFFSETS)
    np.sort(drawn.integers(2**64, size=num_documents, dtype=np.uint64)).tofile(path / TEXT_HASHES)
    return Shard(path, ShardFacts(num_documents, num_tokens, False, path.name), dtype)


def start_of_a_rank(data: DataConfig) -> None:
    """Load data as a rank does, and read the rows of a batch."""
    from llama_core.data.datasets import load_datasets

    mixture = load_datasets(data, SPEC, seq_len=SEQ_LEN).train
    order = mixture.order(0)
    for index in order(np.arange(8)).tolist():
        mixture.row(index)


def shuffle_in_memory(data: DataConfig) -> None:
    """Hold out documents, and shuffle the others, with arrays of all of them."""
    shards = sorted(Path(data.cache_dir or "").glob("shard-*"))
    hashes = np.concatenate([np.fromfile(shard / TEXT_HASHES, np.uint64) for shard in shards])
    lengths = np.concatenate([np.diff(np.fromfile(shard / OFFSETS, np.int64)) for shard in shards])
    kept = np.flatnonzero(hashes >= np.uint64(data.validation_fraction * 2.0**64))
    order = kept[np.argsort(np.random.PCG64(0).random_raw(len(kept)), kind="stable")]
    starts = np.concatenate([[0], np.cumsum(lengths[order])])
    num_rows = int(starts[-1]) // SEQ_LEN
    rows = np.argsort(np.random.PCG64(1).random_raw(num_rows), kind="stable")
    np.searchsorted(starts, rows[:8] * SEQ_LEN)


def _in_a_process(what: str, data: DataConfig) -> Row:
    """Return the CPU seconds and the bytes of memory that one of the functions above takes, beside its imports."""
    command = [sys.executable, "-m", "benchmarks.data_at_scale", "--child", what, data.model_dump_json()]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measured(function: Callable[[DataConfig], None], data: DataConfig) -> Row:
    """Return what a function takes in this process: CPU seconds, on which other work has little influence."""
    import llama_core.data.datasets as _  # noqa: F401  # its imports are not what is measured

    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is that of the imports
    own = _memory("RssAnon")
    everything = _memory("VmRSS")
    began = time.process_time()
    function(data)
    seconds = time.process_time() - began
    return {"seconds": seconds, "bytes": _memory("RssAnon") - own, "peak_bytes": _memory("VmHWM") - everything}


def _memory(kind: str) -> int:
    """Return bytes of this process: ``RssAnon`` is without the pages of files, which the kernel can take back."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) * 1024


CHILDREN = {"start": start_of_a_rank, "shuffle": shuffle_in_memory}


def _median(rows: Sequence[Row]) -> Row:
    return {what: statistics.median(row[what] for row in rows) for what in rows[0]}


def starts(folder: Path) -> list[Row]:
    """Return a row for each number of documents; the first rank of a machine looks into every shard."""
    rows = []
    for num_documents, num_shards in STARTS:
        place = folder / f"documents-{num_documents}-{num_shards}"
        shutil.rmtree(place, ignore_errors=True)
        data = make_source(place, num_documents, num_shards)
        row: Row = {"documents": num_documents, "shards": num_shards}
        row["first"] = _in_a_process("start", data)
        row["rank"] = _median([_in_a_process("start", data) for _ in range(5)])
        row["shuffle"] = _in_a_process("shuffle", data)
        rows.append(row)
        sys.stdout.write(f"{num_documents:,} documents: {json.dumps(row)}\n")
        shutil.rmtree(place)
    return rows


# --- tokenising


def _text_files(folder: Path, num_files: int) -> list[Path]:
    """Divide the built-in sample into files."""
    from llama_core.data.sample import sample_file

    lines = sample_file(folder).read_text(encoding="utf-8").splitlines(keepends=True)
    files = [folder / f"text-{number}.jsonl" for number in range(num_files)]
    for number, file in enumerate(files):
        file.write_text("".join(lines[number::num_files]), encoding="utf-8")
    return files


def with_shards(files: Sequence[Path], tokenizer: Path, folder: Path) -> None:
    """Tokenise files as ``training-infra tokenize --workers 1`` does."""
    from llama_core.data.find import find_files
    from llama_core.data.formats import FieldNames
    from llama_core.data.shards import grouping
    from llama_core.data.shards.workers import ShardOrder, Start, build_orders

    data = DataConfig(source=tuple(map(str, files)), tokenizer=str(tokenizer))
    found = find_files(*map(str, files)).files
    assert all(file.num_bytes < grouping.ALONE_BYTES for file in found)
    orders = [ShardOrder((file,), FieldNames(), file, folder / "cache") for file in found]
    build_orders(orders, Start(data, SPEC), 1, lambda done, total: None)
    shutil.rmtree(folder / "cache")


def with_tokenizers_alone(files: Sequence[Path], tokenizer: Path, folder: Path) -> None:
    """Give the texts to ``tokenizers``, whose ids are not kept."""
    from tokenizers import Tokenizer as Rust

    rust = Rust.from_file(str(tokenizer))
    for file in files:
        texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
        rust.encode_batch_fast(texts, add_special_tokens=False)


def line_by_line(files: Sequence[Path], tokenizer: Path, folder: Path) -> None:
    """Encode each line by itself and append its ids to a file."""
    from tokenizers import Tokenizer as Rust

    rust = Rust.from_file(str(tokenizer))
    for file in files:
        with (folder / "ids.bin").open("wb") as ids, file.open(encoding="utf-8") as lines:
            for line in lines:
                ids.write(np.array(rust.encode(json.loads(line)["text"]).ids, np.int32).tobytes())


WAYS = {"ours": with_shards, "tokenizers alone": with_tokenizers_alone, "line by line": line_by_line}


def speeds(folder: Path, repeats: int) -> Row:
    """Return the MB of text that each way tokenises in a second of CPU time, one process on one core each."""
    from llama_core.data.sample import sample_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    files = _text_files(folder, 4)
    tokenizer = sample_tokenizer(folder)
    num_bytes = sum(file.stat().st_size for file in files)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.data_at_scale", "--child", way, str(tokenizer), str(folder)]
            before = _cpu_seconds_of_children()
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            subprocess.run([*command, *map(str, files)], check=True, env=environment)
            found[way].append(_cpu_seconds_of_children() - before)
    bare = _seconds_to_start()
    return {way: num_bytes / 1e6 / (statistics.median(seconds) - bare[way]) for way, seconds in found.items()}


def _seconds_to_start() -> dict[str, float]:
    """Return the CPU seconds of each way without any text: of its imports."""
    own = [sys.executable, "-c", "import benchmarks.data_at_scale"]
    worker = [sys.executable, "-c", "import llama_core.data.shards.worker"]
    seconds = {}
    for way, commands in {"ours": (own, worker), "tokenizers alone": (own,), "line by line": (own,)}.items():
        before = _cpu_seconds_of_children()
        for command in commands:
            subprocess.run(command, check=True)
        seconds[way] = _cpu_seconds_of_children() - before
    return seconds


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the tables


def computed(rows: Sequence[Row]) -> Row:
    """Return the row of ``LARGE``: a shard costs what it does in the last two rows, a shuffle what a document does."""
    num_documents, num_shards = LARGE
    few, largest, many = rows[1], rows[2], rows[3]
    row: Row = {"documents": num_documents, "shards": num_shards}
    for who in ("first", "rank"):
        row[who] = {
            what: many[who][what]
            + (many[who][what] - few[who][what]) / (many["shards"] - few["shards"]) * (num_shards - many["shards"])
            for what in ("seconds", "bytes")
        }
    factor = num_documents / largest["documents"]
    row["shuffle"] = {what: factor * largest["shuffle"][what] for what in ("seconds", "bytes", "peak_bytes")}
    return row


def as_markdown(machine: str, rows: Sequence[Row], speed: Row) -> str:
    """Return the tables."""
    lines = [
        f"{machine}; CPU seconds, with the files in the page cache.",
        "",
        "| documents | shards | first rank of a machine | every other rank | its memory, beside imports | a shuffle of "
        "all documents in memory | times as fast | times as little memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (*rows, computed(rows)):
        rank, shuffle = row["rank"], row["shuffle"]
        is_computed = "peak_bytes" not in rank
        cells = [
            f"{row['documents']:.0e}{' (computed)' if is_computed else ''}",
            f"{row['shards']:,}",
            f"{row['first']['seconds']:.2f} s",
            f"{rank['seconds']:.2f} s",
            f"{rank['bytes'] / MIB:.0f} MiB",
            f"{shuffle['seconds']:.2f} s, {shuffle['peak_bytes'] / MIB:,.0f} MiB at its peak",
            f"{shuffle['seconds'] / rank['seconds']:.1f}",
            f"{shuffle['peak_bytes'] / max(rank['bytes'], MIB):,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| tokenising | MB of text in a CPU second | share of `tokenizers` alone |", "|---|---|---|"]
    alone = speed["tokenizers alone"]
    lines += [f"| {way} | {rate:.2f} | {rate / alone:.2f} |" for way, rate in speed.items()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_at_scale", description="Measure data at scale.")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go; needs 5 GB of room for a while")
    parser.add_argument("--page", type=Path, help="a page whose tables are rewritten")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way to tokenise")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return _child(*options.child)
    folder = options.out or Path("data-at-scale")
    folder.mkdir(parents=True, exist_ok=True)
    rows = starts(folder)
    speed = speeds(folder / "text", options.repeats)
    machine = f"{cpu_model()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    figures = {"machine": machine, "starts": rows, "speeds": speed}
    publish("data at scale", figures, as_markdown(machine, rows, speed), folder=folder, page=options.page)
    return 0


def _child(what: str, *given: str) -> int:
    if what in CHILDREN:
        sys.stdout.write(json.dumps(measured(CHILDREN[what], DataConfig.model_validate_json(given[0]))))
    else:
        tokenizer, folder, *files = map(Path, given)
        WAYS[what](files, tokenizer, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
