"""VADER: how positive a text is, from a lexicon and rules (Hutto and Gilbert 2014), as a reward."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

VADER = SentimentIntensityAnalyzer()


def compound(prompts: list[str], responses: list[str]) -> list[float]:
    """Its compound score of each response, from -1 (negative) to 1 (positive)."""
    return [VADER.polarity_scores(response)["compound"] for response in responses]


def short(prompts: list[str], responses: list[str], words: int = 12) -> list[float]:
    """1 for a response of at most so many words that ends with a full stop, else 0: a rule that is met or not."""
    return [float(0 < len(text.split()) <= words and text.rstrip().endswith(".")) for text in responses]
