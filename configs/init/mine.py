"""Reward functions of mine.yaml: a number for each response, higher is better."""


def sentences(prompts, responses, count=5):  # an empty text must score low: the policy finds it first
    return [-abs(sum(map(response.count, ".!?")) - count) for response in responses]


def right(prompts, responses, answer):  # the column `answer` of prompts.jsonl
    return [float(word in response) for word, response in zip(answer, responses, strict=True)]
