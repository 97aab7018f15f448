"""What each server makes of an exported folder: its verdict, the reasons and the commands."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llama_core.hugging_face.peft import is_adapter_folder
from llama_core.hugging_face.servers.exported import ExportedAdapters, ExportedModel, read_adapters, read_model
from llama_core.hugging_face.servers.llama_cpp import LLAMA_CPP
from llama_core.hugging_face.servers.rules import MERGE, Effect, Rule, Server
from llama_core.hugging_face.servers.sglang import SGLANG
from llama_core.hugging_face.servers.vllm import VLLM

Verdict = Literal["natively", "through transformers", "with a loss", "refused"]

SERVERS = (VLLM, SGLANG, LLAMA_CPP)
"""The table; another server is a file beside this one and its row here."""
_ANY_ADAPTERS = (
    Rule(
        "refused",
        lambda it: it.base is None and not it.base_is_elsewhere,
        f"the base {{it.named_base}} is no Hugging Face folder; {MERGE}",
        "each of them reads the base's config.json",
    ),
    Rule(
        "advice",
        lambda it: it.base_is_elsewhere,
        "the base {it.named_base} is not on this machine: what becomes of its own traits is not known",
        "each of them reads the base's config.json",
    ),
)


@dataclass(frozen=True)
class ServerFinding:
    """What a server makes of an export."""

    server: str
    """Its name and version."""
    verdict: Verdict
    notes: tuple[str, ...]
    """A line for each trait that it refuses or loses, then for what else to know."""
    commands: tuple[str, ...]
    """How to serve it there; none if it is refused."""

    @property
    def lines(self) -> list[str]:
        """What to print."""
        indented = [f"  {text}" for text in (*self.notes, *(f"$ {command}" for command in self.commands))]
        return [f"{self.server}: {self.verdict}", *indented]


def findings(folder: Path) -> list[ServerFinding]:
    """Return what each server makes of a folder that ``export-hf`` wrote.

    Reads ``config.json`` or ``adapter_config.json`` and the tokenizer's files, but no weights.

    Args:
        folder: a Hugging Face folder, or a PEFT folder; the traits of its base are known if that is on this machine.

    Raises:
        ConfigError: if ``config.json`` describes no model that we have.
        WeightsError: if another file cannot be read.
    """
    if is_adapter_folder(folder):
        adapters = read_adapters(folder)
        return [_of_adapters(server, adapters) for server in SERVERS]
    model = read_model(folder)
    return [_of_model(server, model) for server in SERVERS]


def _of_model(server: Server, model: ExportedModel) -> ServerFinding:
    said = _said(server.rules, model)
    return _finding(server, model.model_type, said, _filled(server.commands, model.folder))


def _of_adapters(server: Server, adapters: ExportedAdapters) -> ServerFinding:
    base = adapters.base
    said = _said((*_ANY_ADAPTERS, *server.adapter_rules), adapters)
    if base is not None:
        said += [(effect, f"the base: {text}") for effect, text in _said(server.rules, base)]
    rank = next((rank for rank in server.lora_ranks if rank >= adapters.rank), adapters.rank)
    commands = _filled(server.adapter_commands, adapters.folder, base=adapters.named_base, rank=rank)
    return _finding(server, base.model_type if base else None, said, commands)


def _said(rules: Iterable[Rule], exported: ExportedModel | ExportedAdapters) -> list[tuple[Effect, str]]:
    pairs = [(rule.effect, rule.about(exported)) for rule in rules]
    return [(effect, text) for effect, text in pairs if text is not None]


def _finding(
    server: Server, model_type: str | None, said: list[tuple[Effect, str]], commands: tuple[str, ...]
) -> ServerFinding:
    effects = {effect for effect, _ in said}
    verdict: Verdict = "through transformers" if model_type in server.through_transformers else "natively"
    if "refused" in effects:
        verdict = "refused"
        commands = ()
    elif "loss" in effects:
        verdict = "with a loss"
    by_weight = [text for wanted in ("refused", "loss", "advice") for effect, text in said if effect == wanted]
    return ServerFinding(f"{server.name} {server.version}", verdict, tuple(by_weight), commands)


def _filled(commands: tuple[str, ...], folder: Path, base: str = "", rank: int = 0) -> tuple[str, ...]:
    """Return commands with their paths, quoted for a shell."""

    def gguf(path: str, ending: str = "") -> str:
        return shlex.quote(f"{Path(path).name}{ending}.gguf")

    words = {
        "folder": shlex.quote(str(folder)),
        "gguf": gguf(str(folder)),
        "small": gguf(str(folder), "-q4_k_m"),
        "vocabulary": gguf(str(folder), "-vocabulary"),
        "named": shlex.quote(f"{folder.name}={folder}"),
        "base": shlex.quote(base),
        "base_gguf": gguf(base),
        "rank": str(rank),
    }
    return tuple(command.format(**words) for command in commands)
