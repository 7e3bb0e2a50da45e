"""32 varied chats: languages, code, lists, several turns, very short and rather long ones."""

from __future__ import annotations

Chat = list[dict[str, str]]

_QUESTIONS = [
    "What is the capital of France?",
    "Say hello.",
    "2+2=",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child in two sentences.",
    "List the first ten prime numbers.",
    "Translate 'good morning' into Spanish, French and German.",
    "Was ist die Hauptstadt von Deutschland?",
    "¿Cuántos días tiene una semana?",
    "日本の首都はどこですか？",
    "Write a Python function that returns the nth Fibonacci number.",
    "```python\ndef add(a, b):\n    return a - b\n```\nWhat is wrong with this code?",
    "Give me a JSON object with the keys name and age.",
    "Why is the sky blue?",
    "Who wrote 'Romeo and Juliet'?",
    "Name three fruits that are red. 🍎",
    "Count from 1 to 20.",
    "Summarize: The quick brown fox jumps over the lazy dog. The dog does not mind. The fox is pleased with itself.",
    "What comes next: A, B, C, D,",
    "Write a limerick about a cat named Tom.",
    "How do I boil an egg?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Tell me a joke about computers.",
    "SELECT * FROM users WHERE age > 30; -- explain this query",
    "What is the difference between a list and a tuple in Python?",
    "Naïve café résumé: spell these words without accents.",
    "x" * 200,
    "Repeat the word 'banana' five times.",
]

_LONG = "Here is a report. " + " ".join(
    f"In week {week} the team shipped {week * 3 % 17} features and fixed {week * 7 % 23} bugs." for week in range(1, 25)
)

CHATS: list[Chat] = [
    *([{"role": "user", "content": question}] for question in _QUESTIONS),
    [{"role": "user", "content": _LONG + " In which week were the most features shipped?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Nice to meet you, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Where is the treasure?"},
        {"role": "assistant", "content": "Arr, it be buried on the island!"},
        {"role": "user", "content": "Which island?"},
    ],
]
