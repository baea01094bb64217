"""A campaign's configuration: one TOML file, checked in full before anything runs.

Unknown keys are refused naming the nearest known one; a wrong type is one line
with the file and the key.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from factory.errors import UserError
from factory.executors.base import Limits
from leaderboard.records import FREE_ON_RESUME

__all__ = [
    "CampaignConfig",
    "DeviceConfig",
    "ExecutorConfig",
    "LimitsConfig",
    "changed_keys",
    "load_campaign",
    "preset_names",
    "preset_text",
    "to_toml",
    "validate_config",
    "with_defaults",
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LimitsConfig(_Model):
    """Wall-clock limits of one CPU stage of one trial, in seconds."""

    emulate_s: float = Field(default=300.0, gt=0)
    compile_s: float = Field(default=600.0, gt=0)

    def as_limits(self) -> Limits:
        """The same numbers in the form that crosses processes."""
        return Limits(**self.model_dump())


class DeviceConfig(_Model):
    """Limits of a device job; the seconds are for one regime's message to the candidate."""

    load_s: float = Field(default=180.0, gt=0)
    """From the start of a candidate's process to a launchable kernel, compilation included."""
    gate_s: float = Field(default=30.0, gt=0)
    screen_s: float = Field(default=30.0, gt=0)
    time_s: float = Field(default=60.0, gt=0)
    control_s: float = Field(default=300.0, gt=0)
    """For baselines, some of which tune themselves on first use."""
    drift: float = Field(default=0.03, gt=0)
    """Relative change of a control within the job that voids it."""
    slow_factor: float = Field(default=3.0, gt=1)
    """A screened candidate slower than this times the best is not timed."""


class ExecutorConfig(_Model):
    """Where stages run; free to change when a campaign is resumed."""

    kind: Literal["inline", "ray"] = "inline"
    workers: int = Field(default=0, ge=0)
    """CPU worker processes; 0 means one for each CPU."""
    ray_address: str | None = None
    """Cluster to join; None starts one on this machine."""


class CampaignConfig(_Model):
    """What ``factory launch`` runs."""

    name: str = Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Campaigns are told apart by it: resuming looks for this name."""
    operation: str
    space: str | None = None
    """Offered subset of the schedule space, by the family's name for it; None is its first."""
    budget: int = Field(default=64, ge=1)
    """Finished trials in all, resumed ones included; never more than are offered."""
    gpu_minutes: float = Field(default=0.0, ge=0)
    """Minutes of gate, screen and time in all, over all GPUs, after which nothing is begun;
    0 sets no limit."""
    patience: int = Field(default=0, ge=0)
    """Finished trials without a new best after which nothing is begun; 0 sets no limit."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of inputs and sampler."""
    sampler: Literal["tpe", "gp", "random", "grid"] = "tpe"
    first: int = Field(default=0, ge=0)
    """So many schedules, the best by the cost model, are proposed before the sampler is asked."""
    warm_start: bool | list[str] = False
    """Whether the sampler knows the trials of earlier campaigns on the same operation and source;
    a list names the campaigns, by name or id."""
    clock: Literal["gpu", "modelled"] | None = None
    """Clock that ranks; None is ``gpu`` where there is an sm90 GPU, else ``modelled``."""
    stop_after: Literal["emulate", "compile"] = "compile"
    """Last stage of a campaign on the modelled clock; a measured one always compiles."""
    finalists: int = Field(default=3, ge=1, le=16)
    """Best measured candidates that are re-timed together before a winner is named."""
    controls: list[str] | None = None
    """Baselines timed beside the candidates, by name; None is every one that can run."""
    limits: LimitsConfig = LimitsConfig()
    device: DeviceConfig = DeviceConfig()
    executor: ExecutorConfig = ExecutorConfig()


