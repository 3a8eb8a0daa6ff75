"""The target model's owner: sessions, scheduling, acceptance, and the two streams that leave from it. Knows no text.

The process:
    app, loading                         the process; from flags to a loaded model
    sizing                               how large pool, contexts and chunks are
    target                               what a process says of itself
    turns                                which thread takes the engine's steps on
    metrics, counting, call_totals       what Prometheus is told; plain numbers behind that
    tracing                              spans of traced calls
    admin                                the rpcs of AdminService

Calls:
    service                              the rpcs of VerifyService
    requests                             from a GenerateRequest to sessions
    calls, call_stream                   how calls begin and end; many on one stream
    commands                             what the event loop asks of the engine

Sessions:
    session                              one continuation of one prompt
    scheduler                            who runs: admission, preemption
    session_pages                        a session's pages and slots

A step:
    step_loop                            the engine's loop, from commands to telling
    gathering                            proposals matched, late ones waited for
    planner, work                        which trees and rows go in; a session's part of them
    runner                               what the loop needs of a model
    session_sampler, sampler             one session's rule of drawing; a step's draws and acceptance
    device_sampler                       the same where the logits are
    device_layout                        how a step's work lies for that
    logprobs                             log-probabilities of tokens
    committing, unsent                   pages kept, verdicts prepared; what clients are to get
    step_failures                        what a failed step means

Grammars:
    grammar                              what is allowed after each path
    grammar_compiler, grammar_tokenizer  compiled off the loop; a tokenizer for it
    grammar_trial, grammar_trial_worker  those that may take for ever, tried in a process

Drafters:
    speculate                            one drafter's stream
    enlisting, hosts                     whether a drafter fits; how often a host may enlist
    drafters, drafter                    those enlisted; one of them
    assigning, assignment                who gets which; a session in a drafter's hands
    parsing, intake, proposals           checked; filed; matched and re-rooted
    telling, outbox                      what drafters are told; rounds that wait for one
    features, feature_calls              hidden states for heads; fetched beside rounds

What drafts are worth:
    acceptance, hindsight                how often nodes come true; what trees would have given
    replies                              how long drafters take
    drafter_record                       what one drafter has shown
    brake                                how many nodes pay for themselves
    weighing, plain_times                what a step cost and gave; what plain ones take
    account                              whether drafters are heard at all
    halves                               which sessions a step leaves out
"""
