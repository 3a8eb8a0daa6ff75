"""Models and what runs them: files, weights, steps, pools, draft heads. For both services, and for training.

A model's files:
    model_folder, weight_files        from a name to a folder; which files hold weights
    config, fields                    shapes in config.json, and its values, checked
    rope_config, stored_quantization  parts of it: rotary embedding; quantised already or not
    checkpoint, tensors, loader       tensors mapped; what is asked of them; checked weights
    fingerprint                       names for what must be equal on two sides
    saving, whole                     files that others may read; that appear whole or not at all
    progress                          a bar for something slow

A step:
    runner                            a model and its pool: segments in, logits out
    batch                             what sessions add to a step, as flat rows
    execution                         how steps are computed, where flags leave a choice
    devices, threads                  where models run; threads of a CPU
    attention, rope                   which function serves; rotary embedding
    cpu_kernels                       whether the C kernels are there
    graphs                            CUDA graphs of small steps
    quantization, smoothing           weights quantised at load; channels evened out before
    models                            forward passes, and draft heads

Keys and values:
    kv_pool, pages                    the pool's tensors; which pages are free
    radix_cache                       whose beginnings are there already
    memory                            how much there is, and what weights take
    feature_spec, feature_wire        hidden states kept for drafters; as the wire names them

What ships:
    embedded, gguf_convert            the default model; out of GGUF
    shipped, packed                   heads that come with Outrider; how they are stored, in weights/
    convert                           published draft heads in one form
"""
