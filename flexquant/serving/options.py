# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the user's options and the served policy, which vLLM's ``--additional-config`` carries.

The front end puts the policy's route table (:mod:`flexquant.serving.config`) beside the user's options. vLLM
passes both to every worker that the front end starts, so no worker reads a policy. Workers of several front
ends, one on each machine, compare what they received (:mod:`flexquant.serving.worker.ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flexquant.checkpoint.merged_config import MergedConfig
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

OPTIONS_KEY = "flexquant"
"""Key of ``additional_config`` with the user's options."""
RESOLVED_KEY = "flexquant_policy"
"""Key of ``additional_config`` with the policy that the front end has resolved."""


class ServingOptions(BaseModel):
    """Options in ``--additional-config '{"flexquant": {...}}'``; a field's description says what it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    policy: str | None = Field(None, description="a string")
    """Name of a built-in policy or path of a YAML file; None: the checkpoint's, else the default."""
    trace: str | None = Field(None, description="a string")
    """File that receives one JSON line per forward pass (phase, tokens, plan ...); None: no trace."""
    trace_mib: int = Field(1024, ge=1, description="a whole number from 1 on")
    """Largest size of a trace file in MiB, at least 1."""
    verify: bool = Field(False, description="true or false")
    """Whether the checkpoint is compared with the hashes that the merge recorded before it is loaded."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ServingOptions:
        """Read the options; raise :class:`FlexQuantError` for an unknown key or a value of another type."""
        options = additional_config(vllm_config).get(OPTIONS_KEY, {})
        try:
            return cls.model_validate(options)
        except ValidationError as e:
            path, value = e.errors()[0]["loc"], e.errors()[0]["input"]
        fields, allowed = cls.model_fields, list(cls.model_fields)
        if not path:
            problem = f"key '{OPTIONS_KEY}' is {options!r}; give a mapping with keys {allowed}"
        elif path[0] not in fields:
            problem = f"'{OPTIONS_KEY}' has the unknown key '{path[0]}'; allowed: {allowed}"
        else:
            problem = f"'{OPTIONS_KEY}.{path[0]}' is {value!r}; give {fields[str(path[0])].description}"
        raise FlexQuantError(f"additional-config {problem}")


def merged_of(model_config: ModelConfig) -> MergedConfig:
    """Return the section about the variants; raise :class:`FlexQuantError` if it is none of this version."""
    return MergedConfig.from_json(model_config.hf_config.quantization_config)


def additional_config(vllm_config: VllmConfig) -> JsonObject:
    """Return a copy of vLLM's ``additional_config``; raise :class:`FlexQuantError` if it is no mapping."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise FlexQuantError(
            f"additional-config is of the type {type(additional).__name__}, and FlexQuant puts the policy "
            "into it; give a mapping, or none"
        )
    return dict(additional)


@dataclass(frozen=True)
class ServedPolicy:
    """A policy as the front end hands it to workers: its route table for one model and server."""

    name: str
    """Name for users: a built-in policy's name, a file's path, or the name that they gave."""
    digest: str
    """SHA-256 of the policy document without its measured times, in hexadecimal."""
    routes: RouteTable

    @classmethod
    def from_json(cls, data: JsonObject) -> ServedPolicy:
        """Return the policy that :meth:`to_json` returned as data."""
        return cls(data["name"], data["digest"], RouteTable.from_json(data["routes"]))

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ServedPolicy:
        """In a worker: return the policy that the front end has resolved."""
        resolved = additional_config(vllm_config).get(RESOLVED_KEY)
        if resolved is None:
            raise FlexQuantError(
                "the configuration holds no policy, which FlexQuant's front end puts there; build it with "
                "vLLM's EngineArgs.create_engine_config(), in a process in which the plugin is loaded"
            )
        return cls.from_json(resolved)

    def to_json(self) -> JsonObject:
        """Return the policy as JSON-able data."""
        return {**self.described(), "routes": self.routes.to_json()}

    def described(self) -> dict[str, str]:
        """Return the name and the digest, for people."""
        return {"name": self.name, "digest": self.digest}
