"""Tree attention over a paged pool: every backend has the reference's signature.

What a step is:
    layout                         where its rows sit
    pool                           rows into a paged pool and out of it

Backends:
    reference                      the oracle
    cpu                            the C kernel
    torch_native                   torch's operator
    triton                         our Triton kernels
    flashinfer                     FlashInfer's wrappers
    split                          two of them, for prompts and for single rows

Triton's parts:
    triton_kernels, triton_blocks  the kernels; their block sizes
    triton_plan, native_plan       what they are told of a step; the same by C
    triton_rope                    rotation and store in one
"""
