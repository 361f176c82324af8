# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Score one plan after another on one engine, against the log-probabilities of a reference.

Prompts are always prefilled in the highest precision, and only their continuations are decoded by the plan.
Results are saved after every plan, and an interrupted run resumes from them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from flexquant.checkpoint.folder import find_model
from flexquant.checkpoint.merged_checkpoint import folder_label, weights_identity
from flexquant.checkpoint.model_config import JsonObject
from flexquant.checkpoint.output import check_free_space, read_earlier, write_text
from flexquant.documents import parse_json
from flexquant.documents.results import digest_of
from flexquant.evaluation.engine import (
    describe_command,
    describe_machine,
    describe_versions,
    engine,
    environment,
    prepare_environment,
    take_policy,
)
from flexquant.evaluation.inputs import Settings, Subject, read_rows
from flexquant.evaluation.measure import Scores, decode_forced, engine_options
from flexquant.policy.plans import Layers, Plan, all_in, describe_layers, with_layer
from flexquant.policy.rules import Policy, with_derivations
from flexquant.policy.schema import SCHEMA as POLICY_SCHEMA

if TYPE_CHECKING:
    from vllm import LLM

SCHEMA = "flexquant.sensitivity/v2"
Measure = Callable[[Layers], list[float]]
"""Returns the mean KL divergence of every row to the reference under a plan, in nats a token."""


class StudyDocument(TypedDict):
    """A file of results: the study's inputs, and what was measured so far."""

    schema: str
    checkpoint: str
    files: dict[str, str]
    """What :func:`weights_identity` returns for the checkpoint."""
    reference: str | None
    reference_files: dict[str, str] | None
    """The same of the reference."""
    variants: list[str]
    """The most precise one comes first."""
    derive: JsonObject
    """The derivations of those that are derived, as in a policy."""
    layers: int
    """Number of decoder layers."""
    settings: JsonObject
    text: dict[str, str]
    rows: str
    """SHA-256 of the rows of token ids that are drawn from the text."""
    device: str
    versions: dict[str, str]
    kl: dict[str, list[float]]
    """Plan, as ``describe_layers`` has it -> mean KL divergence of every row to the reference, in nats."""
    machine: NotRequired[JsonObject]
    argv: NotRequired[list[str]]


