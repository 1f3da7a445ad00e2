"""Which experts does an answer need? python examples/own_operator.py [MODEL]

The rule file puts CountingRouter (counting_router.py, beside this file) in the place of the model's routers.
"""

import sys
from pathlib import Path

from counting_router import CountingRouter

from ktransformers import LLM

model = sys.argv[1] if len(sys.argv) > 1 else None
rules = Path(__file__).parent / "rules" / "count_experts.yaml"

# trust_rules=True: the rule file names a class of our own.
# use_cuda_graph=False: steps that are replayed from a CUDA graph run no Python, so that nothing would be counted.
with LLM(model, optimize_config_path=rules, trust_rules=True, use_cuda_graph=False) as llm:
    print(llm.chat("What is 17 + 25?")[0].text)

layers = sorted({layer for layer, _ in CountingRouter.chosen})
for layer in layers:
    counts = {expert: count for (name, expert), count in CountingRouter.chosen.items() if name == layer}
    best = sorted(counts, key=lambda expert: -counts[expert])[:4]
    print(f"{layer}: {len(counts)} experts, most often " + ", ".join(f"{one} ({counts[one]} times)" for one in best))
