"""The layer loop of the decoder: where hidden states change device."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from torch import nn

from ktransformers.errors import UnsupportedError
from ktransformers.operators.base import OperatorConfig, Placement
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KModel"]

logger = logging.getLogger(__name__)


class KModel(WrapperOperator):
    """Operator of the `model` of a causal LM.

    transfer_map: {layer index: device}: what `cuda` means from that layer on (optimize/layer_devices). Hidden states
    follow the layers. On the CPU alone all devices are one, so that a pipeline over several GPUs runs as a plain loop.
    per_layer_prefill_intput_threshold (sic): rows from which a layer's weights were swapped in during prefill; 0 = off.
    """

    KWARGS: ClassVar[frozenset[str]] = frozenset({"transfer_map", "per_layer_prefill_intput_threshold"})

    def __init__(
        self,
        module: nn.Module,
        key: str,
        config: OperatorConfig,
        placement: Placement | None = None,
        transfer_map: dict[int, str] | None = None,
        per_layer_prefill_intput_threshold: int = 0,
    ):
        super().__init__(module, key, config, placement)
        self.transfer_map = self._checked(transfer_map or {}, key)
        if per_layer_prefill_intput_threshold:
            logger.info("%s: per_layer_prefill_intput_threshold has no effect: weights never move", key)
        if self.transfer_map and not self.device.is_gpu:
            logger.info("%s: transfer_map has no effect on the CPU: all layers run on one device", key)

    @staticmethod
    def _checked(transfer_map: Any, key: str) -> dict[int, str]:
        if not isinstance(transfer_map, dict):
            raise UnsupportedError(f"{key}: transfer_map must be a mapping of layer number to device")
        for layer, device in transfer_map.items():
            if not isinstance(layer, int) or not isinstance(device, str):
                raise UnsupportedError(f"{key}: transfer_map entry {layer!r}: {device!r} is not `layer: device`")
        return dict(transfer_map)
