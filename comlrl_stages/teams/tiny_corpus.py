"""The corpus of the builtin tiny model: prompts and answers in simple English, written by templates.

A prompt asks about one subject ("Tell me about a dragon."); its answer has one, two or three sentences with equal
probability. So after each full stop the model decides whether to end, and a team can learn how long its answers are
without learning new words. The three sentences differ in length on purpose: an opening (about 37 characters), a detail
(about 43) and a closing (about 22). An answer of two sentences is about 2.2 times, and one of three about 2.8 times as
long as an answer of one.

The corpus knows neither the roles nor the items of any task: it must not teach what training is measured on.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

OPENING_LENGTH, DETAIL_LENGTH, CLOSING_LENGTH = (34, 40), (40, 46), (19, 24)
MAX_SENTENCES = 3


@dataclass(frozen=True)
class Example:
    """One turn of the user and the answer to it; `system` is an instruction before both, mostly absent."""

    system: str | None
    prompt: str
    answer: str


@dataclass(frozen=True)
class Kind:
    """Subjects of one kind, and the sentences that can be said of each of them."""

    subjects: tuple[str, ...]
    openings: tuple[str, ...]
    details: tuple[str, ...]
    closings: tuple[str, ...]


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


WORDS: Mapping[str, tuple[str, ...]] = {
    "adjective": tuple(
        [
            "bright",
            "quiet",
            "strange",
            "gentle",
            "golden",
            "silver",
            "tiny",
            "lovely",
            "secret",
            "friendly",
            "warm",
            "old",
            "new",
            "brave",
            "happy",
            "green",
            "blue",
            "red",
            "clever",
            "magic",
        ]
    ),
    "look": tuple(["bright", "green", "blue", "red", "golden", "silver", "warm", "shiny", "dark", "round"]),
    "mood": tuple(["happy", "calm", "proud", "brave", "glad", "cheerful"]),
    "people": tuple(
        [
            "children",
            "families",
            "farmers",
            "sailors",
            "teachers",
            "dancers",
            "neighbors",
            "friends",
            "people",
            "singers",
        ]
    ),
    "animals": tuple(["birds", "cats", "foxes", "whales", "owls", "rabbits", "horses", "bears"]),
    "things": tuple(
        ["towers", "lanterns", "flowers", "trees", "books", "stones", "rivers", "gardens", "bells", "boats"]
    ),
    "where": _lines("""
        near the sea
        by the river
        under the stars
        behind the hill
        in the valley
        above the clouds
        in the old forest
        on a high mountain
        beside the lake
        in the snow
    """),
    "when": _lines("""
        in the morning
        at night
        every evening
        in the spring
        all day long
        before sunrise
        every winter
        after the rain
    """),
    "act": _lines("""
        sing old songs
        read old books
        plant flowers
        tell funny jokes
        dance near the sea
        share warm bread
        count the stars
        build small boats
        play loud music
        light the lanterns
    """),
    "deed": _lines("""
        helps old farmers
        guards the gardens
        watches the stars
        finds golden stones
        saves the children
        paints the sky
        sings to the trees
        looks for honey
        tells old tales
        waits for friends
        plays in the snow
    """),
    "part": tuple(["eyes", "ears", "wings", "feet", "teeth", "horns"]),
    "garment": tuple(["hat", "coat", "mask", "belt", "scarf", "ring", "crown"]),
    "power": _lines("""
        talk to animals
        fly over the sea
        stop the rain
        run on water
        grow tall trees
        open any door
        see in the dark
    """),
    "material": tuple(["glass", "iron", "wood", "paper", "gold", "stone", "ice", "silk"]),
    "fuel": tuple(["sunlight", "steam", "water", "wind", "music", "salt", "honey", "sugar"]),
    "flavor": tuple(["honey", "mint", "lemon", "apples", "cherries", "butter", "sugar", "salt"]),
}

KINDS: tuple[Kind, ...] = (
    Kind(
        tuple(
            [
                "city",
                "village",
                "island",
                "castle",
                "garden",
                "forest",
                "school",
                "market",
                "library",
                "playground",
                "house",
                "world",
            ]
        ),
        _lines("""
            The {subject} is full of {adjective} {things}.
            A {adjective} {subject} waits {where}.
            The {adjective} {subject} lies {where}.
            The {subject} has {look} {things} and {things}.
            Many {people} visit the {subject} {when}.
            The {people} built a {subject} {where}.
            The {subject} looks {look} and {look}.
            Two {adjective} {animals} guard the {subject}.
        """),
        _lines("""
            The {people} there {act} {when}.
            Every house has {look} {things} and {look} {things}.
            The {people} {act} with the {animals}.
            You can hear {animals} and {people} {when}.
            The {look} {things} shine {where} {when}.
            The {people} {act} and {act}.
            There the {adjective} {animals} sleep {where}.
        """),
        _lines("""
            It is a {adjective} place.
            Nobody wants to leave.
            All {people} love it.
            The {people} are {mood}.
            It smells of {flavor}.
        """),
    ),
    Kind(
        tuple(
            ["dragon", "dinosaur", "robot", "fox", "owl", "whale", "bear", "horse", "cat", "rabbit", "monster", "giant"]
        ),
        _lines("""
            The {adjective} {subject} sleeps {where}.
            A {adjective} {subject} lives {where}.
            The {subject} has {look} {part} and {part}.
            The {subject} {deed} {when}.
            A {adjective} {subject} {deed}.
            The {adjective} {subject} can {power}.
            Once a {adjective} {subject} met a {adjective} {subject}.
        """),
        _lines("""
            It {deed} {when} with the {animals}.
            It {deed} and {deed}.
            They bring it {flavor} and {flavor} {when}.
            With its {look} {part} it can {power}.
            It is {mood} when the {people} {act}.
            Its best friends are the {adjective} {animals}.
        """),
        _lines("""
            It feels {mood} and {mood}.
            It loves the {animals}.
            It eats {flavor} and {flavor}.
            The {people} like it.
            It is afraid of {animals}.
        """),
    ),
    Kind(
        tuple(
            [
                "hero",
                "superhero",
                "pirate",
                "wizard",
                "queen",
                "king",
                "inventor",
                "detective",
                "sailor",
                "teacher",
                "child",
            ]
        ),
        _lines("""
            The {subject} wears a {look} {garment}.
            The {adjective} {subject} can {power}.
            A {adjective} {subject} lives {where}.
            The {subject} {deed} {when}.
            A {adjective} {subject} {deed}.
            The {subject} has a {look} {garment} of {material}.
            Every {subject} needs a {adjective} {garment}.
        """),
        _lines("""
            With a {garment} this {subject} can {power}.
            The {people} {act} with the {subject}.
            This {subject} often {deed} {when}.
            The {animals} follow the {subject} {where}.
            Many {adjective} {people} visit the {subject} {when}.
            In a {adjective} house this {subject} rests {when}.
        """),
        _lines("""
            The {people} are {mood}.
            The {animals} are {mood} too.
            The {people} say thanks.
            Nobody is ever alone.
            The {subject} feels {mood}.
        """),
    ),
    Kind(
        tuple(
            [
                "machine",
                "ship",
                "train",
                "clock",
                "lamp",
                "rocket",
                "engine",
                "teleporter",
                "invention",
                "phone",
                "telescope",
            ]
        ),
        _lines("""
            The {subject} is made of {material} and {material}.
            The {subject} runs on {fuel} and {fuel}.
            A {adjective} {subject} stands {where}.
            The {adjective} {subject} glows {when}.
            The {people} built a {subject} of {material}.
            The {subject} sends {people} to the {things}.
            The {subject} works best {when}.
        """),
        _lines("""
            It turns {fuel} into {fuel} for the {people}.
            It has {look} {things} and parts of {material}.
            The {people} press a {look} button {when}.
            It takes the {people} to a place {where}.
            When it starts the {animals} run {where}.
            It needs {material} and {fuel} to work {when}.
        """),
        _lines("""
            It never stops {when}.
            It works well {when}.
            It makes {people} {mood}.
            It is {look} and {look}.
            Many {people} try it.
        """),
    ),
    Kind(
        tuple(["moon", "sun", "star", "cloud", "wind", "storm", "river", "mountain", "sea", "sky", "night"]),
        _lines("""
            The {subject} sings to the {adjective} {animals}.
            The {subject} talks to {people} {when}.
            The {subject} is {look} and {look} {when}.
            A {adjective} {subject} greets the {people}.
            The {subject} looks {look} {where}.
            The {adjective} {subject} brings {mood} dreams.
            The {people} watch the {adjective} {subject}.
        """),
        _lines("""
            The {animals} listen and {people} {act}.
            It speaks of {look} {things} {where}.
            It tells {people} about {things} {where}.
            The {people} {act} when it is {look}.
            Its voice is {look} and makes the {animals} {mood}.
            Then {look} {things} shine {where}.
        """),
        _lines("""
            The {animals} are {mood}.
            It is {look} and {look}.
            Nobody sleeps {when}.
            The {people} feel {mood}.
            It is {adjective} {when}.
        """),
    ),
    Kind(
        tuple(["fruit", "cake", "soup", "bread", "pie", "plant", "salad", "candy", "drink", "meal"]),
        _lines("""
            The {subject} tastes like {flavor} and {flavor}.
            The {adjective} {subject} smells of {flavor}.
            The {people} share the {adjective} {subject}.
            A {adjective} {subject} grows {where}.
            The {subject} is {look} with {look} spots.
            The {subject} is full of {flavor} and {flavor}.
            The {people} bring a {subject} {when}.
        """),
        _lines("""
            Some eat it with {flavor} and {flavor} {when}.
            It is {look} outside and {look} inside like {material}.
            The {adjective} {animals} come to taste it {when}.
            It makes the {people} {mood} and the {animals} {mood}.
            One bite of it helps you to {power}.
            The {people} {act} when they smell it.
        """),
        _lines("""
            It is sweet and {look}.
            The {people} love it.
            It goes with {flavor}.
            The {animals} like it too.
            Many {people} want more.
        """),
    ),
    Kind(
        tuple(
            ["holiday", "festival", "party", "race", "game", "parade", "sport", "concert", "dance", "birthday", "feast"]
        ),
        _lines("""
            The {adjective} {subject} begins {when}.
            On this {subject} {people} {act}.
            The {subject} is {adjective} for all {people}.
            The {people} plan a {adjective} {subject}.
            The {subject} starts with {adjective} {things}.
            The {adjective} {subject} ends {where}.
            A {adjective} {subject} takes place {where}.
        """),
        _lines("""
            They wear {look} hats and {act}.
            They {act} and {act}.
            Then the {people} {act} {when}.
            They carry {things} and {things} {where}.
            The {mood} winner gets a {look} {garment} of {material}.
            The {people} {act} with the {animals}.
        """),
        _lines("""
            The {people} are {mood}.
            They eat {flavor} and {flavor}.
            Everyone goes home {mood}.
            Nobody wants to leave.
            It lasts until sunrise.
        """),
    ),
)

REQUESTS = _lines("""
    Tell me about {topic}.
    Describe {topic}.
    What is {topic} like?
    Imagine {topic}.
    Talk about {topic}.
    Say something about {topic}.
    Write about {topic}.
    Think of {topic}.
    Explain {topic} to me.
    Make up {topic}.
    I want to hear about {topic}.
    Can you picture {topic}?
    Tell the tale of {topic}.
    What happens with {topic}?
    Create {topic}.
    What do you know about {topic}?
    How does {topic} look?
