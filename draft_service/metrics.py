"""What a draft process tells Prometheus; docs/metrics.md explains the names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from draft_service.drafters.base import Drafter
from draft_service.drafting import Drafting
from draft_service.planning import Planner
from draft_service.worker import Worker
from outrider.algorithms import algorithm_name
from outrider.metrics import Families, Family, Reading, new_registry
from outrider.v1 import draft_pb2

FAMILIES = (
    Family("outrider_draft_links", "gauge", "Streams to verify services.", ("state",)),
    Family("outrider_draft_sessions", "gauge", "Sessions open with a verify service.", ("replica",)),
    Family("outrider_draft_connects_total", "counter", "Times that a stream was opened.", ("replica",)),
    Family("outrider_draft_rounds_total", "counter", "Rounds received.", ("replica",)),
    Family("outrider_draft_verdict_tokens_total", "counter", "Tokens that verdicts committed.", ("replica",)),
    Family("outrider_draft_nodes_verified_total", "counter", "Nodes that verdicts name as verified.", ("replica",)),
    Family("outrider_draft_nodes_accepted_total", "counter", "Nodes that verdicts name as accepted.", ("replica",)),
    Family("outrider_draft_rejected_total", "counter", "Proposals that were refused.", ("replica", "reason")),
    Family("outrider_draft_proposals_total", "counter", "Proposals made; early: below a guess.", ("kind",)),
    Family("outrider_draft_nodes_total", "counter", "Nodes of these proposals.", ("kind",)),
    Family("outrider_draft_copies_total", "counter", "Proposals that were copied from their session's own text."),
    Family("outrider_draft_copied_nodes_total", "counter", "Nodes of these."),
    Family("outrider_draft_copied_nodes_accepted_total", "counter", "Of these nodes, those that were accepted."),
    Family("outrider_draft_seconds", "histogram", "Time of one call of the drafter, for a batch.", ("kind",)),
    Family("outrider_draft_steps_total", "counter", "Steps of the draft model.", ("kind",)),
    Family("outrider_planner_speculates", "gauge", "Whether drafts are made now; 0: declined, since they do not pay."),
    Family("outrider_planner_outcomes", "gauge", "Outcomes drafted below ahead of each step; 0: no overlap."),
    Family("outrider_planner_steps", "gauge", "Depth of the trees that are planned; absent where flags fix them."),
    Family("outrider_planner_branches", "gauge", "Branches of these."),
    Family("outrider_planner_draft_tokens", "gauge", "Their nodes, root included."),
    Family("outrider_planner_least_reach", "gauge", "Chance of acceptance below which no further step is drafted."),
    Family("outrider_planner_decisions_total", "counter", "Changes of plan.", ("decision",)),
    Family("outrider_ngram_nodes", "gauge", "Nodes of the n-gram trie in use; absent for models."),
    Family("outrider_ngram_capacity_nodes", "gauge", "Nodes that the n-gram trie may hold; absent for models."),
    Family("outrider_ngram_dropped_tokens_total", "counter", "Tokens left out of the trie, over --max-pending-tokens."),
)

_STATES = {
    draft_pb2.VERIFY_LINK_STATE_CONNECTING: "connecting",
    draft_pb2.VERIFY_LINK_STATE_ENLISTED: "enlisted",
    draft_pb2.VERIFY_LINK_STATE_REFUSED: "refused",
}
_FROM_VERDICTS = {
    "tokens_committed": "outrider_draft_verdict_tokens_total",
    "nodes_verified": "outrider_draft_nodes_verified_total",
    "nodes_accepted": "outrider_draft_nodes_accepted_total",
}
_REJECTED = "rejected_"


def make_registry(drafter: Drafter, drafting: Drafting, worker: Worker) -> CollectorRegistry:
    """All metrics of the process, labelled with its algorithm."""

    def read(reading: Reading) -> None:
        _read_links(reading, worker)
        counts = drafting.counts
        for kind, buckets in counts.calls_s.items():
            reading.add("outrider_draft_proposals_total", counts.proposals[kind], kind)
            reading.add("outrider_draft_nodes_total", counts.nodes[kind], kind)
            reading.add_buckets("outrider_draft_seconds", buckets, kind)
        reading.add("outrider_draft_steps_total", counts.steps, "tree")
        if (copier := drafting.copier) is not None:
            reading.add("outrider_draft_copies_total", copier.num_copies)
            reading.add("outrider_draft_copied_nodes_total", copier.num_nodes)
            reading.add("outrider_draft_copied_nodes_accepted_total", copier.num_accepted)
        _read_planner(reading, drafting.planner)
        if drafter.corpora is not None:
            corpus = drafter.corpora.corpus
            reading.add("outrider_ngram_nodes", corpus.num_nodes)
            reading.add("outrider_ngram_capacity_nodes", corpus.capacity)
            reading.add("outrider_ngram_dropped_tokens_total", corpus.num_dropped_tokens)

    name = algorithm_name(drafter.algorithm)
    registry = new_registry()
    registry.register(Families(FAMILIES, read, [("algorithm", name)]))
    return registry


def _read_planner(reading: Reading, planner: Planner) -> None:
    plan = planner.current
    reading.add("outrider_planner_speculates", plan.speculate)
    reading.add("outrider_planner_outcomes", plan.outcomes)
    if plan.shape is not None:
        reading.add("outrider_planner_steps", plan.shape.num_steps)
        reading.add("outrider_planner_branches", plan.shape.topk)
        reading.add("outrider_planner_draft_tokens", plan.shape.num_draft_tokens)
        reading.add("outrider_planner_least_reach", plan.least_reach)
    for decision, number in list(planner.decisions.items()):
        reading.add("outrider_planner_decisions_total", number, decision)


def _read_links(reading: Reading, worker: Worker) -> None:
    links = worker.links
    for state, name in _STATES.items():
        reading.add("outrider_draft_links", sum(link.stats.state == state for link in links), name)
    for link in links:
        reading.add("outrider_draft_sessions", link.num_sessions, link.address)
        reading.add("outrider_draft_connects_total", link.stats.connects, link.address)
        reading.add("outrider_draft_rounds_total", link.stats.rounds, link.address)
        counters = dict(link.stats.counters)
        for counter, family in _FROM_VERDICTS.items():
            reading.add(family, counters.get(counter, 0), link.address)
        for counter, number in counters.items():
            if counter.startswith(_REJECTED):
                reading.add("outrider_draft_rejected_total", number, link.address, counter.removeprefix(_REJECTED))