@dataclass(frozen=True)
class Study:
    """The inputs of a measurement: plans of a merged checkpoint, rows of a text and a reference."""

    subject: Subject
    variants: Mapping[str, Policy]
    """Variant -> policy that runs every pass in it; the most precise variant comes first, and prefills."""
    text: Path
    reference: str | None
    """Folder or Hugging Face id of the 16-bit model; None: the most precise variant is the reference."""
    settings: Settings
    """Settings with a single batch size."""

    def __post_init__(self) -> None:
        """Raise FlexQuantError for rows too long and a reference of another model."""
        self.subject.check_length(self.settings.row_tokens, "a prompt and its continuation")
        if self.reference is not None:
            self.subject.check_reference(self.reference)

    @property
    def highest(self) -> str:
        return next(iter(self.variants))

    @cached_property
    def rows(self) -> list[list[int]]:
        """Rows of token ids; raises FlexQuantError for a text that is too short."""
        return read_rows(self.text, self.subject.tokenizer, self.settings)

    def alone(self) -> list[Layers]:
        """Return the plans that run every layer in one variant."""
        return [all_in(variant, self.subject.num_layers) for variant in self.variants]

    def leaving(self, variant: str) -> list[Layers]:
        """Return every plan that runs all layers but one in this variant."""
        whole, others = all_in(variant, self.subject.num_layers), [v for v in self.variants if v != variant]
        return [with_layer(whole, layer, other) for layer in range(len(whole)) for other in others]

    def described(self) -> StudyDocument:
        """Return the document of all that the results depend on, with nothing measured yet."""
        machine, reference = describe_machine(), self.reference
        return {
            "schema": SCHEMA,
            "checkpoint": folder_label(self.subject.folder),
            "files": weights_identity(self.subject.folder),
            "reference": None if reference is None else folder_label(find_model(reference)),
            "reference_files": None if reference is None else weights_identity(find_model(reference)),
            "variants": list(self.variants),
            "derive": policy_that_loads(self.variants).get("derive", {}),
            "layers": self.subject.num_layers,
            "settings": {**asdict(self.settings), "batch_sizes": list(self.settings.batch_sizes)},
            "text": {"file": self.text.name},
            "rows": digest_of(self.rows),
            "device": machine["gpu"] or machine["cpu"],
            "versions": describe_versions(),
            "kl": {},
        }

    def measure(self, file: Path, *, overwrite: bool, progress: Callable[[str], None]) -> StudyDocument:
        """Measure the plans of each layer alone that ``file`` lacks; return the document in it.

        Raises FlexQuantError for a text that is too short and, unless ``overwrite``, another study's file.
        """
        *_, lowest = self.variants
        plans = [*self.alone(), *self.leaving(self.highest), *self.leaving(lowest)]
        with self.measuring(file, overwrite=overwrite, progress=progress) as (document, measure):
            measure_plans(plans, document, measure, progress)
        return document

    @contextmanager
    def measuring(
        self, file: Path, *, overwrite: bool, progress: Callable[[str], None]
    ) -> Iterator[tuple[StudyDocument, Measure]]:
        """Yield the document of ``file``, and what measures a plan, on an engine that it then starts."""
        prepare_environment()
        document = self._load(file, overwrite)
        score: Measure | None = None
        # vLLM's second model runner has another interface for logits processors.
        with environment(VLLM_USE_V2_MODEL_RUNNER="0"), ExitStack() as stack:

            def measure(layers: Layers) -> list[float]:
                nonlocal score
                name = describe_layers(layers)
                if name not in document["kl"]:
                    score = score or stack.enter_context(self._scoring(progress))
                    document["kl"][name] = score(layers)
                    document["machine"], document["argv"] = describe_machine(), describe_command()
                    write_text(file, json.dumps(document, indent=1) + "\n")
                return document["kl"][name]

            yield document, measure

    @contextmanager
    def _scoring(self, progress: Callable[[str], None]) -> Iterator[Measure]:
        """Score the reference, then yield a function that scores a plan on an engine with all variants."""
        (batch_size,) = self.settings.batch_sizes
        options = engine_options(batch_size, self.settings.prompt_tokens, self.settings.row_tokens)
        with tempfile.TemporaryDirectory(prefix="flexquant-sensitivity-") as folder:
            stored, scores = Path(folder, "reference"), Path(folder, "scores")
            check_free_space(stored, 4 * len(self.rows) * self.settings.tokens * self.subject.vocab_size)
            if self.reference is not None:
                progress(f"the reference {self.reference}")
                with engine(self.reference, **options) as llm:
                    self._score(llm, scores, store_in=stored)
            # Run eagerly on every device: a compiled engine has no plans but those of its policy.
            policy = Path(folder, "policy.json")
            policy.write_text(json.dumps(policy_that_loads(self.variants)))
            eager = {**options, "enforce_eager": True}
            with engine(self.subject.folder, flexquant={"policy": str(policy)}, **eager) as llm:
                if self.reference is None:
                    progress(f"the reference {self.highest}")
                    self._take(llm, self.alone()[0])
                    self._score(llm, scores, store_in=stored)

                def score(layers: Layers) -> list[float]:
                    self._take(llm, layers)
                    found = self._score(llm, scores, compare_with=stored)
                    assert found.kl is not None
                    return [float(mean) for mean in found.kl.mean(axis=1)]

                yield score

    def _load(self, file: Path, overwrite: bool) -> StudyDocument:
        described = self.described()
        if overwrite:
            return described

        def read(text: str) -> tuple[JsonObject, StudyDocument]:
            document = parse_json(text)
            document["kl"].items()  # raises AttributeError if it is no mapping
            document.setdefault("derive", {})  # earlier files have none
            return {key: document.get(key) for key in described} | {"kl": {}}, document

        foreign = "is not what 'flexquant sensitivity' wrote ({}); give another --output"
        other = "has results with other {}; give another --output, or --overwrite"
        return read_earlier(file, described, read, foreign=foreign, other=other) or described

    def _take(self, llm: LLM, layers: Layers) -> None:
        """Decode by another plan from now on."""
        prefill = {"when": {"phase": ["prefill", "mixed"]}, "use": self.highest}
        decode = {"use": Plan.from_layers(layers).rule_use()}
        take_policy(llm, "plan", _with_rules([prefill, decode], self.variants))

    def _score(self, llm: LLM, folder: Path, **files: Path) -> Scores:
        (batch_size,) = self.settings.batch_sizes
        return decode_forced(llm, self.rows, self.settings.prompt_tokens, batch_size, folder, **files)


def measure_plans(
    plans: Sequence[Layers], document: StudyDocument, measure: Measure, progress: Callable[[str], None]
) -> None:
    """Measure the plans that the document lacks, with what :meth:`Study.measuring` yields."""
    missing = [plan for plan in plans if describe_layers(plan) not in document["kl"]]
    for number, plan in enumerate(missing, 1):
        progress(f"{describe_layers(plan)} ({len(plans) - len(missing) + number} of {len(plans)})")
        measure(plan)


def policy_that_loads(variants: Mapping[str, Policy]) -> JsonObject:
    """Return a policy that makes an engine load all layers of every variant."""
    *few, last = variants
    rules = [{"when": {"tokens": {"max": tokens}}, "use": use} for tokens, use in enumerate(few, 1)]
    return _with_rules([*rules, {"use": last}], variants)


def _with_rules(rules: list[JsonObject], variants: Mapping[str, Policy]) -> JsonObject:
    return with_derivations({"schema": POLICY_SCHEMA, "rules": rules}, variants.values())
