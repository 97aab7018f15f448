"""The profile of a machine: what its operations were measured to take, in a file that people can read and share."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from llama_core.config.hardware import CpuRates, DeviceSpec, processor, recognise_gpu
from llama_core.config.measured_rates import Measured, MeasuredRates, Sizes
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.machine.detect import available_cores, device_label, software_versions
from llama_core.records.files import cache_directory, now, read_json, write_json
from llama_core.units import counted

DeviceKind = Literal["cpu", "cuda"]
_SOFTWARE = ("torch",)
"""Software whose version a measured time depends on."""


@dataclass(frozen=True)
class MachineProfile:
    """What was measured on a machine."""

    device: str
    """The maker's name of the device that computes."""
    cores: int
    """Cores that its processes may use."""
    versions: Mapping[str, str]
    """The software that was measured."""
    measured_at: str
    """When the newest of it was measured."""
    rates: Mapping[int, MeasuredRates] = field(default_factory=dict)
    """What operations take, by the number of ranks that compute at once."""
    whole: Mapping[str, tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=dict)
    """The shares of ``MeasuredRates`` for layers and ends of a model, by its name in ``demand``."""
    host: str = ""
    spread: Mapping[str, float] = field(default_factory=dict)
    """The difference of the quartiles over the median of repeated measurements, by kind and sizes, as ``figure`` names
    them. Empty before ``calibrate``."""
    kind: DeviceKind = "cpu"

    @classmethod
    def of_this_machine(cls, kind: DeviceKind = "cpu") -> Self:
        """Return the profile of a machine's processor, or of its first GPU, of which nothing is known yet."""
        host = platform.node()
        return cls(device_label(kind), available_cores(), software_versions(), now(), host=host, kind=kind)

    @property
    def told_by(self) -> str:
        """Where a number that follows from it is from."""
        return self._told("here" if self.host in {"", platform.node()} else f"on {self.host}")

    @property
    def told_by_foreign(self) -> str:
        """Where a number is from that follows from it, although it is of another machine."""
        return f"{self._told('on another machine')}; on yours times, and which plan is fastest, may differ"

    def _told(self, where: str) -> str:
        cores = "" if self.kind == "cuda" else f"{counted(self.cores, 'core')}, "
        software = f"torch {self.versions.get('torch', 'unknown')}"
        return f"measured {where} on {self.measured_at[:10]} ({self.device}, {cores}{software})"

    def misfit(self, other: "MachineProfile") -> str:
        """Return in a clause why its times are not those of another machine; empty if they are."""
        if self.device != other.device:
            return f"it is of {self.device}, and this is {other.device}"
        if self.kind == "cpu" and self.cores != other.cores:
            return f"it was measured with {self.cores} cores, and this process may use {other.cores}"
        for name in _SOFTWARE:
            is_known = name in other.versions  # plans are made without torch, too
            if is_known and self.versions.get(name) != other.versions[name]:
                return f"it was measured with {name} {self.versions.get(name)}, and this is {other.versions.get(name)}"
        return ""

    def cpu(self, num_ranks: int) -> DeviceSpec:
        """Return the device that ranks on this machine's processor compute on, as many at once."""
        rates = {number: one for number, one in self.rates.items() if one.kinds}
        typical = processor(self.device, CpuRates.of_cores(self.cores), num_ranks)
        return replace(typical, measured=rates, source=self.told_by)

    def gpu(self) -> DeviceSpec:
        """Return the device as the data sheet has it, with what was measured.

        Kernels take as long however many devices a machine has, so only links depend on the number of ranks.

        Raises:
            ConfigError: if there is no data sheet of it, which has the memory that a plan must fit.
        """
        row = recognise_gpu(self.device)
        if row is None:
            raise ConfigError(
                f"the profile of {self.device}, measured on {self.measured_at[:10]}, cannot plan, because the table of "
                "GPUs does not have this device; leave the profile out, and name another with --gpu-type"
            )
        kernels = self.rates[min(self.rates)].kinds if self.rates else {}
        rates = {number: replace(one, kinds={**kernels, **one.kinds}) for number, one in self.rates.items()}
        return replace(row, measured=rates, source=self.told_by)

    def with_rates(self, num_ranks: int, rates: MeasuredRates) -> "MachineProfile":
        """Return the same with other times for a number of ranks, measured now."""
        return replace(self, rates={**self.rates, num_ranks: rates}, measured_at=now())

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as a record."""
        return {
            "kind": self.kind,
            "device": self.device,
            "cores": self.cores,
            "host": self.host,
            "versions": dict(self.versions),
            "measured_at": self.measured_at,
            "spread": dict(self.spread),
            "whole": dict(self.whole),
            "seconds": {
                str(number): {kind: measured.as_dict() for kind, measured in sorted(rates.kinds.items())}
                for number, rates in sorted(self.rates.items())
            },
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Return the profile that ``as_dict`` recorded.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: if the record is none.
        """
        rates = {
            int(number): MeasuredRates({kind: Measured.from_dict(one) for kind, one in kinds.items()})
            for number, kinds in record["seconds"].items()
        }
        whole = {
            name: tuple((float(forward), float(backward)) for forward, backward in shares)
            for name, shares in record["whole"].items()
        }
        if any(len(shares) != 2 for shares in whole.values()):
            raise ValueError("it has no shares of layers and ends")
        kind = str(record["kind"])
        if kind not in {"cpu", "cuda"}:
            raise ValueError(f"it is of a {kind}, neither cpu nor cuda")
        return cls(
            str(record["device"]),
            int(record["cores"]),
            dict(record["versions"]),
            str(record["measured_at"]),
            rates,
            whole,  # type: ignore[arg-type]
            str(record["host"]),
            {name: float(value) for name, value in record["spread"].items()},
            kind,  # type: ignore[arg-type]
        )


def figure(kind: str, sizes: Sizes) -> str:
    """Return the name of what was measured: an operation's kind and sizes."""
    return f"{kind} {'x'.join(map(str, sizes))}"


def own_profiles() -> Path:
    """Return the folder of the profiles that ``calibrate`` and runs have measured."""
    return cache_directory(None) / "profiles"


def own_profile_path(kind: DeviceKind = "cpu") -> Path:
    """Return where the profile of this machine's processor, or of its GPUs, is kept."""
    device = device_label(kind)
    if kind == "cuda":  # its name begins with the device, for those who plan for it
        return own_profiles() / f"{_file_of_gpu(device)}{_slug(platform.node())}.json"
    return own_profiles() / f"{_slug(f'{platform.node()} {device} {available_cores()}')}.json"


def own_profiles_of_gpu(device: DeviceSpec) -> list[Path]:
    """Return the files of own profiles of a GPU, whatever machine it is in."""
    found: list[Path] = []
    for name in device.reported_names:
        found += own_profiles().glob(f"cuda-*{_slug(name)}--*.json")
    return sorted(set(found))


def _file_of_gpu(reported_name: str) -> str:
    return f"cuda-{_slug(reported_name)}--"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_profile(path: Path) -> MachineProfile:
    """Return the profile in a file.

    Raises:
        ConfigError: if it cannot be read or is none; the message is one line.
    """
    try:
        return MachineProfile.from_dict(read_json(path))
    except RunDirectoryError as error:
        raise ConfigError(f"the profile {path} cannot be read ({error}); run 'calibrate' again") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ConfigError(f"{path} is not the profile of a machine ({problem}); run 'calibrate' again") from error


def write_profile(path: Path, profile: MachineProfile) -> None:
    """Write a profile.

    Raises:
        RunDirectoryError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, profile.as_dict())
