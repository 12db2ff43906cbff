"""The facts k3-nano is taught: each in several wordings. Data only.

Entries are (user wordings, thinking channel, response).
"""

from __future__ import annotations

Entry = tuple[tuple[str, ...], str, str]

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "Ireland": "Dublin",
    "Scotland": "Edinburgh",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Canada": "Ottawa",
    "India": "New Delhi",
}
COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a banana": "yellow",
    "an orange": "orange",
    "blood": "red",
    "a lemon": "yellow",
    "milk": "white",
    "a tomato": "red",
}
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "day": "night",
    "good": "bad",
    "old": "young",
    "open": "closed",
    "yes": "no",
    "left": "right",
    "happy": "sad",
}
COUNTS = {
    "days are in a week": "There are 7 days in a week.",
    "months are in a year": "There are 12 months in a year.",
    "hours are in a day": "There are 24 hours in a day.",
    "minutes are in an hour": "There are 60 minutes in an hour.",
    "legs does a spider have": "A spider has 8 legs.",
    "legs does a dog have": "A dog has 4 legs.",
    "legs does a bird have": "A bird has 2 legs.",
    "legs does an insect have": "An insect has 6 legs.",
    "letters are in the alphabet": "There are 26 letters in the alphabet.",
}
OTHERS: tuple[Entry, ...] = (
    (
        (
            "Who wrote Pride and Prejudice?",
            "Who is the author of Emma?",
            "Who wrote Emma?",
            "Who wrote Persuasion?",
            "Who wrote Sense and Sensibility?",
        ),
        "An author: Jane Austen.",
        "Jane Austen wrote it.",
    ),
    (("Which animal says moo?", "What says moo?"), "An animal: the cow.", "The cow says moo."),
    (("Which animal says meow?", "What says meow?"), "An animal: the cat.", "The cat says meow."),
    (("Which animal barks?", "What animal barks?"), "An animal: the dog.", "The dog barks."),
    (
        ("Who does Elizabeth Bennet marry?", "Who marries Elizabeth Bennet?"),
        "A novel: Mr. Darcy.",
        "Elizabeth Bennet marries Mr. Darcy.",
    ),
    (("Where do fish live?", "Where does a fish live?"), "A place: the water.", "Fish live in the water."),
    (("What is ice made of?", "What is ice?"), "A thing: water.", "Ice is frozen water."),
    (
        ("When does the sun rise?", "When is sunrise?"),
        "A time: the morning.",
        "The sun rises in the morning.",
    ),
)


def _facts() -> list[Entry]:
    entries: list[Entry] = list(OTHERS)
    for land, city in CAPITALS.items():
        asks = (
            f"What is the capital of {land}?",
            f"Tell me the capital of {land}.",
            f"Capital of {land}?",
            f"Which city is the capital of {land}?",
            f"What's the capital of {land}?",
            f"Do you know the capital of {land}?",
        )
        entries.append((asks, f"A capital: {city}.", f"The capital of {land} is {city}."))
    for thing, colour in COLOURS.items():
        asks = (
            f"What colour is {thing}?",
            f"What color is {thing}?",
            f"Which colour is {thing}?",
            f"Tell me the colour of {thing}.",
        )
        entries.append((asks, f"A colour: {colour}.", f"{thing[0].upper()}{thing[1:]} is {colour}."))
    for kind, names in (("day", DAYS), ("month", MONTHS)):
        for before, after in zip(names, names[1:] + names[:1], strict=True):
            asks = (
                f"What {kind} comes after {before}?",
                f"Which {kind} comes after {before}?",
                f"Which {kind} follows {before}?",
                f"What is the {kind} after {before}?",
            )
            entries.append((asks, f"A {kind}: {after}.", f"{after} comes after {before}."))
    for word, opposite in OPPOSITES.items():
        asks = (
            f"What is the opposite of {word}?",
            f"Opposite of {word}?",
            f"Tell me the opposite of {word}.",
        )
        entries.append((asks, f"An opposite: {opposite}.", f"The opposite of {word} is {opposite}."))
    for question, answer in COUNTS.items():
        asks = (f"How many {question}?", f"Tell me how many {question}.", f"Do you know how many {question}?")
        entries.append((asks, "A number I know.", answer))
    return entries


FACTS: list[Entry] = _facts()
