"""Matrix products: linear layers, what they are stored as, and modules that are little more than them."""
