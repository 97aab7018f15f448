"""Where the rates of a device are from: the profile that a user names, one in the cache, or the data sheet."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from llama_core.calibration.profile import (
    DeviceKind,
    MachineProfile,
    own_profiles_of_gpu,
    read_profile,
)
from llama_core.config.hardware import DEFAULT_GPU_TYPE, DeviceSpec, gpu_spec, recognise_gpu
from llama_core.config.settings import LaunchConfig
from llama_core.errors import ConfigError
from llama_core.records.files import user_path

KEY = "launch.machine_profile"


@dataclass(frozen=True)
class KnownDevice:
    """A device that plans are timed on, and where its rates are from."""

    spec: DeviceSpec | None
    """None for a processor of which nothing was measured that tells the time."""
    is_foreign: bool = False
    """Whether its rates were measured on another machine."""
    note: str = ""
    """Why a profile is not used, in a line."""

    @property
    def source(self) -> str:
        """Where its rates are from, in words."""
        if self.spec is None:
            return "none, because nothing that tells the time was measured on this CPU ('training-infra calibrate')"
        return self.spec.source if self.spec.measured else f"data sheet of {self.spec.label}"

    def as_dict(self) -> dict[str, Any]:
        """Return the source as a record."""
        return {
            "source": self.source,
            "is_measured": self.spec is not None and bool(self.spec.measured),
            "is_foreign": self.is_foreign,
            "note": self.note,
        }


class FoundProfile(NamedTuple):
    """A profile that a user has named."""

    profile: MachineProfile
    path: Path
    is_foreign: bool

    @property
    def told_by(self) -> str:
        """Where a number that follows from it is from."""
        return self.profile.told_by_foreign if self.is_foreign else self.profile.told_by


def gpu_for(launch: LaunchConfig) -> KnownDevice:
    """Return the GPU that a run is planned for: measured, if the named profile or one in the cache is of it.

    Raises:
        ConfigError: if the named profile is missing, damaged, or of something else; the message is one line.
    """
    sheet = gpu_spec(launch.gpu_type or DEFAULT_GPU_TYPE)
    notes: list[str] = []
    found = named_profile(launch, "cuda", sheet, notes.append)
    if found is not None:
        device = replace(found.profile.gpu(), source=found.told_by)
        if device.name != sheet.name:
            raise ConfigError(
                f"{KEY}={found.path} is of {found.profile.device}, and launch.gpu_type={sheet.name}; leave one of them "
                "out"
            )
        return KnownDevice(device, found.is_foreign)
    own = _own_of_gpu(sheet, notes.append)
    return KnownDevice(own.gpu()) if own is not None else KnownDevice(sheet, note="; ".join(notes))


def gpu_type_named(launch: LaunchConfig) -> str | None:
    """Return the type of the GPU whose profile the user names by its file; None if it is none.

    Raises:
        ConfigError: as ``gpu_for``.
    """
    if launch.machine_profile is None or user_path(launch.machine_profile).is_dir():
        return None
    profile = _read_named(launch.machine_profile)
    return profile.gpu().name if profile.kind == "cuda" else None


def named_profile(
    launch: LaunchConfig, kind: DeviceKind, sheet: DeviceSpec | None, tell: Callable[[str], None]
) -> FoundProfile | None:
    """Return the profile that the user names; None without one, and if a named folder has none of the device.

    A file counts whatever machine it is of. In a folder, a GPU's is that of its type, and a processor's has to fit this
    machine; of several, the newest.

    Args:
        launch: how the run starts.
        kind: of the device that the run is planned for.
        sheet: the GPU; None for this machine's processor.
        tell: called with a line that says that a folder has none.

    Raises:
        ConfigError: as ``gpu_for``.
    """
    named = launch.machine_profile
    if named is None:
        return None
    path = user_path(named)
    if not path.is_dir():
        profile = _read_named(named)
        if profile.kind != kind:
            raise ConfigError(
                f"{KEY}={named} is of {profile.device}, a {profile.kind} device, and the run is planned for {kind}; "
                "leave one of them out"
            )
        return FoundProfile(profile, path, is_foreign=bool(profile.misfit(_here(kind))))
    suited = []
    for file in sorted(path.glob("*.json")):
        profile = read_profile(file)
        misfit = profile.misfit(_here(kind))
        is_of_device = not misfit if sheet is None else recognise_gpu(profile.device) == sheet
        if profile.kind == kind and is_of_device:
            suited.append(FoundProfile(profile, file, is_foreign=bool(misfit)))
    if not suited:
        label = sheet.label if sheet is not None else _here(kind).device
        tell(f"{KEY}={named} has no profile of {label}")
        return None
    return max(suited, key=lambda found: (not found.is_foreign, found.profile.measured_at))


def _read_named(named: str) -> MachineProfile:
    path = user_path(named)
    if not path.exists():
        raise ConfigError(
            f"{KEY}={named} does not exist; name a file that 'training-infra calibrate --out FILE' wrote, or a folder "
            "of such files"
        )
    return read_profile(path)


def _own_of_gpu(sheet: DeviceSpec, tell: Callable[[str], None]) -> MachineProfile | None:
    """Return the newest profile of a GPU in the cache; it may be of another machine that shares the home directory."""
    suited = []
    for path in own_profiles_of_gpu(sheet):
        try:
            profile = read_profile(path)
        except ConfigError as error:
            tell(str(error))
            continue
        if recognise_gpu(profile.device) != sheet:
            continue
        # the device that is here, if any, need not be the one that is planned for
        if misfit := profile.misfit(replace(_here("cuda"), device=profile.device)):
            tell(f"the profile {path} is not used: {misfit}; 'training-infra calibrate' measures it again")
        else:
            suited.append(profile)
    return max(suited, key=lambda profile: profile.measured_at, default=None)


@cache
def _here(kind: DeviceKind) -> MachineProfile:
    return MachineProfile.of_this_machine(kind)
