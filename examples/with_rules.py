"""A rule file of your own: python examples/with_rules.py [MODEL [RULES]]"""

import sys
from pathlib import Path

from ktransformers import LLM

model = sys.argv[1] if len(sys.argv) > 1 else None
rules = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "rules" / "experts_by_layer.yaml"

# strict: a rule that matches no module is an error, not a warning. Mistakes are reported with file and line.
with LLM(model, optimize_config_path=rules, strict=True) as llm:
    for entry in llm.engine.plan.entries:
        if entry.key.endswith(".experts"):
            print(f"{entry.key}: {entry.placement.generate_device}, {entry.total_bytes / 1e6:.1f} MB")
    print(llm.chat("What is 17 + 25?")[0].text)
