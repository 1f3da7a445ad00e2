"""`ktransformers pull org/name[:Q4_K_M]`: bring a model of the hub into its cache.

With no quantization named, takes the best that a plan on this machine says fits. What it does goes to standard error;
standard output gets one line, the path of the model. Exit code 1 when it was not taken, 130 when Ctrl-C stopped it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.models.pull_progress import make_progress
from ktransformers.cli.parsing.options import add_logging_flag, set_up_logging
from ktransformers.config import CPU_QUANT_TYPES, EngineConfig
from ktransformers.core import format_bytes
from ktransformers.errors import CapacityError, ConfigError, KTransformersError, UnsupportedError, WeightError
from ktransformers.hub.names import ModelName, parse_name
from ktransformers.hub.variants import Variant, find_variants, is_companion, select

if TYPE_CHECKING:
    from ktransformers.engine.plan.hardware import Hardware
    from ktransformers.hub.remote import Repository
    from ktransformers.optimize.plan import Plan

__all__ = ["add_parser", "pull_command"]

_REFUSALS = (UnsupportedError, WeightError, CapacityError)
"""Errors of a plan that say that the model cannot run here."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `pull` among the subcommands.

    `run` is set to the function that takes the parsed arguments and returns an exit code.
    """
    parser = subparsers.add_parser(
        "pull",
        help="download a model from the Hugging Face hub, by itself the quantization that fits",
        description="Download a model from the Hugging Face hub into its cache (HF_HOME). A download that was stopped "
        "goes on where it was. HF_TOKEN or `hf auth login` opens gated models, HF_ENDPOINT names a mirror.",
    )
    parser.add_argument("model", metavar="MODEL", help="org/name, org/name:Q4_K_M, org/name/file.gguf or a link")
    parser.add_argument("--force", action="store_true", help="take it although the plan says that it does not fit")
    parser.add_argument("--cache_lens", type=int, default=0, help="tokens in the cache of the plan; 0: automatic")
    parser.add_argument("--cpu_quant", choices=CPU_QUANT_TYPES, help="how experts of safetensors will be quantized")
    parser.add_argument("--gpu_memory", type=float, default=0.0, metavar="GIB", help="most memory of each GPU; 0: all")
    parser.add_argument("--trust_remote_code", action="store_true", help="take Python files that come with the model")
    add_logging_flag(parser)
    parser.set_defaults(run=pull_command, log_level="warning")


def pull_command(args: argparse.Namespace) -> int:
    """Download the model that the arguments name into the hub's cache. Raises KTransformersError."""
    set_up_logging(args.log_level)
    name = parse_name(args.model)
    from ktransformers.hub.remote import list_repository

    repository = list_repository(name)
    variants = find_variants(repository.files, with_code=args.trust_remote_code)
    _check_has_weights(repository, variants)
    variant = select(variants, name)
    fitting = _Fitting(repository, args)
    if variant is None:
        variant = _chosen(fitting, variants, force=args.force)
    elif not args.force and not fitting.is_here(variant):
        _warn_of_misfit(fitting, variant)
    return _download(repository, variant, variants)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check_has_weights(repository: Repository, variants: list[Variant]) -> None:
    name = repository.name.repo_id
    taken = {path for variant in variants for path in variant.side}
    for path in sorted(path for path in repository.files if is_companion(path) and path not in taken):
        _say(f"left out: {path} (not a language model)")
    if variants:
        return
    if any(path.endswith((".bin", ".pt", ".pth")) for path in repository.files):
        raise UnsupportedError(f"{name} has its weights as Python pickles only, which can run code; take a GGUF of it")
    if any(path.endswith(".safetensors") for path in repository.files):
        raise UnsupportedError(f"{name} has safetensors without a config.json beside them; it is no whole model")
    raise UnsupportedError(f"{name} holds neither GGUF files nor safetensors; it is no model that runs here")


