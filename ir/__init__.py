"""Data of the compiler: graphs, op rows, meshes, layouts, plans, rank programs."""
