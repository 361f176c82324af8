# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a variant lost against the 16-bit model, by itself or with prompts that another variant read.

It is measured on the first tokens of the documents of ``flexquant.documents.texts`` that are held out. The
16-bit model answers once, and its likeliest tokens are kept; KL divergences count all others as one token.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from llmcompressor.utils.dev import get_main_device
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from flexquant.checkpoint.measured_loss import PROMPT_TOKENS, Loss
from flexquant.documents.texts import Corpus, document_tokens, read_corpus, start_of_row
from flexquant.quantization.sampling import Language, known_documents, known_languages

TOKENS = 128
"""Tokens of each document; shorter documents are left out."""
BATCH = 4
"""Documents in one pass."""
LIKELIEST = 1024
DIGITS = 4
"""Decimals of what is recorded: equal inputs give equal files."""

TextRows = Mapping[str, Sequence[list[int]]]
"""Kind -> rows of TOKENS token ids."""


class RowAnswers(NamedTuple):
    """What the 16-bit model says after each token but the last of a row."""

    likeliest: torch.Tensor
    """Token ids, int64 [tokens, LIKELIEST or the vocabulary's size]."""
    log_probabilities: torch.Tensor
    """Log-probabilities of these, and of all others together, fp32 [tokens, likeliest + 1]."""
    nll: torch.Tensor
    """Negative log-likelihood of the token that follows, fp32 [tokens], in nats."""


class Reference(NamedTuple):
    """The texts to measure with, and what the 16-bit model says to them."""

    rows: TextRows
    """All rows, also of kinds without answers."""
    answers: Mapping[str, Sequence[RowAnswers]]
    """Kind -> the answers to its rows, all of them finite."""


