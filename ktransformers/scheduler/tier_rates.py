"""Decides between fetching and recomputing: which part of a known prefix is worth copying back, by rates measured while
running. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Option", "Rate", "TierRates"]

_KEPT = 0.9
"""Of what was measured before, with every new measurement: some ten of them count."""

MAX_DECLINED = 64
"""After so many choices against a tier it is measured again: a disk that was busy once may be fast now."""


@dataclass(slots=True)
class Rate:
    """A rate that was measured of late, in amounts per second."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Note that `amount` took `seconds`."""
        if amount > 0 and seconds > 0:
            self.amount = _KEPT * self.amount + amount
            self.seconds = _KEPT * self.seconds + seconds

    def seconds_for(self, amount: float) -> float:
        """Return the seconds that `amount` is expected to take; 0 while the rate is unknown, so that it is tried and
        measured."""
        return amount * self.seconds / self.amount if self.amount else 0.0

    @property
    def is_known(self) -> bool:
        return self.amount > 0


@dataclass(frozen=True, slots=True)
class Option:
    """A way to begin a prompt. num_tokens: that need not be computed. load_bytes: to be copied from host memory for
    that; read_bytes: from files before."""

    num_tokens: int
    load_bytes: int = 0
    read_bytes: int = 0


@dataclass(slots=True)
class TierRates:
    """The rates by which fetching is compared with recomputing. prefill: tokens. load: bytes from host memory to the
    cache. read: bytes from files to host memory."""

    prefill: Rate = field(default_factory=Rate)
    load: Rate = field(default_factory=Rate)
    read: Rate = field(default_factory=Rate)
    num_declined: int = 0

    def saved(self, option: Option) -> float:
        """Return the seconds that an option takes less than computing all. With no prefill measured yet: any token is
        worth all copies."""
        if not self.prefill.is_known:
            return float(option.num_tokens)
        cost = self.load.seconds_for(option.load_bytes) + self.read.seconds_for(option.read_bytes)
        return self.prefill.seconds_for(option.num_tokens) - cost

    def best(self, options: Sequence[Option]) -> int:
        """Return the index of the option that saves most; of equal ones the first. There must be one."""
        chosen = max(range(len(options)), key=lambda i: self.saved(options[i]))
        longest = max(option.num_tokens for option in options)
        self.num_declined = self.num_declined + 1 if options[chosen].num_tokens < longest else 0
        if self.num_declined >= MAX_DECLINED:
            self.num_declined, self.load, self.read = 0, Rate(), Rate()
        return chosen
