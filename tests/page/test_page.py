"""The playground in Chromium: what it shows of an answer, its tokens, trees and figures."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, Request, expect

from tests.gateway.fakes import RunningGateway
from tests.page.browser import Visit
from tests.page.conftest import ANSWER, Say


def answer_of(page: Page, index: int = 0) -> str:
    """The text of an answer."""
    return page.locator(".answer .text:not(.reasoning)").nth(index).text_content() or ""


def body_of(request: Request) -> dict[str, Any]:
    """The JSON that the page sent."""
    body = request.post_data_json
    assert body is not None
    return body


def origins_of(page: Page) -> list[tuple[str, str]]:
    """Class and text of every token of the newest answer."""
    tokens = page.locator(".answer").last.locator(".token")
    made: list[list[str]] = tokens.evaluate_all("spans => spans.map(span => [span.classList[1], span.textContent])")
    return [(origin, text) for origin, text in made]


def test_an_answer_streams_with_its_origins(gateway: RunningGateway, visit: Visit, say: Say) -> None:
    ids = say(ANSWER)
    visit.ask("Hello?")
    visit.wait_done()
    assert answer_of(visit.page) == ANSWER
    origins = origins_of(visit.page)
    assert "".join(text for _, text in origins) == ANSWER
    # The fake's steps: the prefill's token, then two drafts and the target's own; the end token comes last.
    steps = [[*ids, 2][at : at + 3] for at in range(1, len(ids) + 1, 3)]
    expected = ["target", *(["accepted"] * (len(step) - 1) + ["bonus"] for step in steps)]
    flat = [expected[0], *(origin for step in expected[1:] for origin in step)][: len(ids)]
    assert [origin for origin, _ in origins] == flat
    first = [visit.page.locator(f".answer .token.{origin}").first for origin in ("accepted", "bonus", "target")]
    assert len({token.evaluate("token => getComputedStyle(token).backgroundColor") for token in first}) == 3
    expect(visit.page.get_by_role("status")).to_contain_text(f"{len(ids)} tokens")
    expect(visit.page.locator("#model")).to_have_text("small")
    (request,) = gateway.verify[0].requests
    assert request.include_trees


def test_the_tree_tells_of_its_nodes(gateway: RunningGateway, visit: Visit) -> None:
    page = visit.page
    visit.ask("Hello?")
    visit.wait_done()
    newest = int(page.locator("#step").input_value())
    page.locator("#step").focus()
    page.keyboard.press("Home")
    caption = page.locator("#tree-caption")
    expect(caption).to_have_text("Step 1, NGRAM: 2 of 3 accepted; drafted in 5 µs, step of 7 µs.")
    nodes = page.get_by_role("treeitem")
    verdicts = nodes.evaluate_all("nodes => nodes.map(node => node.classList[1])")
    assert verdicts == ["root", "accepted", "accepted", "bonus", "rejected"]
    assert nodes.evaluate_all("nodes => nodes.map(node => Number(node.ariaLevel))") == [1, 2, 3, 4, 2]
    seen = "[...node.querySelectorAll('text')].map(text => text.textContent).join(' ')"
    assert nodes.evaluate_all(f"nodes => nodes.every(node => node.ariaLabel.startsWith({seen}))")
    page.locator(".answer .token").first.click()
    expect(caption).to_have_text("The prompt was read, and the first token drawn.")
    page.locator("#step").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")  # past the button and the box, to the one tab stop of the tree
    expect(nodes.nth(2)).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(nodes.nth(3)).to_be_focused()
    page.keyboard.press("End")
    expect(nodes.nth(4)).to_be_focused()
    details = page.locator("#node")
    for told in ("2 of 2", "0.500", "rejected"):
        expect(details).to_contain_text(told)
    nodes.nth(1).hover()
    expect(details).to_contain_text("1 of 2")
    expect(details).to_contain_text("accepted")
    # The tokens of that step are marked in the text, and a token leads to its step.
    expect(page.locator(".answer .token.current")).to_have_count(3)
    page.locator(".answer .token.bonus").nth(1).click()
    assert page.locator("#step").input_value() == "2" != str(newest)
    expect(page.get_by_label("Newest")).not_to_be_checked()


def test_charts_say_their_figures(visit: Visit) -> None:
    visit.ask("Hello?")
    visit.wait_done()
    accept = re.compile(r"Accept length by step: mean \d\.\d\d, most 3, \d+ steps")
    expect(visit.page.locator("#accept-chart [role=img]")).to_have_attribute("aria-label", accept)
    speed = re.compile(r"Tokens per second over \d+\.\d seconds: on \d+ at the end")
    expect(visit.page.locator("#speed-chart [role=img]")).to_have_attribute("aria-label", speed)
    for word in ("Speed", "Accept length", "First token", "Drafted", "Accepted"):
        expect(visit.page.locator("#figures").get_by_text(word, exact=True)).to_be_visible()


def test_speculation_on_and_off_side_by_side(gateway: RunningGateway, visit: Visit) -> None:
    page = visit.page
    visit.ask("Hello?", mode="compare")
    visit.wait_done()
    expect(page.locator(".columns-2 h3")).to_have_text(["With speculation", "Without speculation"])
    assert answer_of(page, 0) == answer_of(page, 1) == ANSWER
    expect(page.locator(".note")).to_contain_text("Both answers are identical")
    on, off = gateway.verify[0].requests
    assert on.sampling.seed == off.sampling.seed
    assert not on.speculative.HasField("enabled")  # left to the server
    assert off.speculative.HasField("enabled")
    assert not off.speculative.enabled
    expect(page.locator("#figures")).to_contain_text("Speed when off")


def test_answers_that_differ_are_said_to(gateway: RunningGateway, visit: Visit) -> None:
    gateway.verify[0].say = lambda request, choice: [40 + len(gateway.verify[0].requests), 2]
    visit.ask("Hello?", mode="compare")
    visit.wait_done()
    expect(visit.page.locator(".note")).to_contain_text("The answers differ")


def test_settings_reach_the_server(gateway: RunningGateway, visit: Visit) -> None:
    page = visit.page
    numbers: dict[str, Any] = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "max_tokens": 6,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25,
        "num_steps": 3, "topk": 2, "num_draft_tokens": 8,
    }  # fmt: skip
    for name, value in numbers.items():
        page.locator(f"[name={name}]").fill(str(value))
    page.locator("[name=system]").fill("Be brief.")
    page.locator("[name=stop]").fill("END\nx\\n\\ny")
    page.locator("[name=algorithm]").select_option("EAGLE3")
    with page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("Hello?")
    body = body_of(sent.value)
    visit.wait_done()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"},
    ]  # fmt: skip
    speculative = {name: numbers.pop(name) for name in ("num_steps", "topk", "num_draft_tokens")}
    assert body["speculative"] == {
        **speculative, "algorithm": "EAGLE3", "include_origins": True, "include_trees": True,
    }  # fmt: skip
    assert body["stop"] == ["END", "x\n\ny"]
    assert {name: body[name] for name in numbers} == numbers
    (request,) = gateway.verify[0].requests
    assert request.sampling.top_k == 40
    assert request.sampling.max_tokens == 6
    expect(page.locator(".summary")).to_contain_text("cut at its length")


def test_what_is_out_of_bounds_is_shown_in_its_place(gateway: RunningGateway, visit: Visit) -> None:
    page = visit.page
    page.locator("[name=temperature]").fill("3")
    page.locator("#settings-box summary").click()  # closed: it opens where something is wrong
    visit.ask("Hello?")
    expect(page.locator("[name=temperature]")).to_be_visible()
    expect(page.locator("[name=temperature]")).to_be_focused()
    assert gateway.verify[0].requests == []


def test_the_conversation_goes_on(gateway: RunningGateway, visit: Visit) -> None:
    page = visit.page
    visit.ask("One?")
    visit.wait_done()
    with page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("Two?", mode="off")
    visit.wait_done()
    body = body_of(sent.value)
    assert [message["content"] for message in body["messages"]] == ["One?", ANSWER, "Two?"]
    assert body["speculative"]["enabled"] is False
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    with page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("Three?")
    assert [message["content"] for message in body_of(sent.value)["messages"]] == ["Three?"]
    visit.wait_done()


def test_an_empty_answer_stays_in_the_conversation(visit: Visit, say: Say) -> None:
    say("")
    visit.ask("One?")
    visit.wait_done()
    expect(visit.page.locator(".turn.user")).to_have_count(1)
    expect(visit.page.locator(".summary")).to_have_text("0 tokens")
    say("H")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("Two?")
    assert [message["content"] for message in body_of(sent.value)["messages"]] == ["One?", "", "Two?"]
    visit.wait_done()
    expect(visit.page.locator(".turn.user")).to_have_count(2)
    expect(visit.page.locator(".summary").last).to_contain_text("1 token,")


@pytest.mark.parametrize("by_key", [False, True])
def test_stop_cancels(gateway: RunningGateway, visit: Visit, by_key: bool) -> None:
    page, (verify,) = visit.page, gateway.verify
    verify.hold_after = 2
    visit.ask("Hello?")
    expect(page.locator(".answer .token")).to_have_count(4)
    if by_key:
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    visit.wait_done()
    gateway.wait(verify.idle)
    assert verify.cancelled == 1
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.locator(".summary")).to_contain_text("stopped")
    expect(page.get_by_label("Message")).to_be_focused()
    assert answer_of(page) != ""


def test_a_new_chat_stops_and_forgets(gateway: RunningGateway, visit: Visit) -> None:
    page, (verify,) = visit.page, gateway.verify
    verify.hold_after = 2
    caption = page.locator("#tree-caption").text_content() or ""
    visit.ask("One?", mode="compare")
    expect(page.locator(".answer .token")).to_have_count(4)
    page.get_by_role("button", name="New chat").click()
    visit.wait_done()
    gateway.wait(verify.idle)
    verify.reset()
    expect(page.get_by_role("treeitem")).to_have_count(0)
    expect(page.locator("#tree-caption")).to_have_text(caption)
    with page.expect_request("**/v1/chat/completions") as sent:
        visit.ask("Two?")
    assert [message["content"] for message in body_of(sent.value)["messages"]] == ["Two?"]
    visit.wait_done()
    assert answer_of(page) == ANSWER
    expect(page.get_by_role("alert")).to_be_empty()


ATTACK = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{constructor}}'


def test_what_the_model_says_stays_text(visit: Visit, say: Say) -> None:
    page = visit.page
    say(ATTACK)
    visit.ask(ATTACK, mode="compare")
    visit.wait_done()
    assert answer_of(page) == ATTACK
    expect(page.locator(".turn.user p")).to_have_text(ATTACK)
    page.get_by_role("treeitem").first.hover()
    assert page.locator("main img, main script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_no_other_host_is_asked(gateway: RunningGateway, visit: Visit) -> None:
    visit.ask("Hello?", mode="compare")
    visit.wait_done()
    assert {urlsplit(url).netloc for url in visit.requested} == {f"127.0.0.1:{gateway.port}"}
