# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Score one plan after another on one engine, against the log-probabilities of a reference.

Prompts are prefilled in the higher precision always, and their continuations decoded by the plan, so that
nothing but decoding differs from plan to plan. What has been measured is kept in a file after every plan,
and a run that was stopped goes on from there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.output import check_free_space, staged_file
from flexquant.checkpoint.provenance import folder_label
from flexquant.errors import FlexQuantError, UsageError
from flexquant.evaluation.measure import Scores, decode_forced, engine_options
from flexquant.evaluation.settings import Settings
from flexquant.evaluation.subject import Subject
from flexquant.evaluation.text import hash_text, read_rows
from flexquant.measuring.engine import engine, environment, prepare_environment
from flexquant.measuring.machine import describe_command, describe_machine, describe_versions
from flexquant.policy.rules import SCHEMA as POLICY_SCHEMA

if TYPE_CHECKING:
    from vllm import LLM

SCHEMA = "flexquant.sensitivity/v1"
LOWERED, RAISED = "lowered", "raised"


def plan_name(direction: str, layer: int) -> str:
    """Return what results call the plan in which one layer alone is in the other precision."""
    return f"{direction} {layer}"


@dataclass(frozen=True)
class Study:
    """What is measured: every layer of a merged checkpoint alone in the lower and in the higher precision."""

    subject: Subject
    higher: str
    """The variant of higher precision, which prefills."""
    lower: str
    text: Path
    reference: str | None
    """Folder or Hugging Face id of the 16-bit model; None: the higher variant is the reference."""
    settings: Settings
    """With one batch size."""

    def plans(self) -> dict[str, Any]:
        """Return by name what each plan's rule uses: both variants alone first, then layer by layer."""
        found: dict[str, Any] = {self.higher: self.higher, self.lower: self.lower}
        for layer in range(self.subject.num_layers):
            for direction, most, one in (
                (LOWERED, self.higher, self.lower),
                (RAISED, self.lower, self.higher),
            ):
                found[plan_name(direction, layer)] = {"default": most, "layers": {str(layer): one}}
        return found

    def described(self) -> dict[str, Any]:
        """Return what a file of results is of, as data that JSON can hold."""
        return {
            "schema": SCHEMA,
            "checkpoint": folder_label(self.subject.folder),
            "files": {f.name: f.stat().st_size for f in sorted(self.subject.folder.glob("*.safetensors"))},
            "reference": None if self.reference is None else Path(self.reference).name,
            "higher": self.higher,
            "lower": self.lower,
            "layers": self.subject.num_layers,
            "settings": {**asdict(self.settings), "batch_sizes": list(self.settings.batch_sizes)},
            "text": {"file": self.text.name, "sha256": hash_text(self.text)},
        }

    # vLLM's second model runner has another interface for logits processors.
    @environment(VLLM_USE_V2_MODEL_RUNNER="0")
    def measure(self, file: Path, *, overwrite: bool, progress: Callable[[str], None]) -> dict[str, Any]:
        """Measure what ``file`` does not hold yet, and return the document that it holds then.

        ``kl`` of the document holds by plan the mean KL divergence of every row to the reference, in nats a
        token. ``progress`` gets a line for every plan. Raises FlexQuantError for a text that is too short,
        and for a file of another study unless it may be overwritten.
        """
        prepare_environment()
        rows = read_rows(self.text, self.subject.tokenizer, self.settings)
        document = self._load(file, overwrite)
        plans = self.plans()
        missing = [name for name in plans if name not in document["kl"]]
        if not missing:
            return document
        (batch_size,) = self.settings.batch_sizes
        options = engine_options(batch_size, self.settings.prompt_tokens, self.settings.row_tokens)
        with tempfile.TemporaryDirectory(prefix="flexquant-sensitivity-") as folder:
            stored = Path(folder, "reference")
            check_free_space(stored, 4 * len(rows) * self.settings.tokens * self.subject.vocab_size)
            if self.reference is not None:
                progress(f"the reference {self.reference}")
                with engine(self.reference, **options) as llm:
                    self._score(llm, rows, Path(folder, "scores"), store_in=stored)
            # Eager on every device: a compiled engine builds no plans that its policy has not.
            policy = Path(folder, "policy.json")
            policy.write_text(json.dumps(self._policy(self.lower)))
            eager = {**options, "enforce_eager": True}
            with engine(self.subject.folder, flexquant={"policy": str(policy)}, **eager) as llm:
                if self.reference is None:
                    progress(f"the reference {self.higher}")
                    self._take(llm, self.higher)
                    self._score(llm, rows, Path(folder, "scores"), store_in=stored)
                for number, name in enumerate(missing):
                    progress(f"{name} ({len(plans) - len(missing) + number + 1} of {len(plans)})")
                    self._take(llm, plans[name])
                    scores = self._score(llm, rows, Path(folder, f"plan-{number}"), compare_with=stored)
                    assert scores.kl is not None
                    document["kl"][name] = [float(mean) for mean in scores.kl.mean(axis=1)]
                    self._save(file, document)
        return document

    def _load(self, file: Path, overwrite: bool) -> dict[str, Any]:
        described = self.described()
        if overwrite or not file.exists():
            return {**described, "kl": {}}
        try:
            document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            different = [key for key, value in described.items() if document.get(key) != value]
            measured = document["kl"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise UsageError(
                f"{file} is not what 'flexquant sensitivity' wrote ({e!r}); give another --output"
            ) from e
        if different or not isinstance(measured, dict):
            raise UsageError(
                f"{file} has results with other {', '.join(different)}; give another --output, or --overwrite"
            )
        return document

    def _save(self, file: Path, document: dict[str, Any]) -> None:
        document |= {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "argv": describe_command(),
        }
        with staged_file(file) as partial:
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def _policy(self, use: Any) -> dict[str, Any]:
        """Return the policy that decodes by a plan."""
        return {
            "schema": POLICY_SCHEMA,
            "rules": [{"when": {"phase": ["prefill", "mixed"]}, "use": self.higher}, {"use": use}],
        }

    def _take(self, llm: LLM, use: Any) -> None:
        """Decode by another plan from now on."""
        arguments = ("plan", self._policy(use), False)
        for answer in llm.collective_rpc("flexquant_change_policy", args=arguments):
            if "refused" in answer:
                raise FlexQuantError(answer["refused"])

    def _score(self, llm: LLM, rows: list[list[int]], folder: Path, **files: Path) -> Scores:
        (batch_size,) = self.settings.batch_sizes
        return decode_forced(llm, rows, self.settings.prompt_tokens, batch_size, folder, **files)
