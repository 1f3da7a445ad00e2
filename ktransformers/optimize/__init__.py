"""WHICH operator goes where: rule files (rules) -> checked plan (plan) -> model with operators in place (apply)."""
