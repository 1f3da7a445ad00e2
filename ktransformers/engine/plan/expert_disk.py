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

__all__ = ["has_files", "open_expert_files"]

logger = logging.getLogger(__name__)


def has_files(opened: OpenedModel) -> bool:
    """Whether a model has files, or is a shape that stands for such."""
    stands_for_files = isinstance(opened.source, SyntheticSource) and opened.source.stands_for_files
    return bool(opened.files) or stands_for_files


def open_expert_files(opened: OpenedModel) -> ExpertFiles:
    """Open the files of a model's experts. Reads headers, and of a packed file's model a page of some tensors.

    Raises UnsupportedError for a model without files, FormatError for a packed file that is damaged, ConfigError for
    one of another model.
    """
    if not has_files(opened):
        raise UnsupportedError("this model is made up in memory, and has no files that its experts could be read from")
    if not opened.files:
        return ExpertFiles(())
    path = place_beside(opened.files)
    if not path.exists():
        if path.is_symlink():
            logger.warning(
                "%s leads to %s, which is not there (is its disk?): experts are read from the model's own files",
                *(path, path.readlink()),
            )
        return ExpertFiles(opened.files)
    packed = StoredExperts.open(path, SourceIdentity.of(opened.source, opened.files))
    logger.info("experts are read from %s", path)
    return ExpertFiles(opened.files, packed)
