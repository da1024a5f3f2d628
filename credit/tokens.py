"""Where the sampled tokens of a response stand in its text, without encoding it again."""

from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from grpo import Rollouts, decode


def char_starts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Where in the text of `ids` each token starts.

    With these, what is found in a text is found in the sampled ids. Several byte-level tokens may
    be parts of one character; each of them starts where the character does, and so does the token
    after bytes that are not a character.
    """
    starts = []
    whole, shown = 0, 0  # tokens ids[:whole] are whole characters, `shown` of them
    context = 0  # a token before, as some tokenizers drop the space of a text's first one
    for end in range(1, len(ids) + 1):
        starts.append(shown)
        text = decode(tokenizer, ids[context:end])
        # otherwise the character goes on, up to four bytes
        if not text.endswith("\ufffd") or end - whole > 4:
            shown += len(text) - len(decode(tokenizer, ids[context:whole]))
            context, whole = whole, end
    return starts


def tokens_of(tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts, row: int) -> list[str]:
    """The text of each response token of a rollout, which together are its text.

    A character of several tokens belongs to the last one.
    """
    ids = rollouts.ids[row][rollouts.mask[row]].tolist()
    text = decode(tokenizer, ids)
    return [text[start:end] for start, end in pairwise([*char_starts(tokenizer, ids), len(text)])]
