"""What goes where, and whether it fits: placement, caches, tiers, and what would make it fit. Reads no weights."""
