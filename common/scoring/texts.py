"""Compare texts without a model: words copied from the prompt, ROUGE-L with a reference."""

import re


def words(text: str) -> list[str]:
    """Split a text into its words, in lower case and without punctuation."""
    return re.findall(r"\w+", text.lower())


def copied(response: str, prompt: str) -> float:
    """Measure copying: the share of the response's word 3-grams that occur in the prompt, 0 to 1. A response
    of fewer than three words gets 0.

    arXiv:2009.01325, section 4.4, divides the longest common subsequence of bigrams by the number of bigrams,
    at a cost that grows with the product of both lengths."""
    of_response = words(response)
    of_prompt = words(prompt)
    in_prompt = set(zip(of_prompt, of_prompt[1:], of_prompt[2:]))
    copies = [gram in in_prompt for gram in zip(of_response, of_response[1:], of_response[2:])]
    return sum(copies) / max(1, len(copies))


def rouge_l(text: str, reference: str) -> float:
    """Compute the F1 of ROUGE-L, 0 to 1, without stemming (Lin 2004): the harmonic mean of L / (words of the
    text) and L / (words of the reference), where L is the length of their longest common subsequence of
    words."""
    of_text = words(text)
    of_reference = words(reference)
    longest = [0] * (len(of_reference) + 1)  # L of the text so far and the first j words of the reference
    for word in of_text:
        row = [0]
        for j, other in enumerate(of_reference):
            row.append(longest[j] + 1 if word == other else max(longest[j + 1], row[j]))
        longest = row
    return 2 * longest[-1] / max(1, len(of_text) + len(of_reference))
