"""Tool use: typed calls for given schemas (also for tool names never trained on), and answers from tool results."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from .base import Task, ask, assistant, pick_zh, user
from .words import CITIES, COLOURS, LONG_CITIES, NAMES, NOUNS, OBJECTS, VERBS, ZH_CITIES, ZH_NAMES, any_word

_CALL_THOUGHT = ("I need a tool for this.", "这需要调用工具。")
_READ_THOUGHT = ("I read the result of the tool.", "读取工具的结果。")


def schema(name: str, description: str, parameters: dict[str, dict]) -> dict:
    """An OpenAI-style function schema in which every parameter is required."""
    body = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


def call(name: str, arguments: dict) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class Known:
    """A tool with natural wording: how users ask for it, what it returns and how the result reads."""

    name: str
    description: str
    types: dict[str, str]
    en: tuple[str, ...]
    zh: tuple[str, ...]
    result: tuple[str, ...]
    answer_en: str
    answer_zh: str


_KNOWN = (
    Known("get_weather", "Get the current weather of a city.", {"city": "string"},
          ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}, please.", "What's the weather like in {city}?"),
          ("{city}的天气怎么样？", "{city}今天天气如何？", "查一下{city}的天气。"), ("temperature", "condition"),
          "It is {temperature} degrees and {condition} in {city}.", "{city}现在{temperature}度，{condition}。"),
    Known("get_time", "Get the local time of a city.", {"city": "string"},
          ("What time is it in {city}?", "Tell me the time in {city}.", "Local time in {city}?"),
          ("{city}现在几点？", "查一下{city}的时间。"), ("time",), "It is {time} in {city}.", "{city}现在是{time}。"),
    Known("convert_currency", "Convert an amount of money.", {"amount": "integer", "source": "string", "target": "string"},
          ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?", "What is {amount} {source} in {target}?"),
          ("{amount} {source}等于多少{target}？", "把{amount} {source}换成{target}。"), ("value",),
          "{amount} {source} is {value} {target}.", "{amount} {source}等于{value} {target}。"),
    Known("set_timer", "Start a timer.", {"minutes": "integer"},
          ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Timer for {minutes} minutes, please."),
          ("设一个{minutes}分钟的定时器。", "定时{minutes}分钟。"), ("status",),
          "The timer for {minutes} minutes is {status}.", "{minutes}分钟的定时器：{status}。"),
    Known("send_message", "Send a text message to a person.", {"to": "string", "text": "string"},
          ('Send a message to {to}: "{text}"', 'Tell {to} "{text}"', 'Text {to}: "{text}"'),
          ("给{to}发消息：“{text}”", "告诉{to}：“{text}”"), ("status",), "The message to {to} is {status}.", "给{to}的消息：{status}。"),
    Known("search_web", "Search the web.", {"query": "string"},
          ("Search the web for {query}.", "Look up {query} on the web.", "Search for {query}."), ("在网上搜索{query}。", "搜索{query}。"),
          ("hits",), "I found {hits} pages about {query}.", "我找到了{hits}个关于{query}的网页。"),
    Known("turn_on_light", "Switch on the light of a room.", {"room": "string", "brightness": "integer"},
          ("Turn on the light in the {room} at {brightness} percent.", "Light in the {room} to {brightness} percent, please."),
          ("把{room}的灯开到{brightness}%。",), ("status",), "The light in the {room} is {status}.", "{room}的灯：{status}。"),
    Known("add_event", "Add an event to the calendar.", {"title": "string", "day": "string", "hour": "integer"},
          ("Add {title} on {day} at {hour} to my calendar.", "Put {title} into my calendar for {day} at {hour}."),
          ("在{day} {hour}点添加日程{title}。",), ("id",), "The event {title} has the number {id}.", "日程{title}的编号是{id}。"),
    Known("get_price", "Get the price of a product.", {"product": "string"},
          ("What does a {product} cost?", "How much is a {product}?", "What is the price of a {product}?"), ("一个{product}多少钱？", "{product}的价格是多少？"),
          ("price",), "A {product} costs {price} dollars.", "{product}的价格是{price}元。"),
    Known("find_route", "Find a route between two cities.", {"start": "string", "end": "string"},
          ("How do I get from {start} to {end}?", "Find a route from {start} to {end}.", "Route from {start} to {end}, please."),
          ("从{start}到{end}怎么走？", "查找从{start}到{end}的路线。"), ("distance",),
          "The route from {start} to {end} is {distance} km long.", "从{start}到{end}的路程是{distance}公里。"),
)  # fmt: skip
_CITY = ("city", "city", "location", "place")
_OTHER_PARAMETERS = {"city": _CITY, "source": ("source", "from", "from_currency"), "target": ("target", "to", "to_currency"), "to": ("to", "recipient"),
                     "text": ("text", "message"), "query": ("query", "q"), "product": ("product", "item")}  # fmt: skip
_OTHER_NAMES = {"get_weather": ("get_weather", "get_weather", "get_current_weather", "get_current_temperature", "weather", "fetch_weather"),
                "get_time": ("get_time", "get_time", "get_current_time", "local_time"),
                "search_web": ("search_web", "web_search", "search"), "send_message": ("send_message", "send_text")}  # fmt: skip
_DESCRIPTIONS = ("The {p}.", "The {p} to use.", "The {p}, as given by the user.", "A {p}, e.g. San Francisco, CA.")
_ROOMS = "kitchen bedroom bathroom hall garage office cellar".split()
_CURRENCIES = "USD EUR GBP JPY CNY CHF SEK INR".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_CONDITIONS = "sunny rainy cloudy windy foggy snowy".split()
_STATES = "running done sent set ready on".split()


def _slot(rng: random.Random, name: str, zh: bool) -> object:
    if name in ("city", "start", "end"):
        return rng.choice(ZH_CITIES if zh else (*CITIES, *LONG_CITIES))
    draws = {
        "amount": lambda: rng.randint(1, 999),
        "source": lambda: rng.choice(_CURRENCIES),
        "target": lambda: rng.choice(_CURRENCIES),
        "minutes": lambda: rng.randint(2, 90),
        "to": lambda: rng.choice(ZH_NAMES if zh else NAMES),
        "text": lambda: " ".join(any_word(rng) for _ in range(rng.randint(1, 5))),
        "query": lambda: " ".join(any_word(rng) for _ in range(rng.randint(1, 3))),
        "room": lambda: rng.choice(_ROOMS),
        "brightness": lambda: rng.randint(1, 100),
        "title": lambda: any_word(rng),
        "day": lambda: rng.choice(_DAYS),
        "hour": lambda: rng.randint(1, 23),
        "product": lambda: any_word(rng),
    }
    return draws[name]()


def _result(rng: random.Random, name: str) -> object:
    draws = {
        "temperature": lambda: rng.randint(0, 39),
        "condition": lambda: rng.choice(_CONDITIONS),
        "time": lambda: f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}",
        "value": lambda: rng.randint(1, 9999),
        "status": lambda: rng.choice(_STATES),
        "hits": lambda: rng.randint(1, 999),
        "id": lambda: rng.randint(1, 9999),
        "price": lambda: rng.randint(1, 999),
        "distance": lambda: rng.randint(10, 9999),
    }
    return draws[name]()


def _known_schema(rng: random.Random, tool: Known) -> dict:
    explained = rng.random() < 0.4
    names = {p: rng.choice(_OTHER_PARAMETERS.get(p, (p,))) for p in tool.types}
    parameters = {
        n: {"type": tool.types[p]} | ({"description": rng.choice(_DESCRIPTIONS).format(p=n)} if explained else {})
        for p, n in names.items()
    }
    built = schema(rng.choice(_OTHER_NAMES.get(tool.name, (tool.name,))), tool.description, parameters)
    if "city" in tool.types and rng.random() < 0.2:
        parameters["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}  # optional, never asked for
    return built


def _call_of(described: dict, arguments: dict) -> dict:
    """The call of a known tool under the names that its schema shows; `arguments` in the order of its parameters."""
    function = described["function"]
    return call(function["name"], dict(zip(function["parameters"]["required"], arguments.values(), strict=True)))


_PARAMETERS = {
    "string": "name city color room owner label title target group mode user path".split(),
    "integer": "count level size number amount speed page limit index weight".split(),
    "boolean": "enabled force silent urgent public".split(),
}


def _random_schema(rng: random.Random) -> dict:
    """A tool with an invented name `verb_object` and one to three typed parameters."""
    verb, thing = rng.choice(VERBS), rng.choice(OBJECTS)
    parameters = {}
    for _ in range(rng.randint(1, 3)):
        kind = rng.choices(("string", "integer", "boolean"), (5, 4, 1))[0]
        parameters[rng.choice(_PARAMETERS[kind])] = {"type": kind}
    built = schema(f"{verb}_{thing}", f"{verb.capitalize()} the {thing}.", parameters)
    if rng.random() < 0.2:
        for name, spec in parameters.items():
            spec["description"] = rng.choice(_DESCRIPTIONS).format(p=name)
    return built


def _distractors(rng: random.Random, taken: str) -> list[dict]:
    tools: dict[str, dict] = {}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        tool = _known_schema(rng, rng.choice(_KNOWN)) if rng.random() < 0.5 else _random_schema(rng)
        tools.setdefault(tool["function"]["name"], tool)
    tools.pop(taken, None)
    return list(tools.values())


def _toolbox(rng: random.Random, tool: dict) -> tuple[dict, ...]:
    tools = [tool, *_distractors(rng, tool["function"]["name"])]
    rng.shuffle(tools)
    return tuple(tools)


def _value(rng: random.Random, kind: str) -> object:
    if kind == "integer":
        return rng.randint(0, 999)
    if kind == "boolean":
        return rng.random() < 0.5
    return rng.choice((any_word(rng), rng.choice(NOUNS), rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLOURS)))


_FREE = (
    "Use {f} with {a}.", "Call {f} with {a}.", "Please {v} the {o} with {a}.", "{v} the {o}: {a}.", "I want to {v} the {o} with {a}.",
    "Run {f}: {a}.",
)  # fmt: skip
_ZH_FREE = ("请调用{f}，{a}。", "使用{f}：{a}。")


def _free_call(rng: random.Random) -> Task:
    """A call of an invented tool; the tool's name decides the split, so held-out names were never seen."""
    zh = pick_zh(rng)
    tool = _random_schema(rng)
    name = tool["function"]["name"]
    arguments = {p: _value(rng, spec["type"]) for p, spec in tool["function"]["parameters"]["properties"].items()}
    pattern = rng.choice(("{k} {v}", "{k}={v}", "{k} set to {v}", "{k}: {v}") if not zh else ("{k}={v}", "{k}为{v}"))
    shown = [pattern.format(k=k, v=str(v).lower() if isinstance(v, bool) else v) for k, v in arguments.items()]
    listed = ("，" if zh else ", ").join(shown) if zh or rng.random() < 0.5 else " and ".join(shown)
    verb, thing = name.split("_", 1)
    question = ask(rng, _ZH_FREE if zh else _FREE, zh, f=name, v=verb, o=thing, a=listed)
    answer = {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]}
    return Task("tool_calls", name, (user(question), answer), _toolbox(rng, tool), _CALL_THOUGHT[zh])


