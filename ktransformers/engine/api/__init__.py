"""What programs import: LLM, AsyncLLM and the loop that steps a batch for them."""
