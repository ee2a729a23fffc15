"""PyTorch: rank programs as graph modules with functional collectives, and what runs them."""
