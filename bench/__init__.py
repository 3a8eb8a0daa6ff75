"""Speed, as ratios: what is measured side by side, and the tools for that.

Servers and answers:
    serve, peers                 load on any server; several systems side by side
    mt_bench, shipped            speed on MT-bench; of every shipped drafter
    speculative, goodput         SGLang's grid of trees; fixed trees against the planner
    theory                       what was gained, beside what was promised
    vllm_head                    a head of ours in vLLM

Parts of Outrider:
    wire                         the stream and the overlap, over scripted networks
    early, useless               what drafting ahead brings; what wrong drafts cost
    gateway, stand_in            the gateway's time; a verify service without a model
    steps, layers, device        a step of verify; its layers; an 8B's on a device
    drafting, ngram              a draft round; the n-gram trie

Command lines and files:
    _main, _flags, _serve_flags  how one starts; kinds of values; `serve`'s flags
    _output, _plot               files of figures; pictures
    _prompts                     what is asked

Load:
    _load, _drive, _stream       so much at once; one server in turn; one request
    _accept_length               of servers whose answers lack it
    _figures, _ratios            from answers to figures; from rounds to tables

Processes:
    _process, _server            spoken to over gRPC; over HTTP
    _parts, _metered             what runs in them; Outrider with metrics at hand
    _pairs, _wrong_draft         ways side by side; a drafter that is always wrong
    _grid                        trees that SGLang tries
    _goodput_stand_in            `goodput` over scripted networks

Other systems:
    _systems, _install           how each is started; how it is fetched
    _gguf, _transformers_server  the model for llama.cpp; transformers as a server

`bench wire`:
    _wire_run, _wire_picture     a run; a picture of it
    _wire_verify, _wire_draft    its two services
    _wire_script, _wire_model    what the networks say; the drafter's
    _wire_clock, _wire_stamps    a network's time; when frames come and go
    _wire_hops, _wire_echo       where a round's time goes; gRPC alone
"""

import outrider as outrider  # before gRPC is imported
