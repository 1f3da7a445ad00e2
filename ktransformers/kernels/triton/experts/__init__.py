"""Routing, sorting rows by expert, and the products of routed experts."""
