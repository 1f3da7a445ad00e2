"""Names of models as Ollama writes them: NAME:TAG, where the tag is "latest" unless it is said."""

from __future__ import annotations

from ktransformers.server.service import Service

__all__ = ["LATEST", "listed_names", "named_service", "plain_name", "shown_name"]

LATEST = ":latest"


def plain_name(service: Service, asked: str | None) -> str | None:
    """Return the served name behind the one that was asked for; that itself when there is none."""
    if asked is None or asked in service.model_names:
        return asked
    plain = asked.removesuffix(LATEST)
    return plain if plain in service.model_names else asked


def named_service(service: Service, asked: str | None) -> Service:
    """Return the service at this address whose model is asked for; this one when there is none."""
    return next((one for one in service.beside if plain_name(one, asked) in one.model_names), service)


def shown_name(service: Service, asked: str | None, served: str) -> str:
    """Return the model's name for the answer: as it was asked for, where that model is served."""
    return asked if asked is not None and plain_name(service, asked) == served else served


def listed_names(service: Service) -> list[str]:
    """Return the operator's names of the model, with a tag each."""
    return [name if ":" in name.rpartition("/")[2] else name + LATEST for name in service.config.model_names]
