"""Training data: prompts of every kind, answered by the target itself.

From nothing to shards:
    build                the command: until there are enough tokens
    conversations        what is asked, and how one is made
    completer            many completions at once
    store                conversations on disk

Prompts:
    templates, material  composed from templates; their words, in prompts.toml
    passages             texts to ask about
    given, jsonl         the user's own; their files
    overlap              keeps benchmarks' prompts out
    quality              which are worth an answer
"""
