"""Varied prompts: facts, code, lists, stories, other languages, repetition, copying, a long conversation."""

_TRANSCRIPT = "\n".join(
    [
        "Remember the code: ZK-4817-QX.",
        *(f"Speaker {n % 3}: sentence number {n} of our talk." for n in range(60)),
    ]
)

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List five fruits that are red.",
    "Translate to Spanish: Good morning, my friend.",
    "Write a Python function that reverses a string.",
    "What is 17 times 23? Show your steps.",
    "Tell me a short story about a dragon and a baker.",
    "Give three reasons to learn a new language.",
    "Summarise: The quick brown fox jumps over the lazy dog while the cat watches from the roof.",
    "Repeat the word banana ten times.",
    "Who wrote Romeo and Juliet, and when?",
    "Describe the taste of a lemon in one sentence.",
    "How do I boil an egg?",
    "Bonjour, comment allez-vous ?",
    "Write a JSON object with the keys name, age and city.",
    "What happens when water freezes?",
    "Name the planets of the solar system in order.",
    "Write a polite e-mail that declines an invitation.",
    "Why is the sky blue? Answer like a pirate.",
    "banana " * 60,
    "Copy this id exactly, and nothing else: 7f3ac91e-04bd-4c5e-9a17-2e6d80b1f5aa",
    f"{_TRANSCRIPT}\nWhat was the code?",
)
