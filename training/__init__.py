"""Makes draft heads: data from the target itself, training, export in the published formats.

Commands:
    app                            `outrider train COMMAND`
    args                           a dataclass of settings for each
    data                           `train data`: the target's own answers
    loop                           `train head`
    evaluate                       `train eval`
    export, packing                `train export`; `train pack`
    frequencies                    `train token-map`: how often the target writes each token
    outputs, stopping              where commands write; how long work ends well

What a head learns from:
    batches                        conversations as padded batches
    chat_format, template_process  conversations as ids; the template in a process
    target_states, state_store     the target's states: computed; kept on disk

A network:
    kinds                          the kinds that are trained
    network                        the engine's head with parameters
    attending                      attention over unrolled rows
    losses, cross_entropy          what is learnt; its gradient on the way forward

Where it starts:
    initial                        from the target's own layer
    fitting                        from least squares on its states
    copying, looking               heads that copy; taught where to look
    shallow                        a target's first layers as a draft model
    exported                       from a published head

How it goes:
    optimizers, muon               which moves what; Muon by blocks
    averages                       a running mean of parameters
    ranks                          a process per device
    checkpoints                    to go on as if never stopped
    writer, plot                   what is told; as a picture

How good it is:
    answers                        the target's greedy answers
    accept_length                  computed from them
    evaluation                     measured while training
    served                         measured through the services
    card                           a model card
"""
