"""Compare texts without a model: words copied from the prompt, ROUGE-L to a reference; edit a text."""

import re


def words(text: str) -> list[str]:
    """Split a text into its words, in small letters, without punctuation."""
    return re.findall(r"\w+", text.lower())


def copied(response: str, prompt: str) -> float:
    """Measure copying: the share of the response's 3-grams of words that stand in the prompt, 0 to 1; 0 of
    fewer than three words. (arXiv:2009.01325, section 4.4, divides the longest common subsequence of bigrams
    by the number of bigrams, at a cost that grows with the product of both lengths.)"""
    of_response = words(response)
    of_prompt = words(prompt)
    in_prompt = set(zip(of_prompt, of_prompt[1:], of_prompt[2:]))
    copies = [gram in in_prompt for gram in zip(of_response, of_response[1:], of_response[2:])]
    return sum(copies) / max(1, len(copies))


def rouge_l(text: str, reference: str) -> float:
    """Compute ROUGE-L's F1, 0 to 1: the harmonic mean of L / words of the text and L / words of the
    reference, L the length of their longest common subsequence of words (Lin 2004). No stemming."""
    of_text = words(text)
    of_reference = words(reference)
    longest = [0] * (len(of_reference) + 1)  # of the text so far and the first j words of the reference
    for word in of_text:
        row = [0]
        for j, other in enumerate(of_reference):
            row.append(longest[j] + 1 if word == other else max(longest[j + 1], row[j]))
        longest = row
    return 2 * longest[-1] / max(1, len(of_text) + len(of_reference))


def swapped(text: str, prompt: str = "") -> str | None:
    """Swap two words of a text wherever they stand, as when its persons change roles; None without two.

    The words are the first name and the last other name; where there are no two, the same of its numbers;
    else of its words of more than three letters. A name is a word that text or prompt write with a capital,
    and never with a small letter, inside of a sentence: what begins one, as `The`, need not be a name. A word
    takes the case that its new place had."""
    in_text = re.findall(r"\w+", text)
    inside = set(re.findall(r"(?<=[\w,;] )\w\w+", f"{prompt}\n{text}"))
    names = [word for word in in_text if word in inside and word[0].isupper() and word.lower() not in inside]
    digits = [word for word in in_text if word.isdigit()]
    not_split = re.findall(r"\w+(?!['’\w])", text)  # without the `wouldn` of `wouldn't`
    long = [word for word in not_split if word.isalpha() and len(word) > 3]
    for kind in (names, digits, long):
        if different := [word for word in kind if word.lower() != kind[0].lower()]:
            other = {kind[0].lower(): different[-1], different[-1].lower(): kind[0]}
            return re.sub(r"\w+", lambda match: _with_case_of(match[0], other), text)
    return None


def _with_case_of(word, other):
    new = other.get(word.lower(), word)
    return (new[0].upper() if word[0].isupper() else new[0].lower()) + new[1:]