def _known_call(rng: random.Random) -> tuple[Known, Task, dict, bool]:
    tool = rng.choice(_KNOWN)
    zh = pick_zh(rng)
    arguments = {p: _slot(rng, p, zh) for p in tool.types}
    question = ask(rng, tool.zh if zh else tool.en, zh, **arguments)
    described = _known_schema(rng, tool)
    answer = {"role": "assistant", "content": "", "tool_calls": [_call_of(described, arguments)]}
    key = f"{tool.name} {json.dumps(arguments, ensure_ascii=False)} {question if tool.name in _FEW else ''}"
    toolbox = _toolbox(rng, described)
    return tool, Task("tool_calls", key, (user(question), answer), toolbox, _CALL_THOUGHT[zh]), arguments, zh


# Tools with so few possible arguments that the wording has to be part of the instance.
_FEW = ("get_weather", "get_time", "set_timer")


def _two_calls(rng: random.Random) -> Task:
    """Two cities in one question: two calls in one turn."""
    tool = rng.choice(_KNOWN[:2])
    zh = pick_zh(rng)
    first, second = rng.sample(ZH_CITIES if zh else CITIES, 2)
    both = f"{first}和{second}" if zh else f"{first} and {second}"
    question = ask(rng, tool.zh if zh else tool.en, zh, city=both)
    described = _known_schema(rng, tool)
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [_call_of(described, {"city": c}) for c in (first, second)],
    }
    return Task("tool_calls", f"{tool.name} {first} {second}", (user(question), answer), _toolbox(rng, described), _CALL_THOUGHT[zh])  # fmt: skip


def calls(rng: random.Random) -> Task:
    """The assistant turn that calls tools."""
    kind = rng.random()
    if kind < 0.5:
        return _free_call(rng)
    return _two_calls(rng) if kind < 0.6 else _known_call(rng)[1]


def results(rng: random.Random) -> Task:
    """The answer after a tool has returned."""
    tool, task, arguments, zh = _known_call(rng)
    result = {r: _result(rng, r) for r in tool.result}
    content = json.dumps(result, ensure_ascii=False)
    text = (tool.answer_zh if zh else tool.answer_en).format(**arguments, **result)
    messages = (*task.messages, {"role": "tool", "content": content}, assistant(text))
    return Task("tool_results", f"{task.key} {content}", messages, task.tools, _READ_THOUGHT[zh])
