"""Configurations: any text, any keys, any values."""

import json
from functools import partial

import yaml
from malformed import WORDS, cases, changed, damaged, junk, keep_the_law, naming, write

from llama_core.config.run import RunConfig, config_keys
from llama_core.sweep.grid import SweepConfig

CONFIG = RunConfig().model_dump(mode="json")
SWEEP = {"name": "x", "base": {"model": "tiny_llama3_50m"}, "grid": {"parallel.tp": [1, 2]}, "exclude": []}
PIECES = (
    "- ", ": ", "&a ", "*a", "<<: ", "!!int ", "!!float ", "!!timestamp ", "!!binary ", "!!bool ", "!!set ",
    "!!omap ", "!!python/object/apply:os.system ['true']", "? ", "[", "{", "}", "]", "\n", "\n  ", "model",
    "training", "0b_", "0x_", "-1:60", "1:2:3", ".inf", "---", "...", "|\n  ", ">\n  ", "'", '"\\ud800"', "\t", "#",
    "%YAML 9.9\n", "1e5", "~",
)  # fmt: skip


def text_of(rng):
    """Return the text of a file: changed keys, damaged bytes, or pieces of YAML."""
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 12))).encode(errors="surrogatepass")
    if kind == 1:
        return damaged(rng, yaml.safe_dump(CONFIG).encode())
    if kind == 2:
        return json.dumps(changed(rng, CONFIG)).encode()
    section = rng.choice([name for name, value in CONFIG.items() if isinstance(value, dict)])
    return json.dumps({"model": "tiny_llama3_50m", section: changed(rng, CONFIG[section])}).encode()


def override_of(rng):
    key = rng.choice((*config_keys(), *WORDS, "training", "a.b.c.d.e"))
    return f"{key}{rng.choice(('=', '', '=='))}{rng.choice((json.dumps(junk(rng)), rng.choice(PIECES)))}"


def test_any_file_and_any_override_is_a_run_or_one_line(tmp_path):
    def load(path, overrides):
        config = RunConfig.load(path, overrides)
        assert RunConfig.load(path, overrides).fingerprint() == config.fingerprint()
        config.to_yaml()

    path = tmp_path / "run.yaml"
    for number, rng in cases("configuration"):
        write(path, text_of(rng))
        overrides = [override_of(rng) for _ in range(rng.randrange(3))]
        with naming(number):
            keep_the_law([partial(load, path, overrides), partial(RunConfig.from_mapping, {}, overrides)], tmp_path)


def test_any_sweep_is_one_or_one_line(tmp_path):
    path = tmp_path / "sweep.yaml"
    for number, rng in cases("grid"):
        write(path, json.dumps(changed(rng, SWEEP)).encode() if rng.random() < 0.8 else text_of(rng))
        with naming(number):
            keep_the_law([partial(SweepConfig.load, path)], tmp_path)


def test_a_few_lines_cannot_stand_for_billions_of_values(tmp_path):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 14)]
    merged = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}]}}" for n in range(1, 14)]
    for text in ("\n".join(lines), "\n".join(merged), "model: &m [*m]", "[" * 500, "a: " + "{b: " * 500):
        write(tmp_path / "run.yaml", text.encode())
        keep_the_law([partial(RunConfig.load, tmp_path / "run.yaml")], tmp_path, names=["run.yaml"])
