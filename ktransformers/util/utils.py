"""The generation loop, where upstream has it."""

from ktransformers.engine.sequence.generate import prefill_and_generate as prefill_and_generate
