"""The service against its own OpenAPI document: whatever fits it, or nearly, is answered without a 5xx."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.servers.server_process import ServerProcess

pytestmark = pytest.mark.slow


def check(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict) and "max_tokens" in case.body:
        case.body["max_tokens"] = 1  # what is asked about is the service, not the model's stamina
    if isinstance(case.body, dict) and isinstance(case.body.get("options", {}), dict) and case.path.startswith("/api/"):
        case.body["options"] = case.body.get("options", {}) | {"num_predict": 1}
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and case.path.startswith("/v1/messages"):
        assert set(response.json()) == {"type", "error", "request_id"}
    elif response.status_code >= 400 and case.path.startswith("/api/"):
        assert set(response.json()) == {"error"}
    elif response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.exhaustive
def test_no_server_error(server: ServerProcess, random_cases: Callable[[int, int], int]) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 24
    limits = settings(
        max_examples=random_cases(10, 100),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations:
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.body:  # nothing can be wrong with a bare GET
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            limits(given(case=operation.as_strategy(generation_mode=mode))(check))()
