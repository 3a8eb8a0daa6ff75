"""The C kernels, compiled on first use. A .c file, or the .h file of its name, begins with what it does.

Python's side:
    build      compiles the C kernels once, and loads them
    library    their structures and functions
    memory     large memory for weights and pools
    streaming  whether a model is read past the caches
"""
