"""Opens what the experts of a model are read from while it runs: its own files, or what `ktransformers pack` made of
them.
"""

from __future__ import annotations

import logging

from ktransformers.engine.model.opened import OpenedModel
from ktransformers.errors import UnsupportedError
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.weights.stored_experts.header import SourceIdentity
from ktransformers.weights.stored_experts.places import place_beside
from ktransformers.weights.stored_experts.reading import StoredExperts
from ktransformers.weights.synthetic import SyntheticSource

__all__ = ["open_expert_files"]

logger = logging.getLogger(__name__)


def open_expert_files(opened: OpenedModel) -> ExpertFiles:
    """Open the files of a model's experts. Reads headers, and of a packed file's model a page of some tensors.

    Raises UnsupportedError for a model without files, FormatError for a packed file that is damaged, ConfigError for
    one of another model.
    """
    if not opened.files:
        if isinstance(opened.source, SyntheticSource) and opened.source.stands_for_files:
            return ExpertFiles(())
        raise UnsupportedError("this model is made up in memory, and has no files that its experts could be read from")
    path = place_beside(opened.files)
    if not path.exists():
        return ExpertFiles(opened.files)
    packed = StoredExperts.open(path, SourceIdentity.of(opened.source, opened.files))
    logger.info("experts are read from %s", path)
    return ExpertFiles(opened.files, packed)
