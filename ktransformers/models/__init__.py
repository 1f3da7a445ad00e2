"""Facts per Hugging Face `model_type` where families differ, and the rule file that each gets by default."""
