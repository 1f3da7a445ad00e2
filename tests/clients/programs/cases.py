"""What every program here does: each case asks the server, one line of JSON says what all of them got."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

QUESTION = "What is 17 + 25?"
WEATHER = "What is the weather in Paris?"
EXTRACT = "Extract name, age and city as JSON: Anna is 31 years old and lives in Paris."
FORECAST = {"temperature": 18, "condition": "sunny"}


def report(cases: dict[str, Callable[[], Any]]) -> None:
    """{case: {"got": its result} or {"error": its traceback}}. Coroutines that cases return share an event loop."""
    got: dict[str, Any] = {}
    with asyncio.Runner() as runner:
        for name, case in cases.items():
            try:
                result = case()
                got[name] = {"got": runner.run(result) if inspect.iscoroutine(result) else result}
            except Exception:  # noqa: BLE001 - whatever it is, the report tells it, and the other cases go on
                got[name] = {"error": traceback.format_exc()[-3000:]}
    sys.stdout.write(json.dumps(got) + "\n")
