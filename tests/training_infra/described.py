"""The blocks of ``public_api.md``, and a user's directory to run them in."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("public_api.md")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    name: str
    """The headings above it, without the page's title; numbered from the second of that name on."""
    language: str
    text: str

    @property
    def commands(self):
        """The command lines of a shell block, comments left out and continued lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def blocks(language):
    """Return the blocks of a language, in the order of the page."""
    found, headings, names = [], [], {}
    for part in re.split(r"^(```\w*\n.*?^```$)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        fence = re.fullmatch(r"```(\w*)\n(.*?)```", part, re.DOTALL)
        if fence is None:
            for marks, title in re.findall(r"^(#+) (.*)$", part, re.MULTILINE):
                headings = [*(one for one in headings if one[0] < len(marks)), (len(marks), title.replace("*", ""))]
            continue
        name = " / ".join(title for level, title in headings if level > 1)
        names[name] = names.get(name, 0) + 1
        name = name if names[name] == 1 else f"{name} {names[name]}"
        found.append(Block(name, fence[1], fence[2]))
    return [block for block in found if block.language == language]


def write_somebodys_files(folder):
    """Write what a user may have lying about: modules with our folders' names, and data."""
    for name in ("tasks", "reports", "flows"):
        (folder / f"{name}.py").write_text(f'raise RuntimeError("somebody\'s own {name}.py was imported")\n')
    (folder / "path" / "to").mkdir(parents=True)
    texts = "".join(
        json.dumps({"text": f"document {number}: " + "to be or not to be " * 40}) + "\n" for number in range(60)
    )
    spoken = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]
    for name in ("sample_data", "dev_data", "full_dataset"):
        (folder / f"{name}.jsonl").write_text(texts)
    for name in ("small_dataset", "training_data", "test_data", "dev_data", "data"):
        (folder / "path" / "to" / f"{name}.jsonl").write_text(texts)
    (folder / "path" / "to" / "instruct_data.jsonl").write_text(json.dumps({"messages": spoken}) + "\n")
