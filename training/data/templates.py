"""Prompts composed from templates, over every kind of thing that people ask of an assistant.

A template is a sentence with slots: `{topic}` takes a word of that list, `{n:3:9}` a number, `{passage}` and `{code}` a
text that the system's documentation brings. A prompt may get a wish about its form at the end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Final

from training.data.words import WORDS

TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "writing": (
        "Write a {style} {form} about {topic}.", "Write a {form} about {topic}.", "Write a {form} about a {animal} and a {thing}.",
        "Compose a {form} set in {place}.", "Write a {form} in which {person} finds a {thing}.",
        "Write an email to my {job} asking about {topic}.", "Draft a {style} letter to a neighbour about {topic}.",
        "Write a cover letter for a job as a {job}.", "Write the opening of a story that begins with a broken {thing}.",
        "Write a product description for a {product}.", "Come up with five slogans for a {product}.",
        "Write a blog post with the title \"What {topic} taught me\".", "Write an outline for an essay about {topic}.",
        "Describe {place} at night in a {style} tone.", "Write a {style} review of a {product}.",
        "Write a persuasive paragraph for or against {topic}.", "Describe a {feeling} {animal} in three sentences.",
        "Write a short dialogue between {person} and {person}.", "Write a thank-you note to a {job}.",
        "Write a speech of two minutes about {topic} for a school event.", "Suggest {n:3:10} titles for a book about {topic}.",
        "Write a message that politely declines an invitation to an event about {topic}.",
        "Write a newsletter announcing a new {product}.", "Write an apology from a company whose {product} failed.",
    ),
    "roleplay": (
        "You are {person}. {name} asks you about {topic}. What do you say?", "Pretend to be {person} and explain {science} to me.",
        "Act as {person}. Tell me about your day.", "Imagine you are {person} visiting {place} for the first time. Describe it.",
        "Speak like {person} and give me advice on {topic}.", "You are {person} giving an interview. What is your opinion on {topic}?",
        "Play the role of {person}. I am a customer who wants to buy a {thing}. Start the conversation.",
        "Let's do a role play. You are {person}, I am {person}. You begin.", "As {person}, write a letter to your younger self.",
        "Answer as if you were {person}: what is the meaning of {topic}?", "Be my {job} for today. I want to know about {topic}.",
        "If you were a {thing}, what would a day in your life be like?", "You are a {animal}. Explain why you like {topic}.",
        "Act as an interviewer for a {job} position and ask me {n:3:6} questions.",
    ),
    "reasoning": (
        "{name} is taller than {name2}. {name2} is taller than {name3}. Who is the shortest?",
        "If all {animal}s are animals and some animals sleep at night, do all {animal}s sleep at night? Explain.",
        "A {thing} and a {thing2} cost {n:20:90} dollars together. The {thing} costs {n:2:15} dollars more. What does each cost?",
        "What is the odd one out: {animal}, {animal2}, {thing}, {animal3}? Why?", "What comes next: {a}, {b}, {c}, {d}?",
        "{name} has {n:2:9} sisters and each sister has {n:1:3} brothers. How many children are there in the family?",
        "Is it better to learn about {topic} or {topic2} first? Argue step by step.",
        "You have a {n:3:9}-litre jug and a {n:2:8}-litre jug. How can you measure exactly one litre?",
        "Today is {weekday}. What day will it be in {n:10:99} days?", "A farmer has {n:5:40} chickens and {n:2:20} goats. How many legs?",
        "What would happen if there were no {topic}? Think step by step.", "Why might {name} be {feeling} after losing a {thing}?",
        "Sort these by size and explain: {animal}, {animal2}, {animal3}.", "Find the mistake in this argument: {topic} is old, so it is bad.",
        "{name} walks {n:2:9} blocks north, {n:2:9} blocks east, and {n:2:9} blocks south. Where is {name} now?",
        "In a race, {name} finished before {name2} but after {name3}. Who won?",
        "Give arguments for and against {topic}, then decide.", "What can you conclude: whenever it rains, {name} takes an umbrella. {name} has no umbrella.",
    ),
    "math": (
        "What is {n:12:99} times {n:3:49}?", "Solve for x: {n:2:9}x + {n:1:30} = {n:31:90}.", "Compute {n:100:999} - {n:10:99} + {n:2:50}.",
        "What is {n:5:60}% of {n:80:900}?", "{name} buys {n:2:9} {thing}s for {n:3:40} dollars each and pays with {n:200:500} dollars. How much change?",
        "A train goes {n:40:120} km per hour. How far does it go in {n:2:9} hours?", "Find the area of a rectangle of {n:3:40} by {n:3:40} metres.",
        "What is the area of a circle of radius {n:2:20}?", "What is the probability of rolling a {n:1:6} twice with a die?",
        "Solve x^2 - {n:3:11}x + {n:1:24} = 0.", "What is the average of {a}, {b}, {c} and {d}?", "Simplify ({n:2:9}x + {n:1:9})({n:2:9}x - {n:1:9}).",
        "If f(x) = {n:2:9}x + {n:1:9}, what is f({n:2:20})?", "Explain how to add {n:1:9}/{n:2:9} and {n:1:9}/{n:2:12}.",
        "{name} saves {n:20:300} dollars a month. How long does it take to save {n:1000:9000} dollars?", "Find the derivative of {n:2:9}x^{n:2:5} + {n:2:9}x.",
        "A bag holds {n:2:9} red and {n:2:9} blue balls. What is the probability to draw a red one?", "What is the sum of the first {n:5:100} numbers?",
        "The price of a {thing} rises from {n:20:50} to {n:51:99} dollars. By what percentage?", "Integrate {n:2:9}x^{n:1:4} with respect to x.",
        "How many ways are there to arrange {n:3:6} books on a shelf?", "Find the perimeter of a triangle with sides {a}, {b} and {c}.",
        "A tank holds {n:100:900} litres and loses {n:2:30} litres per hour. When is it half empty?", "What is the greatest common divisor of {n:12:96} and {n:18:144}?",
    ),
    "coding": (
        "Write a {code_language} function that {code_task}.", "Write a {code_language} program that {code_task}.", "How do I write code that {code_task}?",
        "Write a {code_language} script that {code_task}. Add comments.", "Explain {code_idea} with an example in {code_language}.",
        "What is the difference between {code_idea} and {code_idea2}?", "Explain {code_idea} to a beginner.",
        "Write a class in {code_language} that {code_task} and show how it is used.", "Write unit tests for a function that {code_task}.",
        "What is the time complexity of code that {code_task}? Show the code.", "When should I use {code_idea}?",
        "Explain what this module does:\n\n{code}", "Write an example that uses this:\n\n{code}", "Rewrite this documentation for beginners:\n\n{code}",
        "Create a web page in HTML and CSS about {topic}.", "Write an SQL query that finds the {n:3:10} most expensive {thing}s.",
    ),
    "extraction": (
        "Extract the names of people, places and dates from this text:\n\n{passage}", "List the key facts of this text as bullet points:\n\n{passage}",
        "Give me all the numbers in the following text as a JSON object:\n\n{passage}", "What are the main keywords of this text?\n\n{passage}",
        "Answer in one sentence, using only this text: what is it about?\n\n{passage}", "Make a table of the terms in this text:\n\n{passage}",
        "Classify each of these as an animal or an object: {animal}, {thing}, {animal2}, {thing2}. Answer as JSON.",
        "From these reviews, tell whether each is positive or negative:\n1. The {product} broke at once.\n2. I love my {product2}.\n3. The {thing} is fine.",
        "{name} is a {job} in {place}. {name2} is a {job2} in {place2}. Make a table of names, jobs and places.",
        "Find the verbs in this sentence: {name} lost a {thing} in {place} and felt {feeling}.",
        "Turn this into CSV with a header: {name}, {n:20:60} years, {job}; {name2}, {n:20:60} years, {job2}; {name3}, {n:20:60} years, {job}.",
        "Write three questions that this text answers:\n\n{passage}",
    ),
    "stem": (
        "Explain {science} in simple terms.", "How does {science} work?", "Why is {science} important?", "What is {science}? Give an example.",
        "What is the relation between {science} and {science2}?", "Describe an experiment that shows {science}.", "Who discovered {science}?",
        "Explain {science} to a {job}.", "What are common misunderstandings about {science}?", "Compare {science} with {science2}.",
        "How do engineers make use of {science}?", "What happens in {science}, step by step?", "Why do {animal}s behave as they do?",
        "How would you design a {thing} that uses {science}?", "Name {n:3:6} facts about {animal}s.",
    ),
    "humanities": (
        "What were the causes of {humanities}?", "Explain {humanities} in simple words.", "How did {humanities} change society?", "Summarize the history of {humanities}.",
        "Compare {humanities} with {humanities2}.", "What can we learn today from {humanities}?", "Give {n:3:5} arguments about {humanities}.",
        "Who were the important people of {humanities}?", "Discuss the ethics of {topic}.", "How does {humanities} influence {topic}?",
        "Write a lesson plan about {humanities} for teenagers.", "Describe daily life in {place} a hundred years ago.", "What do economists say about {topic}?",
        "Propose three methods to teach {humanities}.",
    ),
    "summary": (
        "Summarize this text in {n:1:4} sentences:\n\n{passage}", "Explain this text to a child:\n\n{passage}", "Summarize:\n\n{passage}", "TL;DR:\n\n{passage}",
        "{passage}\n\nWhat is the main idea of this text?", "Rewrite this text in a {style} style:\n\n{passage}", "Give this text a title:\n\n{passage}",
        "Improve the grammar and wording of this text:\n\n{passage}", "Continue this text:\n\n{passage}", "Make this shorter:\n\n{passage}",
    ),
    "translation": (
        "Translate to {language}: {name} bought a {thing} in {place}.", "How do you say \"I am {feeling}\" in {language}?", "Translate into {language}: {topic}, {thing}, {animal}.",
        "Give me {n:3:8} useful phrases in {language} for a trip.", "Translate this into {language}:\n\n{passage}", "What does {language} have in common with English?",
    ),
    "chat": (
        "Hello! How are you?", "Tell me something interesting about {topic}.", "I feel {feeling} today.", "What is your name?", "Can you help me with {topic}?",
        "Tell me a joke about a {animal}.", "What should I cook tonight with {n:2:5} eggs and some rice?", "Recommend a book about {topic}.", "I want to learn about {topic}. Where do I start?",
        "What are the best things to do in {place}?", "Plan a {n:2:7}-day trip to {place}.", "Give me {n:3:10} tips for {topic}.", "How can I become a better {job}?",
        "What are the pros and cons of {topic}?", "Is {topic} worth it?", "What gift should I buy for {name}, who likes {topic}?", "How do I clean a {thing}?",
        "How do I fix a broken {thing}?", "Make a weekly plan for someone who wants to get into {topic}.", "Should I get a {animal} as a pet?",
        "My friend {name} is {feeling}. What should I do?", "Explain {topic} like I'm five.", "What is the history of {topic}?", "Give me a quiz about {topic}.",
        "List {n:3:10} ideas for a {product} business.", "What questions should I ask a {job}?", "How much does a {thing} cost?", "Compare a {thing} with a {thing2}.",
    ),
}  # fmt: skip
# How often each kind is taken.
WEIGHTS: Final[dict[str, int]] = {
    "writing": 12, "roleplay": 10, "reasoning": 11, "math": 11, "coding": 14, "extraction": 8, "stem": 12, "humanities": 10,
    "summary": 6, "translation": 2, "chat": 10,
}  # fmt: skip

FOLLOW_UPS: Final = (
    "Make it shorter.", "Can you explain that in more detail?", "Give me an example.", "Rewrite it in a {style} tone.", "Why?",
    "Now write it as a {form}.", "What did you leave out?", "Translate your answer into {language}.", "Summarize your answer in one sentence.",
    "Explain it to a ten-year-old.", "What would {person} say about it?", "Add a part about {topic}.", "Turn your answer into a list.",
    "How sure are you, and why?", "What is the most important point?", "Can you do it without using the word \"the\"?", "Are there other ways to do it?",
    "Now do the same for {topic}.", "What are the disadvantages?", "Give me {n:2:5} more.", "Ask me a question about it.", "How could this be tested?",
    "Change the main character to {person}.", "Write it in {code_language} instead.", "Can you make it more efficient?", "Add comments and error handling.",
    "What if the number were {n:2:90} instead?", "Check your answer step by step.", "Put the result into a table.", "Answer again in fewer than {n:20:60} words.",
    "How does this compare with {topic}?", "Thanks! What should I read next?", "Who disagrees with this, and what do they say?", "Use simpler words.",
    "Describe the same thing from the view of a {animal}.", "What would be different in {place}?", "Give the answer as JSON.", "Find a mistake in what you said.",
)  # fmt: skip
WISHES: Final = (
    "Keep it short.", "Use bullet points.", "Answer in fewer than {n:40:200} words.", "Be {style}.", "Give examples.", "Think step by step.",
    "Use simple words.", "Include {n:2:5} examples.", "Explain your reasoning.", "Write at least {n:2:4} paragraphs.",
)  # fmt: skip
SYSTEMS: Final = (
    "You are a helpful assistant.", "You are {person}.", "Answer in a {style} tone.", "You are an expert in {science}.", "You are a careful {job} who explains things well.",
    "Answer briefly.", "You are an AI assistant that helps people with {topic}.",
)  # fmt: skip
WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_SLOT = re.compile(r"\{(\w+?)(\d?)(?::(\d+):(\d+))?\}")
Passage = Callable[[random.Random], str]


class Composer:
    """Fills templates. `passage` and `code` give a text for a random state."""

    def __init__(self, passage: Passage, code: Passage) -> None:
        self._passages = {"passage": passage, "code": code}
        self._kinds = list(WEIGHTS)

    def prompt(self, rng: random.Random) -> tuple[str, str]:
        """A kind and a prompt of it."""
        kind = rng.choices(self._kinds, weights=list(WEIGHTS.values()))[0]
        text = self.fill(rng.choice(TEMPLATES[kind]), rng)
        if "\n" not in text and rng.random() < 0.2:
            text += " " + self.fill(rng.choice(WISHES), rng)
        return kind, text

    def about(self, kind: str, passage: str, rng: random.Random) -> str:
        """A task of that kind on `passage`."""
        template = rng.choice([template for template in TEMPLATES[kind] if "{passage}" in template])
        before, _, after = template.partition("{passage}")
        return self.fill(before, rng) + passage + self.fill(after, rng)

    def follow_up(self, rng: random.Random) -> str:
        """What a user may say after an answer."""
        return self.fill(rng.choice(FOLLOW_UPS), rng)

    def system(self, rng: random.Random) -> str:
        """A system prompt."""
        return self.fill(rng.choice(SYSTEMS), rng)

    def fill(self, template: str, rng: random.Random) -> str:
        """`template` with its slots filled; `{topic}` and `{topic2}` differ."""
        used: set[str] = set()

        def one(match: re.Match[str]) -> str:
            kind, _, low, high = match.groups()
            if low is not None:
                return str(rng.randint(int(low), int(high)))
            if kind in "abcd":
                return str(rng.randint(2, 99))
            if kind == "weekday":
                return rng.choice(WEEKDAYS)
            if kind in self._passages:
                return self._passages[kind](rng)
            word = rng.choice([word for word in WORDS[kind] if word not in used] or list(WORDS[kind]))
            used.add(word)
            return word

        text = _SLOT.sub(one, template)
        return re.sub(r"\ba (?=[aeiou]\w)(?!unique|use|one)", "an ", text) if "\n\n" not in text else text
