# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a variant lost against the 16-bit model: measured, and made less by training its scales.

It is measured on the texts of ``flexquant.documents.texts`` that are held out: the first tokens of each
document. The 16-bit model answers once, and its likeliest tokens are kept. KL divergences count all tokens
beyond the likeliest as one, so they are a little small.

GPTQ minimises the output error of every linear by itself. Training changes no integer, but all scales
together, to minimise the KL divergence of the next token to the 16-bit model's on the calibration rows, as in
the second stage of EfficientQAT (arXiv 2407.11062). Bytes and kernels do not change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.utils import patch_attr
from llmcompressor.utils.dev import get_main_device
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from flexquant.checkpoint.measured_loss import Loss
from flexquant.checkpoint.writer import Progress
from flexquant.documents.texts import Corpus, document_tokens, read_corpus, start_of_row
from flexquant.errors import FlexQuantError
from flexquant.quantization.sampling import Language, known_documents, known_languages

TOKENS = 128
"""Tokens of each document; shorter documents are left out."""
BATCH = 4
"""Documents in one pass, and rows in a training step."""
LIKELIEST = 1024
DIGITS = 4
"""Decimals of what is recorded: equal inputs give equal files."""
LEARNING_RATE = 1e-3
"""Highest learning rate of the factors by which the scales change."""
WARM_UP = 4
"""Steps until the highest learning rate, from which the rate falls as a cosine."""

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
    finite = {
        kind: found for kind, found in answers.items() if all(bool(a.nll.isfinite().all()) for a in found)
    }
    return Reference(rows, finite)


def measuring_rows(
    corpus: Corpus, languages: Sequence[Language], tokenizer: PreTrainedTokenizerBase
) -> TextRows:
    """Return the rows to measure with: each kind of English text, and the ``languages`` as one kind.

    Without a chat template conversations are measured as plain text.
    """
    start = start_of_row(tokenizer)
    kinds: dict[str, list[list[int]]] = {}
    for kind, document in known_documents(corpus, languages, tokenizer):
        ids = document_tokens(document, tokenizer, "the corpus")
        if len(start) + len(ids) >= TOKENS:
            kinds.setdefault(kind.partition("/")[0], []).append((start + ids)[:TOKENS])
    return kinds


def measure_loss(model: PreTrainedModel, reference: Reference) -> dict[str, Loss]:
    """Return what ``model`` lost on each kind of text."""
    losses = {}
    for kind, answers in reference.answers.items():
        pairs = zip(_said(model, reference.rows[kind]), answers, strict=True)
        losses[kind] = _loss([_compare(*said, was) for said, was in pairs])
    return losses


def _said(model: PreTrainedModel, rows: Sequence[list[int]]) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Yield for each row the log-probabilities after each token but the last [tokens - 1, vocabulary]."""
    for first in range(0, len(rows), BATCH):
        batch = rows[first : first + BATCH]
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor(batch, device=get_main_device()), use_cache=False).logits
            for row, of_row in zip(batch, logits, strict=True):
                yield of_row[:-1].float().log_softmax(-1).cpu(), row


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
    found = {
        "kl": means[0],
        "kl_error": errors[0],
        "perplexity": growth - 1,
        "perplexity_error": growth * errors[1],
        "same_top": means[2],
    }
    return Loss(
        documents=len(documents), **{key: round(float(value), DIGITS) for key, value in found.items()}
    )


def distill_scales(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    rows: Sequence[torch.Tensor],
    epochs: int,
    seed: int,
    progress: Progress | None,
) -> list[float]:
    """Train the scales of ``model`` in place; return the mean KL divergence of every epoch, nats a token.

    ``model`` has weight-only integer quantisation, and is not saved yet; ``teacher`` is the 16-bit model. All
    ``rows`` [tokens] have one length. ``progress`` is called with (steps done, all steps). Raises
    FlexQuantError if the divergence is not finite.
    """
    linears: list[Any] = [module for module in model.modules() if hasattr(module, "quantization_scheme")]
    device = get_main_device()
    teacher.to(device)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    factors = [torch.ones_like(module.weight_scale, dtype=torch.float32) for module in linears]
    integers = [_integers(module.weight.float(), module.weight_scale.float()) for module in linears]
    optimizer = torch.optim.Adam([f.requires_grad_() for f in factors], lr=LEARNING_RATE, betas=(0.9, 0.95))
    steps = epochs * math.ceil(len(rows) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_rate, steps=steps))
    random = torch.Generator().manual_seed(seed)
    found: list[float] = []
    with ExitStack() as stack, torch.enable_grad():
        for module, number, factor in zip(linears, integers, factors, strict=True):
            held = {"integers": number, "scale": module.weight_scale.float(), "bias": module.bias}
            forward = functools.partial(_forward, factor=factor, **held)
            stack.enter_context(patch_attr(module, "forward", forward))
        for _ in range(epochs):
            divergences = []
            for batch in torch.randperm(len(rows), generator=random).split(BATCH):
                ids = torch.stack([rows[i] for i in batch]).to(device)
                divergence = _divergence(model, teacher, ids)
                divergence.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                divergences.append(float(divergence.detach()))
                if not math.isfinite(divergences[-1]):
                    raise FlexQuantError(
                        "the KL divergence to the 16-bit model is not finite on the calibration data; check "
                        "that the model answers sensibly, or remove scale_distillation from the recipe"
                    )
                if progress is not None:
                    progress(schedule.last_epoch, steps)
            found.append(sum(divergences) / len(divergences))
    for module, number, factor in zip(linears, integers, factors, strict=True):
        scale = module.weight_scale.float() * factor.detach()
        update_offload_parameter(module, "weight_scale", scale)
        update_offload_parameter(module, "weight", (number * scale[..., None]).flatten(1))
    return found


@torch.no_grad()
def _integers(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return a quantised linear's integers less zero points, int8 [out, groups, inputs of a group]."""
    grouped = weight.view(weight.shape[0], scale.shape[1], -1)
    return (grouped / scale[..., None]).round().to(torch.int8)


def _forward(
    x: torch.Tensor, *, integers: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, bias: Any
) -> torch.Tensor:
    weight = (integers * (scale * factor)[..., None]).flatten(1)
    return functional.linear(x, weight.to(x.dtype), bias)


def _divergence(model: PreTrainedModel, teacher: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean KL divergence over the tokens of ``ids`` [rows, tokens], in float32."""
    # The processor multiplies in bfloat16 if it can, which halves the time of training.
    in_16_bit = ids.device.type != "cpu" or bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=in_16_bit):
        with torch.no_grad():
            expected = teacher(input_ids=ids, use_cache=False).logits
        given = model(input_ids=ids, use_cache=False).logits
    target = expected.float().log_softmax(-1).flatten(0, 1)
    return functional.kl_div(
        given.float().log_softmax(-1).flatten(0, 1), target, reduction="batchmean", log_target=True
    )


def _rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, as a share of the highest."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
