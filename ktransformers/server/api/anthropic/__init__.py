"""Anthropic's dialect: POST /v1/messages and what Claude Code asks beside it. https://docs.anthropic.com/en/api/messages"""
