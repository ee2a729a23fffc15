"""Lower bounds, and the choices that are read off them."""
