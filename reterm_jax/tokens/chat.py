"""Token ids of a conversation, built by appending only, and equal to what the chat template would render.

The template is rendered for the first prompt, and a few times with placeholders to learn what text stands between
messages; after that, ids are only appended. Text that comes from outside (instructions, terminal output) is always
encoded as plain text: `<|im_end|>` in a log file is ten characters, never the token that ends a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

Message = Mapping[str, Any]

_SLOT = "RETERMSLOT{}X"
_SLOTS = re.compile(r"RETERMSLOT(\d+)X")
_SURROGATES = re.compile("[\ud800-\udfff]")


class ChatFormatError(ValueError):
    """The tokenizer's chat template cannot be continued by appending."""


class ChatFormat:
    """The chat format of one tokenizer.

    Args:
      tokenizer: a fast Hugging Face tokenizer with a chat template in the manner of Qwen: a turn ends with one special
        token, and messages of the tool role leave the turns before them as they were.

    Attributes:
      tokenizer: as given.
      stop_id: the token that ends a policy turn. stop_token: its text.

    Raises:
      ChatFormatError: the template is not of this kind; says in what way.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._added = {token.content: index for index, token in added.items()}
        special = [token.content for token in added.values() if token.special]
        policy = [text for text in self._added if not any(mark in text for mark in special)]
        self._any_markup = _pattern(self._added)
        self._policy_markup = _pattern(policy)
        self._plain = _without_added_tokens(tokenizer)
        self._boundaries: dict[tuple[str, ...], list[str | int]] = {}
        self.stop_token = self._check_template()
        self.stop_id: int = self._added[self.stop_token]

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Ids of the first prompt, up to where the policy begins to write.

        Args:
          messages: role and content each (system, user), content as text.
          tools: tool schemas for the template.
        """
        contents = [_clean(message.get("content") or "") for message in messages]
        # An empty content stays empty, since a template may leave out an empty system message.
        slotted = [
            {**message, "content": _SLOT.format(index) if contents[index] else ""}
            for index, message in enumerate(messages)
        ]
        return self._fill(_pieces(self._render(slotted, tools=tools, generation=True)), contents)

    def turn_boundary_ids(self, observation: str | Sequence[str], stop_token_included: bool) -> list[int]:
        """Ids that close the policy's turn, give it what it observed, and open its next turn.

        Args:
          observation: content of the tool message; several texts become several tool messages in a row. As templates
            do, white space at both ends is dropped.
          stop_token_included: whether the policy's own ids end with the stop token; if not, it is put first.
        """
        texts = [observation] if isinstance(observation, str) else observation
        return self.boundary_ids([{"role": "tool", "content": text} for text in texts], stop_token_included)

    def boundary_ids(self, messages: Sequence[Message], stop_token_included: bool) -> list[int]:
        """As `turn_boundary_ids`, for messages of any role (data sets have user messages between turns too)."""
        if not messages:
            raise ValueError("a turn boundary needs at least one message")
        roles = tuple(message["role"] for message in messages)
        if roles not in self._boundaries:
            self._boundaries[roles] = self._boundary(roles)
        ids = self._fill(self._boundaries[roles], [_clean(message.get("content") or "") for message in messages])
        return ids[1:] if stop_token_included else ids

    def policy_ids(self, text: str) -> list[int]:
        """Ids of a policy turn that was written rather than sampled, with the stop token.

        Protocol markup in it becomes its tokens; tokens that structure the conversation are plain text here too.
        """
        return [*self._encode(_surrogate_free(text), self._policy_markup), self.stop_id]

    def policy_text(self, ids: Sequence[int]) -> str:
        """Text of a sampled turn, without the stop token that ends it."""
        if ids and ids[-1] == self.stop_id:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _boundary(self, roles: tuple[str, ...]) -> list[str | int]:
        """What the template puts after an assistant's turn when messages of these roles follow; slots as numbers."""
        turn = "RETERMTURN"
        follow = [{"role": role, "content": _SLOT.format(index)} for index, role in enumerate(roles)]
        text = self._render([*_opening(turn), *follow], generation=True)
        if text.count(turn) != 1:
            raise ChatFormatError("the chat template drops or repeats an assistant's content")
        pieces = _pieces(text.split(turn)[1])
        if [piece for piece in pieces if isinstance(piece, int)] != list(range(len(roles))):
            raise ChatFormatError(f"the chat template drops, repeats or reorders messages of the roles {roles}")
        if not pieces[0].startswith(self.stop_token):
            raise ChatFormatError(f"the chat template does not put {self.stop_token} between a turn and {roles}")
        return pieces

    def _check_template(self) -> str:
        """Returns the stop token, after checks that tool turns only ever append."""
        thought, turn = "RETERMTHOUGHT", "RETERMTURN"
        before = self._render(_opening(turn, thought), generation=False)
        follow = {"role": "tool", "content": "RETERMTOOL"}
        after = self._render([*_opening(turn, thought), follow], generation=True)
        if not after.startswith(before):
            raise ChatFormatError(
                "the chat template renders a turn otherwise once a tool message follows it, so ids cannot be appended"
            )
        if thought not in after:
            raise ChatFormatError("the chat template drops the reasoning of turns that tool messages follow")
        stop = self._any_markup.match(after.split(turn)[1])
        if stop is None:
            raise ChatFormatError("the chat template does not end an assistant's turn with a special token")
        return stop[0]

    def _render(
        self, messages: Sequence[Message], *, generation: bool, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ChatFormatError("the tokenizer has no chat template; put chat_template.jinja into its directory")
        return self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=generation
        )

    def _fill(self, pieces: Sequence[str | int], contents: Sequence[str]) -> list[int]:
        """Encodes rendered markup (strings) with contents (slot numbers) as plain text in their places.

        Content joins the markup's plain text on both sides before it is encoded: a tokenizer may merge the last
        character of an output with the newline that follows it.
        """
        ids: list[int] = []
        plain = ""
        for piece in pieces:
            if isinstance(piece, int):
                plain += contents[piece]
                continue
            end = 0
            for match in self._any_markup.finditer(piece):
                ids += self._plain_ids(plain + piece[end : match.start()])
                ids.append(self._added[match[0]])
                plain, end = "", match.end()
            plain += piece[end:]
        return ids + self._plain_ids(plain)

    def _encode(self, text: str, markup: re.Pattern[str]) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in markup.finditer(text):
            ids += self._plain_ids(text[end : match.start()])
            ids.append(self._added[match[0]])
            end = match.end()
        return ids + self._plain_ids(text[end:])

    def _plain_ids(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids if text else []


def _opening(turn: str, thought: str = "") -> list[dict[str, str]]:
    content = f"{thought}\n</think>\n\n{turn}" if thought else turn
    return [{"role": "user", "content": "task"}, {"role": "assistant", "content": content}]


def _pieces(text: str) -> list[str | int]:
    """Splits rendered text at its slots: text, slot number, text, ..., text."""
    return [int(piece) if index % 2 else piece for index, piece in enumerate(_SLOTS.split(text))]


def _pattern(tokens: Sequence[str] | Mapping[str, int]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest at each place, as tokenizers do; nothing if there are none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _without_added_tokens(tokenizer: Any) -> Tokenizer:
    """The tokenizer's model alone, to which every text is plain."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ChatFormatError(f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json)")
    state = json.loads(backend.to_str())
    state |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(state))


def _clean(content: str) -> str:
    return _surrogate_free(content).strip()


def _surrogate_free(text: str) -> str:
    """Lone surrogates (bytes that were not UTF-8, in Python's escape) as replacement characters."""
    return _SURROGATES.sub("\ufffd", text)
