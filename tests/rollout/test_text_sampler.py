"""A server that speaks text: what it is asked, what becomes of its answers, and its bad moments."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer

from reterm_jax.agent.protocol import render_turn
from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.rollout.samplers.text import TextSampler
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat

TURN = render_turn("look", "ls -la")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return ChatFormat(AutoTokenizer.from_pretrained(tiny_tokenizer.build([TURN], tmp_path_factory.mktemp("tokenizer"))))


class Server:
    """Gives `answers` in turn, and the last one for ever: (status, JSON value or bytes)."""

    def __init__(self, *answers):
        self.asked, answers = [], list(answers)
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                asked.append((self.path, self.headers.get("authorization"), body))
                status, answer = answers.pop(0) if len(answers) > 1 else answers[0]
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def sample(chat, *answers, max_tokens=99, **options):
    server = Server(*answers)

    async def go():
        async with TextSampler(server.url, "teacher", chat, pause=0.01, **options) as sampler:
            ids = chat.prompt_ids([{"role": "user", "content": "do it"}], [])
            return ids, await sampler.generate(ids, max_tokens=max_tokens, temperature=0.5, seed=3, session="s")

    try:
        return server.asked, *asyncio.run(go())
    finally:
        server.close()


def answer(text, reason):
    return 200, {"choices": [{"text": text, "finish_reason": reason}]}


def test_text_goes_out_and_a_turn_comes_back(chat):
    text = TURN.removesuffix(chat.stop_token)
    asked, ids, done = sample(chat, answer(text, "stop"), api_key="key")
    (path, key, body) = asked[0]
    assert (path, key, body["model"], body["stop"]) == ("/v1/completions", "Bearer key", "teacher", [chat.stop_token])
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (99, 0.5, 3)
    assert chat.tokenizer.encode(body["prompt"], add_special_tokens=False) == ids
    assert done.ids == chat.policy_ids(TURN) and done.stop == "stop"
    assert done.version == -1 and done.logprobs == [0.0] * len(done.ids)


def test_a_turn_is_cut_at_the_limit_by_whoever_counts(chat):
    for reason, limit in (("length", 99), ("stop", 3)):
        _, _, done = sample(chat, answer(TURN, reason), max_tokens=limit)
        if limit == 3:
            assert done.stop == "length" and len(done.ids) == 3
    _, _, done = sample(chat, answer("ls", "length"))
    assert done.stop == "length" and chat.stop_id not in done.ids


def test_bad_moments_are_waited_out(chat):
    asked, _, done = sample(chat, (503, {}), (429, {}), (200, b"<html>"), answer("ls", "stop"))
    assert len(asked) == 4 and done.stop == "stop"


@pytest.mark.parametrize(
    ("given", "said", "tries"),
    [
        ((400, {"error": "no such model"}), "HTTP 400: .*no such model", 1),
        ((500, {"error": "down"}), "HTTP 500", 3),
        ((200, {"choices": []}), "an answer of another form", 1),
        (answer("x", "content_filter"), "the request ended by 'content_filter'", 1),
        (answer("", "length"), "an empty answer", 1),
    ],
)
def test_what_is_no_answer_is_an_error(chat, given, said, tries):
    server = Server(given)

    async def go():
        async with TextSampler(server.url, "teacher", chat, tries=3, pause=0.01) as sampler:
            await sampler.generate([1, 2], max_tokens=9, temperature=1.0, seed=0, session="s")

    try:
        with pytest.raises(SamplerError, match=said):
            asyncio.run(go())
        assert len(server.asked) == tries
    finally:
        server.close()
