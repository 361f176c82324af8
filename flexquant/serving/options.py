# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Read the user's options and the served policy, which vLLM's ``--additional-config`` carries.

The front end resolves the policy to a route table (:mod:`flexquant.serving.config`) and puts the table into
the configuration beside the user's options. vLLM passes the configuration to every worker that the front end
starts, so their ranks route by the same table, and no worker reads a policy. Workers of several front ends,
one on each of several machines, compare what they received (:mod:`flexquant.serving.worker.ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError
from flexquant.policy.routes import RouteTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS_KEY = "flexquant"
"""Key of ``additional_config`` with the user's options."""
RESOLVED_KEY = "flexquant_policy"
"""Key of ``additional_config`` with the policy that the front end has resolved."""

KINDS = {bool: (bool, "true or false"), int: (int, "a whole number from 1 on")}
"""Type of an option's default -> type of its values, and their name in messages; other options take text."""


@dataclass(frozen=True)
class ServingOptions:
    """Options in ``--additional-config '{"flexquant": {...}}'``."""

    policy: str | None = None
    """Name of a built-in policy or path of a YAML file; None: the checkpoint's, else the default."""
    trace: str | None = None
    """File that receives one JSON line per forward pass (phase, tokens, plan ...); None: no trace."""
    trace_mib: int = 1024
    """Largest size of a trace file in MiB, at least 1."""
    verify: bool = False
    """Whether the checkpoint is compared with the hashes that the merge recorded before it is loaded."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ServingOptions:
        """Read the options; raise :class:`FlexQuantError` for an unknown key or a value of another type."""
        options = additional_config(vllm_config).get(OPTIONS_KEY, {})
        allowed = list(cls.__dataclass_fields__)
        if not isinstance(options, dict):
            raise FlexQuantError(
                f"additional-config key '{OPTIONS_KEY}' is {options!r}; give a mapping with keys {allowed}"
            )
        for key, value in options.items():
            if key not in allowed:
                raise FlexQuantError(
                    f"additional-config '{OPTIONS_KEY}' has the unknown key '{key}'; allowed: {allowed}"
                )
            default = cls.__dataclass_fields__[key].default
            expected, wanted = KINDS.get(type(default), (str, "a string"))
            if type(value) is not expected or (type(value) is int and value < 1):
                raise FlexQuantError(f"additional-config '{OPTIONS_KEY}.{key}' is {value!r}; give {wanted}")
        return cls(**options)


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
    """SHA-256 of the policy document, in hexadecimal."""
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
