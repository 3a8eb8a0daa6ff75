"""The draft service: a disposable maker of token trees. Drafters dial verify services; they hold no truth.

The process:
    app, worker          the process; a link for every verify service
    service              the rpcs of DraftService
    rehearsal            a session played before any is served
    inspecting           `outrider draft --inspect`
    metrics, counting    what Prometheus is told; plain numbers behind that
    tracing              spans of drafts
    corpus_files         texts of the n-gram corpus in files

A stream to verify:
    link                 dialled, enlisted, served, dialled again
    arrivals, reading    what came and waits; rounds as they are read
    framing              frames that go out
    fetching             feature rows that were only announced

A round:
    drafting             rounds in, drafts for whoever is due, frames out
    sessions, session    what one verify service told; one session
    visits, calling      calls to a drafter: what for, and on which thread
    news                 verdicts that came while it works ahead
    copying, repetition  drafts out of a session's own text

What is worth drafting:
    planners             from flags to a planner
    planning, evidence   depth and width by what was measured; the measures
    overlap              whether to draft ahead of verify's steps
    adaptive             SGLang's rule for steps

What makes trees:
    drafters             n-grams, draft models, heads
"""
