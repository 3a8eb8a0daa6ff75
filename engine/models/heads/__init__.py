"""Draft heads: small networks that go on from the target's hidden states.

From files to a head:
    load                  what does not fit is refused
    config, names         config.json; from tensors' names to a family
    target, target_names  what is taken from the target; its names in transformers
    token_map             which tokens can be drafted

Networks:
    base, block           what every head is; a decoder layer of one
    eagle, eagle3, mtp    a family each

Steps:
    step, runner          what a step gives; a head with its pool
    native, trees         a step, and whole trees, by the C kernels
    graphs                CUDA graphs of steps
"""
