"""A vLLM server that never was: answers the sampler's calls, and fails in the ways a test asks for.

What it samples is a function of the weights that it was told to load and of the prompt, so a test sees which weights
answered. `faults` maps a path to a list of faults that the next calls of that path meet, one each: a status (500), or
"hang", "cut", "close", "abort", "garbage". With `sticky` a fault stays.
"""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from reterm_jax.serving.published import read_manifest

STOP = 9
GENERATE, LOAD = "/inference/v1/generate", "/collective_rpc"


class FakeVllm:
    def __init__(self, port=0):
        self.faults, self.sticky, self.calls, self.running = {}, {}, [], 0
        self.mode, self.max_len, self.delay, self.device = "processed_logprobs", 64, 0.0, "cuda"
        self.loaded, self.version, self.stale = None, "default", False
        self.go = threading.Event()
        self.go.set()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    def paths(self):
        return [path for path, _ in self.calls]

    def fault(self, path):
        waiting = self.faults.get(path)
        return waiting.pop(0) if waiting else self.sticky.get(path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(json.loads(body) if body else None)

    def _answer(self, body):
        fake, path = self.fake, self.path.partition("?")[0]
        fake.calls.append((path, body))
        fault = fake.fault(path)
        if fault == "hang":
            time.sleep(3)
            return self.connection.close()
        if fault == "close":
            self.close_connection = True
            return self.connection.close()
        if isinstance(fault, int):
            return self._send(fault, b'{"error": {"message": "fault"}}')
        reply = json.dumps(self._reply(path, body, fault)).encode()
        if fault == "garbage":
            reply = b"<html>"
        self._send(200, reply, cut=fault == "cut")

    def _send(self, status, reply, cut=False):
        try:
            self.send_response(status)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply[: len(reply) // 2] if cut else reply)
            if cut:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
        except OSError:
            pass

    def _reply(self, path, body, fault):
        fake = self.fake
        if path == "/v1/models":
            return {"data": [{"max_model_len": fake.max_len}]}
        if path == "/server_info":
            device = {"device": fake.device}
            return {"vllm_config": {"model_config": {"logprobs_mode": fake.mode}, "device_config": device}}
        if path == "/pause":
            fake.go.clear()
        if path == "/resume":
            fake.go.set()
        if path == LOAD and not fake.stale:
            fake.loaded = read_manifest(body["kwargs"]["directory"])
        if path == "/update_weight_version":
            fake.version = body["new_version"]
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == GENERATE:
            return self._sample(body, fault)
        return {}

    def _sample(self, body, fault):
        fake, params, ids = self.fake, body["sampling_params"], body["token_ids"]
        fake.running += 1
        begun = fake.version
        if "prompt_logprobs" not in params:
            time.sleep(fake.delay)
        fake.go.wait(5)
        fake.running -= 1
        prompt = None
        if "prompt_logprobs" in params:
            probe = zip(ids[1:], fake.loaded.probe.logprobs, strict=True)
            prompt = [None] + [{str(token): {"logprob": logprob}} for token, logprob in probe]
        out = [len(ids) % 8, STOP][: params["max_tokens"]]
        return {
            "prompt_logprobs": prompt,
            "choices": [
                {
                    "finish_reason": "abort" if fault == "abort" else "stop" if out[-1] == STOP else "length",
                    "token_ids": out,
                    "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in out]},
                    "weight_versions": [{"version": begun, "start": 0, "end": 1}],
                }
            ],
        }
