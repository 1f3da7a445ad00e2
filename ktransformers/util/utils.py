"""The generation loop, under the name that upstream has for it."""

from ktransformers.engine.api.generate import prefill_and_generate as prefill_and_generate
