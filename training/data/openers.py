"""How prompts begin that the model then finishes by itself, speaking as the user.

A small model left alone at a high temperature asks half nonsense; given how people start, at a lower one, it asks what
people ask. `{slots}` are templates.py's. An empty opener leaves all to the model.
"""

from __future__ import annotations

from typing import Final

OPENERS: Final = (
    "", "", "", "", "", "Write a", "Write an", "Write a {form} about", "Write a {form} in which", "Write an email to", "Compose a", "Draft a", "Create a",
    "Describe", "Describe a", "Describe how", "Imagine", "Imagine you are", "Imagine that", "Pretend to be", "Pretend you are", "Act as", "Act like", "You are",
    "You are a", "You are {person}.", "Assume the role of", "Suppose", "Suppose you", "If you", "If a", "If I", "Given", "Given the following", "Given a list of",
    "What is", "What are", "What is the", "What was", "What would", "What would happen if", "What happens when", "What does", "What makes", "What's the best way to",
    "What is the difference between", "What can", "How", "How do", "How do I", "How does", "How can I", "How can", "How would you", "How many", "How much", "How did",
    "Why", "Why is", "Why do", "Why does", "Why did", "Who", "Who was", "When", "When should", "Where", "Which", "Is it", "Is", "Are", "Are there", "Do", "Does", "Can",
    "Can you", "Can you explain", "Can you write", "Can you help me", "Could you", "Should", "Should I", "Will", "Explain", "Explain the", "Explain how", "Explain why",
    "Explain {science}", "Explain to", "Discuss", "Discuss the", "Compare", "Compare and contrast", "Contrast", "Analyze", "Evaluate", "Evaluate the", "Summarize",
    "Summarize the following", "Identify", "Identify the", "List", "List the", "Name", "Give me", "Give an example of", "Give me a list of", "Provide", "Provide a",
    "Suggest", "Recommend", "Propose", "Design", "Design a", "Develop", "Develop a", "Plan a", "Outline", "Tell me", "Tell me about", "Tell me a story about", "Help me",
    "I", "I am", "I'm", "I have", "I want to", "I need", "I need to", "I would like", "I'm writing", "I'm trying to", "I'm working on", "I've been", "My", "My friend",
    "There are", "There is", "A", "A man", "A train", "A store", "A farmer", "A company", "A teacher", "A rectangle", "A car", "A student", "The", "The following",
    "{name}", "{name} has", "{name} is", "{name} and {name2}", "In", "In a", "In the", "At a", "On", "For", "To", "One", "Two", "Three", "Each", "Each of",
    "Solve", "Solve for", "Solve the", "Calculate", "Calculate the", "Compute", "Find", "Find the", "Determine", "Prove", "Simplify", "Convert", "Let x", "Let",
    "The sum of", "The ratio of", "The vertices of", "The cost of", "The number of", "What is the value of", "What is the probability", "How many integers",
    "Implement", "Implement a", "Write a function", "Write a Python function", "Write a Python program", "Write a C++ program", "Write a program", "Write code",
    "Write an SQL", "Write a regular expression", "Write a script", "Create an HTML", "Develop a Python", "Given an array", "Given two", "Debug", "Fix", "Optimize",
    "Refactor", "Here is", "Here is a", "Here are", "Read the following", "Based on", "Extract", "Extract the", "Classify", "Categorize", "Determine whether", "Convert the",
    "Format", "Return", "Rewrite", "Rewrite the", "Edit", "Edit the following", "Paraphrase", "Proofread", "Translate", "Translate the", "Complete", "Continue", "Fill in",
    "Edit this", "Turn", "Make", "Make a", "Generate", "Generate a", "Come up with", "Brainstorm", "Rank", "Please", "Please write", "Please explain", "Hi", "Hello", "Hey",
    "Thanks", "Use", "Using", "Let's", "Let's play", "Did", "Has", "Have you", "Were", "Was", "Consider", "Some", "Some people", "Many", "Most", "People", "During",
    "After", "Before", "Since", "While", "With", "Without", "As a", "As an", "By", "From", "Assuming", "According to", "Argue", "Justify", "Define", "Interpret",
    "Investigate", "Examine", "Explore", "Illustrate", "Highlight", "Construct", "Formulate", "Organize", "Arrange", "Match", "Choose", "Select", "Predict", "Estimate",
    "Teach me", "Show me", "Guide me", "Advise", "Write about", "Write the", "Write two", "Write three", "Write some", "Write down", "Write me",
    "Tell me about {topic}", "What do you think about {topic}", "How is {topic}", "Why is {topic}", "I read about {topic}", "Explain {humanities}", "How did {humanities}",
    "What was {humanities}", "How does {science}", "Why does {science}", "In {place},", "I am a {job}", "As {person},", "You are a {job}", "A {animal}", "My {animal}",
    "My {thing}", "Our {product}", "Write a {code_language} function that {code_task}", "Use {code_idea}", "In {code_language},", "What does {code_idea}",
)  # fmt: skip
