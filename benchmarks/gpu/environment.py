"""Write down the environment of the stages: that of a rank of the product.

On CUDA, all stages share the product's caches of compiled blocks and kernels.
"""

import argparse
import json
import os
from pathlib import Path

from llama_core.launch.attempts import flight_recorder
from llama_core.launch.rank.supervisor import worker_environment
from llama_core.machine.detect import available_cores
from llama_core.records.directory import RunDirectory

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variables with the folders of compiled code, and names for them below another folder."""


def environment_of_stages(device: str, folder: Path) -> dict[str, str]:
    """Return the variables of a stage on ``device``.

    Args:
        device: ``cuda`` or ``cpu``.
        folder: takes the flight recorder's files, and compiled code if the product's folder cannot be written.
    """
    own = dict(os.environ)
    if device == "cpu":  # a thread for each process: some run at once
        return worker_environment(own, "cpu", available_cores(), folder)
    environment = worker_environment(own, "cuda", 1, folder)
    flight_recorder(RunDirectory(folder)).mkdir(parents=True, exist_ok=True)  # torch does not make it
    for variable, name in CACHES.items():
        try:
            Path(environment[variable]).mkdir(parents=True, exist_ok=True)
        except OSError:
            environment[variable] = str(folder / name)
    return environment


def main() -> None:
    """Write it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    options.record.write_text(json.dumps(environment_of_stages(options.device, options.folder)))


if __name__ == "__main__":
    main()