def read_reference(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Reference:
    """Have the 16-bit model read all texts that are held out, of the kinds that it knows."""
    rows = measuring_rows(read_corpus(held_out=True), known_languages(model, tokenizer), tokenizer)
    return reference_of(model, rows)


def reference_of(model: PreTrainedModel, rows: TextRows) -> Reference:
    """Return the 16-bit model's answers to ``rows``, of the kinds to which all are finite."""
    answers = {kind: [_answers(*said) for said in _said(model, of_kind)] for kind, of_kind in rows.items()}
    finite = {kind: found for kind, found in answers.items() if all(a.nll.isfinite().all() for a in found)}
    return Reference(rows, finite)


def measuring_rows(
    corpus: Corpus, languages: Sequence[Language], tokenizer: PreTrainedTokenizerBase
) -> TextRows:
    """Return the rows to measure with, by kind of English text; all ``languages`` are one kind."""
    start = start_of_row(tokenizer)
    kinds: dict[str, list[list[int]]] = {}
    for kind, document in known_documents(corpus, languages, tokenizer):
        ids = document_tokens(document, tokenizer, "the corpus")
        row = ids if ids[: len(start)] == start else start + ids  # chat templates write the start too
        if len(row) >= TOKENS:
            kinds.setdefault(kind.partition("/")[0], []).append(row[:TOKENS])
    return kinds


def measure_loss(model: PreTrainedModel, reference: Reference) -> dict[str, Loss]:
    """Return what ``model`` lost on each kind of text."""
    losses = {}
    for kind, answers in reference.answers.items():
        pairs = zip(_said(model, reference.rows[kind]), answers, strict=True)
        losses[kind] = _loss([_compare(*said, was) for said, was in pairs])
    return losses


class ReadPrompts(NamedTuple):
    """The prompts of a batch of documents, as one model read them."""

    last: torch.Tensor
    """Logits after the last token [documents, 1, vocabulary]."""
    cache: Cache
    """Keys and values of PROMPT_TOKENS tokens."""


def read_prompts(model: PreTrainedModel, reference: Reference) -> dict[str, list[ReadPrompts]] | None:
    """Return the prompts by kind of text, as ``model`` reads them; None for models that carry states."""
    prompts: dict[str, list[ReadPrompts]] = {}
    for kind in reference.answers:
        prompts[kind] = []
        for batch in _batches(reference.rows[kind]):
            with torch.inference_mode():
                said = model(input_ids=batch[:, :PROMPT_TOKENS], use_cache=True)
            layers = said.past_key_values.layers
            if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
                return None
            prompts[kind].append(ReadPrompts(said.logits[:, -1:].clone(), said.past_key_values))
    return prompts


def measure_answers(
    model: PreTrainedModel, prompts: dict[str, list[ReadPrompts]], reference: Reference
) -> dict[str, Loss]:
    """Return what is lost on the answers of ``model`` to ``prompts``, which another may have read.

    The first token of an answer is that of the model that read the prompt. ``prompts`` is used up.
    """
    losses = {}
    for kind, answers in reference.answers.items():
        pairs = zip(_answered(model, reference.rows[kind], prompts.pop(kind)), answers, strict=True)
        after = ((said, RowAnswers(*(part[PROMPT_TOKENS - 1 :] for part in was))) for said, was in pairs)
        losses[kind] = _loss([_compare(*said, was) for said, was in after])
    return losses


def _batches(rows: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """Yield BATCH rows at a time, int64 [rows, tokens]."""
    for first in range(0, len(rows), BATCH):
        yield torch.tensor(rows[first : first + BATCH], device=get_main_device())


def _said(model: PreTrainedModel, rows: Sequence[list[int]]) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield for each row the log-probabilities after each token but the last [tokens - 1, vocabulary]."""
    for batch in _batches(rows):
        with torch.inference_mode():
            yield from _log_probabilities(model(input_ids=batch, use_cache=False).logits, batch)


def _answered(
    model: PreTrainedModel, rows: Sequence[list[int]], prompts: Sequence[ReadPrompts]
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield the same of each row from the last token of its prompt on."""
    for batch, (last, cache) in zip(_batches(rows), prompts, strict=True):
        with torch.inference_mode():
            logits = model(input_ids=batch[:, PROMPT_TOKENS:], past_key_values=cache, use_cache=True).logits
            yield from _log_probabilities(torch.cat([last, logits], dim=1), batch[:, PROMPT_TOKENS - 1 :])


def _log_probabilities(logits: torch.Tensor, batch: torch.Tensor) -> Iterable[tuple[torch.Tensor, list[int]]]:
    for row, of_row in zip(batch, logits, strict=True):
        yield of_row[:-1].float().log_softmax(-1).cpu(), row.tolist()


def _answers(found: torch.Tensor, row: list[int]) -> RowAnswers:
    """Return the answers to a row, from the log-probabilities [tokens, vocabulary]."""
    top = found.topk(min(LIKELIEST, found.shape[-1]), dim=-1).indices
    return RowAnswers(top, _lumped(found, top), _nll(found, row))


def _lumped(found: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of some tokens, and as a last column of all others together."""
    chosen = found.gather(-1, likeliest)
    others = (1 - chosen.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps).log()
    return torch.cat([chosen, others], dim=-1)


def _nll(found: torch.Tensor, row: list[int]) -> torch.Tensor:
    return -found.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]


def _compare(found: torch.Tensor, row: list[int], was: RowAnswers) -> tuple[float, float, float]:
    """Return means over a row: KL divergence, nats above the 16-bit model's, share of same top tokens."""
    kl = (was.log_probabilities.exp() * (was.log_probabilities - _lumped(found, was.likeliest))).sum(-1)
    same = found.argmax(-1) == was.likeliest[:, 0]
    return float(kl.mean()), float((_nll(found, row) - was.nll).mean()), float(same.float().mean())


def _loss(documents: Sequence[tuple[float, float, float]]) -> Loss:
    values = torch.tensor(documents, dtype=torch.float64)
    means, errors = values.mean(0), (values.var(0, correction=0) / (len(documents) - 1)).sqrt()
    growth = means[1].exp()
    found = {"kl": means[0], "kl_error": errors[0], "same_top": means[2]}
    found |= {"perplexity": growth - 1, "perplexity_error": growth * errors[1]}
    rounded = {key: round(float(value), DIGITS) for key, value in found.items()}
    return Loss(documents=len(documents), **rounded)
