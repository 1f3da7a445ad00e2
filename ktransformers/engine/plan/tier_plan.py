"""Plans how much goes below the cache: from --cpu_memory_size_GB, --kv_disk_path, --kv_disk_size_GB to numbers of
slots."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ktransformers.cache.paged import LayerShape, PagedCache, state_shapes
from ktransformers.cache.tiers import PAGE, STATE
from ktransformers.config import EngineConfig
from ktransformers.core import format_bytes
from ktransformers.engine.model.fingerprint import Identified
from ktransformers.engine.step.kv_offload import TieredCache
from ktransformers.errors import ConfigError
from ktransformers.scheduler.config import TierConfig

__all__ = ["check_tiers", "open_tiers", "tier_bytes"]

logger = logging.getLogger(__name__)

DISK_ONLY_BYTES = 256 << 20
"""Host memory that pages pass through on their way to files where none is asked for."""

LEAST_PAGES, LEAST_STATES = 4, 2

STATE_SHARE = 0.5
"""Of the host memory, for states where there are recurrent layers."""

MAX_SLOTS = 1 << 20

_SAMPLED = 1 << 16


def tier_bytes(config: EngineConfig) -> int:
    """Return the bytes of host memory that tiers take."""
    if not config.prefix_cache:
        return 0
    asked = int(config.cpu_memory_size_GB * 2**30)
    return asked or (DISK_ONLY_BYTES if config.kv_disk_path is not None else 0)


def check_tiers(shapes: Sequence[LayerShape], page_size: int, config: EngineConfig) -> None:
    """Raise ConfigError for tiers that hold less than some pages and states; logs when tiers were asked for in vain."""
    if not config.prefix_cache and (config.cpu_memory_size_GB or config.kv_disk_path is not None):
        logger.warning("--cpu_memory_size_GB and --kv_disk_path have no effect: --no_prefix_cache keeps no pages")
    nbytes = tier_bytes(config)
    page = PagedCache.size(shapes, page_size)
    state = sum(one.nbytes for one in state_shapes(shapes).values())
    least = max(LEAST_PAGES * page, LEAST_STATES * state) * (2 if state else 1)
    on_disk = 0 if config.kv_disk_path is None else int(config.kv_disk_size_GB * 2**30)
    for flag, given in (("cpu_memory_size_GB", nbytes), ("kv_disk_size_GB", on_disk)):
        if given and given < least:
            raise ConfigError(
                f"--{flag}: {format_bytes(given)} are too little for this model, whose pages take "
                f"{format_bytes(page)} and states {format_bytes(state)}; give it at least {format_bytes(least)}"
            )


def open_tiers(
    config: EngineConfig, cache: PagedCache, identified: Identified
) -> tuple[TierConfig, TieredCache] | None:
    """Open the tiers below a cache; None where there are none. Reads the weights' files where pages outlive the
    process.

    Raises WeightError.
    """
    nbytes = tier_bytes(config)
    if not nbytes:
        return None
    layouts = TieredCache.layouts(cache)
    page_bytes = layouts[PAGE].nbytes
    state_bytes = layouts[STATE].nbytes if STATE in layouts else 0
    for_states = int(STATE_SHARE * nbytes) if state_bytes else 0
    files, disk_bytes, fingerprint = None, 0, identified.sampled.digest
    if config.kv_disk_path is not None:
        fingerprint = identified.whole().digest
        disk_bytes = int(config.kv_disk_size_GB * 2**30)
        files = TieredCache.files(cache, fingerprint, config.kv_disk_path, disk_bytes)
    tiers = TierConfig(
        fingerprint=fingerprint,
        host_pages=min((nbytes - for_states) // page_bytes, MAX_SLOTS),
        page_bytes=page_bytes,
        page_file_bytes=0 if files is None else files.file_nbytes(PAGE),
        host_states=min(for_states // state_bytes, MAX_SLOTS) if state_bytes else 0,
        state_bytes=state_bytes,
        state_file_bytes=files.file_nbytes(STATE) if files is not None and state_bytes else 0,
        disk_bytes=disk_bytes,
    )
    tokens = tiers.host_pages * cache.page_size
    logger.info("below the cache: %s of host memory for %d tokens", format_bytes(nbytes), tokens)
    return tiers, TieredCache(cache, tiers, files=files)