class _Fitting:
    """Plans variants of a repository on this machine, from their headers. Imports what it needs when it is asked."""

    def __init__(self, repository: Repository, args: argparse.Namespace):
        self.repository, self.args = repository, args
        self._hardware: Hardware | None = None

    @property
    def hardware(self) -> Hardware:
        """Devices and memory of this machine, measured once."""
        if self._hardware is None:
            from ktransformers.engine.plan.hardware import Hardware

            self._hardware = Hardware.detect(EngineConfig(gpu_memory=self.args.gpu_memory))
        return self._hardware

    def nbytes(self, variant: Variant) -> int:
        """Bytes of all its files."""
        return sum(self.repository.files[path].size for path in variant.files)

    def is_here(self, variant: Variant) -> bool:
        """Whether the cache has it whole."""
        from ktransformers.hub.download import Downloader

        return Downloader(self.repository).bytes_here(variant.files) == self.nbytes(variant)

    def misfit(self, variant: Variant) -> str | None:
        """Why it fits neither disk nor memory, None when it does. Raises KTransformersError for what cannot run."""
        from ktransformers.hub.download import Downloader

        return Downloader(self.repository).disk_shortage(variant.files) or self.memory_shortage(variant)

    def memory_shortage(self, variant: Variant) -> str | None:
        """Why it does not fit into memory, None when it does. Raises KTransformersError for what cannot run."""
        with tempfile.TemporaryDirectory(prefix="ktransformers-pull-") as folder:
            try:
                plan = self._plan(variant, Path(folder))
            except _REFUSALS as error:
                raise type(error)(str(error).replace(f"{folder}/", "")) from error
        if plan.misfit() is None:
            return None
        total, free = plan.total_bytes, plan.capacity
        short = [device for device in total if total[device] > free.get(device, 0)]
        return ", ".join(
            f"{format_bytes(total[device])} needed on {device}, {format_bytes(free.get(device, 0))} free"
            for device in short
        )

    def _plan(self, variant: Variant, folder: Path) -> Plan:
        from ktransformers.engine.load.builder import plan_model
        from ktransformers.hub.headers import fetch_headers

        path = fetch_headers(self.repository, variant, folder)
        config = EngineConfig(
            model_path=None if variant.is_gguf else path,
            gguf_path=path if variant.is_gguf else None,
            cache_lens=self.args.cache_lens,
            cpu_quant=None if variant.is_gguf else self.args.cpu_quant,
            gpu_memory=self.args.gpu_memory,
            trust_remote_code=self.args.trust_remote_code,
        )
        return plan_model(config, hardware=self.hardware)


def _chosen(fitting: _Fitting, variants: list[Variant], *, force: bool) -> Variant:
    """The best variant that fits, and one line that says why. Raises CapacityError when none does."""
    from ktransformers.hub.choice import candidates, choose

    nbytes = {variant.label: fitting.nbytes(variant) for variant in variants}
    offered = candidates(variants, nbytes)
    smallest = offered[-1]
    labels = ", ".join(variant.label for variant in reversed(offered))
    _say(f"{fitting.repository.name.repo_id} has {labels}; planning on this machine ...")
    try:
        choice = choose(offered, nbytes, sum(fitting.hardware.machine.devices.values()), fitting.misfit)
    except _REFUSALS as error:
        if not force:
            raise type(error)(f"{error} (--force downloads it all the same)") from error
        _say(f"{smallest.label}: taken by force: {error}")
        return smallest
    if choice.variant is not None:
        why = "the best that fits" if len(offered) > 1 else "fits"
        if choice.refused:
            better, reason = choice.refused[-1]
            why += f"; {better.label} does not: {reason}"
        _say(f"{choice.variant.label} ({format_bytes(nbytes[choice.variant.label])}): {why}")
        return choice.variant
    _, reason = choice.refused[-1]
    if force:
        _say(f"{smallest.label} ({format_bytes(nbytes[smallest.label])}): taken by force, it does not fit: {reason}")
        return smallest
    sizes = ", ".join(f"{variant.label} {format_bytes(nbytes[variant.label])}" for variant in offered)
    raise CapacityError(
        f"nothing of {fitting.repository.name.repo_id} fits into this machine ({sizes}); {smallest.label}: {reason}. "
        "Nothing was taken; name a quantization or pass --force to take it all the same"
    )


def _warn_of_misfit(fitting: _Fitting, variant: Variant) -> None:
    """A variant that was named is taken also when it does not fit, but not when it cannot run."""
    try:
        reason = fitting.memory_shortage(variant)
    except _REFUSALS as error:
        raise type(error)(f"{error} (--force downloads it all the same)") from error
    if reason is not None:
        _say(f"warning: {variant.label} is taken because you named it, but it does not fit: {reason}")


def _download(repository: Repository, variant: Variant, variants: list[Variant]) -> int:
    from ktransformers.hub.download import Downloader

    if variant.missing:
        raise ConfigError(f"{repository.name.repo_id} lacks {', '.join(variant.missing[:3])}: its upload is not whole")
    downloader = Downloader(repository)
    downloader.check_disk(variant.files)
    total, here = sum(repository.files[path].size for path in variant.files), downloader.bytes_here(variant.files)
    quant = variant.label if variant.is_gguf or len(variants) > 1 else None
    name = str(ModelName(repository.name.repo_id, repository.name.revision, quant))
    if 0 < here < total:
        _say(f"{format_bytes(here)} of {format_bytes(total)} are here; going on")
    try:
        with make_progress(name, total, here) as progress:
            for path in variant.files:
                downloader.fetch(path, progress.advance)
    except (KeyboardInterrupt, KTransformersError) as error:
        kept = downloader.bytes_here(variant.files)
        _say(f"stopped at {format_bytes(kept)} of {format_bytes(total)}; the same command goes on from there")
        if isinstance(error, KTransformersError):
            raise
        return 130
    downloader.finish()
    state = "checksums verified" if here < total else "here already"
    _say(f"{name}: {format_bytes(total)}, {state}; try: ktransformers chat {name}")
    print(downloader.snapshot / variant.weights[0] if variant.is_gguf else downloader.snapshot)
    return 0
