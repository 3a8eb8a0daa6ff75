"""Forward passes of whole models.

Llama's family:
    llama, llama_native                           in torch's operators; by the C kernels
    llama_weights                                 its tensors and their names
    native_decoder                                a decoder of the C kernels

Models that transformers runs:
    transformers_config, transformers_loading     shapes; a model with its weights
    transformers_decoder, transformers_attention  its step over our pool; its attention
    long_rope                                     longrope's two tables of angles

Draft heads:
    heads                                         networks that go on from the target's states
"""
