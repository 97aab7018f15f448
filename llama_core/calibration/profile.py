"""The profile of a machine: what its operations were measured to take, in a file that people can read and share."""

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from llama_core.config.hardware import DeviceSpec
from llama_core.config.measured_rates import Measured, MeasuredRates
from llama_core.errors import ConfigError, RunDirectoryError
from llama_core.machine.detect import available_cores, cpu_model, software_versions
from llama_core.records.files import cache_directory, now, read_json, write_json
from llama_core.units import GIB

CPU = "cpu"
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
    """The difference of the quartiles over the median of repeated measurements, by the first word of their kinds: the
    median over all sizes. Empty before ``calibrate``."""

    @classmethod
    def of_this_machine(cls) -> Self:
        """Return the profile of a machine of which nothing is known yet."""
        return cls(cpu_model(), available_cores(), software_versions(), now(), host=platform.node())

    @property
    def told_by(self) -> str:
        """Where a number that follows from it is from."""
        return f"measured here on {self.measured_at[:10]}"

    def misfit(self, other: "MachineProfile") -> str:
        """Return in a clause why its times are not those of another machine; empty if they are."""
        if self.device != other.device:
            return f"it is of {self.device}, and this is {other.device}"
        if self.cores != other.cores:
            return f"it was measured with {self.cores} cores, and this process may use {other.cores}"
        for name in _SOFTWARE:
            if self.versions.get(name) != other.versions.get(name):
                return f"it was measured with {name} {self.versions.get(name)}, and this is {other.versions.get(name)}"
        return ""

    def cpu(self, num_ranks: int) -> DeviceSpec:
        """Return the device that ranks on this machine's processor compute on, as many at once."""
        rates = {number: one for number, one in self.rates.items() if one.kinds}
        return DeviceSpec(
            CPU,
            self.device,
            bf16_flops=1.0,  # a peak that nothing measured asks for
            memory_bytes=GIB,
            memory_bandwidth=1.0,
            link_bandwidth=0.0,
            gpus_per_node=num_ranks,
            is_gpu=False,
            measured=rates,
            source=self.told_by,
        )

    def with_rates(self, num_ranks: int, rates: MeasuredRates) -> "MachineProfile":
        """Return the same with other times for a number of ranks, measured now."""
        return replace(self, rates={**self.rates, num_ranks: rates}, measured_at=now())

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as a record."""
        return {
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
        return cls(
            str(record["device"]),
            int(record["cores"]),
            dict(record["versions"]),
            str(record["measured_at"]),
            rates,
            whole,  # type: ignore[arg-type]
            str(record["host"]),
            {name: float(value) for name, value in record["spread"].items()},
        )


def own_profile_path() -> Path:
    """Return where the profile of this machine is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{platform.node()} {cpu_model()} {available_cores()}".lower())
    return cache_directory(None) / "profiles" / f"{name.strip('-')}.json"


def read_profile(path: Path) -> MachineProfile:
    """Return the profile in a file.

    Raises:
        ConfigError: if it cannot be read or is none; the message is one line.
    """
    try:
        return MachineProfile.from_dict(read_json(path))
    except RunDirectoryError as error:
        raise ConfigError(f"the machine's profile {path} cannot be read ({error}); run 'calibrate' again") from error
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
