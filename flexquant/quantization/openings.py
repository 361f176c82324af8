# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the FlexQuant project
"""What a model is given to go on from when it writes its own calibration text: requests and first words.

English has requests with a place for a topic, and code; the other languages are used where the model knows
them. ``sentence`` says the same in every language, so that a model which knows two of them finds it about as
likely in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Language:
    """One language that a model may know."""

    sentence: str
    requests: tuple[str, ...]
    """What a user asks; ``{}`` stands for one of TOPICS."""
    openings: tuple[str, ...]
    """How a text begins."""


TOPICS = (
    "a bakery",
    "electricity",
    "the railway",
    "chess",
    "the human heart",
    "gardening",
    "money",
    "music",
    "a lighthouse",
    "the weather",
    "computers",
    "democracy",
    "learning a language",
    "the sea",
    "cooking",
    "sleep",
)

ENGLISH = Language(
    "In winter it gets dark early, and many people prefer to stay at home in the evening.",
    (
        "Explain in simple words how {} works.",
        "What should I know about {}?",
        "Write a short story about {}.",
        "Name some important facts about {}.",
        "Write a letter to a friend about {}.",
        "How did {} change over the last hundred years?",
        "Give me advice on {}, step by step.",
        "Summarise the history of {}.",
        "Write a Python class that models {}, with an example of its use.",
        "Make a table of numbers about {}, and explain how to work out their mean.",
    ),
    (
        *("The", "In", "A", "When", "It", "For", "This", "One", "Many", "After", "We", "There", "How", "I"),
        *("import", "def", "class", "#include <", "function", "public class", "SELECT", "<html>", "# ", "1."),
    ),
)

OTHERS = (
    Language(
        "Im Winter wird es früh dunkel, und viele Menschen bleiben am Abend lieber zu Hause.",
        (
            "Erkläre mit einfachen Worten, wie ein Kühlschrank funktioniert.",
            "Schreibe eine kurze Geschichte über einen Leuchtturm.",
            "Wie lerne ich am besten eine Sprache?",
            "Was sollte ich über den Wald wissen?",
        ),
        ("Die", "Im Jahr", "Als", "Ein", "Viele", "Es war", "Wenn"),
    ),
    Language(
        "En hiver, il fait nuit tôt, et beaucoup de gens préfèrent rester chez eux le soir.",
        (
            "Explique simplement comment fonctionne un moteur.",
            "Écris une courte histoire sur un boulanger.",
            "Comment apprendre à jouer aux échecs ?",
            "Que faut-il savoir sur la mer ?",
        ),
        ("Le", "Dans", "Une", "Quand", "Il était", "Les", "Pour"),
    ),
    Language(
        "En invierno anochece temprano, y mucha gente prefiere quedarse en casa por la tarde.",
        (
            "Explica de forma sencilla cómo funciona la electricidad.",
            "Escribe un cuento corto sobre un jardín.",
            "¿Cómo puedo dormir mejor?",
            "¿Qué debería saber sobre el tiempo?",
        ),
        ("El", "En", "Una", "Cuando", "Había", "Los", "Para"),
    ),
    Language(
        "D'inverno fa buio presto, e molte persone preferiscono restare a casa la sera.",
        ("Spiega in parole semplici come funziona il cuore.", "Scrivi una breve storia sul mare."),
        ("Il", "Nel", "Una", "Quando", "C'era", "Molti"),
    ),
    Language(
        "No inverno escurece cedo, e muitas pessoas preferem ficar em casa à noite.",
        ("Explique com palavras simples como funciona um avião.", "Escreva uma história curta sobre música."),
        ("O", "Em", "Uma", "Quando", "Havia", "Muitos"),
    ),
    Language(
        "Зимой рано темнеет, и многие люди предпочитают вечером оставаться дома.",
        ("Объясни простыми словами, как работает телефон.", "Напиши короткий рассказ о железной дороге."),
        ("В", "Это", "Когда", "На", "Один", "Многие"),
    ),
    Language(
        "冬天天黑得早，很多人晚上更喜欢待在家里。",
        ("请用简单的话解释电是怎么来的。", "写一个关于大海的小故事。", "怎样才能学好一门语言？"),
        ("在", "这", "一个", "我们", "中国", "当"),
    ),
    Language(
        "冬は早く暗くなるので、多くの人は夜は家で過ごすことを好みます。",
        ("電気の仕組みを簡単に説明してください。", "海についての短い物語を書いてください。"),
        ("この", "日本", "ある日", "私は", "多くの", "現在"),
    ),
    Language(
        "في الشتاء يحل الظلام مبكرا، ويفضل كثير من الناس البقاء في المنزل مساء.",
        ("اشرح بكلمات بسيطة كيف يعمل القلب.", "اكتب قصة قصيرة عن البحر."),
        ("في", "كان", "هذا", "عندما", "من", "هناك"),
    ),
)


def draw_request(languages: tuple[Language, ...], draw: Random) -> str:
    """Return a request in one of the languages."""
    return draw.choice(draw.choice(languages).requests).replace("{}", draw.choice(TOPICS))


def draw_opening(languages: tuple[Language, ...], draw: Random) -> str:
    """Return the first words of a text in one of the languages, or of code."""
    return draw.choice(draw.choice(languages).openings)
