"""Compare texts without a model: words copied from the prompt, ROUGE-L with a reference, swapped words."""

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


def swapped(text: str, prompt: str = "") -> str | None:
    """Swap two words of a text at all their places, for example so that two people change roles. Returns None
    if there are no two words to swap.

    Names are preferred to numbers, and numbers to words of more than three letters. Of these, the first one
    and the last different one are swapped. A name is a word that text or prompt write with a capital, and
    never in lower case, inside a sentence; the first word of a sentence, such as `The`, has a capital anyway.
    A swapped word takes the case of the word that it replaces."""
    in_text = re.findall(r"\w+", text)
    inside = set(re.findall(r"(?<=[\w,;] )\w\w+", f"{prompt}\n{text}"))
    names = [word for word in in_text if word in inside and word[0].isupper() and word.lower() not in inside]
    digits = [word for word in in_text if word.isdigit()]
    not_split = re.findall(r"\w+(?!['’\w])", text)  # leaves out the `wouldn` of `wouldn't`
    long = [word for word in not_split if word.isalpha() and len(word) > 3]
    for kind in (names, digits, long):
        if different := [word for word in kind if word.lower() != kind[0].lower()]:
            other = {kind[0].lower(): different[-1], different[-1].lower(): kind[0]}
            return re.sub(r"\w+", lambda match: _with_case_of(match[0], other), text)
    return None


def _with_case_of(word, other):
    """Replace a word by {lower-case word: new word}, and give the new word's first letter the old case."""
    new = other.get(word.lower(), word)
    return (new[0].upper() if word[0].isupper() else new[0].lower()) + new[1:]
