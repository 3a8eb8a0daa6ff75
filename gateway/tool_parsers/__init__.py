"""The formats in which models write calls of tools, one a file; `formats` has them by name.

Formats:
    formats          all by name, and the one that a chat template shows
    tagged           JSON between marks, or a header and then the arguments
    mistral          `[TOOL_CALLS]`
    pythonic         a list in Python's syntax
    xml, xml_values  Qwen3-Coder's; its bare values as JSON

What they share:
    scanner          a call in JSON, read as it comes
    json_text        JSON text that can go out as UTF-8
    strict           grammars for text with calls of strict functions
"""
