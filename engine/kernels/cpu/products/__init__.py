"""Matrix products: packed weights, register tiles of each type, and what follows a product."""
