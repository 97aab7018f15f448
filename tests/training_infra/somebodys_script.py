"""Runs Python blocks one statement after the other in one namespace, and continues after errors.

``python somebodys_script.py BLOCKS.json ENDS.json``: the blocks are a list of texts. For each, ENDS lists every
statement's first line and how it ended: null, or a record of the error.
"""

import ast
import json
import sys
from pathlib import Path


def main(blocks, ends):
    namespace = supplied()
    told = [[run(statement, text, namespace) for statement in ast.parse(text).body] for text in json.loads(blocks)]
    Path(ends).write_text(json.dumps(told))


def run(statement, text, namespace):
    """Run one statement and return its first line and how it ended."""
    line = ast.get_source_segment(text, statement).splitlines()[0]
    try:
        exec(compile(ast.Module([statement], []), "page", "exec"), namespace)
    except Exception as error:
        from llama_core.errors import TrainingInfraError

        expected = isinstance(error, TrainingInfraError)
        return line, {"type": type(error).__name__, "text": str(error), "for_people": expected}
    return line, None


def supplied():
    """Return the names that the page leaves to its reader: batches, and the functions of a pipeline stage."""
    import torch

    batches = list(torch.randint(0, 1000, (4, 17), generator=torch.Generator().manual_seed(0)).split(2))
    loaders = ("train", "val", "small", "finetune", "massive")
    return dict.fromkeys((f"{name}_dataloader" for name in loaders), batches) | {
        "microbatches": [float(number) for number in range(8)],
        "forward_fn": lambda microbatch: 2 * microbatch,
        "backward_fn": lambda output: None,
        "optimizer_fn": lambda: None,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]).read_text(), sys.argv[2])
