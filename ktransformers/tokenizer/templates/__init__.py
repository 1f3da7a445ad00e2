"""Rendering of conversations as chat templates keep them.

rendering.py   a template's text, within limits     probe.py    made-up conversations, to see what is kept
traits.py      what a template does with turns      fold.py     conversations as it keeps them
calls.py       ids, arguments, calls as text        effort.py   words for the effort of reasoning
described.py   tools in words                       turns.py    all of it for one template
"""

from ktransformers.tokenizer.templates.probe import Prober
from ktransformers.tokenizer.templates.rendering import Message, rendered
from ktransformers.tokenizer.templates.turns import Ending, Rendered, Rendering, TemplateTurns

__all__ = ["Ending", "Message", "Prober", "Rendered", "Rendering", "TemplateTurns", "rendered"]