def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets, sorted."""
    folder = resources.files("factory") / "presets"
    return tuple(
        sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))
    )


def preset_text(name: str) -> str:
    """TOML text of a shipped preset."""
    return (resources.files("factory") / "presets" / f"{name}.toml").read_text("utf-8")


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _known_keys(info.annotation, f"{prefix}{name}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _explain(error: ValidationError, origin: str) -> str:
    """The first problem of ``error`` as one line."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    value = problem["input"]
    if problem["loc"][:1] == ("warm_start",):  # a union: its problems name its members
        return f"{origin}: warm_start should be true, false or a list of campaigns"
    if key == "name" and isinstance(value, str):
        return (
            f"{origin}: name should be 1 to 100 letters, digits, '_', '.' and '-', the first a "
            f"letter or digit, not {_shown(value)}"
        )
    match problem["type"]:
        case "extra_forbidden":
            known = list(_known_keys(CampaignConfig))
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            return f"{origin}: unknown key {key!r}; {hint}"
        case "model_type":
            return (
                f"{origin}: {key} should be a table, not {_shown(value)} ({type(value).__name__})"
            )
        case "missing":
            return f"{origin}: key {key!r} is missing"
        case _:
            said = problem["msg"].removeprefix("Input should be ")
            kind = type(value).__name__
            return f"{origin}: {key} should be {said}, not {_shown(value)} ({kind})"


def validate_config(values: Mapping[str, Any], origin: str) -> CampaignConfig:
    """Check ``values`` in full.

    Parameters
    ----------
    values : Mapping
        As parsed from TOML.
    origin : str
        File or preset named in the message.

    Raises
    ------
    UserError
        One line with the origin, the key and the fix.
    """
    try:
        return CampaignConfig.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(_explain(error, origin)) from error


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin}: not valid TOML: {error}") from error


def load_campaign(campaign: str, overrides: Mapping[str, Any] | None = None) -> CampaignConfig:
    """Read a preset, a TOML file, or the plain campaign of an operation.

    Parameters
    ----------
    campaign : str
        A preset's name, a path, or an operation's name.  A preset wins over
        an operation of the same name; anything that ends in ``.toml`` or
        holds a ``/`` is a path.
    overrides : Mapping, optional
        Dotted key to value, for example ``{"executor.kind": "ray"}``; a value
        of None leaves the key alone.

    Raises
    ------
    UserError
        No such campaign, or a key or type is wrong.
    """
    values: dict[str, Any]
    if campaign in preset_names():
        origin = f"preset {campaign}"
        values = _parse(preset_text(campaign), origin)
    elif campaign.endswith(".toml") or "/" in campaign:
        origin = campaign
        try:
            text = Path(campaign).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
            raise UserError(f"{campaign}: {why}") from error
        values = _parse(text, origin)
    else:
        import operations

        if campaign not in operations.names():
            known = [*preset_names(), *operations.names()]
            near = difflib.get_close_matches(campaign, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"presets: {', '.join(preset_names())}"
            raise UserError(
                f"unknown campaign {campaign!r}: neither a preset, a .toml file "
                f"nor an operation; {hint}"
            )
        origin = f"operation {campaign}"
        values = {"name": campaign, "operation": campaign}
    for dotted, value in (overrides or {}).items():
        if value is None:
            continue
        *parents, leaf = dotted.split(".")
        table = values
        for parent in parents:
            table = table.setdefault(parent, {})
        table[leaf] = value
    return validate_config(values, origin)


def to_toml(config: CampaignConfig) -> str:
    """Canonical TOML text that loads back to an equal configuration."""
    lines: list[str] = []
    tables: list[str] = []
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            tables.append(f"\n[{key}]")
            tables.extend(f"{k} = {_toml_value(v)}" for k, v in value.items() if v is not None)
        elif value is not None:
            lines.append(f"{key} = {_toml_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(v) for v in value)}]"
    return repr(value)


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys that differ and may not differ when a campaign is resumed."""
    changed: list[str] = []
    for key in sorted({*old, *new}):
        if not prefix and key in FREE_ON_RESUME:
            continue
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            changed += changed_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            changed.append(f"{prefix}{key}")
    return changed


def with_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration with the keys that came later, each with its default."""
    later = {
        name: info.get_default(call_default_factory=True, validated_data={})
        for name, info in CampaignConfig.model_fields.items()
        if name not in stored and not info.is_required()
    }
    return {
        **{k: v.model_dump() if isinstance(v, BaseModel) else v for k, v in later.items()},
        **stored,
    }
