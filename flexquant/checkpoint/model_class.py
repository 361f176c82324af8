# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""Hold a checkpoint's tensors against the class of transformers that its config names.

The class is built without memory for weights, and transformers' own loader is given the tensors' names and
shapes. So the loader says what the class needs and the checkpoint lacks, under whatever names transformers
reads: older names, and experts one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from flexquant.checkpoint.built_model import NOT_BUILT, known_config, nothing_fetched, refused
from flexquant.checkpoint.model_config import JsonObject
from flexquant.errors import FlexQuantError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.core_model_loading import WeightRenaming

Shapes = Mapping[str, tuple[int, ...]]


class ModelClass:
    """A model of transformers, heads included, whose parameters have names and shapes alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        """Shapes of what the class loads, by its own names."""

    def name_of(self, tensor: str) -> str:
        """Return the class's own name for a tensor of a checkpoint; experts stay apart."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        renamed, _ = rename_source_key(tensor, self._renamings, [], prefix, self._states)
        if renamed not in self.shapes and tensor in self.shapes:
            return tensor
        return renamed

    def drops(self, tensor: str) -> bool:
        """Whether the class leaves a checkpoint's tensor out on purpose, such as a head that drafts."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, self.name_of(tensor)) for pattern in patterns)

    def check(self, shapes: Shapes, place: str) -> None:
        """Raise FlexQuantError, which names ``place``, unless ``shapes`` are those of the class.

        ``shapes`` are those of a checkpoint's parameters, without quantisation, by name. What the class ties
        to another parameter, and what it does not need, may be absent.
        """
        import torch
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        loading = LoadStateDictConfig(
            device_map={"": "meta"}, weight_mapping=self._conversions, ignore_mismatched_sizes=True
        )
        with _quiet():
            found, _ = convert_and_load_state_dict_in_model(self._model, tensors, loading)
        self._model._adjust_missing_and_unexpected_keys(found)
        mismatched = {name: stored for name, stored, _ in found.mismatched_keys}
        ties = self._model.all_tied_weights_keys
        for name, expected in self.shapes.items():
            if name in mismatched:
                raise FlexQuantError(
                    f"'{name}' has shape {list(mismatched[name])} in {place}, but the model that its "
                    f"config.json describes has {list(expected)} there; fetch or quantise it again"
                )
        missing = [name for name in self.shapes if {name, ties.get(name, name)} <= found.missing_keys]
        if missing:
            raise FlexQuantError(
                f"{place} lacks {len(missing)} of the parameters of a {type(self._model).__name__}, "
                f"'{missing[0]}' or a part of it first; download or quantise the model again"
            )

    @cached_property
    def _conversions(self) -> list[Any]:
        """How transformers renames and converts a checkpoint's tensors when it loads them."""
        from transformers.conversion_mapping import get_model_conversion_mapping

        return get_model_conversion_mapping(self._model)

    @cached_property
    def _renamings(self) -> list[WeightRenaming]:
        from transformers.core_model_loading import WeightRenaming

        return [change for change in self._conversions if isinstance(change, WeightRenaming)]

    @cached_property
    def _states(self) -> dict[str, object]:
        return dict(self.shapes)


def find_model_class(config: JsonObject, place: str) -> ModelClass | None:
    """Return the class that a ``config.json`` names; None if transformers does not have or cannot build it.

    Raises FlexQuantError, which begins with ``place``, for a config that transformers refuses.
    """
    try:
        return _find(json.dumps(config, sort_keys=True), place)
    except NOT_BUILT:
        return None


@lru_cache(maxsize=4)
def _find(written: str, place: str) -> ModelClass | None:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    config = json.loads(written)
    known = known_config(config, place)
    architecture: Any = getattr(transformers, str(next(iter(config.get("architectures") or ()), "")), None)
    if known is None or not _is_class_for(architecture, known):
        return None
    try:
        with torch.device("meta"), no_init_weights(), nothing_fetched():
            model: PreTrainedModel = architecture._from_config(known, attn_implementation="eager")
    except NOT_BUILT:
        raise
    except Exception as e:  # arithmetic with the config's numbers can raise anything
        raise refused(config, place, e) from e
    return ModelClass(model)


def _is_class_for(architecture: object, config: PretrainedConfig) -> bool:
    return isinstance(config, getattr(architecture, "config_class", None) or ())


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out transformers' progress bar."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