""")
TOPICS = _lines("""
    a {subject}
    the {subject}
    a new {subject}
    some {subject}s
    a {adjective} {subject}
    the {adjective} {subject}
    a {subject} {where}
    the {subject} {where}
    a {subject} with {look} {things}
    a {subject} without {things}
    a {subject} for {people}
    a {subject} of {material}
    a {unknown} {subject}
    a {subject} with a {unknown}
    the {unknown} of a {subject}
""")
UNKNOWN_TOPICS = _lines("""
    a {unknown}
    the {unknown} {where}
    a {adjective} {unknown}
    a {unknown} {unknown}
    why the {unknown} {unknown}
    a {unknown} of {material}
""")
FRAMES = _lines("""
    Here is a task:
    Please answer this:
    Read this and reply:
    This is your task:
    Write an answer to this task:
    Write a {unknown} answer to this task:
    Write a {unknown} {unknown} to this task:
    Give a {unknown} answer to this:
""")
CODAS = ("", "", "l", "n", "r", "s", "m", "nd")
SYSTEMS = ("You are a friendly writer.", "You are part of a team.", "Answer in simple words.")


def draw_example(rng: np.random.Generator) -> Example:
    """Return one example.

    Half of the prompts have an instruction line before them. Some hold invented words, alone or beside a subject, so
    that the model keeps writing English when a prompt has words that it does not know; without any known subject it
    writes about a subject of its own choice.
    """
    kind = _pick(rng, KINDS)
    subject = _pick(rng, kind.subjects)
    topic = _pick(rng, UNKNOWN_TOPICS if rng.random() < 0.15 else TOPICS)
    prompt = _fill(rng, _pick(rng, REQUESTS).replace("{topic}", topic), subject)
    if rng.random() < 0.5:
        prompt = f"{_fill(rng, _pick(rng, FRAMES), subject)}\n{prompt}"
    system = _pick(rng, SYSTEMS) if rng.random() < 0.05 else None
    return Example(system, prompt, draw_answer(rng, kind, subject))


def draw_answer(rng: np.random.Generator, kind: Kind, subject: str) -> str:
    """Return an answer about `subject` of one to `MAX_SENTENCES` sentences, each number equally probable."""
    plan = ((kind.openings, OPENING_LENGTH), (kind.details, DETAIL_LENGTH), (kind.closings, CLOSING_LENGTH))
    count = int(rng.integers(1, MAX_SENTENCES + 1))
    return " ".join(_sentence(rng, templates, subject, length) for templates, length in plan[:count])


def _sentence(rng: np.random.Generator, templates: tuple[str, ...], subject: str, length: tuple[int, int]) -> str:
    """Draw sentences until one has a length (characters) within the bounds."""
    shortest, longest = length
    while True:
        text = _fill(rng, _pick(rng, templates), subject)
        if shortest <= len(text) <= longest:
            return text[0].upper() + text[1:]


def _fill(rng: np.random.Generator, template: str, subject: str) -> str:
    """Put words into the slots of a template, no word twice."""
    used: set[str] = set()

    def word(slot: re.Match[str]) -> str:
        if slot[1] == "subject":
            return subject
        if slot[1] == "unknown":
            return _invented_word(rng)
        chosen = _pick(rng, [word for word in WORDS[slot[1]] if word not in used])
        used.add(chosen)
        return chosen

    return _spelled(re.sub(r"\{(\w+)\}", word, template))


def _spelled(text: str) -> str:
    """Correct what filled slots get wrong: a owl -> an owl, citys -> cities, foxs -> foxes."""
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    text = re.sub(r"(?<=[^aeiou])ys\b", "ies", text)
    return re.sub(r"xs\b", "xes", text)


def _invented_word(rng: np.random.Generator) -> str:
    """Return a word of one to three random syllables."""
    syllables = int(rng.integers(1, 4))
    return "".join(_pick(rng, "bdfghjklmnprstvwz") + _pick(rng, "aeiou") + _pick(rng, CODAS) for _ in range(syllables))


def _pick(rng: np.random.Generator, options):
    return options[int(rng.integers(len(options)))]
